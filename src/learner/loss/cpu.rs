//! The loss over log-probs as a candle op on the CPU. It runs the reference itself: per token there is nothing to
//! gain from a second implementation.

use super::{LossConfig, LossOutput, TokenBatch, loss};
use crate::learner::error::LearnerError;
use crate::learner::kernels::f32_slice;
use crate::learner::policy::{Slot, keep, lock};
use candle_core::{CpuStorage, CustomOp1, Device, Layout, Result, Shape, Tensor};

/// Per-token constants of a loss, owned by the op.
#[derive(Debug, Clone, Default)]
pub struct TokenConstants {
    /// See [`TokenBatch::logp_old`].
    pub logp_old: Option<Vec<f32>>,
    /// See [`TokenBatch::logp_ref`].
    pub logp_ref: Option<Vec<f32>>,
    /// See [`TokenBatch::logp_sampler`].
    pub logp_sampler: Option<Vec<f32>>,
    /// See [`TokenBatch::mask`].
    pub mask: Vec<bool>,
    /// See [`TokenBatch::offsets`].
    pub offsets: Vec<usize>,
    /// See [`TokenBatch::advantages`].
    pub advantages: Vec<f32>,
    /// See [`TokenBatch::weights`].
    pub weights: Vec<f64>,
}

impl TokenConstants {
    /// The loss's view of these constants with the policy's numbers.
    pub fn view<'a>(&'a self, logp: &'a [f32], entropy: Option<&'a [f32]>) -> TokenBatch<'a, f32> {
        TokenBatch {
            logp,
            logp_old: self.logp_old.as_deref(),
            logp_ref: self.logp_ref.as_deref(),
            logp_sampler: self.logp_sampler.as_deref(),
            entropy,
            mask: &self.mask,
            offsets: &self.offsets,
            advantages: &self.advantages,
            weights: &self.weights,
        }
    }
}

/// [2, N] log-probs and entropies -> scalar loss.
pub struct TokenLossOp {
    pub(in crate::learner) config: LossConfig,
    pub(in crate::learner) tokens: TokenConstants,
    /// Filled by the forward: value in f64, statistics, gradients.
    pub(in crate::learner) output: Slot<LossOutput<f32>>,
    pub(in crate::learner) error: Slot<LearnerError>,
}

impl CustomOp1 for TokenLossOp {
    fn name(&self) -> &'static str {
        "token-loss"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (_, n) = layout.shape().dims2()?;
        let (logp, entropy) = f32_slice(storage, layout, "log-probs")?.split_at(n);
        let output =
            loss(&self.config, &self.tokens.view(logp, Some(entropy))).map_err(|e| keep(&self.error, e.into()))?;
        let value = output.summary.loss as f32;
        *lock(&self.output) = Some(output);
        Ok((CpuStorage::F32(vec![value]), ().into()))
    }

    fn bwd(&self, arg: &Tensor, _result: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        let scale = gradient.to_scalar::<f32>()?;
        let output = lock(&self.output);
        let Some(output) = output.as_ref() else { candle_core::bail!("token-loss: backward before forward") };
        let mut out = vec![0f32; arg.elem_count()];
        for (o, g) in out.iter_mut().zip(output.dlogp.iter().chain(&output.dentropy)) {
            *o = scale * g;
        }
        Ok(Some(Tensor::from_vec(out, arg.shape(), &Device::Cpu)?))
    }
}
