//! The two candle ops of a gradient step: `loss = TokenLossOp(ModelOp(parameters))`.
//!
//! The whole model is one op over the flat parameter `Var`, the loss is another one, and candle's
//! autograd joins them. Both work on the CPU storage directly; the loss in f64 sums goes out through a side
//! channel because a candle scalar of an f32 graph is f32.

use super::compute::Compute;
use super::error::LearnerError;
use super::kernels::f32_slice;
use super::loss::{LossConfig, LossOutput, TokenBatch, loss};
use crate::model::TrainBatch;
use candle_core::{CpuStorage, CustomOp1, Device, Layout, Result, Shape, Storage, Tensor};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The model, shared between the learner and the ops of a graph.
pub type SharedCompute = Arc<Mutex<Box<dyn Compute>>>;

/// A panic elsewhere leaves the workspace in an unknown state, but generation numbers guard its use.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A side channel of an op.
pub(super) type Slot<T> = Arc<Mutex<Option<T>>>;

/// Keeps our own error while candle sees a text.
fn keep(slot: &Slot<LearnerError>, error: LearnerError) -> candle_core::Error {
    let text = error.to_string();
    *lock(slot) = Some(error);
    candle_core::Error::Msg(text)
}

/// Flat parameters [P] -> [2, N]: log-probs and entropies of the batch's targets.
pub struct ModelOp {
    pub(super) compute: SharedCompute,
    pub(super) batch: Arc<TrainBatch>,
    pub(super) temperature: f32,
    /// Generation of the forward, which the backward must meet.
    pub(super) generation: Arc<Mutex<u64>>,
    /// Whether entropies take part in the loss.
    pub(super) entropy_gradient: bool,
    pub(super) error: Slot<LearnerError>,
}

impl CustomOp1 for ModelOp {
    fn name(&self) -> &'static str {
        "policy-logp"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let parameters = f32_slice(storage, layout, "parameters")?;
        let forward =
            lock(&self.compute).forward(parameters, &self.batch, self.temperature).map_err(|e| keep(&self.error, e))?;
        *lock(&self.generation) = forward.generation;
        let n = forward.logp.len();
        if n != self.batch.targets() || forward.entropy.len() != n {
            candle_core::bail!(
                "policy-logp: {n} log-probs and {} entropies for {} targets",
                forward.entropy.len(),
                self.batch.targets()
            );
        }
        let mut out = forward.logp;
        out.extend_from_slice(&forward.entropy);
        Ok((CpuStorage::F32(out), (2, n).into()))
    }

    fn bwd(&self, parameters: &Tensor, result: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        let n = result.dim(1)?;
        let (storage, layout) = gradient.storage_and_layout();
        let Storage::Cpu(storage) = &*storage else {
            candle_core::bail!("policy-logp: the gradient is not on the CPU")
        };
        let flat = f32_slice(storage, layout, "gradient")?;
        let (dlogp, dentropy) = flat.split_at(n);
        let mut out = vec![0f32; parameters.elem_count()];
        let generation = *lock(&self.generation);
        lock(&self.compute)
            .backward(generation, dlogp, self.entropy_gradient.then_some(dentropy), &mut out)
            .map_err(|e| keep(&self.error, e))?;
        Ok(Some(Tensor::from_vec(out, parameters.shape(), &Device::Cpu)?))
    }
}

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
    pub(super) config: LossConfig,
    pub(super) tokens: TokenConstants,
    /// Filled by the forward: value in f64, statistics, gradients.
    pub(super) output: Slot<LossOutput<f32>>,
    pub(super) error: Slot<LearnerError>,
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
