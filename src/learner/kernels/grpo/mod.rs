//! The policy-gradient loss as one op over logits: value, per-token log-prob and entropy forward; dL/dlogits
//! backward, into the logits' own memory where the caller allows it.
//!
//! Per row i (one trained or masked token; v = vocabulary, T = temperature, z = logits / T):
//!
//! ```text
//! lse_i = log sum_j exp z_ij      logp_i = z_i,target - lse_i      H_i = -sum_j p_ij log p_ij
//! dL/dlogits_ij = 1/T [ dL/dlogp_i (1[j = target] - p_ij) - dL/dH_i p_ij (log p_ij + H_i) ]
//! ```
//!
//! The op returns one vector so that nothing hides outside candle's graph: [`HEADER`] scalars (slot 0 is the
//! loss, the only one with a gradient), then five arrays of n values: log-probs, entropies, lse, dL/dlogp,
//! dL/dH. Chunks of a larger update add up: the token weights already hold the update's denominators.

mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(any(feature = "cuda", test))]
mod options;
mod reference;

use crate::learner::loss::{LossConfig, LossError, Summary, TokenBatch, TokenConstants};
use candle_core::{CpuStorage, CustomOp1, CustomOp3, InplaceOp3, Layout, Result, Shape, Tensor};
use std::sync::Arc;

/// Source of the CUDA kernels, compiled by NVRTC on first use.
pub const CUDA_SOURCE: &str = include_str!("grpo.cu");

/// Kernels in [`CUDA_SOURCE`].
pub const CUDA_KERNELS: [&str; 4] = ["grpo_rows", "grpo_sequences", "grpo_total", "grpo_backward"];

/// Scalars before the per-token arrays of the op's result: loss, policy loss, sum of KL, sum of entropy,
/// clipped tokens, capped tokens, trained tokens, non-finite (0 or 1).
pub const HEADER: usize = 8;

/// The fused loss over a chunk of logits that holds whole sequences.
#[derive(Debug, Clone)]
pub struct GrpoOp {
    inner: Arc<Inner>,
    reuse_logits: bool,
}

#[derive(Debug)]
struct Inner {
    config: LossConfig,
    temperature: f64,
    targets: Vec<u32>,
    tokens: TokenConstants,
}

/// What the fused forward gives.
#[derive(Debug, Clone)]
pub struct FusedLoss {
    /// Scalar, differentiable with respect to the logits.
    pub loss: Tensor,
    /// `[n]`, detached.
    pub logp: Tensor,
    /// `[n]`, detached, nats.
    pub entropy: Tensor,
    /// Statistics, in the precision of the logits.
    pub summary: Summary,
}

impl GrpoOp {
    /// An op for `targets.len()` rows. `tokens` holds one entry per row (and per sequence where so
    /// documented); `temperature` divides the logits. Errors when the arrays do not fit together.
    pub fn new(
        config: LossConfig,
        temperature: f64,
        targets: Vec<u32>,
        tokens: TokenConstants,
    ) -> std::result::Result<GrpoOp, LossError> {
        if !(temperature.is_finite() && temperature > 0.0) {
            return Err(LossError::Setting { field: "temperature", value: temperature, rule: "must be > 0" });
        }
        // Entropies come from the logits, so any array of the right length stands for them here.
        let stand_in = vec![0f32; targets.len()];
        tokens.view(&stand_in, Some(&stand_in)).validate(&config)?;
        let inner = Arc::new(Inner { config, temperature, targets, tokens });
        Ok(GrpoOp { inner, reuse_logits: false })
    }

    /// Lets the backward write dL/dlogits into the logits' own memory. Only for logits that nothing else
    /// reads afterwards (they come straight from a matmul; never a `Var`).
    pub fn reusing_logits(mut self) -> GrpoOp {
        self.reuse_logits = true;
        self
    }

    /// The loss of `logits` [n, v] as part of candle's graph.
    pub fn forward(&self, logits: &Tensor) -> Result<FusedLoss> {
        let n = self.inner.targets.len();
        let out = logits.apply_op1(self.clone())?;
        let header = out.narrow(0, 0, HEADER)?.to_dtype(candle_core::DType::F64)?.to_vec1::<f64>()?;
        let array = |k: usize| out.narrow(0, HEADER + k * n, n).map(|t| t.detach());
        Ok(FusedLoss {
            loss: out.narrow(0, 0, 1)?.squeeze(0)?,
            logp: array(0)?,
            entropy: array(1)?,
            summary: summary_of(&header),
        })
    }

    /// Forward and backward at once without a graph: afterwards `logits` holds dL/dlogits. This is the step
    /// of a chunked linear-and-loss, whose peak memory is one chunk.
    pub fn forward_backward(&self, logits: &Tensor) -> Result<FusedLoss> {
        let n = self.inner.targets.len();
        let out = logits.apply_op1_no_bwd(self)?;
        let one = Tensor::ones(1, logits.dtype(), logits.device())?;
        logits.inplace_op3(&out, &one, &Backward(Arc::clone(&self.inner)))?;
        let header = out.narrow(0, 0, HEADER)?.to_dtype(candle_core::DType::F64)?.to_vec1::<f64>()?;
        Ok(FusedLoss {
            loss: out.narrow(0, 0, 1)?.squeeze(0)?,
            logp: out.narrow(0, HEADER, n)?,
            entropy: out.narrow(0, HEADER + n, n)?,
            summary: summary_of(&header),
        })
    }
}

fn summary_of(header: &[f64]) -> Summary {
    Summary {
        loss: header[0],
        policy_loss: header[1],
        kl_sum: header[2],
        entropy_sum: header[3],
        clipped: header[4] as u64,
        capped: header[5] as u64,
        trained_tokens: header[6] as u64,
        non_finite: header[7] != 0.0,
    }
}

impl Inner {
    fn shape(&self, layout: &Layout) -> Result<(usize, usize)> {
        let (n, v) = layout.shape().dims2()?;
        if n != self.targets.len() {
            candle_core::bail!("grpo-loss: {n} rows of logits for {} targets", self.targets.len());
        }
        if let Some(row) = self.targets.iter().position(|t| *t as usize >= v) {
            candle_core::bail!("grpo-loss: target {} of row {row} is outside {v} logits", self.targets[row]);
        }
        Ok((n, v))
    }

    /// Per-token constants in the number type of the logits.
    fn batch<'a, F>(&'a self, arrays: &'a Arrays<F>, logp: &'a [F], entropy: &'a [F]) -> TokenBatch<'a, F> {
        TokenBatch {
            logp,
            logp_old: arrays.old.as_deref(),
            logp_ref: arrays.reference.as_deref(),
            logp_sampler: arrays.sampler.as_deref(),
            entropy: Some(entropy),
            mask: &self.tokens.mask,
            offsets: &self.tokens.offsets,
            advantages: &arrays.advantages,
            weights: &self.tokens.weights,
        }
    }
}

/// The constants that are numbers, converted.
struct Arrays<F> {
    old: Option<Vec<F>>,
    reference: Option<Vec<F>>,
    sampler: Option<Vec<F>>,
    advantages: Vec<F>,
}

impl CustomOp1 for GrpoOp {
    fn name(&self) -> &'static str {
        "grpo-loss"
    }

    fn cpu_fwd(&self, logits: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (n, v) = self.inner.shape(layout)?;
        cpu::forward(&self.inner, logits, layout, n, v)
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        logits: &candle_core::CudaStorage,
        layout: &Layout,
    ) -> Result<(candle_core::CudaStorage, Shape)> {
        let (n, v) = self.inner.shape(layout)?;
        cuda::forward(&self.inner, logits, layout, n, v)
    }

    fn bwd(&self, logits: &Tensor, result: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        let op = Backward(Arc::clone(&self.inner));
        let (result, gradient) = (result.detach(), gradient.contiguous()?);
        if self.reuse_logits {
            logits.inplace_op3(&result, &gradient, &op)?;
            return Ok(Some(logits.detach()));
        }
        Ok(Some(logits.apply_op3_no_bwd(&result, &gradient, &op)?))
    }
}

/// (logits, result of the forward, gradient of it) -> dL/dlogits. Only the gradient of slot 0 counts.
struct Backward(Arc<Inner>);

impl CustomOp3 for Backward {
    fn name(&self) -> &'static str {
        "grpo-loss-backward"
    }

    fn cpu_fwd(
        &self,
        logits: &CpuStorage,
        l1: &Layout,
        result: &CpuStorage,
        l2: &Layout,
        gradient: &CpuStorage,
        l3: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (_, v) = self.0.shape(l1)?;
        let mut out = cpu::copy(logits, l1)?;
        cpu::backward(&self.0, &mut out, 0, (result, l2), (gradient, l3), v)?;
        Ok((out, l1.shape().clone()))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        logits: &candle_core::CudaStorage,
        l1: &Layout,
        result: &candle_core::CudaStorage,
        l2: &Layout,
        gradient: &candle_core::CudaStorage,
        l3: &Layout,
    ) -> Result<(candle_core::CudaStorage, Shape)> {
        let (n, v) = self.0.shape(l1)?;
        let out = cuda::backward(&self.0, (logits, l1), (result, l2), (gradient, l3), n, v)?;
        Ok((out, l1.shape().clone()))
    }
}

impl InplaceOp3 for Backward {
    fn name(&self) -> &'static str {
        "grpo-loss-backward-in-place"
    }

    fn cpu_fwd(
        &self,
        logits: &mut CpuStorage,
        l1: &Layout,
        result: &CpuStorage,
        l2: &Layout,
        gradient: &CpuStorage,
        l3: &Layout,
    ) -> Result<()> {
        let (_, v) = self.0.shape(l1)?;
        let Some((from, _)) = l1.contiguous_offsets() else {
            candle_core::bail!("grpo-loss: logits must be contiguous");
        };
        cpu::backward(&self.0, logits, from, (result, l2), (gradient, l3), v)
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        logits: &mut candle_core::CudaStorage,
        l1: &Layout,
        result: &candle_core::CudaStorage,
        l2: &Layout,
        gradient: &candle_core::CudaStorage,
        l3: &Layout,
    ) -> Result<()> {
        let (n, v) = self.0.shape(l1)?;
        cuda::backward_in_place(&self.0, (logits, l1), (result, l2), (gradient, l3), n, v)
    }
}

#[cfg(test)]
mod source_tests;
#[cfg(test)]
mod tests;
