//! Facts of the step and the evolution round in progress: what a resumed run need not do again.
//!
//! Whole events are kept, so that a resume has everything from the state alone. A step leaves with its
//! `StepFinished`, a round with its `EvolutionFinished`.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::decide::signals::Raised;
use crate::event::{
    BatchPlanned, DraftProposed, DraftRejected, DraftValidated, EvolutionStarted, ExplorationStepTaken,
    GradientStepTaken, PolicyPublished, ReflectionWritten, RolloutFinished, RolloutKey, SignalKind, StepSkipped,
};

/// A training step in progress.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct RecordedStep {
    /// Its plan.
    pub plan: Option<BatchPlanned>,
    /// Its finished rollouts, in canonical order.
    #[serde(with = "crate::decide::pairs")]
    pub rollouts: BTreeMap<RolloutKey, RolloutFinished>,
    /// Whether the rollouts are folded into signals, histories and metrics.
    pub closed: bool,
    /// Once closed: all signals the rollouts raise, in canonical order.
    pub raised: Vec<Raised>,
    /// Signals that are in the log.
    pub logged: BTreeSet<(RolloutKey, SignalKind)>,
    /// Updates applied, by number.
    pub updates: BTreeMap<u32, GradientStepTaken>,
    /// Updates skipped, by number.
    pub skipped: BTreeMap<u32, StepSkipped>,
    /// The version it published.
    pub published: Option<PolicyPublished>,
}

impl RecordedStep {
    /// Keys of all planned rollouts, in planned order; empty without a plan.
    pub fn planned_keys(&self) -> Vec<RolloutKey> {
        let Some(plan) = &self.plan else { return Vec::new() };
        let of_group = |(task, draw): &(String, u32)| {
            let (task, draw) = (task.clone(), *draw);
            (0..plan.group_size).map(move |k| RolloutKey { step: plan.step, task: task.clone(), draw, k })
        };
        plan.groups.iter().flat_map(of_group).collect()
    }

    /// Planned rollouts that are not in the log, in planned order.
    pub fn missing_rollouts(&self) -> Vec<RolloutKey> {
        self.planned_keys().into_iter().filter(|key| !self.rollouts.contains_key(key)).collect()
    }
}

/// An evolution round in progress.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RecordedRound {
    /// How it began.
    pub started: EvolutionStarted,
    /// Reflections by context.
    pub reflections: BTreeMap<String, ReflectionWritten>,
    /// Exploration steps by (context, round, step).
    #[serde(with = "crate::decide::pairs")]
    pub exploration: BTreeMap<(String, u32, u32), ExplorationStepTaken>,
    /// Drafts by id.
    pub drafts: BTreeMap<String, DraftProposed>,
    /// Validations by draft.
    pub validated: BTreeMap<String, DraftValidated>,
    /// Rejections by draft.
    pub rejected: BTreeMap<String, DraftRejected>,
    /// Drafts whose task joined D.
    pub admitted: BTreeSet<String>,
}

impl RecordedRound {
    /// A round that just began.
    pub fn new(started: &EvolutionStarted) -> RecordedRound {
        RecordedRound {
            started: started.clone(),
            reflections: BTreeMap::new(),
            exploration: BTreeMap::new(),
            drafts: BTreeMap::new(),
            validated: BTreeMap::new(),
            rejected: BTreeMap::new(),
            admitted: BTreeSet::new(),
        }
    }

    /// Exploration steps of a context, by (round, step).
    pub fn exploration_of<'a>(&'a self, context: &'a str) -> impl Iterator<Item = &'a ExplorationStepTaken> {
        self.exploration.iter().filter(move |((c, _, _), _)| c == context).map(|(_, e)| e)
    }
}

/// What is in progress.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Recorded {
    /// Steps without their `StepFinished`.
    pub steps: BTreeMap<u32, RecordedStep>,
    /// Round without its `EvolutionFinished`.
    pub round: Option<RecordedRound>,
    /// Last finished step; 0 = none.
    pub finished_step: u32,
    /// Last finished evolution round.
    pub finished_round: Option<u32>,
    /// Whether `RunFinished` is there.
    pub run_finished: bool,
}
