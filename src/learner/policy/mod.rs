//! The policy as a candle op: flat parameters to log-probs and entropies.
//!
//! A gradient step is `loss = TokenLossOp(ModelOp(parameters))`: the whole model is one op over the flat
//! parameter `Var`, the loss ([`super::loss::TokenLossOp`]) is another one, and candle's autograd joins them.
//! Both work on the CPU storage directly; the loss in f64 sums goes out through a side channel because a candle
//! scalar of an f32 graph is f32.

use super::compute::Compute;
use super::error::LearnerError;
use super::kernels::f32_slice;
use crate::model::TrainBatch;
use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Storage, Tensor};
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
pub(super) fn keep(slot: &Slot<LearnerError>, error: LearnerError) -> candle_core::Error {
    let text = error.to_string();
    *lock(slot) = Some(error);
    candle_core::Error::Msg(text)
}

/// The gradient of an update, to which the backward of each of its micro-batches adds in place: one vector of
/// the parameters' length, however many micro-batches there are.
#[derive(Debug, Default)]
pub struct Accumulated {
    pub(super) sum: Vec<f32>,
    /// Backwards that were added.
    pub(super) parts: usize,
}

/// Shared between the learner and the ops of its graphs.
pub type SharedGradient = Arc<Mutex<Accumulated>>;

/// Flat parameters `[P]` -> `[2, N]`: log-probs and entropies of the batch's targets. The gradient of the parameters
/// goes into [`Accumulated`], not back through candle, which would allocate it anew for every micro-batch.
pub struct ModelOp {
    pub(super) compute: SharedCompute,
    pub(super) batch: Arc<TrainBatch>,
    pub(super) temperature: f32,
    /// Generation of the forward, which the backward must meet.
    pub(super) generation: Arc<Mutex<u64>>,
    /// Whether entropies take part in the loss.
    pub(super) entropy_gradient: bool,
    pub(super) gradient: SharedGradient,
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
        let mut gradient = lock(&self.gradient);
        if gradient.sum.len() != parameters.elem_count() {
            candle_core::bail!(
                "policy-logp: a gradient of {} values for {} parameters",
                gradient.sum.len(),
                parameters.elem_count()
            );
        }
        let generation = *lock(&self.generation);
        let (weights, weights_layout) = parameters.storage_and_layout();
        let Storage::Cpu(weights) = &*weights else {
            candle_core::bail!("policy-logp: the parameters are not on the CPU")
        };
        let weights = f32_slice(weights, weights_layout, "parameters")?;
        lock(&self.compute)
            .backward(generation, weights, dlogp, self.entropy_gradient.then_some(dentropy), &mut gradient.sum)
            .map_err(|e| keep(&self.error, e))?;
        gradient.parts += 1;
        Ok(None)
    }
}
