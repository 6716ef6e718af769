//! AdamW over one flat f32 parameter vector, and the global gradient norm.
//!
//! ```text
//! m = b1 m + (1 - b1) g            v = b2 v + (1 - b2) g^2          t = t + 1
//! p = p (1 - lr wd) - lr / (1 - b1^t) * m / (sqrt(v) / sqrt(1 - b2^t) + eps)
//! ```
//!
//! This is PyTorch's AdamW (decoupled decay applied first). Elementwise, so any split over threads gives the
//! same bits; the norm is summed in f64 over fixed blocks whose partial sums are added in order.

mod cpu;
#[cfg(test)]
mod reference;
#[cfg(test)]
mod tests;

pub use cpu::grad_norm;

use super::error::LearnerError;
use candle_core::{CpuStorage, InplaceOp2, Layout};
use std::sync::Mutex;

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
        cpu::update((parameters, &mut self.m, &mut self.v), gradient, scale, learning_rate, self.step, config);
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
        let (Some((a, b)), gradient) = (
            parameters_layout.contiguous_offsets(),
            crate::learner::kernels::f32_slice(gradient, gradient_layout, "gradient")?,
        ) else {
            candle_core::bail!("adamw: parameters must be contiguous");
        };
        let mut state = self.state.lock().map_err(|_| candle_core::Error::Msg("adamw: state poisoned".into()))?;
        state
            .update(&mut parameters[a..b], gradient, self.scale, self.learning_rate, &self.config)
            .map_err(candle_core::Error::wrap)
    }
}
