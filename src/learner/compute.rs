//! What the learner asks of a model, and the model that answers.

use super::error::LearnerError;
use crate::model::{Forward, LoraLayout, LoraParams, ModelConfig, ModelError, Params, TensorSpec, TrainBatch, Trainer};

/// A differentiable policy over one flat vector of trainable parameters.
pub trait Compute: Send {
    /// Names, offsets and shapes of the trainable vector.
    fn tensors(&self) -> Vec<TensorSpec>;

    /// Log-prob (of logits / temperature) and entropy of every target under `trainable`. Keeps the
    /// activations for [`Compute::backward`] until the next forward or reference.
    fn forward(&mut self, trainable: &[f32], batch: &TrainBatch, temperature: f32) -> Result<Forward, LearnerError>;

    /// Adds to `gradient` that of `sum dlogp logp + dentropy entropy`. `trainable` holds the values of that
    /// forward.
    fn backward(
        &mut self,
        generation: u64,
        trainable: &[f32],
        dlogp: &[f32],
        dentropy: Option<&[f32]>,
        gradient: &mut [f32],
    ) -> Result<(), LearnerError>;

    /// Log-probs under the fixed reference. Invalidates the activations of an earlier forward.
    fn reference(&mut self, batch: &TrainBatch, temperature: f32) -> Result<Vec<f32>, LearnerError>;
}

/// The built-in decoder, trained whole or through LoRA adapters.
#[derive(Debug)]
pub struct ModelCompute {
    trainer: Trainer,
    trained: Trained,
}

#[derive(Debug)]
enum Trained {
    /// All parameters; the reference is a copy of the first ones.
    Full { reference: Params },
    /// Adapters; the reference is the base without them.
    Lora { base: Params, adapters: LoraParams },
}

fn failed(stage: &'static str) -> impl Fn(ModelError) -> LearnerError {
    move |e| match e {
        ModelError::Generation { asked, held } => LearnerError::Generation { asked, held },
        other => LearnerError::Compute { stage, detail: other.to_string() },
    }
}

impl ModelCompute {
    /// Trains every parameter; `reference` is the fixed policy of the KL term.
    pub fn full(config: &ModelConfig, reference: Params, threads: usize) -> Result<ModelCompute, LearnerError> {
        let trainer = Trainer::new(config, threads).map_err(failed("setup"))?;
        Ok(ModelCompute { trainer, trained: Trained::Full { reference } })
    }

    /// Trains adapters over a frozen base, which without them is the reference.
    pub fn lora(
        config: &ModelConfig,
        base: Params,
        adapters: LoraParams,
        threads: usize,
    ) -> Result<ModelCompute, LearnerError> {
        let trainer = Trainer::new(config, threads).map_err(failed("setup"))?;
        Ok(ModelCompute { trainer, trained: Trained::Lora { base, adapters } })
    }

    /// The trainable vector as given at construction.
    pub fn initial(&self) -> Vec<f32> {
        match &self.trained {
            Trained::Full { reference } => reference.data().to_vec(),
            Trained::Lora { adapters, .. } => adapters.data().to_vec(),
        }
    }
}

impl Trained {
    /// Base parameters and adapters of a trainable vector: used where it lies, never copied.
    fn weights<'a>(&'a self, trainable: &'a [f32]) -> (&'a [f32], Option<(&'a LoraLayout, &'a [f32])>) {
        match self {
            Trained::Full { .. } => (trainable, None),
            Trained::Lora { base, adapters } => (base.data(), Some((adapters.layout(), trainable))),
        }
    }
}

impl Compute for ModelCompute {
    fn tensors(&self) -> Vec<TensorSpec> {
        match &self.trained {
            Trained::Full { reference } => reference.layout().table().tensors().to_vec(),
            Trained::Lora { adapters, .. } => adapters.layout().table().tensors().to_vec(),
        }
    }

    fn forward(&mut self, trainable: &[f32], batch: &TrainBatch, temperature: f32) -> Result<Forward, LearnerError> {
        let (base, adapters) = self.trained.weights(trainable);
        self.trainer.forward_flat(base, adapters, batch, temperature).map_err(failed("forward"))
    }

    fn backward(
        &mut self,
        generation: u64,
        trainable: &[f32],
        dlogp: &[f32],
        dentropy: Option<&[f32]>,
        gradient: &mut [f32],
    ) -> Result<(), LearnerError> {
        let (base, adapters) = self.trained.weights(trainable);
        self.trainer.backward_flat(generation, base, adapters, dlogp, dentropy, gradient).map_err(failed("backward"))
    }

    fn reference(&mut self, batch: &TrainBatch, temperature: f32) -> Result<Vec<f32>, LearnerError> {
        let base = match &self.trained {
            Trained::Full { reference } => reference,
            Trained::Lora { base, .. } => base,
        };
        Ok(self.trainer.forward(base, None, batch, temperature).map_err(failed("reference"))?.logp)
    }
}
