//! From recorded rollouts to a better policy: advantages, batch, loss, gradient, optimiser, checkpoint.
//!
//! [`Learner::step`] is the page to read first. Everything here is deterministic: the same rollouts, weights
//! and optimiser state give the same bits for any number of threads.
//!
//! * [`batch`]: the only shift and mask; rows, micro-batches, shared prefixes.
//! * [`loss`]: every loss over flat per-token arrays, with its gradient.
//! * [`policy`]: the model as a candle op, joined with the loss by candle's autograd.
//! * [`adamw`]: our own AdamW with serialisable f32 state; [`schedule`]: its learning rate.
//! * [`checkpoint`]: weights and optimiser state on disk, exact to the bit.
//! * [`kernels`]: the fused loss over logits, CPU and CUDA, and how the folder of an op is laid out.
//! * [`check_loss`]: `coevolve check loss`.
//!
//! # One token, from logits to weight
//!
//! Token `y` was sampled at place p of a rollout; `T` is the temperature of the rollouts. Files are below `src/`.
//!
//! | | what | formula | file |
//! |---|---|---|---|
//! | 1 | sampled, with its log-prob q | ids and q are stored and never re-encoded | `agent/sample.rs` |
//! | 2 | target: predicted at p - 1; what was not sampled is no target (that is the mask) | `(p - 1, y)` | `learner/batch.rs` |
//! | 3 | hidden state of p - 1, shared prompts once | `h` | `model/train/layers.rs` |
//! | 4 | logits, one chunk of rows at a time | `z = W h` | `model/train/head.rs` |
//! | 5 | log-prob and entropy | `logp = z_y/T - lse`, `lse = log sum exp(z_j/T)`, `H = -sum p_j log p_j` | `model/kern/score` |
//! | 6 | old log-prob: the policy's own before the step's first update; in the first update `logp` itself, detached | `logp_old` | `learner/step/mod.rs` |
//! | 7 | reference log-prob, if beta > 0 | `logp_ref`, `d = logp_ref - logp` | `learner/compute.rs` |
//! | 8 | ratio (gspo: of the whole sequence) | `r = exp(logp - logp_old)`, exponent within +-20 | `learner/loss/reference.rs` |
//! | 9 | advantage of its rollout | `A = (R - mean) / (std + 1e-4)` over the group's scored members | `decide/advantage.rs` |
//! | 10 | weight of its sequence, fixed for the whole update | dapo: `w = 1 / trained tokens` | `learner/loss/weights.rs` |
//! | 11 | its loss; c = sampler correction, else 1 | `w (c max(-r A, -clip(r) A) + beta (e^d - d - 1) - eta H)` | `learner/loss/reference.rs` |
//! | 12 | dL/dlogp | `g = w (-c r A [not clipped] + beta (1 - e^d))`; dL/dH: `-w eta` | `learner/loss/reference.rs` |
//! | 13 | dL/dlogits, into the logits' memory | `dz_j = (g ([j = y] - p_j) + w eta p_j (log p_j + H)) / T` | `model/kern/score` |
//! | 14 | head | `dW += dz h^T`, `dh = W^T dz` | `model/train/head.rs` |
//! | 15 | layers, or adapters only | backward of each, added into one gradient for all micro-batches | `model/train/layers.rs`, `learner/policy` |
//! | 16 | clip by the global norm | `G *= min(1, bound / (norm + 1e-6))` | `learner/adamw` |
//! | 17 | moments, from f32 state | `m = b1 m + (1 - b1) G`, `v = b2 v + (1 - b2) G^2` | `learner/adamw/cpu.rs` |
//! | 18 | learning rate of the update | warm-up, then constant, linear or cosine to a floor | `learner/schedule.rs` |
//! | 19 | new weight, in the f32 master copy | `x = x (1 - lr wd) - lr m' / (sqrt(v') + eps)`, m' and v' without their start's bias | `learner/adamw/cpu.rs` |
//! | 20 | version and hash of the weights, recorded | `GradientStepTaken` | `learner/step/mod.rs` |
//!
//! If any of these numbers is not finite, or there is no trained token, nothing changes and `StepSkipped` says
//! why. Steps 8 to 12 equal TRL and verl ([`check_loss`] feeds them; `tests/losses.rs`), 3 to 7 and 13 to 15
//! transformers and f64, 16 to 19 PyTorch.

pub mod adamw;
pub mod batch;
pub mod check_loss;
pub mod checkpoint;
pub mod compute;
pub mod config;
pub mod error;
pub mod kernels;
pub mod loss;
pub mod policy;
pub mod schedule;
pub mod step;

#[cfg(test)]
pub(crate) mod fake;

pub use batch::{GroupRollouts, group_rollouts};
pub use checkpoint::CheckpointInfo;
pub use compute::{Compute, ModelCompute};
pub use config::LearnerConfig;
pub use error::LearnerError;
pub use loss::{LossConfig, LossKind};
pub use step::{Learner, StepOutcome, UpdateOutcome};
