//! Facts of the step and the evolution round in progress: what a resumed run need not do again.
//!
//! Whole events are kept, so that a resume has everything from the state alone; those of a step as the archives they
//! are, in buffers that the next step uses again. A step leaves with its `StepFinished`, a round with its
//! `EvolutionFinished`.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::raised::RaisedSignals;
use super::rollouts::{Rollouts, Span, native};
use super::series::Uncompared;
use crate::decide::signals::{Raised, Tried};
use crate::event::{
    BatchPlanned, BatchRefilled, DraftProposed, DraftRejected, DraftValidated, Event, EvolutionStarted,
    ExplorationStepTaken, GradientStepTaken, Kind, PolicyPublished, ReflectionWritten, Reward, RolloutFinished,
    RolloutKey, SignalKind, StepSkipped, codec, view::Archived,
};

/// A training step in progress.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct RecordedStep {
    /// Sequence number of its first event. Not a fact.
    pub first_seq: u64,
    /// Its finished rollouts.
    pub rollouts: Rollouts,
    /// Whether the rollouts are folded into signals, histories and metrics.
    pub closed: bool,
    /// Once closed: all signals the rollouts raise.
    pub raised: RaisedSignals,
    /// Signals in the log whose rollouts are not: a correct run has none.
    strays: BTreeSet<(RolloutKey, SignalKind)>,
    /// Archives of the events below.
    bytes: Vec<u8>,
    plan: Option<Span>,
    /// Further rounds, from round 1.
    refills: Vec<Span>,
    updates: Vec<(u32, Span)>,
    skipped: Vec<(u32, Span)>,
    published: Option<Span>,
}

/// The event of a kind that a span holds.
macro_rules! kept {
    ($self:ident, $span:expr, $kind:ident) => {
        match native(Kind::$kind, $span.of(&$self.bytes))? {
            Event::$kind(e) => Ok::<$kind, codec::Error>(e),
            other => {
                Err(codec::Error::Malformed { kind: other.kind(), version: 0, why: "kept as another kind".into() })
            }
        }
    };
}

// Every error below is one that cannot be for events that were applied: their archives were validated then.
impl RecordedStep {
    /// Its plan.
    ///
    /// # Errors
    /// Never for what was applied.
    pub fn plan(&self) -> Result<Option<BatchPlanned>, codec::Error> {
        self.plan.map(|span| kept!(self, span, BatchPlanned)).transpose()
    }

    /// Its further rounds, in order: the first is round 1.
    ///
    /// # Errors
    /// Never for what was applied.
    pub fn refills(&self) -> Result<Vec<BatchRefilled>, codec::Error> {
        self.refills.iter().map(|span| kept!(self, span, BatchRefilled)).collect()
    }

    /// How many further rounds it has.
    pub fn rounds(&self) -> u32 {
        self.refills.len() as u32
    }

    /// (task, draw) of every group planned, those of further rounds behind those of the plan; empty without a plan.
    ///
    /// # Errors
    /// Never for what was applied.
    pub fn groups(&self) -> Result<Vec<(String, u32)>, codec::Error> {
        let planned = self.plan()?.map_or_else(Vec::new, |plan| plan.groups);
        Ok(planned.into_iter().chain(self.refills()?.into_iter().flat_map(|refill| refill.groups)).collect())
    }

    /// How many groups that teach something ([`crate::decide::refill`]) its plan asks for and its rollouts lack. What
    /// is not finished yet teaches nothing.
    ///
    /// # Errors
    /// Never for what was applied.
    pub fn lacking(&self) -> Result<usize, codec::Error> {
        let wanted = self.plan()?.map_or(0, |plan| plan.groups.len());
        Ok(wanted.saturating_sub(self.rollouts.teaching_groups()))
    }

    /// Updates applied, in order.
    ///
    /// # Errors
    /// Never for what was applied.
    pub fn updates(&self) -> Result<BTreeMap<u32, GradientStepTaken>, codec::Error> {
        self.updates.iter().map(|(update, span)| Ok((*update, kept!(self, span, GradientStepTaken)?))).collect()
    }

    /// Updates skipped, in order.
    ///
    /// # Errors
    /// Never for what was applied.
    pub fn skipped(&self) -> Result<BTreeMap<u32, StepSkipped>, codec::Error> {
        self.skipped.iter().map(|(update, span)| Ok((*update, kept!(self, span, StepSkipped)?))).collect()
    }

    /// The version it published.
    ///
    /// # Errors
    /// Never for what was applied.
    pub fn published(&self) -> Result<Option<PolicyPublished>, codec::Error> {
        self.published.map(|span| kept!(self, span, PolicyPublished)).transpose()
    }

    /// Whether it published a version.
    pub fn is_published(&self) -> bool {
        self.published.is_some()
    }

    /// Whether it is planned.
    pub fn is_planned(&self) -> bool {
        self.plan.is_some()
    }

    /// Whether an update was applied.
    pub fn has_update(&self, update: u32) -> bool {
        self.updates.iter().any(|(u, _)| *u == update)
    }

    /// Whether an update was skipped.
    pub fn has_skipped(&self, update: u32) -> bool {
        self.skipped.iter().any(|(u, _)| *u == update)
    }

    /// Keys of all planned rollouts, in planned order, further rounds included; empty without a plan.
    ///
    /// # Errors
    /// Never for what was applied.
    pub fn planned_keys(&self) -> Result<Vec<RolloutKey>, codec::Error> {
        let Some(plan) = self.plan()? else { return Ok(Vec::new()) };
        let of_group = |(task, draw): &(String, u32)| {
            let (task, draw) = (task.clone(), *draw);
            (0..plan.group_size).map(move |k| RolloutKey { step: plan.step, task: task.clone(), draw, k })
        };
        Ok(self.groups()?.iter().flat_map(of_group).collect())
    }

    /// Planned rollouts that are not in the log, in planned order.
    ///
    /// # Errors
    /// Never for what was applied.
    pub fn missing_rollouts(&self) -> Result<Vec<RolloutKey>, codec::Error> {
        Ok(self.planned_keys()?.into_iter().filter(|key| !self.rollouts.contains(key)).collect())
    }

    /// Once closed: all signals the rollouts raise, with their evidence, in canonical order.
    pub fn raised(&self) -> Vec<Raised> {
        self.raised.native(&self.rollouts)
    }

    /// Whether a signal is in the log.
    pub fn has_logged(&self, step: u32, task: &str, draw: u32, k: u32, kind: SignalKind) -> bool {
        let place = self.rollouts.place(step, task, draw, k);
        // A signal may have come before its rollout.
        let stray = || self.strays.contains(&(RolloutKey { step, task: task.to_owned(), draw, k }, kind));
        place.is_some_and(|place| self.rollouts.at(place).has_logged(kind)) || (!self.strays.is_empty() && stray())
    }

    /// Notes that a signal is in the log; whether it follows from the rollouts.
    pub(super) fn note_logged(&mut self, step: u32, task: &str, draw: u32, k: u32, kind: SignalKind) -> bool {
        match self.rollouts.place(step, task, draw, k) {
            Some(place) => {
                self.rollouts.note_logged(place, kind);
                self.rollouts.at(place).has_raised(kind)
            }
            None => {
                self.strays.insert((RolloutKey { step, task: task.to_owned(), draw, k }, kind));
                false
            }
        }
    }

    pub(super) fn keep_plan(&mut self, facts: &[u8]) {
        self.plan = Some(Span::push(&mut self.bytes, facts));
    }

    /// Takes a further round; whether it follows from what is there: a plan, every earlier round, and rollouts that
    /// are not folded yet.
    pub(super) fn keep_refill(&mut self, round: u32, facts: &[u8]) -> bool {
        let follows = self.is_planned() && !self.closed && self.rounds().checked_add(1) == Some(round);
        if follows {
            self.refills.push(Span::push(&mut self.bytes, facts));
        }
        follows
    }

    pub(super) fn keep_update(&mut self, update: u32, facts: &[u8]) {
        let span = Span::push(&mut self.bytes, facts);
        self.updates.insert(self.updates.partition_point(|(u, _)| *u < update), (update, span));
    }

    pub(super) fn keep_skipped(&mut self, update: u32, facts: &[u8]) {
        let span = Span::push(&mut self.bytes, facts);
        self.skipped.insert(self.skipped.partition_point(|(u, _)| *u < update), (update, span));
    }

    pub(super) fn keep_published(&mut self, facts: &[u8]) {
        self.published = Some(Span::push(&mut self.bytes, facts));
    }

    /// Forgets all; keeps the buffers.
    fn clear(&mut self) {
        self.first_seq = 0;
        self.rollouts.clear();
        self.closed = false;
        self.raised.clear();
        self.strays.clear();
        self.bytes.clear();
        self.plan = None;
        self.refills.clear();
        self.updates.clear();
        self.skipped.clear();
        self.published = None;
    }
}

/// A step in progress for the digest: rollouts without their tokens, which the facts digest covers.
#[derive(Serialize)]
pub(super) struct StepDigest {
    plan: Option<BatchPlanned>,
    // Left out where there is none: the digest of such a step is what it was before there were further rounds.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    refills: Vec<BatchRefilled>,
    rollouts: Vec<(RolloutKey, u32, Reward, Vec<String>)>,
    raised: Vec<Raised>,
    logged: BTreeSet<(RolloutKey, SignalKind)>,
    updates: BTreeMap<u32, GradientStepTaken>,
    skipped: BTreeMap<u32, StepSkipped>,
    published: Option<PolicyPublished>,
}

impl StepDigest {
    pub(super) fn of(step: &RecordedStep) -> Result<StepDigest, codec::Error> {
        let mut logged = step.strays.clone();
        let mut rollouts = Vec::with_capacity(step.rollouts.len());
        for rollout in step.rollouts.iter() {
            for kind in [SignalKind::Forgetting, SignalKind::Boundary, SignalKind::Rare] {
                if rollout.has_logged(kind) {
                    logged.insert((rollout.key(), kind));
                }
            }
            let calls = rollout.calls().map(str::to_owned).collect();
            rollouts.push((rollout.key(), rollout.policy_version(), rollout.archived()?.reward.native(), calls));
        }
        Ok(StepDigest {
            plan: step.plan()?,
            refills: step.refills()?,
            rollouts,
            raised: step.raised(),
            logged,
            updates: step.updates()?,
            skipped: step.skipped()?,
            published: step.published()?,
        })
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
    pub fn new(started: EvolutionStarted) -> RecordedRound {
        RecordedRound {
            started,
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
    /// Buffers of finished steps.
    #[serde(skip)]
    spare: Uncompared<Vec<RecordedStep>>,
}

/// Buffers of at most this many finished steps are kept.
const MAX_SPARE: usize = 4;

impl Recorded {
    /// The record of a step, made when missing.
    pub(super) fn open(&mut self, step: u32, seq: u64) -> &mut RecordedStep {
        let spare = &mut self.spare.0;
        self.steps.entry(step).or_insert_with(|| {
            let mut fresh = spare.pop().unwrap_or_default();
            fresh.first_seq = seq;
            fresh
        })
    }

    /// A step is finished; returns the sequence number of its first event, if it had one.
    pub(super) fn finish(&mut self, step: u32) -> Option<u64> {
        self.finished_step = self.finished_step.max(step);
        let mut left = self.steps.remove(&step)?;
        let first = left.first_seq;
        left.clear();
        if self.spare.0.len() < MAX_SPARE {
            self.spare.0.push(left);
        }
        Some(first)
    }

    /// Rollouts of a step in progress, owned, in canonical order; none for other steps.
    ///
    /// # Errors
    /// Never for what was applied.
    pub fn rollouts(&self, step: u32) -> Result<Vec<RolloutFinished>, codec::Error> {
        self.steps.get(&step).map_or(Ok(Vec::new()), |s| s.rollouts.native())
    }
}
