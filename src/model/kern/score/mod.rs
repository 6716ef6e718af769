//! From logits to log-probabilities and entropies of chosen tokens, and back.
//!
//! Per row of v logits l with target y, at temperature T, z = l / T:
//!
//! ```text
//! lse = log sum_j exp z_j      logp = z_y - lse      p_j = exp(z_j - lse)      H = -sum_j p_j log p_j
//!
//! dlogp/dl_j = ([j = y] - p_j) / T                   dH/dl_j = -p_j (log p_j + H) / T
//! ```
//!
//! `logits` are `[rows][v]`; log-probs, entropies and lse in nats. The forward keeps [`Scored`] per row; the backward
//! turns the logits into their gradient in place. A token whose logit is -inf
//! has no share in entropy and gradient. A logit that is NaN makes its row's lse NaN.
//!
//! The derivatives are those of the log-softmax; `learner/kernels/grpo` holds the same with the loss between. Measured
//! figures stand in `benches/model.rs`, as part of train.

mod cpu;
#[cfg(test)]
mod reference;
#[cfg(test)]
mod tests;

pub use cpu::{score, score_backward};

/// What the forward keeps of a scored row.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Scored {
    /// Log-sum-exp of logits / temperature.
    pub lse: f32,
    /// Log-probability of the target, nats.
    pub logp: f32,
    /// Entropy, nats.
    pub entropy: f32,
}
