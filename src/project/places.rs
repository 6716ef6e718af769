//! Where in the log things are: sequence numbers by what they hold. Not facts (they differ between two
//! equal runs), never part of a digest.
//!
//! Of rollouts and signals, which are most of a log, only the stretch of their step is kept; who wants one reads that
//! stretch ([`State::stretch`](super::State::stretch)). So the index grows with steps, updates, tasks and drafts.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::series::Series;
use crate::decide::signals::with_entry;
use crate::event::CheckpointSaved;
use crate::event::view::{Archived, EventRef};

/// Sequence numbers of a draft's events.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct DraftPlaces {
    /// `DraftProposed`.
    pub proposed: Option<u64>,
    /// `DraftValidated`.
    pub validated: Option<u64>,
    /// `DraftRejected`.
    pub rejected: Option<u64>,
}

/// Sequence numbers of a context's events.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct ContextPlaces {
    /// `ReflectionWritten`.
    pub reflection: Option<u64>,
    /// `ExplorationStepTaken` by (round, step).
    #[serde(with = "crate::decide::pairs")]
    pub exploration: BTreeMap<(u32, u32), u64>,
}

/// Where a finished step stands: all its rollouts, signals and updates lie in `first..=last`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StepPlace {
    /// Its first event; `StepFinished` itself for a step without others.
    pub first: u64,
    /// `StepFinished`.
    pub last: u64,
}

/// The index. Of things recorded twice the first place counts, as in the fold.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Places {
    /// `RunStarted`.
    pub run: Option<u64>,
    /// `TaskAdmitted` by task.
    pub tasks: BTreeMap<String, u64>,
    /// `GradientStepTaken` by (step, update).
    pub updates: Series<(u32, u32), u64>,
    /// `EvaluationFinished` by (step, split).
    #[serde(with = "crate::decide::pairs")]
    pub evaluations: BTreeMap<(u32, String), u64>,
    /// `EvolutionStarted` by round.
    pub rounds: BTreeMap<u32, u64>,
    /// Reflections and exploration steps by context.
    pub contexts: BTreeMap<String, ContextPlaces>,
    /// Events of drafts.
    pub drafts: BTreeMap<String, DraftPlaces>,
    /// Finished steps.
    pub steps: Series<u32, StepPlace>,
    /// Checkpoints by policy version (the newest of a version).
    pub checkpoints: BTreeMap<u32, CheckpointSaved>,
}

impl Places {
    /// Notes where an event is. A step's place is noted with [`Places::finish`].
    pub fn apply(&mut self, seq: u64, event: EventRef<'_>) {
        match event {
            EventRef::RunStarted(_) => {
                self.run.get_or_insert(seq);
            }
            EventRef::TaskAdmitted(e) => {
                if !self.tasks.contains_key(e.task.id.as_str()) {
                    self.tasks.insert(e.task.id.as_str().to_owned(), seq);
                }
            }
            EventRef::GradientStepTaken(e) => {
                self.updates.get_or_insert_with((e.step.to_native(), e.update.to_native()), || seq);
            }
            EventRef::EvaluationFinished(e) => {
                self.evaluations.entry((e.step.to_native(), e.split.as_str().to_owned())).or_insert(seq);
            }
            EventRef::EvolutionStarted(e) => {
                self.rounds.entry(e.round.to_native()).or_insert(seq);
            }
            EventRef::ReflectionWritten(e) => {
                with_entry(&mut self.contexts, &e.context, |context| *context.reflection.get_or_insert(seq));
            }
            EventRef::ExplorationStepTaken(e) => {
                let at = (e.round.to_native(), e.step.to_native());
                with_entry(&mut self.contexts, &e.context, |context| *context.exploration.entry(at).or_insert(seq));
            }
            EventRef::DraftProposed(e) => {
                with_entry(&mut self.drafts, &e.draft, |draft| *draft.proposed.get_or_insert(seq));
            }
            EventRef::DraftValidated(e) => {
                with_entry(&mut self.drafts, &e.draft, |draft| *draft.validated.get_or_insert(seq));
            }
            EventRef::DraftRejected(e) => {
                with_entry(&mut self.drafts, &e.draft, |draft| *draft.rejected.get_or_insert(seq));
            }
            EventRef::CheckpointSaved(e) => {
                self.checkpoints.insert(e.version.to_native(), e.native());
            }
            EventRef::BatchPlanned(_)
            | EventRef::BatchRefilled(_)
            | EventRef::RolloutFinished(_)
            | EventRef::SignalRaised(_)
            | EventRef::StepSkipped(_)
            | EventRef::PolicyPublished(_)
            | EventRef::EvolutionFinished(_)
            | EventRef::StepFinished(_)
            | EventRef::RunFinished(_)
            | EventRef::RunResumed(_)
            | EventRef::FailureNoted(_)
            | EventRef::LlmAsked(_)
            | EventRef::BranchCreated(_)
            | EventRef::BranchUndone(_)
            | EventRef::BranchDeleted(_)
            | EventRef::GarbageCollected(_) => {}
        }
    }

    /// A step is finished by event `last`; `first` is its first event, if it had others.
    pub fn finish(&mut self, step: u32, first: Option<u64>, last: u64) {
        self.steps.get_or_insert_with(step, || StepPlace { first: first.unwrap_or(last), last });
    }
}
