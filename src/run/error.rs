//! What stops a run.

use crate::config::SettingsError;
use crate::env::EnvError;
use crate::evolve::ExploreError;
use crate::pipeline::PipelineError;
use std::path::PathBuf;

/// A failed run. Whatever was acknowledged is in the log; `coevolve resume` goes on from there.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// Settings.
    #[error(transparent)]
    Settings(#[from] SettingsError),
    /// The log.
    #[error(transparent)]
    Log(#[from] crate::log::Error),
    /// An environment, outside an episode.
    #[error(transparent)]
    Environment(#[from] EnvError),
    /// A stage.
    #[error(transparent)]
    Pipeline(#[from] PipelineError),
    /// The learner.
    #[error(transparent)]
    Learner(#[from] crate::learner::LearnerError),
    /// A model folder or file.
    #[error(transparent)]
    Model(#[from] crate::model::ModelError),
    /// Exploration that cannot start.
    #[error(transparent)]
    Explore(#[from] ExploreError),
    /// The policy cannot be built.
    #[error("policy `{model}`: {message}")]
    Policy {
        /// The setting.
        model: String,
        /// What is wrong and what to do.
        message: String,
    },
    /// The run folder, or a part of it, cannot be written.
    #[error("{dir} cannot be written: {message}")]
    Folder {
        /// The folder.
        dir: PathBuf,
        /// Why.
        message: String,
    },
    /// The folder holds no run.
    #[error(
        "{dir} holds no run yet (it was stopped before its first event); start it afresh with `coevolve train --run {dir}`"
    )]
    NothingToResume {
        /// The folder.
        dir: PathBuf,
    },
    /// What the run was started with is not what is here.
    #[error(
        "{what} has changed since the run was started: recorded {recorded}, found {found}; resume with the original, or start a new run"
    )]
    Changed {
        /// What.
        what: &'static str,
        /// As recorded.
        recorded: String,
        /// As found.
        found: String,
    },
    /// Recomputing did not give what is recorded.
    #[error("recomputing {what} gives something else than the log holds: recorded {recorded}, recomputed {computed}")]
    Diverged {
        /// Which fact.
        what: String,
        /// As recorded.
        recorded: String,
        /// As recomputed.
        computed: String,
    },
    /// No task to train on.
    #[error(
        "split `{split}` gave no task and exploration admitted none; look at env.split, env.seed_tasks and evolve.initial"
    )]
    NoTasks {
        /// The split.
        split: String,
    },
    /// A broken invariant of this program.
    #[error("internal: {what}: {detail}; please report it with the run folder")]
    Internal {
        /// What.
        what: &'static str,
        /// Detail.
        detail: String,
    },
}

impl RunError {
    pub(crate) fn internal(what: &'static str, e: impl std::fmt::Display) -> RunError {
        RunError::Internal { what, detail: e.to_string() }
    }
}
