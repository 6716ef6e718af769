//! Training on the CPU: log-probs and entropies of chosen tokens, and their exact gradient.

mod batch;

pub use batch::{Sequence, TrainBatch, TrainRow};

use super::config::ModelConfig;
use super::error::ModelError;
use super::lora::LoraParams;
use super::params::Params;

/// Result of [`Trainer::forward`].
#[derive(Debug, Clone, PartialEq)]
pub struct Forward {
    /// Identifies this forward; [`Trainer::backward`] wants it back.
    pub generation: u64,
    /// Natural log-probability of each target at the given temperature, rows in order, targets in order.
    pub logp: Vec<f32>,
    /// Entropy in nats of the distribution each target was scored under.
    pub entropy: Vec<f32>,
}

/// Forward and backward of one model over a reused workspace, on a fixed number of threads.
#[derive(Debug)]
pub struct Trainer {
    config: ModelConfig,
    generation: u64,
}

impl Trainer {
    /// A trainer for `config` on `threads` threads (results have the same bits for any number).
    ///
    /// # Errors
    /// [`ModelError::Config`] or [`ModelError::Threads`].
    pub fn new(config: &ModelConfig, threads: usize) -> Result<Self, ModelError> {
        config.check()?;
        let _ = threads;
        Ok(Trainer { config: config.clone(), generation: 0 })
    }

    /// Log-probs (of logits / `temperature`) and entropies of all targets of `batch`.
    ///
    /// # Errors
    /// A malformed batch, a temperature that is not positive and finite, or parameters of another model.
    pub fn forward(
        &mut self,
        params: &Params,
        lora: Option<&LoraParams>,
        batch: &TrainBatch,
        temperature: f32,
    ) -> Result<Forward, ModelError> {
        let _ = (params, lora, temperature);
        batch.check(&self.config)?;
        Err(ModelError::Batch("training is not built yet".into()))
    }

    /// Adds to `grad` the gradient of `sum_i dlogp[i] logp[i] + dentropy[i] entropy[i]`: over the adapters
    /// when `lora` is given (the base is frozen), else over all parameters. `params` and `lora` must be
    /// those of the forward.
    ///
    /// # Errors
    /// [`ModelError::Generation`] when the workspace holds another forward, [`ModelError::Length`].
    pub fn backward(
        &mut self,
        generation: u64,
        params: &Params,
        lora: Option<&LoraParams>,
        dlogp: &[f32],
        dentropy: Option<&[f32]>,
        grad: &mut [f32],
    ) -> Result<(), ModelError> {
        let _ = (params, lora, dlogp, dentropy, grad);
        Err(ModelError::Generation { asked: generation, held: self.generation })
    }
}
