//! From recorded rollouts to a better policy: advantages, batch, loss, gradient, optimiser, checkpoint.
//!
//! [`Learner::step`] is the page to read first. Everything here is deterministic: the same rollouts, weights
//! and optimiser state give the same bits for any number of threads.
//!
//! * [`batch`]: the only shift and mask; rows, micro-batches, shared prefixes.
//! * [`loss`]: every loss over flat per-token arrays, with its gradient.
//! * [`ops`]: model and loss as candle ops, joined by candle's autograd.
//! * [`adamw`]: our own AdamW with serialisable f32 state; [`schedule`]: its learning rate.
//! * [`checkpoint`]: weights and optimiser state on disk, exact to the bit.
//! * [`kernels`]: the fused loss over logits, CPU and CUDA.
//! * [`check_loss`]: `coevolve check loss`.

pub mod adamw;
pub mod batch;
pub mod check_loss;
pub mod checkpoint;
pub mod compute;
pub mod config;
pub mod error;
pub mod kernels;
pub mod loss;
pub mod ops;
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
