//! Where in the log things are: sequence numbers by what they hold. Not facts (they differ between two
//! equal runs), never part of a digest.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::event::{CheckpointSaved, Event, RolloutKey, SignalKind};

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

/// The index. Of things recorded twice the first place counts, as in the fold.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Places {
    /// `RunStarted`.
    pub run: Option<u64>,
    /// `TaskAdmitted` by task.
    pub tasks: BTreeMap<String, u64>,
    /// `BatchPlanned` by step.
    pub plans: BTreeMap<u32, u64>,
    /// `RolloutFinished`.
    #[serde(with = "crate::decide::pairs")]
    pub rollouts: BTreeMap<RolloutKey, u64>,
    /// `SignalRaised`.
    #[serde(with = "crate::decide::pairs")]
    pub signals: BTreeMap<(RolloutKey, SignalKind), u64>,
    /// `GradientStepTaken` by (step, update).
    #[serde(with = "crate::decide::pairs")]
    pub updates: BTreeMap<(u32, u32), u64>,
    /// `EvaluationFinished` by (step, split).
    #[serde(with = "crate::decide::pairs")]
    pub evaluations: BTreeMap<(u32, String), u64>,
    /// `EvolutionStarted` by round.
    pub rounds: BTreeMap<u32, u64>,
    /// Reflections and exploration steps by context.
    pub contexts: BTreeMap<String, ContextPlaces>,
    /// Events of drafts.
    pub drafts: BTreeMap<String, DraftPlaces>,
    /// `StepFinished` by step.
    pub steps: BTreeMap<u32, u64>,
    /// Checkpoints by policy version (the newest of a version).
    pub checkpoints: BTreeMap<u32, CheckpointSaved>,
}

impl Places {
    /// Notes where an event is.
    pub fn apply(&mut self, seq: u64, event: &Event) {
        match event {
            Event::RunStarted(_) => {
                self.run.get_or_insert(seq);
            }
            Event::TaskAdmitted(e) => {
                self.tasks.entry(e.task.id.clone()).or_insert(seq);
            }
            Event::BatchPlanned(e) => {
                self.plans.entry(e.step).or_insert(seq);
            }
            Event::RolloutFinished(e) => {
                self.rollouts.entry(e.key.clone()).or_insert(seq);
            }
            Event::SignalRaised(e) => {
                self.signals.entry((e.key.clone(), e.kind)).or_insert(seq);
            }
            Event::GradientStepTaken(e) => {
                self.updates.entry((e.step, e.update)).or_insert(seq);
            }
            Event::EvaluationFinished(e) => {
                self.evaluations.entry((e.step, e.split.clone())).or_insert(seq);
            }
            Event::EvolutionStarted(e) => {
                self.rounds.entry(e.round).or_insert(seq);
            }
            Event::ReflectionWritten(e) => {
                self.contexts.entry(e.context.clone()).or_default().reflection.get_or_insert(seq);
            }
            Event::ExplorationStepTaken(e) => {
                let context = self.contexts.entry(e.context.clone()).or_default();
                context.exploration.entry((e.round, e.step)).or_insert(seq);
            }
            Event::DraftProposed(e) => {
                self.drafts.entry(e.draft.clone()).or_default().proposed.get_or_insert(seq);
            }
            Event::DraftValidated(e) => {
                self.drafts.entry(e.draft.clone()).or_default().validated.get_or_insert(seq);
            }
            Event::DraftRejected(e) => {
                self.drafts.entry(e.draft.clone()).or_default().rejected.get_or_insert(seq);
            }
            Event::StepFinished(e) => {
                self.steps.entry(e.step).or_insert(seq);
            }
            Event::CheckpointSaved(e) => {
                self.checkpoints.insert(e.version, e.clone());
            }
            Event::StepSkipped(_)
            | Event::PolicyPublished(_)
            | Event::EvolutionFinished(_)
            | Event::RunFinished(_)
            | Event::RunResumed(_)
            | Event::FailureNoted(_)
            | Event::BranchCreated(_)
            | Event::BranchUndone(_)
            | Event::BranchDeleted(_)
            | Event::GarbageCollected(_) => {}
        }
    }
}
