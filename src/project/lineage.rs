//! Ancestry and descent of tasks: task -> draft -> context -> signal and rollouts, and task -> the
//! gradient steps that trained on it. Contents stay in the log; here are only the links.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::decide::signals::with_entry;
use crate::event::view::Archived;
use crate::event::{
    ArchivedDraftProposed, ArchivedEvolutionStarted, ArchivedExplorationStepTaken, ArchivedGradientStepTaken,
    ArchivedReflectionWritten, ContextSpec, RolloutKey, SignalKind,
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
    pub fn start(&mut self, event: &ArchivedEvolutionStarted) {
        for context in event.contexts.iter() {
            let ContextSpec { id, task, kind, rollouts } = context.native();
            let node = self.contexts.entry(id).or_default();
            node.round = event.round.to_native();
            node.step = event.step.to_native();
            node.mode = event.mode.as_str().to_owned();
            node.task = task;
            node.kind = kind;
            node.rollouts = rollouts;
        }
    }

    /// A reflection was written.
    pub fn reflect(&mut self, event: &ArchivedReflectionWritten) {
        with_entry(&mut self.contexts, &event.context, |node| node.reflected = true);
    }

    /// An exploration step was taken.
    pub fn explore(&mut self, event: &ArchivedExplorationStepTaken) {
        let at = (event.round.to_native(), event.step.to_native());
        with_entry(&mut self.contexts, &event.context, |node| node.explored.insert(at));
    }

    /// A draft was proposed.
    pub fn propose(&mut self, event: &ArchivedDraftProposed) {
        with_entry(&mut self.contexts, &event.context, |node| node.drafts.insert(event.draft.as_str().to_owned()));
    }

    /// An update was applied.
    pub fn train(&mut self, event: &ArchivedGradientStepTaken) {
        let (step, update) = (event.step.to_native(), event.update.to_native());
        let version_after = event.version_after.to_native();
        // Rollouts stand in canonical order: those of a task side by side. Should they not, the counts still add up.
        for of_task in event.rollouts.chunk_by(|a, b| a.0.task == b.0.task) {
            let Some(first) = of_task.first() else { continue };
            let task = first.0.task.as_str();
            let rollouts = of_task.len() as u32;
            with_entry(&mut self.trained, task, |list| match list.last_mut() {
                Some(last) if (last.step, last.update, last.version_after) == (step, update, version_after) => {
                    last.rollouts += rollouts;
                }
                _ => list.push(TrainedBy { step, update, version_after, rollouts }),
            });
        }
    }
}
