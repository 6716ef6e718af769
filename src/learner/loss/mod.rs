//! Policy-gradient losses over flat per-token arrays: value, statistics and the gradient with respect to every
//! token's log-probability. The one reference for all devices: the fused CPU op calls it, the CUDA kernels
//! repeat its arithmetic, `coevolve check loss` prints it.
//!
//! Notation: `r = exp(logp - logp_old)`, m = trained-token mask, A = advantage of the sequence,
//! `d = logp_ref - logp`. Every family is a sum over trained tokens of `weight * token loss`; what tells
//! the aggregations apart is only the weight of a sequence's tokens ([`token_weights`]), which is fixed for
//! the whole optimiser update before any micro-batch runs. That is why the micro-batch split cannot change
//! a loss (except bnpo, which is defined by it).
//!
//! Numerical rules: log-ratios and d are clamped to +-20 *before* exp (gradient 0 outside); masked positions
//! are skipped by selection, never multiplied by zero, so they may hold anything, NaN included.
//! Gradients are exact derivatives of the value as computed; at a tie the unclipped branch counts.

mod config;
mod cpu;
mod real;
mod reference;
mod weights;

#[cfg(test)]
mod tests;

pub use config::{Correction, CorrectionKind, CorrectionLevel, KlKind, LossConfig, LossKind, Overlong};
pub use cpu::{TokenConstants, TokenLossOp};
pub use real::Real;
pub use weights::{UpdateShape, token_weights};

/// Log-ratios are clamped to this many nats on both sides before exp.
pub const LOG_RATIO_LIMIT: f64 = 20.0;

/// What can be wrong with a loss call.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum LossError {
    /// A setting makes no sense.
    #[error("loss setting `{field}` is {value}, {rule}")]
    Setting {
        /// Name.
        field: &'static str,
        /// Value.
        value: f64,
        /// Rule.
        rule: &'static str,
    },
    /// Arrays do not fit together.
    #[error("loss input `{field}` has {got} values, expected {expected}")]
    Length {
        /// Array.
        field: &'static str,
        /// Its length.
        got: usize,
        /// The length it must have.
        expected: usize,
    },
    /// Sequence offsets must start at 0 and not fall.
    #[error("loss input `offsets` must start at 0 and never fall; position {at} is {value}")]
    Offsets {
        /// Position in `offsets`.
        at: usize,
        /// Value there.
        value: usize,
    },
    /// An option needs an array that was not given.
    #[error("{option} needs `{field}`, which is missing")]
    Missing {
        /// Option.
        option: &'static str,
        /// Array.
        field: &'static str,
    },
    /// Micro-batches must hold every sequence exactly once.
    #[error("micro_batches: sequence {sequence} {fault}; every sequence belongs to exactly one micro-batch")]
    Split {
        /// Sequence index.
        sequence: usize,
        /// `is missing`, `is listed twice`, `does not exist`.
        fault: &'static str,
    },
}

/// Why an update must not be applied.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub enum SkipReason {
    /// Every token is masked.
    NoTrainedTokens,
    /// The loss or one of its per-token gradients is NaN or infinite.
    NonFiniteLoss,
    /// The gradient of a parameter is NaN, infinite or too large for f32 moments.
    NonFiniteGradient,
}

impl std::fmt::Display for SkipReason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            SkipReason::NoTrainedTokens => "no trained tokens",
            SkipReason::NonFiniteLoss => "non-finite loss",
            SkipReason::NonFiniteGradient => "non-finite gradient",
        })
    }
}

/// The tokens of some sequences, flat and aligned; all slices but `offsets`, `advantages` and `weights` have
/// one entry per token.
#[derive(Debug, Clone, Copy)]
pub struct TokenBatch<'a, F> {
    /// Log-probabilities under the policy being trained.
    pub logp: &'a [F],
    /// Under the policy before the update. `None` = on-policy: `logp` itself, detached (ratio exactly 1).
    pub logp_old: Option<&'a [F]>,
    /// Under the fixed reference. `None` = no KL term, whatever `beta`.
    pub logp_ref: Option<&'a [F]>,
    /// As the sampler reported them; needed by a correction only.
    pub logp_sampler: Option<&'a [F]>,
    /// Entropy of the policy at each position, nats; needed by the bonus, otherwise only reported.
    pub entropy: Option<&'a [F]>,
    /// Which tokens are trained.
    pub mask: &'a [bool],
    /// Start of each sequence, plus the total at the end.
    pub offsets: &'a [usize],
    /// One per sequence.
    pub advantages: &'a [F],
    /// Weight of each sequence's tokens, from [`token_weights`]; one per sequence.
    pub weights: &'a [f64],
}

/// Value, statistics and gradients. Sums may be added over micro-batches ([`Summary::add`]).
#[derive(Debug, Clone, PartialEq)]
pub struct LossOutput<F> {
    /// Value and statistics.
    pub summary: Summary,
    /// dL/dlogp per token; 0 where masked.
    pub dlogp: Vec<F>,
    /// dL/dentropy per token; empty without an entropy bonus.
    pub dentropy: Vec<F>,
}

/// Value and statistics of a loss over some sequences of an update.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Summary {
    /// policy_loss + beta * aggregated KL - entropy_coef * aggregated entropy.
    pub loss: f64,
    /// The surrogate part.
    pub policy_loss: f64,
    /// Sum over trained tokens of the KL estimate.
    pub kl_sum: f64,
    /// Sum over trained tokens of the entropy.
    pub entropy_sum: f64,
    /// Trained tokens whose ratio was clipped where it mattered: below with A < 0 or above with A > 0
    /// (cispo: above, A != 0).
    pub clipped: u64,
    /// Trained tokens held by the dual clip or by delta.
    pub capped: u64,
    /// Tokens with mask 1.
    pub trained_tokens: u64,
    /// A value or a gradient was not finite.
    pub non_finite: bool,
}

impl Summary {
    /// Adds another micro-batch of the same update.
    pub fn add(&mut self, other: &Summary) {
        self.loss += other.loss;
        self.policy_loss += other.policy_loss;
        self.kl_sum += other.kl_sum;
        self.entropy_sum += other.entropy_sum;
        self.clipped += other.clipped;
        self.capped += other.capped;
        self.trained_tokens += other.trained_tokens;
        self.non_finite |= other.non_finite;
    }

    fn mean(&self, sum: f64) -> f64 {
        if self.trained_tokens == 0 { 0.0 } else { sum / self.trained_tokens as f64 }
    }

    /// Mean KL estimate per trained token.
    pub fn kl(&self) -> f64 {
        self.mean(self.kl_sum)
    }

    /// Mean entropy per trained token, nats.
    pub fn entropy(&self) -> f64 {
        self.mean(self.entropy_sum)
    }

    /// Share of trained tokens whose ratio was clipped.
    pub fn clip_fraction(&self) -> f64 {
        self.mean(self.clipped as f64)
    }

    /// Why the update must be skipped, if it must.
    pub fn skip(&self) -> Option<SkipReason> {
        if self.trained_tokens == 0 {
            Some(SkipReason::NoTrainedTokens)
        } else if self.non_finite || !self.loss.is_finite() {
            Some(SkipReason::NonFiniteLoss)
        } else {
            None
        }
    }
}

impl<F: Real> TokenBatch<'_, F> {
    /// Checks that the arrays fit together and that every option has what it needs.
    pub fn validate(&self, config: &LossConfig) -> Result<(), LossError> {
        config.validate()?;
        let n = self.logp.len();
        let sequences = self.advantages.len();
        let length = |field, got, expected| {
            if got == expected { Ok(()) } else { Err(LossError::Length { field, got, expected }) }
        };
        length("mask", self.mask.len(), n)?;
        length("offsets", self.offsets.len(), sequences + 1)?;
        length("weights", self.weights.len(), sequences)?;
        for (field, array) in [
            ("logp_old", self.logp_old),
            ("logp_ref", self.logp_ref),
            ("logp_sampler", self.logp_sampler),
            ("entropy", self.entropy),
        ] {
            if let Some(array) = array {
                length(field, array.len(), n)?;
            }
        }
        let mut before = 0;
        for (at, &value) in self.offsets.iter().enumerate() {
            if value < before || (at == 0 && value != 0) {
                return Err(LossError::Offsets { at, value });
            }
            before = value;
        }
        length("logp", n, before)?;
        if config.correction.is_some() && self.logp_sampler.is_none() {
            return Err(LossError::Missing { option: "correction", field: "logp_sampler" });
        }
        if config.entropy_coef != 0.0 && self.entropy.is_none() {
            return Err(LossError::Missing { option: "entropy_coef", field: "entropy" });
        }
        Ok(())
    }
}

/// The loss of some sequences of an update and its gradient, in canonical order on one thread.
pub fn loss<F: Real>(config: &LossConfig, batch: &TokenBatch<'_, F>) -> Result<LossOutput<F>, LossError> {
    batch.validate(config)?;
    let n = batch.logp.len();
    let mut output = LossOutput {
        summary: Summary::default(),
        dlogp: vec![F::ZERO; n],
        dentropy: if config.entropy_coef != 0.0 { vec![F::ZERO; n] } else { Vec::new() },
    };
    let constants = reference::Constants::new(config);
    for sequence in 0..batch.advantages.len() {
        let summary = reference::sequence(&constants, batch, sequence, &mut output.dlogp, &mut output.dentropy);
        output.summary.add(&summary);
    }
    if !output.summary.loss.is_finite() {
        output.summary.non_finite = true;
    }
    Ok(output)
}
