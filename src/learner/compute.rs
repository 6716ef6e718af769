//! What the learner asks of a model, and the model that answers.

use super::config::LearnerConfig;
use super::error::LearnerError;
use crate::model::{
    Forward, Keep, LoraLayout, LoraParams, ModelConfig, ModelError, Params, Precision, TensorSpec, TrainBatch, Trainer,
};

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

    /// Turns trainable weights into those that the forward computes with.
    fn to_policy(&self, _trainable: &mut [f32]) {}
}

/// The built-in decoder, trained whole or through LoRA adapters.
#[derive(Debug)]
pub struct ModelCompute {
    trainer: Trainer,
    trained: Trained,
    precision: Precision,
    /// Rounded weights of the last forward, where they are not the trainable ones.
    rounded: Vec<f32>,
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
    fn new(
        model: &ModelConfig,
        threads: usize,
        config: &LearnerConfig,
        trained: Trained,
    ) -> Result<ModelCompute, LearnerError> {
        let mut trainer = Trainer::new(model, threads).map_err(failed("setup"))?;
        trainer.keep(if config.recompute_activations { Keep::Inputs } else { Keep::Activations });
        Ok(ModelCompute { trainer, trained, precision: config.precision, rounded: Vec::new() })
    }

    /// Trains every parameter; `reference` is the fixed policy of the KL term.
    pub fn full(
        model: &ModelConfig,
        reference: Params,
        threads: usize,
        config: &LearnerConfig,
    ) -> Result<ModelCompute, LearnerError> {
        ModelCompute::new(model, threads, config, Trained::Full { reference })
    }

    /// Trains adapters over a frozen base, which without them is the reference.
    pub fn lora(
        model: &ModelConfig,
        mut base: Params,
        adapters: LoraParams,
        threads: usize,
        config: &LearnerConfig,
    ) -> Result<ModelCompute, LearnerError> {
        // It never changes. Adapters stay f32, as `peft` keeps them on a bf16 base.
        config.precision.round(base.data_mut());
        ModelCompute::new(model, threads, config, Trained::Lora { base, adapters })
    }

    /// The trainable vector as given at construction.
    pub fn initial(&self) -> Vec<f32> {
        match &self.trained {
            Trained::Full { reference } => reference.data().to_vec(),
            Trained::Lora { adapters, .. } => adapters.data().to_vec(),
        }
    }
}

/// Base parameters and adapters of a trainable vector: used where they lie, copied only to round them.
fn weights<'a>(
    trained: &'a Trained,
    rounded: &'a [f32],
    trainable: &'a [f32],
) -> (&'a [f32], Option<(&'a LoraLayout, &'a [f32])>) {
    match trained {
        Trained::Full { .. } if !rounded.is_empty() => (rounded, None),
        Trained::Full { .. } => (trainable, None),
        Trained::Lora { base, adapters } => (base.data(), Some((adapters.layout(), trainable))),
    }
}

/// Puts rounded parameters into `rounded`, if they are to be rounded.
fn round(precision: Precision, parameters: &[f32], rounded: &mut Vec<f32>) {
    if precision != Precision::F32 {
        rounded.clear();
        rounded.extend_from_slice(parameters);
        precision.round(rounded);
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
        if let Trained::Full { .. } = self.trained {
            round(self.precision, trainable, &mut self.rounded);
        }
        let (base, adapters) = weights(&self.trained, &self.rounded, trainable);
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
        // The gradient at the rounded weights counts as the masters' (straight through).
        let (base, adapters) = weights(&self.trained, &self.rounded, trainable);
        self.trainer.backward_flat(generation, base, adapters, dlogp, dentropy, gradient).map_err(failed("backward"))
    }

    fn reference(&mut self, batch: &TrainBatch, temperature: f32) -> Result<Vec<f32>, LearnerError> {
        let base = match &self.trained {
            Trained::Full { reference } => {
                round(self.precision, reference.data(), &mut self.rounded);
                weights(&self.trained, &self.rounded, reference.data()).0
            }
            Trained::Lora { base, .. } => base.data(),
        };
        Ok(self.trainer.forward_flat(base, None, batch, temperature).map_err(failed("reference"))?.logp)
    }

    fn to_policy(&self, trainable: &mut [f32]) {
        if let Trained::Full { .. } = self.trained {
            self.precision.round(trainable);
        }
    }
}
