//! AdamW over one flat f32 parameter vector, and the global gradient norm.
//!
//! ```text
//! m = b1 m + (1 - b1) g            v = b2 v + (1 - b2) g^2          t = t + 1
//! p = p (1 - lr wd) - lr / (1 - b1^t) * m / (sqrt(v) / sqrt(1 - b2^t) + eps)
//! ```
//!
//! This is PyTorch's AdamW (decoupled decay applied first). Elementwise, so any split over threads gives the
//! same bits; the norm is summed in f64 over fixed blocks whose partial sums are added in order.

use super::error::LearnerError;
use candle_core::{CpuStorage, InplaceOp2, Layout};
use rayon::prelude::*;
use std::sync::Mutex;

/// Elements per task; part of the definition of [`grad_norm`]'s rounding, so it must not change.
const BLOCK: usize = 1 << 15;

/// Format of [`AdamW::to_bytes`]: magic, version, step, length, m, v, BLAKE3 of all that.
const MAGIC: &[u8; 8] = b"CEADAMW\0";
const FORMAT_VERSION: u32 = 1;
const HEADER_BYTES: usize = 8 + 4 + 8 + 8;
const CHECKSUM_BYTES: usize = 32;

/// Constants of the update.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamWConfig {
    /// Default .9.
    pub beta1: f64,
    /// Default .999.
    pub beta2: f64,
    /// Default 1e-8.
    pub eps: f64,
    /// Default .01.
    pub weight_decay: f64,
}

impl Default for AdamWConfig {
    fn default() -> Self {
        AdamWConfig { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.01 }
    }
}

/// Moments and step count. The f32 parameters themselves are the master weights.
#[derive(Debug, Clone, PartialEq)]
pub struct AdamW {
    m: Vec<f32>,
    v: Vec<f32>,
    step: u64,
}

impl AdamW {
    /// Zero moments for `len` parameters.
    pub fn new(len: usize) -> AdamW {
        AdamW { m: vec![0.0; len], v: vec![0.0; len], step: 0 }
    }

    /// Updates taken so far.
    pub fn step_count(&self) -> u64 {
        self.step
    }

    /// Number of parameters.
    pub fn len(&self) -> usize {
        self.m.len()
    }

    /// Whether there are no parameters.
    pub fn is_empty(&self) -> bool {
        self.m.is_empty()
    }

    /// First moments, flat; zero where a parameter never had a gradient.
    pub fn first_moments(&self) -> &[f32] {
        &self.m
    }

    /// One update in place. `scale` multiplies the gradient first (gradient clipping). Lengths must agree.
    pub fn update(
        &mut self,
        parameters: &mut [f32],
        gradient: &[f32],
        scale: f64,
        learning_rate: f64,
        config: &AdamWConfig,
    ) -> Result<(), LearnerError> {
        if parameters.len() != self.m.len() || gradient.len() != self.m.len() {
            return Err(LearnerError::OptimizerState(format!(
                "{} moments, {} parameters and {} gradients must be equally many",
                self.m.len(),
                parameters.len(),
                gradient.len()
            )));
        }
        self.step += 1;
        let t = self.step as f64;
        let (b1, b2) = (config.beta1 as f32, config.beta2 as f32);
        let (a1, a2) = ((1.0 - config.beta1) as f32, (1.0 - config.beta2) as f32);
        let rate = (learning_rate / (1.0 - config.beta1.powf(t))) as f32;
        let root = (1.0 / (1.0 - config.beta2.powf(t)).sqrt()) as f32;
        let keep = (1.0 - learning_rate * config.weight_decay) as f32;
        let (eps, scale) = (config.eps as f32, scale as f32);
        (parameters.par_chunks_mut(BLOCK), gradient.par_chunks(BLOCK))
            .into_par_iter()
            .zip((self.m.par_chunks_mut(BLOCK), self.v.par_chunks_mut(BLOCK)))
            .for_each(|((p, g), (m, v))| {
                for (((p, g), m), v) in p.iter_mut().zip(g).zip(m).zip(v) {
                    let g = g * scale;
                    *m = b1 * *m + a1 * g;
                    *v = b2 * *v + a2 * (g * g);
                    *p = *p * keep - rate * (*m / (v.sqrt() * root + eps));
                }
            });
        Ok(())
    }

    /// Versioned bytes with a checksum at the end.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(HEADER_BYTES + 8 * self.m.len() + CHECKSUM_BYTES);
        bytes.extend_from_slice(MAGIC);
        bytes.extend_from_slice(&FORMAT_VERSION.to_le_bytes());
        bytes.extend_from_slice(&self.step.to_le_bytes());
        bytes.extend_from_slice(&(self.m.len() as u64).to_le_bytes());
        for value in self.m.iter().chain(&self.v) {
            bytes.extend_from_slice(&value.to_le_bytes());
        }
        let checksum = blake3::hash(&bytes);
        bytes.extend_from_slice(checksum.as_bytes());
        bytes
    }

    /// Reads what [`AdamW::to_bytes`] wrote; anything else is a typed error.
    pub fn from_bytes(bytes: &[u8]) -> Result<AdamW, LearnerError> {
        let refuse = |what: String| Err(LearnerError::OptimizerState(what));
        if bytes.len() < HEADER_BYTES + CHECKSUM_BYTES || !bytes.starts_with(MAGIC) {
            return refuse(format!("these {} bytes are no AdamW state", bytes.len()));
        }
        let (body, checksum) = bytes.split_at(bytes.len() - CHECKSUM_BYTES);
        let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| body[at + i]));
        let version = u32::from_le_bytes(std::array::from_fn(|i| body[8 + i]));
        if version != FORMAT_VERSION {
            return refuse(format!("format version {version}, this program reads {FORMAT_VERSION}"));
        }
        let (step, len) = (word(12), word(20));
        if len.checked_mul(8).and_then(|n| n.checked_add(HEADER_BYTES as u64)) != Some(body.len() as u64) {
            return refuse(format!("{len} parameters do not fit {} bytes", bytes.len()));
        }
        if blake3::hash(body).as_bytes() != checksum {
            return refuse("checksum mismatch; the file is damaged, resume from an older checkpoint".into());
        }
        let values: Vec<f32> = body[HEADER_BYTES..]
            .chunks_exact(4)
            .map(|chunk| f32::from_le_bytes(std::array::from_fn(|i| chunk[i])))
            .collect();
        let (m, v) = values.split_at(len as usize);
        Ok(AdamW { m: m.to_vec(), v: v.to_vec(), step })
    }

    /// BLAKE3 of the state, hex: the checksum of [`AdamW::to_bytes`].
    pub fn hash(&self) -> String {
        let bytes = self.to_bytes();
        bytes[bytes.len() - CHECKSUM_BYTES..].iter().map(|b| format!("{b:02x}")).collect()
    }
}

/// Euclidean norm of a gradient, the same for any number of threads.
pub fn grad_norm(gradient: &[f32]) -> f64 {
    let partial: Vec<f64> =
        gradient.par_chunks(BLOCK).map(|block| block.iter().map(|g| f64::from(*g) * f64::from(*g)).sum()).collect();
    partial.iter().sum::<f64>().sqrt()
}

/// Factor that brings a gradient of norm `norm` within `bound` (PyTorch's `clip_grad_norm_`, eps 1e-6);
/// `bound` 0 = off.
pub fn clip_scale(norm: f64, bound: f64) -> f64 {
    if bound > 0.0 && norm > bound { bound / (norm + 1e-6) } else { 1.0 }
}

/// One [`AdamW::update`] as a candle op in place on the parameters' storage.
pub struct AdamWOp<'a> {
    state: Mutex<&'a mut AdamW>,
    scale: f64,
    learning_rate: f64,
    config: AdamWConfig,
}

impl<'a> AdamWOp<'a> {
    /// `parameters.inplace_op2(&gradient, &AdamWOp::new(..))` takes one update.
    pub fn new(state: &'a mut AdamW, scale: f64, learning_rate: f64, config: AdamWConfig) -> Self {
        AdamWOp { state: Mutex::new(state), scale, learning_rate, config }
    }
}

impl InplaceOp2 for AdamWOp<'_> {
    fn name(&self) -> &'static str {
        "adamw"
    }

    fn cpu_fwd(
        &self,
        parameters: &mut CpuStorage,
        parameters_layout: &Layout,
        gradient: &CpuStorage,
        gradient_layout: &Layout,
    ) -> candle_core::Result<()> {
        let CpuStorage::F32(parameters) = parameters else {
            candle_core::bail!("adamw: parameters must be f32");
        };
        let (Some((a, b)), gradient) =
            (parameters_layout.contiguous_offsets(), super::kernels::f32_slice(gradient, gradient_layout, "gradient")?)
        else {
            candle_core::bail!("adamw: parameters must be contiguous");
        };
        let mut state = self.state.lock().map_err(|_| candle_core::Error::Msg("adamw: state poisoned".into()))?;
        state
            .update(&mut parameters[a..b], gradient, self.scale, self.learning_rate, &self.config)
            .map_err(candle_core::Error::wrap)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::world::draw;
    use proptest::prelude::*;

    fn random(n: usize, purpose: &str) -> Vec<f32> {
        let mut d = draw(5, purpose, &[]);
        (0..n).map(|_| d.unit() as f32 - 0.5).collect()
    }

    #[test]
    fn follows_an_f64_reference() {
        let n = 1000;
        let config = AdamWConfig { weight_decay: 0.1, ..AdamWConfig::default() };
        let mut p = random(n, "p");
        let mut reference: Vec<f64> = p.iter().map(|x| f64::from(*x)).collect();
        let (mut m, mut v) = (vec![0f64; n], vec![0f64; n]);
        let mut adam = AdamW::new(n);
        for t in 1..=5 {
            let g = random(n, &format!("g{t}"));
            adam.update(&mut p, &g, 0.5, 0.01, &config).unwrap();
            for i in 0..n {
                let g = 0.5 * f64::from(g[i]);
                reference[i] -= 0.01 * 0.1 * reference[i];
                m[i] += (1.0 - 0.9) * (g - m[i]);
                v[i] = 0.999 * v[i] + 0.001 * g * g;
                let (mh, vh) = (m[i] / (1.0 - 0.9f64.powi(t)), v[i] / (1.0 - 0.999f64.powi(t)));
                reference[i] -= 0.01 * mh / (vh.sqrt() + 1e-8);
            }
        }
        for (a, b) in p.iter().zip(&reference) {
            assert!((f64::from(*a) - b).abs() < 2e-6, "{a} {b}");
        }
        assert_eq!(adam.step_count(), 5);
    }

    #[test]
    fn same_bits_for_any_thread_count() {
        let n = 3 * BLOCK + 17;
        let run = |threads: usize| {
            rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap().install(|| {
                let mut p = random(n, "p");
                let g = random(n, "g");
                let mut adam = AdamW::new(n);
                let norm = grad_norm(&g);
                adam.update(&mut p, &g, clip_scale(norm, 1.0), 1e-3, &AdamWConfig::default()).unwrap();
                (p, adam, norm.to_bits())
            })
        };
        let one = run(1);
        assert!(one == run(2) && one == run(4));
        let sum: f64 = random(n, "g").iter().map(|g| f64::from(*g).powi(2)).sum();
        assert!((f64::from_bits(one.2) - sum.sqrt()).abs() < 1e-9);
    }

    #[test]
    fn clipping_by_hand() {
        assert_eq!(clip_scale(0.5, 1.0), 1.0);
        assert_eq!(clip_scale(5.0, 0.0), 1.0);
        assert!((clip_scale(5.0, 1.0) - 0.2).abs() < 1e-7);
    }

    #[test]
    fn lengths_must_agree_and_nothing_moves_otherwise() {
        let mut adam = AdamW::new(3);
        let mut p = vec![1.0; 3];
        assert!(adam.update(&mut p, &[1.0; 2], 1.0, 0.1, &AdamWConfig::default()).is_err());
        assert_eq!((adam, p), (AdamW::new(3), vec![1.0; 3]));
    }

    proptest! {
        #[test]
        fn bytes_round_trip_and_every_damage_is_found(n in 0usize..40, at in 0usize..400, bit in 0u8..8) {
            let mut adam = AdamW::new(n);
            let mut p = random(n, "p");
            adam.update(&mut p, &random(n, "g"), 1.0, 0.1, &AdamWConfig::default()).unwrap();
            let mut bytes = adam.to_bytes();
            prop_assert_eq!(&AdamW::from_bytes(&bytes).unwrap(), &adam);
            let at = at % bytes.len();
            prop_assert!(AdamW::from_bytes(&bytes[..at]).is_err());
            bytes[at] ^= 1 << bit;
            prop_assert!(AdamW::from_bytes(&bytes).is_err());
        }
    }
}
