//! What can be chosen about a loss, under the names that users of TRL and verl know.

use serde::{Deserialize, Serialize};

/// The loss family.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LossKind {
    /// Clipped surrogate, mean over sequences of token means.
    Grpo,
    /// Clipped surrogate, sum over the trained tokens of the whole optimiser update / their number.
    #[default]
    Dapo,
    /// Clipped surrogate, sum / (sequences x max completion length).
    DrGrpo,
    /// Clipped surrogate, token mean within each micro-batch, mean over micro-batches.
    Bnpo,
    /// Sequence-level ratio `exp(mean_t log r)`, aggregated like `grpo`.
    Gspo,
    /// `-sg(min(r, epsilon_high)) A logp`, aggregated like `dapo`; `epsilon_high` is the bound itself.
    Cispo,
    /// `-A logp`, aggregated like `dapo`; no ratio, no reference.
    Gpg,
}

impl LossKind {
    /// Every family with its name.
    pub const ALL: [(LossKind, &'static str); 7] = [
        (LossKind::Grpo, "grpo"),
        (LossKind::Dapo, "dapo"),
        (LossKind::DrGrpo, "dr_grpo"),
        (LossKind::Bnpo, "bnpo"),
        (LossKind::Gspo, "gspo"),
        (LossKind::Cispo, "cispo"),
        (LossKind::Gpg, "gpg"),
    ];

    /// Name as configured.
    pub fn name(self) -> &'static str {
        Self::ALL.iter().find(|(kind, _)| *kind == self).map_or("dapo", |(_, name)| name)
    }

    /// Default (`epsilon_low`, `epsilon_high`): .2/.28; gspo 3e-4/4e-4; cispo's upper bound is 5.
    pub fn default_epsilons(self) -> (f64, f64) {
        match self {
            LossKind::Gspo => (3e-4, 4e-4),
            LossKind::Cispo => (0.2, 5.0),
            _ => (0.2, 0.28),
        }
    }
}

/// Estimator of KL(policy || reference) per token, with d = logp_ref - logp.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KlKind {
    /// `-d`.
    K1,
    /// `d^2 / 2`.
    K2,
    /// `e^d - d - 1`, d clamped to +-20.
    #[default]
    K3,
}

/// What an off-policy weight `w = exp(logp_old - logp_sampler)` outside its bounds becomes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CorrectionKind {
    /// Truncated importance sampling: `min(w, max)` (and `max(w, min)` where `min` is given).
    Tis,
    /// Masked importance sampling: 0 outside `[min, max]`.
    Mis,
}

/// Whether the correction looks at tokens or at whole sequences (sum of the log-ratios of the trained tokens).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CorrectionLevel {
    /// One weight per token.
    #[default]
    Token,
    /// One weight per sequence.
    Sequence,
}

/// Correction for a sampler whose log-probs differ from the trainer's. Multiplies the policy part only.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Correction {
    /// Truncate or mask.
    pub kind: CorrectionKind,
    /// Token or sequence. Default token.
    #[serde(default)]
    pub level: CorrectionLevel,
    /// Upper bound C. Default 2.
    #[serde(default = "two")]
    pub max: f64,
    /// Lower bound. Default none.
    #[serde(default)]
    pub min: Option<f64>,
}

fn two() -> f64 {
    2.0
}

/// Soft overlong punishment (DAPO), see [`crate::decide::advantage::overlong_penalty`].
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Overlong {
    /// Longest completion, tokens.
    pub max: u32,
    /// Length of the ramp before it, tokens.
    pub cache: u32,
    /// Penalty at the end of the ramp.
    pub factor: f64,
}

/// A loss, completely specified.
#[derive(Debug, Clone, PartialEq)]
pub struct LossConfig {
    /// Family.
    pub kind: LossKind,
    /// Clip below: ratio >= 1 - epsilon_low.
    pub epsilon_low: f64,
    /// Clip above: ratio <= 1 + epsilon_high; for cispo the bound itself.
    pub epsilon_high: f64,
    /// Two-sided cap: the *unclipped* ratio is capped at delta too (ratio families and gspo).
    pub delta: Option<f64>,
    /// Dual clip c: for A < 0 the loss is at most c |A| (ratio families and gspo).
    pub dual_clip: Option<f64>,
    /// Weight of the KL term; 0 = none.
    pub beta: f64,
    /// KL estimator.
    pub kl: KlKind,
    /// Sampler/trainer correction.
    pub correction: Option<Correction>,
    /// Divisor of `dr_grpo`, tokens.
    pub max_completion_length: u32,
    /// Weight of the entropy bonus; 0 = none.
    pub entropy_coef: f64,
}

impl LossConfig {
    /// The documented defaults of a family: its epsilons, k3 with beta 1e-3, everything else off,
    /// `max_completion_length` 4096.
    pub fn new(kind: LossKind) -> LossConfig {
        let (epsilon_low, epsilon_high) = kind.default_epsilons();
        LossConfig {
            kind,
            epsilon_low,
            epsilon_high,
            delta: None,
            dual_clip: None,
            beta: 1e-3,
            kl: KlKind::K3,
            correction: None,
            max_completion_length: 4096,
            entropy_coef: 0.0,
        }
    }

    /// Refuses settings that cannot mean anything, naming the field.
    pub fn validate(&self) -> Result<(), super::LossError> {
        let mut checks: Vec<(&'static str, f64, bool, &'static str)> = vec![
            ("epsilon_low", self.epsilon_low, self.epsilon_low >= 0.0, "must be >= 0"),
            ("epsilon_high", self.epsilon_high, self.epsilon_high >= 0.0, "must be >= 0"),
            ("beta", self.beta, self.beta >= 0.0, "must be >= 0"),
            ("entropy_coef", self.entropy_coef, true, "must be finite"),
        ];
        if let Some(delta) = self.delta {
            checks.push(("delta", delta, delta > 0.0, "must be > 0"));
        }
        if let Some(c) = self.dual_clip {
            checks.push(("dual_clip", c, c > 1.0, "must be > 1"));
        }
        if let Some(c) = &self.correction {
            checks.push(("correction.max", c.max, c.max > 0.0, "must be > 0"));
            if let Some(min) = c.min {
                checks.push(("correction.min", min, min >= 0.0 && min <= c.max, "must be in [0, max]"));
            }
        }
        for (field, value, ok, rule) in checks {
            if !value.is_finite() || !ok {
                return Err(super::LossError::Setting { field, value, rule });
            }
        }
        if self.max_completion_length == 0 {
            return Err(super::LossError::Setting { field: "max_completion_length", value: 0.0, rule: "must be >= 1" });
        }
        Ok(())
    }
}
