//! The learner: trainable weights, optimiser state, and one training step over recorded rollouts.

use crate::event::{Event, GradientStepTaken, StepSkipped};
use crate::learner::adamw::{AdamW, AdamWConfig, AdamWOp, clip_scale, grad_norm};
use crate::learner::batch::{GroupRollouts, MicroBatch, UpdateBatch, updates};
use crate::learner::compute::{Compute, ModelCompute};
use crate::learner::config::LearnerConfig;
use crate::learner::error::LearnerError;
use crate::learner::kernels::f32_slice;
use crate::learner::loss::{LossOutput, SkipReason, Summary, TokenConstants, TokenLossOp};
use crate::learner::policy::{Accumulated, ModelOp, SharedCompute, SharedGradient, Slot, lock};
use crate::model::{LoraParams, ModelConfig, Params};
use candle_core::{Device, Storage, Tensor, Var};
use std::sync::{Arc, Mutex};

/// A clipped gradient beyond this does not fit into f32 second moments (its square is near f32::MAX).
const LARGEST_GRADIENT: f64 = 1e18;

/// What became of one optimiser update.
#[derive(Debug, Clone, PartialEq)]
pub enum UpdateOutcome {
    /// Weights and moments changed, the version rose by one.
    Taken(GradientStepTaken),
    /// Nothing changed.
    Skipped(StepSkipped),
}

impl From<UpdateOutcome> for Event {
    fn from(outcome: UpdateOutcome) -> Event {
        match outcome {
            UpdateOutcome::Taken(e) => e.into(),
            UpdateOutcome::Skipped(e) => e.into(),
        }
    }
}

/// What became of a step.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct StepOutcome {
    /// One entry per optimiser update, in order.
    pub updates: Vec<UpdateOutcome>,
    /// Rollouts left out because their advantage is exactly zero.
    pub left_out: usize,
    /// Tokens that went through the model's forward, shared prompts counted once (old and reference
    /// log-probs not counted).
    pub computed_tokens: u64,
}

/// Trainable weights with their optimiser. One per run.
pub struct Learner {
    pub(in crate::learner) config: LearnerConfig,
    compute: SharedCompute,
    pub(in crate::learner) weights: Var,
    pub(in crate::learner) optimizer: AdamW,
    pub(in crate::learner) version: u32,
    pub(in crate::learner) skips_in_row: u32,
}

impl std::fmt::Debug for Learner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Learner")
            .field("version", &self.version)
            .field("parameters", &self.optimizer.len())
            .field("updates", &self.optimizer.step_count())
            .finish_non_exhaustive()
    }
}

impl Learner {
    /// A learner at version 0 over any differentiable policy, starting from `trainable`.
    pub fn new(compute: Box<dyn Compute>, trainable: Vec<f32>, config: LearnerConfig) -> Result<Learner, LearnerError> {
        config.validate()?;
        let expected: usize = compute.tensors().iter().map(|t| t.len()).sum();
        if expected != trainable.len() || trainable.is_empty() {
            return Err(LearnerError::Compute {
                stage: "setup",
                detail: format!("{} trainable values for tensors of {expected} values", trainable.len()),
            });
        }
        let len = trainable.len();
        Ok(Learner {
            config,
            compute: Arc::new(Mutex::new(compute)),
            weights: Var::from_vec(trainable, len, &Device::Cpu)?,
            optimizer: AdamW::new(len),
            version: 0,
            skips_in_row: 0,
        })
    }

    /// Trains every parameter of the built-in decoder; `params` is also the fixed reference.
    pub fn full(
        model: &ModelConfig,
        params: Params,
        threads: usize,
        config: LearnerConfig,
    ) -> Result<Learner, LearnerError> {
        let compute = ModelCompute::full(model, params, threads, &config)?;
        let initial = compute.initial();
        Learner::new(Box::new(compute), initial, config)
    }

    /// Trains adapters over a frozen base, which is also the reference.
    pub fn lora(
        model: &ModelConfig,
        base: Params,
        adapters: LoraParams,
        threads: usize,
        config: LearnerConfig,
    ) -> Result<Learner, LearnerError> {
        let compute = ModelCompute::lora(model, base, adapters, threads, &config)?;
        let initial = compute.initial();
        Learner::new(Box::new(compute), initial, config)
    }

    /// Policy version: how many updates were applied.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// The settings.
    pub fn config(&self) -> &LearnerConfig {
        &self.config
    }

    /// The model behind the learner.
    pub(in crate::learner) fn compute(&self) -> &SharedCompute {
        &self.compute
    }

    /// Calls `f` with the trainable weights, flat.
    pub fn with_trainable<T>(&self, f: impl FnOnce(&[f32]) -> T) -> Result<T, LearnerError> {
        let (storage, layout) = self.weights.storage_and_layout();
        let Storage::Cpu(storage) = &*storage else {
            return Err(LearnerError::Compute { stage: "setup", detail: "the weights are not on the CPU".into() });
        };
        Ok(f(f32_slice(storage, layout, "weights")?))
    }

    /// A copy of the trainable weights, flat: all parameters, or the adapters.
    pub fn trainable(&self) -> Result<Vec<f32>, LearnerError> {
        self.with_trainable(<[f32]>::to_vec)
    }

    /// The weights that the policy samples with, flat: [`Learner::trainable`] at the precision of the settings.
    pub fn policy_weights(&self) -> Result<Vec<f32>, LearnerError> {
        let mut weights = self.trainable()?;
        lock(&self.compute).to_policy(&mut weights);
        Ok(weights)
    }

    /// BLAKE3 of the trainable weights' little-endian f32 bytes, hex.
    pub fn weights_hash(&self) -> Result<String, LearnerError> {
        self.with_trainable(crate::learner::checkpoint::weights_hash)
    }

    /// BLAKE3 of the optimiser state, hex.
    pub fn optimizer_hash(&self) -> String {
        self.optimizer.hash()
    }

    /// Learns from the rollouts of training step `step`, which were sampled at `temperature`.
    ///
    /// Per optimiser update and micro-batch: reference log-probs (if beta > 0), the policy's log-probs,
    /// loss, gradient. Then the global norm, clipping, AdamW. The first update of a step is on-policy: its
    /// old log-probs are the policy's own, detached, so every ratio is exactly 1. Later updates of the same
    /// step use old log-probs computed before the first one. An update whose loss or gradient is not finite,
    /// or that has no trained token, changes nothing and says why.
    pub fn step(&mut self, step: u32, temperature: f32, groups: &[GroupRollouts]) -> Result<StepOutcome, LearnerError> {
        let batches = updates(groups, &self.config)?;
        let mut old = Vec::with_capacity(batches.len());
        for (u, update) in batches.iter().enumerate() {
            old.push(if u == 0 { None } else { Some(self.old_logp(update, temperature)?) });
        }
        let mut outcome = StepOutcome::default();
        for ((batch, old), number) in batches.iter().zip(old).zip(0u32..) {
            outcome.left_out += batch.left_out;
            outcome.computed_tokens += batch.micro_batches.iter().map(|m| m.batch.tokens() as u64).sum::<u64>();
            outcome.updates.push(match self.update(step, number, temperature, batch, old.as_deref())? {
                Ok(event) => {
                    self.skips_in_row = 0;
                    UpdateOutcome::Taken(event)
                }
                Err(reason) => {
                    // A step without signal is normal; numbers that are not finite are not.
                    self.skips_in_row += u32::from(reason != SkipReason::NoTrainedTokens);
                    if self.skips_in_row > self.config.max_skips {
                        return Err(LearnerError::TooManySkips {
                            count: self.skips_in_row,
                            reason: reason.to_string(),
                        });
                    }
                    UpdateOutcome::Skipped(StepSkipped { step, update: number, reason: reason.to_string() })
                }
            });
        }
        if batches.is_empty() {
            outcome.updates.push(UpdateOutcome::Skipped(StepSkipped {
                step,
                update: 0,
                reason: SkipReason::NoTrainedTokens.to_string(),
            }));
        }
        Ok(outcome)
    }

    /// Log-probs of every token of an update under the present weights, one array per micro-batch.
    fn old_logp(&self, update: &UpdateBatch, temperature: f32) -> Result<Vec<Vec<f32>>, LearnerError> {
        let mut compute = lock(&self.compute);
        update
            .micro_batches
            .iter()
            .map(|m| self.with_trainable(|w| compute.forward(w, &m.batch, temperature))?.map(|f| f.logp))
            .collect()
    }

    fn update(
        &mut self,
        step: u32,
        number: u32,
        temperature: f32,
        batch: &UpdateBatch,
        old: Option<&[Vec<f32>]>,
    ) -> Result<Result<GradientStepTaken, SkipReason>, LearnerError> {
        let mut total = Summary::default();
        if batch.micro_batches.is_empty() {
            return Ok(Err(SkipReason::NoTrainedTokens));
        }
        let gradient = self.zero_gradient();
        for (i, m) in batch.micro_batches.iter().enumerate() {
            total.add(&self.micro_batch(m, temperature, old.map(|old| old[i].clone()), &gradient)?);
            if total.non_finite {
                return Ok(Err(SkipReason::NonFiniteLoss));
            }
        }
        if let Some(reason) = total.skip() {
            return Ok(Err(reason));
        }
        let gradient = std::mem::take(&mut lock(&gradient).sum);
        let norm = grad_norm(&gradient);
        let scale = clip_scale(norm, self.config.grad_clip);
        if !norm.is_finite() || norm * scale > LARGEST_GRADIENT {
            return Ok(Err(SkipReason::NonFiniteGradient));
        }
        let learning_rate = self.config.learning_rate_at(self.optimizer.step_count());
        let constants = AdamWConfig {
            beta1: self.config.adam_beta1,
            beta2: self.config.adam_beta2,
            eps: self.config.adam_eps,
            weight_decay: self.config.weight_decay,
        };
        let len = gradient.len();
        let gradient = Tensor::from_vec(gradient, len, &Device::Cpu)?;
        {
            let op = AdamWOp::new(&mut self.optimizer, scale, learning_rate, constants);
            self.weights.as_tensor().inplace_op2(&gradient, &op)?;
        }
        self.version += 1;
        Ok(Ok(GradientStepTaken {
            step,
            update: number,
            version_before: self.version - 1,
            version_after: self.version,
            rollouts: batch
                .micro_batches
                .iter()
                .flat_map(|m| m.keys.iter().cloned().zip(m.advantages.iter().copied()))
                .collect(),
            loss: total.loss,
            policy_loss: total.policy_loss,
            kl: total.kl(),
            entropy: total.entropy(),
            clip_fraction: total.clip_fraction(),
            grad_norm: norm,
            learning_rate,
            trained_tokens: total.trained_tokens,
            weights_hash: self.weights_hash()?,
        }))
    }

    /// Where the micro-batches of an update add up their gradients.
    fn zero_gradient(&self) -> SharedGradient {
        Arc::new(Mutex::new(Accumulated { sum: vec![0.0; self.optimizer.len()], parts: 0 }))
    }

    /// Loss of one micro-batch; its gradient, through candle's autograd, is added to `gradient` (not when the
    /// loss is not finite).
    fn micro_batch(
        &self,
        m: &MicroBatch,
        temperature: f32,
        logp_old: Option<Vec<f32>>,
        gradient: &SharedGradient,
    ) -> Result<Summary, LearnerError> {
        let config = self.config.loss_config();
        let logp_ref = match self.config.needs_reference() {
            true => Some(lock(&self.compute).reference(&m.batch, temperature)?),
            false => None,
        };
        let error: Slot<LearnerError> = Slot::default();
        let output: Slot<LossOutput<f32>> = Slot::default();
        let model = ModelOp {
            compute: Arc::clone(&self.compute),
            batch: Arc::new(m.batch.clone()),
            temperature,
            generation: Arc::default(),
            entropy_gradient: config.entropy_coef != 0.0,
            gradient: Arc::clone(gradient),
            error: Arc::clone(&error),
        };
        let loss = TokenLossOp {
            tokens: TokenConstants {
                logp_old,
                logp_ref,
                logp_sampler: config.correction.is_some().then(|| m.logp_sampler.clone()),
                mask: vec![true; m.tokens()],
                offsets: m.offsets.clone(),
                advantages: m.advantages.clone(),
                weights: m.weights.clone(),
            },
            config,
            output: Arc::clone(&output),
            error: Arc::clone(&error),
        };
        // Our own error, where one of our ops failed, says more than candle's wrapping of it.
        let own = |e: candle_core::Error| lock(&error).take().unwrap_or(LearnerError::Candle(e));
        let logp = self.weights.as_tensor().apply_op1(model).map_err(own)?;
        let value = logp.apply_op1(loss).map_err(own)?;
        let summary = lock(&output).as_ref().map(|o| o.summary).unwrap_or_default();
        if summary.non_finite {
            return Ok(summary);
        }
        let before = lock(gradient).parts;
        value.backward().map_err(own)?;
        // candle drops gradients without a word where an op gives none; ours must have arrived.
        if lock(gradient).parts != before + 1 {
            let detail = "autograd did not reach the weights".into();
            return Err(LearnerError::Compute { stage: "backward", detail });
        }
        Ok(summary)
    }
}

#[cfg(test)]
mod head_tests;
#[cfg(test)]
mod model_tests;
#[cfg(test)]
mod tests;
