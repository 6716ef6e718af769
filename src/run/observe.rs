//! How a run tells what it is doing. The library never prints: the command line draws bars.

use crate::project::State;

/// Something to show.
#[derive(Debug)]
pub enum Progress<'a> {
    /// A training step begins.
    StepStarted {
        /// Step.
        step: u32,
        /// Last step.
        of: u32,
    },
    /// Rollouts of the step that are finished.
    Sampled {
        /// Finished.
        done: usize,
        /// Planned.
        of: usize,
    },
    /// The learner works.
    Learning {
        /// Step.
        step: u32,
    },
    /// Held-out tasks that are evaluated.
    Evaluating {
        /// Split.
        split: &'a str,
        /// Finished.
        done: usize,
        /// All.
        of: usize,
    },
    /// Contexts that are explored.
    Evolving {
        /// Finished.
        done: usize,
        /// All.
        of: usize,
    },
    /// A training step ended.
    StepFinished {
        /// Step.
        step: u32,
        /// Last step.
        of: u32,
        /// The state after it.
        state: &'a State,
    },
    /// Something was survived that a person should know.
    Note(String),
}

/// Receives [`Progress`] on the run's thread.
pub trait Observer {
    /// Shows it.
    fn progress(&mut self, progress: Progress<'_>);
}

/// Shows nothing.
#[derive(Debug, Default, Clone, Copy)]
pub struct Silent;

impl Observer for Silent {
    fn progress(&mut self, _progress: Progress<'_>) {}
}
