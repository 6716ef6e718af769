//! Ancestry and descent of tasks: task -> draft -> context -> signal and rollouts, and task -> the
//! gradient steps that trained on it. Contents stay in the log; here are only the links.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::event::{
    ContextSpec, DraftProposed, EvolutionStarted, ExplorationStepTaken, GradientStepTaken, ReflectionWritten,
    RolloutKey, SignalKind,
};

/// An optimiser update that trained on a task.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TrainedBy {
    /// Training step.
    pub step: u32,
    /// Update within the step.
    pub update: u32,
    /// Policy version after it.
    pub version_after: u32,
    /// Rollouts of the task in it.
    pub rollouts: u32,
}

/// A context of an evolution round and what grew from it.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct ContextNode {
    /// Evolution round.
    pub round: u32,
    /// Training step after which the round ran.
    pub step: u32,
    /// `feedback` or `random`.
    pub mode: String,
    /// Task explored.
    pub task: Option<String>,
    /// Signal.
    pub kind: Option<SignalKind>,
    /// Marked rollouts, hardest first.
    pub rollouts: Vec<RolloutKey>,
    /// Whether its reflection is written.
    pub reflected: bool,
    /// Exploration steps taken: (round, step).
    pub explored: BTreeSet<(u32, u32)>,
    /// Drafts proposed from it.
    pub drafts: BTreeSet<String>,
}

/// All links.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Lineage {
    /// Contexts by id.
    pub contexts: BTreeMap<String, ContextNode>,
    /// Per task the updates that trained on it, by (step, update).
    pub trained: BTreeMap<String, Vec<TrainedBy>>,
}

impl Lineage {
    /// A round chose its contexts.
    pub fn start(&mut self, event: &EvolutionStarted) {
        for ContextSpec { id, task, kind, rollouts } in &event.contexts {
            let node = self.contexts.entry(id.clone()).or_default();
            node.round = event.round;
            node.step = event.step;
            node.mode.clone_from(&event.mode);
            node.task.clone_from(task);
            node.kind = *kind;
            node.rollouts.clone_from(rollouts);
        }
    }

    /// A reflection was written.
    pub fn reflect(&mut self, event: &ReflectionWritten) {
        self.contexts.entry(event.context.clone()).or_default().reflected = true;
    }

    /// An exploration step was taken.
    pub fn explore(&mut self, event: &ExplorationStepTaken) {
        self.contexts.entry(event.context.clone()).or_default().explored.insert((event.round, event.step));
    }

    /// A draft was proposed.
    pub fn propose(&mut self, event: &DraftProposed) {
        self.contexts.entry(event.context.clone()).or_default().drafts.insert(event.draft.clone());
    }

    /// An update was applied.
    pub fn train(&mut self, event: &GradientStepTaken) {
        let mut counts: BTreeMap<&str, u32> = BTreeMap::new();
        for (key, _) in &event.rollouts {
            *counts.entry(&key.task).or_insert(0) += 1;
        }
        for (task, rollouts) in counts {
            self.trained.entry(task.to_owned()).or_default().push(TrainedBy {
                step: event.step,
                update: event.update,
                version_after: event.version_after,
                rollouts,
            });
        }
    }
}
