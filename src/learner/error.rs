//! What can go wrong while learning.

use super::loss::LossError;

/// Errors of the learner. A non-finite loss is no error: it is a skipped update.
#[derive(Debug, thiserror::Error)]
pub enum LearnerError {
    /// A loss was called wrongly or a loss setting makes no sense.
    #[error(transparent)]
    Loss(#[from] LossError),
    /// A learner setting makes no sense.
    #[error("learner.{field} is {value}: {rule}")]
    Setting {
        /// Setting.
        field: &'static str,
        /// Value.
        value: String,
        /// What it must be.
        rule: &'static str,
    },
    /// A recorded rollout contradicts itself.
    #[error("rollout {rollout}: {fault}; the log record is damaged or was written by other software")]
    Rollout {
        /// step/task/draw/k.
        rollout: String,
        /// What is wrong.
        fault: String,
    },
    /// The compute core failed.
    #[error("model computation failed in {stage}: {detail}")]
    Compute {
        /// `forward`, `backward`, `reference`.
        stage: &'static str,
        /// What it said.
        detail: String,
    },
    /// A backward met activations that are not those of its own forward.
    #[error("backward of generation {asked}, but the activations are those of generation {held}")]
    Generation {
        /// What the caller holds.
        asked: u64,
        /// What the workspace holds.
        held: u64,
    },
    /// candle failed.
    #[error("candle: {0}")]
    Candle(#[from] candle_core::Error),
    /// Too many updates in a row could not be applied.
    #[error(
        "{count} updates in a row were skipped, the last because of: {reason}. Lower learner.learning_rate, or raise learner.max_skips"
    )]
    TooManySkips {
        /// How many.
        count: u32,
        /// Why the last one was.
        reason: String,
    },
    /// A checkpoint could not be written or read.
    #[error("checkpoint {path}: {fault}")]
    Checkpoint {
        /// File or folder.
        path: String,
        /// What is wrong and what helps.
        fault: String,
    },
    /// Serialised optimiser state is not what this program writes.
    #[error("optimiser state: {0}")]
    OptimizerState(String),
}

impl LearnerError {
    pub(crate) fn checkpoint(path: &std::path::Path, fault: impl std::fmt::Display) -> LearnerError {
        LearnerError::Checkpoint { path: path.display().to_string(), fault: fault.to_string() }
    }
}
