//! Settings `learner.*`.

use super::error::LearnerError;
use super::loss::{Correction, KlKind, LossConfig, LossKind, Overlong};
use super::schedule::Schedule;
use crate::decide::advantage::{AdvantageConfig, Estimator, Scale};
use crate::model::Precision;

/// Everything that decides how rollouts change the policy. Where TOML needs a way to say "off", 0 says it.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LearnerConfig {
    /// Loss family. Default `dapo`.
    pub loss: LossKind,
    /// Clip below. Default by family: .2, gspo 3e-4.
    pub epsilon_low: Option<f64>,
    /// Clip above. Default by family: .28, gspo 4e-4, cispo 5 (the bound itself).
    pub epsilon_high: Option<f64>,
    /// Two-sided cap of the unclipped ratio; 0 = off (default).
    pub delta: f64,
    /// Dual clip for negative advantages; 0 = off. Default 3.
    pub dual_clip: f64,
    /// Weight of KL(policy || reference); 0 = no reference is computed. Default 1e-3.
    pub beta: f64,
    /// KL estimator. Default k3.
    pub kl: KlKind,
    /// Sampler/trainer correction. Default none.
    pub correction: Option<Correction>,
    /// Soft overlong punishment, added to the rewards. Default none.
    pub overlong: Option<Overlong>,
    /// Divisor of `dr_grpo`, tokens. Default 4096.
    pub max_completion_length: u32,
    /// Entropy bonus; 0 = off (default).
    pub entropy_coef: f64,
    /// Advantage estimator. Default `grpo`, for the loss `gpg` `gpg`.
    pub advantage: Option<Estimator>,
    /// Divisor of `grpo` advantages. Default `group`, for the loss `dr_grpo` `none`.
    pub scale: Option<Scale>,
    /// Added to the standard deviation. Default 1e-4.
    pub advantage_eps: f64,
    /// Peak learning rate. Default 1e-6.
    pub learning_rate: f64,
    /// Shape of the learning rate over the updates. Default constant.
    pub schedule: Schedule,
    /// Updates of linear warm-up, the first of which already has rate 1/n (transformers' has rate 0). Default 0.
    pub warmup_updates: u64,
    /// Updates after which a falling schedule has reached its floor; 0 = the schedule stays constant.
    pub total_updates: u64,
    /// Floor of a falling schedule, as a share of the peak. Default 0.
    pub min_learning_rate_ratio: f64,
    /// Adam beta1. Default .9.
    pub adam_beta1: f64,
    /// Adam beta2. Default .999.
    pub adam_beta2: f64,
    /// Adam epsilon. Default 1e-8.
    pub adam_eps: f64,
    /// Decoupled weight decay, on every parameter (as torch and verl; transformers' Trainer leaves out norms and
    /// biases). Default .01.
    pub weight_decay: f64,
    /// Global gradient norm bound; 0 = off. Default 1.
    pub grad_clip: f64,
    /// Optimiser updates per step: the groups are split in canonical order. Default 1.
    pub updates_per_step: u32,
    /// Token budget of one forward and backward (prompts counted once per group). Default 16384.
    pub micro_batch_tokens: u32,
    /// Keep only the input of each layer and run its forward again in the backward: the same bits in less memory (a token of
    /// Qwen3-1.7B's shape 0.5 instead of 3.1 MiB, [`crate::model::Trainer::bytes_per_token`]), for more
    /// time: 1.15 times with 4 layers (`benches/versus.rs`), somewhat more with many, as the last one is not run again. Default
    /// false.
    pub recompute_activations: bool,
    /// Precision of the weights that log-probs are computed with, and of a frozen base and the reference. The trained
    /// weights, the moments and the gradient are f32. Default f32.
    pub precision: Precision,
    /// Leave out rollouts whose advantage is exactly 0: they would contribute only KL (and entropy). They
    /// still count in the loss's denominators, so with `beta = 0` the update is the same. Default false.
    pub skip_zero_advantage: bool,
    /// Stop after this many skipped updates in a row. Default 5.
    pub max_skips: u32,
}

impl Default for LearnerConfig {
    fn default() -> Self {
        LearnerConfig {
            loss: LossKind::Dapo,
            epsilon_low: None,
            epsilon_high: None,
            delta: 0.0,
            dual_clip: 3.0,
            beta: 1e-3,
            kl: KlKind::K3,
            correction: None,
            overlong: None,
            max_completion_length: 4096,
            entropy_coef: 0.0,
            advantage: None,
            scale: None,
            advantage_eps: 1e-4,
            learning_rate: 1e-6,
            schedule: Schedule::Constant,
            warmup_updates: 0,
            total_updates: 0,
            min_learning_rate_ratio: 0.0,
            adam_beta1: 0.9,
            adam_beta2: 0.999,
            adam_eps: 1e-8,
            weight_decay: 0.01,
            grad_clip: 1.0,
            updates_per_step: 1,
            micro_batch_tokens: 16384,
            recompute_activations: false,
            precision: Precision::F32,
            skip_zero_advantage: false,
            max_skips: 5,
        }
    }
}

/// The advantage settings that go with a loss family where none are given.
pub fn advantage_defaults(
    loss: LossKind,
    advantage: Option<Estimator>,
    scale: Option<Scale>,
    eps: f64,
) -> AdvantageConfig {
    AdvantageConfig {
        estimator: advantage.unwrap_or(if loss == LossKind::Gpg { Estimator::Gpg } else { Estimator::Grpo }),
        scale: scale.unwrap_or(if loss == LossKind::DrGrpo { Scale::None } else { Scale::Group }),
        eps,
    }
}

impl LearnerConfig {
    /// The loss these settings mean.
    pub fn loss_config(&self) -> LossConfig {
        let (low, high) = self.loss.default_epsilons();
        let on = |x: f64| (x != 0.0).then_some(x);
        LossConfig {
            kind: self.loss,
            epsilon_low: self.epsilon_low.unwrap_or(low),
            epsilon_high: self.epsilon_high.unwrap_or(high),
            delta: on(self.delta),
            dual_clip: on(self.dual_clip),
            beta: self.beta,
            kl: self.kl,
            correction: self.correction,
            max_completion_length: self.max_completion_length,
            entropy_coef: self.entropy_coef,
        }
    }

    /// The advantages these settings mean.
    pub fn advantage_config(&self) -> AdvantageConfig {
        advantage_defaults(self.loss, self.advantage, self.scale, self.advantage_eps)
    }

    /// Whether reference log-probabilities are needed.
    pub fn needs_reference(&self) -> bool {
        self.beta != 0.0 && self.loss != LossKind::Gpg
    }

    /// The learning rate of an update, counted from 0 over all updates taken.
    pub fn learning_rate_at(&self, update: u64) -> f64 {
        self.learning_rate
            * self.schedule.factor(update, self.warmup_updates, self.total_updates, self.min_learning_rate_ratio)
    }

    /// Refuses settings that cannot mean anything, naming the field.
    pub fn validate(&self) -> Result<(), LearnerError> {
        self.loss_config().validate()?;
        let unit = |x: f64| (0.0..1.0).contains(&x);
        let positive = |x: f64| x.is_finite() && x > 0.0;
        let not_negative = |x: f64| x.is_finite() && x >= 0.0;
        let checks: [(&'static str, f64, bool, &'static str); 9] = [
            ("learning_rate", self.learning_rate, not_negative(self.learning_rate), "must be finite and >= 0"),
            ("adam_beta1", self.adam_beta1, unit(self.adam_beta1), "must be in [0, 1)"),
            ("adam_beta2", self.adam_beta2, unit(self.adam_beta2), "must be in [0, 1)"),
            ("adam_eps", self.adam_eps, positive(self.adam_eps), "must be > 0"),
            ("weight_decay", self.weight_decay, not_negative(self.weight_decay), "must be finite and >= 0"),
            ("grad_clip", self.grad_clip, not_negative(self.grad_clip), "must be finite and >= 0 (0 = off)"),
            ("advantage_eps", self.advantage_eps, positive(self.advantage_eps), "must be > 0"),
            (
                "min_learning_rate_ratio",
                self.min_learning_rate_ratio,
                (0.0..=1.0).contains(&self.min_learning_rate_ratio),
                "must be in [0, 1]",
            ),
            (
                "overlong.factor",
                self.overlong.map_or(0.0, |o| o.factor),
                self.overlong.is_none_or(|o| not_negative(o.factor)),
                "must be finite and >= 0",
            ),
        ];
        for (field, value, ok, rule) in checks {
            if !ok {
                return Err(LearnerError::Setting { field, value: value.to_string(), rule });
            }
        }
        for (field, value) in [
            ("updates_per_step", self.updates_per_step),
            ("micro_batch_tokens", self.micro_batch_tokens),
            ("max_skips", self.max_skips),
        ] {
            if value == 0 {
                return Err(LearnerError::Setting { field, value: "0".into(), rule: "must be >= 1" });
            }
        }
        Ok(())
    }
}
