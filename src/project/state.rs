//! The whole state of a run and its fold.

use std::collections::{BTreeMap, VecDeque};
use std::io::Write;

use serde::{Deserialize, Serialize};

use super::distribution::{TaskDistribution, TaskRow};
use super::drafts::Drafts;
use super::ledger::PolicyLedger;
use super::lineage::Lineage;
use super::metrics::Metrics;
use super::places::Places;
use super::recorded::{Recorded, RecordedRound, RecordedStep};
use super::times::StageTimes;
use crate::decide::contexts::Mark;
use crate::decide::history::ForgettingHistory;
use crate::decide::signals::{Attempt, Raised, SignalState, SignalsConfig};
use crate::event::{Event, Meta, Reward, RolloutKey};

/// Marked rollouts of at most this many steps are kept for the next evolution round.
pub const MAX_MARKED_STEPS: usize = 64;

/// At most this many anomalies are remembered; later ones are only counted.
pub const MAX_ANOMALIES: usize = 100;

/// An event as the log holds it.
pub trait Logged {
    /// Sequence number in its branch, strictly increasing.
    fn seq(&self) -> u64;
    /// The event.
    fn event(&self) -> &Event;
    /// Its meta.
    fn meta(&self) -> &Meta;
}

impl Logged for (u64, Event, Meta) {
    fn seq(&self) -> u64 {
        self.0
    }
    fn event(&self) -> &Event {
        &self.1
    }
    fn meta(&self) -> &Meta {
        &self.2
    }
}

impl<T: Logged> Logged for &T {
    fn seq(&self) -> u64 {
        (*self).seq()
    }
    fn event(&self) -> &Event {
        (*self).event()
    }
    fn meta(&self) -> &Meta {
        (*self).meta()
    }
}

/// How the run began.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct RunInfo {
    /// Random id of the run; not in the digest.
    pub run_id: String,
    /// Master seed.
    pub seed: u64,
    /// Every setting, JSON text; not in the digest.
    pub settings: String,
    /// `coevolve` version; not in the digest.
    pub code_version: String,
    /// Digest of the initial policy, hex.
    pub policy_digest: String,
    /// Name and version of the environment.
    pub environment: String,
}

/// Everything that follows from the events applied so far. Serialisable, so that a snapshot of it plus the
/// events after [`State::last_seq`] is the state.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct State {
    /// How the run began.
    pub run: Option<RunInfo>,
    /// Signal settings in force (from `RunStarted`; a fork changes them with [`State::change_settings`]).
    pub signals_config: SignalsConfig,
    /// The training set D.
    pub tasks: TaskDistribution,
    /// Forgetting history per task.
    pub history: ForgettingHistory,
    /// What the signals remember, as of the last closed step.
    pub signals: SignalState,
    /// Marked rollouts since the last evolution round began, by step.
    pub marks: BTreeMap<u32, Vec<Mark>>,
    /// Ancestry and descent of tasks.
    pub lineage: Lineage,
    /// Drafts.
    pub drafts: Drafts,
    /// Policy versions.
    pub ledger: PolicyLedger,
    /// Figures.
    pub metrics: Metrics,
    /// What is in progress.
    pub recorded: Recorded,
    /// Where things are in the log. Not facts.
    pub places: Places,
    /// What work took. Not facts.
    pub times: StageTimes,
    /// Sequence number of the last event applied.
    pub last_seq: Option<u64>,
    /// Events that contradict the state, in words (a fact recorded twice, a rollout after its step was
    /// closed, a signal that does not follow). A correct run has none. Not in the digest.
    pub anomalies: VecDeque<String>,
    /// How many anomalies there were.
    pub anomaly_count: u64,
}

/// The fold of all events up to and including `seq`.
pub fn as_of<L: Logged>(events: impl IntoIterator<Item = L>, seq: u64) -> State {
    let mut state = State::default();
    for event in events.into_iter().take_while(|e| e.seq() <= seq) {
        state.apply_logged(&event);
    }
    state
}

impl State {
    /// The state before the first event.
    pub fn new() -> State {
        State::default()
    }

    /// Applies the next event as the log holds it.
    pub fn apply_logged(&mut self, logged: &impl Logged) {
        self.apply(logged.seq(), logged.event(), logged.meta());
    }

    /// Applies the next event. Events at or before [`State::last_seq`] are in already and ignored. A fact
    /// that is recorded already (same coordinates) is ignored and noted as an anomaly.
    pub fn apply(&mut self, seq: u64, event: &Event, meta: &Meta) {
        if self.last_seq.is_some_and(|last| seq <= last) {
            return;
        }
        self.last_seq = Some(seq);
        self.times.apply(event, meta);
        if self.is_repeated(event) {
            self.note(format!("event {seq}: {} repeats a recorded fact", event.kind().name()));
            return;
        }
        self.close_before(event);
        self.fold(seq, event);
        self.places.apply(seq, event);
    }

    fn note(&mut self, what: String) {
        self.anomaly_count += 1;
        if self.anomalies.len() < MAX_ANOMALIES {
            self.anomalies.push_back(what);
        }
    }

    fn is_repeated(&self, event: &Event) -> bool {
        let places = &self.places;
        let draft = |id: &String| places.drafts.get(id);
        match event {
            Event::RunStarted(_) => places.run.is_some(),
            Event::TaskAdmitted(e) => places.tasks.contains_key(&e.task.id),
            Event::BatchPlanned(e) => places.plans.contains_key(&e.step),
            Event::RolloutFinished(e) => places.rollouts.contains_key(&e.key),
            Event::SignalRaised(e) => places.signals.contains_key(&(e.key.clone(), e.kind)),
            Event::GradientStepTaken(e) => places.updates.contains_key(&(e.step, e.update)),
            Event::StepSkipped(e) => {
                places.steps.contains_key(&e.step)
                    || self.recorded.steps.get(&e.step).is_some_and(|s| s.skipped.contains_key(&e.update))
            }
            Event::EvaluationFinished(e) => {
                self.metrics.evaluations.get(&e.step).is_some_and(|of| of.contains_key(&e.split))
            }
            Event::EvolutionStarted(e) => places.rounds.contains_key(&e.round),
            Event::ReflectionWritten(e) => places.contexts.get(&e.context).is_some_and(|c| c.reflection.is_some()),
            Event::ExplorationStepTaken(e) => {
                places.contexts.get(&e.context).is_some_and(|c| c.exploration.contains_key(&(e.round, e.step)))
            }
            Event::DraftProposed(e) => draft(&e.draft).is_some_and(|d| d.proposed.is_some()),
            Event::DraftValidated(e) => draft(&e.draft).is_some_and(|d| d.validated.is_some()),
            Event::DraftRejected(e) => draft(&e.draft).is_some_and(|d| d.rejected.is_some()),
            Event::StepFinished(e) => places.steps.contains_key(&e.step),
            _ => false,
        }
    }

    /// Closes the steps whose rollouts are complete now that this event is here (see the room's page).
    fn close_before(&mut self, event: &Event) {
        let through = match event {
            Event::SignalRaised(e) => e.key.step,
            Event::GradientStepTaken(e) => e.step,
            Event::StepSkipped(e) => e.step,
            Event::PolicyPublished(e) => e.step,
            Event::EvaluationFinished(e) => e.step,
            Event::EvolutionStarted(e) => e.step,
            Event::StepFinished(e) => e.step,
            Event::BatchPlanned(e) => e.step.saturating_sub(1),
            Event::RunFinished(_) => u32::MAX,
            _ => return,
        };
        let open: Vec<u32> = self
            .recorded
            .steps
            .iter()
            .take_while(|(step, _)| **step <= through)
            .filter(|(_, recorded)| !recorded.closed && (recorded.plan.is_some() || !recorded.rollouts.is_empty()))
            .map(|(step, _)| *step)
            .collect();
        for step in open {
            self.close(step);
        }
    }

    fn close(&mut self, step: u32) {
        let Some(recorded) = self.recorded.steps.get_mut(&step) else { return };
        let attempts: Vec<Attempt> = recorded.rollouts.values().map(Attempt::of).collect();
        let raised = self.signals.fold(&self.signals_config, &attempts);
        self.history.fold(&attempts);
        self.metrics.close(step, recorded.rollouts.values());
        if !raised.is_empty() {
            self.marks.insert(step, raised.iter().map(Mark::from).collect());
        }
        while self.marks.len() > MAX_MARKED_STEPS {
            self.marks.pop_first();
        }
        recorded.raised = raised;
        recorded.closed = true;
    }

    fn fold(&mut self, seq: u64, event: &Event) {
        match event {
            Event::RunStarted(e) => {
                self.run = Some(RunInfo {
                    run_id: e.run_id.clone(),
                    seed: e.seed,
                    settings: e.settings.clone(),
                    code_version: e.code_version.clone(),
                    policy_digest: e.policy_digest.clone(),
                    environment: e.environment.clone(),
                });
                if let Err(fault) = self.change_settings(&e.settings) {
                    self.note(format!("event {seq}: {fault}"));
                }
            }
            Event::TaskAdmitted(e) => {
                self.tasks.admit(e);
                if let Some(draft) = &e.draft {
                    self.drafts.admit(draft);
                    self.in_round_of_draft(draft, |round| round.admitted += 1);
                    if let Some(round) = &mut self.recorded.round {
                        round.admitted.insert(draft.clone());
                    }
                }
            }
            Event::BatchPlanned(e) => {
                self.tasks.plan(e);
                let metrics = self.metrics.steps.entry(e.step).or_default();
                metrics.policy_version = e.policy_version;
                metrics.groups = e.groups.len() as u32;
                if let Some(step) = self.open_step(e.step) {
                    step.plan = Some(e.clone());
                }
            }
            Event::RolloutFinished(e) => {
                let fits = self.open_step(e.key.step).filter(|step| !step.closed);
                match fits {
                    Some(step) => {
                        step.rollouts.insert(e.key.clone(), e.clone());
                    }
                    None => {
                        self.note(format!("event {seq}: a rollout of step {} after the step was closed", e.key.step))
                    }
                }
            }
            Event::SignalRaised(e) => {
                let metrics = self.metrics.steps.entry(e.key.step).or_default();
                *metrics.signals.entry(e.kind).or_insert(0) += 1;
                let mut follows = true;
                if let Some(step) = self.open_step(e.key.step) {
                    follows = step.raised.iter().any(|r| r.kind == e.kind && r.key == e.key);
                    step.logged.insert((e.key.clone(), e.kind));
                }
                if !follows {
                    self.note(format!("event {seq}: a {:?} signal that does not follow from the rollouts", e.kind));
                }
            }
            Event::GradientStepTaken(e) => {
                self.lineage.train(e);
                self.ledger.update(e);
                self.metrics.update(e);
                if let Some(step) = self.open_step(e.step) {
                    step.updates.insert(e.update, e.clone());
                }
            }
            Event::StepSkipped(e) => {
                self.metrics.steps.entry(e.step).or_default().skipped += 1;
                if let Some(step) = self.open_step(e.step) {
                    step.skipped.insert(e.update, e.clone());
                }
            }
            Event::PolicyPublished(e) => {
                self.ledger.publish(e);
                if e.step > 0
                    && let Some(step) = self.open_step(e.step)
                {
                    step.published = Some(e.clone());
                }
            }
            Event::EvaluationFinished(e) => self.metrics.evaluate(e),
            Event::EvolutionStarted(_)
            | Event::ReflectionWritten(_)
            | Event::ExplorationStepTaken(_)
            | Event::DraftProposed(_)
            | Event::DraftValidated(_)
            | Event::DraftRejected(_)
            | Event::EvolutionFinished(_) => self.fold_evolution(event),
            Event::StepFinished(e) => {
                let metrics = self.metrics.steps.entry(e.step).or_default();
                metrics.tasks = self.tasks.by_origin();
                metrics.finished = true;
                self.recorded.steps.remove(&e.step);
                self.recorded.finished_step = self.recorded.finished_step.max(e.step);
            }
            Event::RunFinished(_) => self.recorded.run_finished = true,
            Event::CheckpointSaved(_)
            | Event::RunResumed(_)
            | Event::FailureNoted(_)
            | Event::BranchCreated(_)
            | Event::BranchUndone(_)
            | Event::BranchDeleted(_)
            | Event::GarbageCollected(_) => {}
        }
    }

    fn fold_evolution(&mut self, event: &Event) {
        let round = self.recorded.round.as_mut();
        match event {
            Event::EvolutionStarted(e) => {
                // Marks of later steps, should there be any, wait for the next round.
                self.marks = self.marks.split_off(&e.step.saturating_add(1));
                self.lineage.start(e);
                self.metrics.start_round(e);
                self.recorded.round = Some(RecordedRound::new(e));
            }
            Event::ReflectionWritten(e) => {
                self.lineage.reflect(e);
                if let Some(round) = round {
                    round.reflections.insert(e.context.clone(), e.clone());
                }
            }
            Event::ExplorationStepTaken(e) => {
                self.lineage.explore(e);
                if let Some(round) = round {
                    round.exploration.insert((e.context.clone(), e.round, e.step), e.clone());
                }
                self.in_round_of_context(&e.context, |round| round.exploration_steps += 1);
            }
            Event::DraftProposed(e) => {
                self.lineage.propose(e);
                self.drafts.propose(e);
                if let Some(round) = round {
                    round.drafts.insert(e.draft.clone(), e.clone());
                }
                self.in_round_of_context(&e.context, |round| round.drafts += 1);
            }
            Event::DraftValidated(e) => {
                self.drafts.validate(e);
                if let Some(round) = round {
                    round.validated.insert(e.draft.clone(), e.clone());
                }
            }
            Event::DraftRejected(e) => {
                self.drafts.reject(e);
                if let Some(round) = round {
                    round.rejected.insert(e.draft.clone(), e.clone());
                }
                let reason = e.reason.clone();
                self.in_round_of_draft(&e.draft, |round| *round.rejected.entry(reason).or_insert(0) += 1);
            }
            Event::EvolutionFinished(e) => {
                self.metrics.finish_round(e);
                self.recorded.round = None;
                self.recorded.finished_round = Some(e.round);
            }
            _ => {}
        }
    }

    /// The record of an unfinished step, made when missing; `None` for finished ones.
    fn open_step(&mut self, step: u32) -> Option<&mut RecordedStep> {
        if self.places.steps.contains_key(&step) {
            return None;
        }
        Some(self.recorded.steps.entry(step).or_default())
    }

    fn in_round_of_context(&mut self, context: &str, change: impl FnOnce(&mut super::metrics::RoundMetrics)) {
        if let Some(round) = self.lineage.contexts.get(context).map(|c| c.round) {
            change(self.metrics.rounds.entry(round).or_default());
        }
    }

    fn in_round_of_draft(&mut self, draft: &str, change: impl FnOnce(&mut super::metrics::RoundMetrics)) {
        if let Some(context) = self.drafts.drafts.get(draft).map(|d| d.context.clone()) {
            self.in_round_of_context(&context, change);
        }
    }

    /// Changes the signal settings from here on: those of `RunStarted`, or what a fork changes (JSON text,
    /// see [`SignalsConfig::from_settings`]). On an error nothing changes.
    pub fn change_settings(&mut self, settings: &str) -> Result<(), String> {
        let value: serde_json::Value =
            serde_json::from_str(settings).map_err(|e| format!("the settings are not JSON: {e}"))?;
        let mut config = self.signals_config.clone();
        config.apply_settings(&value).map_err(|e| e.to_string())?;
        self.signals_config = config;
        Ok(())
    }

    /// Signals that the rollouts of a step raise and that are not in the log yet, in canonical order. Valid
    /// when all rollouts of the step are applied, before and after it was closed.
    pub fn due_signals(&self, step: u32) -> Vec<Raised> {
        let Some(recorded) = self.recorded.steps.get(&step) else { return Vec::new() };
        let raised = if recorded.closed {
            recorded.raised.clone()
        } else {
            let attempts: Vec<Attempt> = recorded.rollouts.values().map(Attempt::of).collect();
            self.signals.clone().fold(&self.signals_config, &attempts)
        };
        raised.into_iter().filter(|r| !recorded.logged.contains(&(r.key.clone(), r.kind))).collect()
    }

    /// Marked rollouts since the last evolution round, for
    /// [`select_contexts`](crate::decide::contexts::select_contexts).
    pub fn marked(&self) -> Vec<Mark> {
        self.marks.values().flatten().cloned().collect()
    }

    /// Rows of `coevolve tasks`, by task id.
    pub fn task_rows(&self) -> Vec<TaskRow> {
        let row = |(id, entry): (&String, &super::distribution::TaskEntry)| {
            let history = self.history.get(id);
            TaskRow {
                id: id.clone(),
                origin: entry.origin,
                admitted_at: entry.admitted_step,
                admitted_seq: self.places.tasks.get(id).copied(),
                weight: entry.weight,
                attempts: history.map_or(0, |h| h.attempts),
                success_rate: self.signals.success_rate(id),
                forgotten: history.map_or(0, |h| h.forgotten_at.len() as u32),
                learnt_at: history.and_then(|h| h.learnt_at),
                family: entry.task.family.clone(),
                query: entry.task.turns.first().map_or_else(String::new, |t| t.query.clone()),
            }
        };
        self.tasks.tasks.iter().map(row).collect()
    }

    /// Digest of everything that follows from facts: BLAKE3, hex, over the canonical JSON of each part
    /// (maps sorted by key). Independent of sequence numbers, times, non-facts and of the order in which
    /// the rollouts of a step or the contexts of a round were logged.
    pub fn digest(&self) -> String {
        let mut hasher = blake3::Hasher::new_derive_key("coevolve 2026 projections v1");
        let run = self.run.as_ref().map(|r| (r.seed, &r.policy_digest, &r.environment));
        part(&mut hasher, "run", &run);
        part(&mut hasher, "signals_config", &self.signals_config);
        part(&mut hasher, "tasks", &self.tasks);
        part(&mut hasher, "history", &self.history);
        part(&mut hasher, "signals", &self.signals);
        part(&mut hasher, "marks", &self.marks);
        part(&mut hasher, "lineage", &self.lineage);
        part(&mut hasher, "drafts", &self.drafts);
        part(&mut hasher, "ledger", &self.ledger);
        part(&mut hasher, "metrics", &self.metrics);
        let progress: Vec<_> = self.recorded.steps.iter().map(|(step, r)| (step, StepDigest::of(r))).collect();
        part(&mut hasher, "steps", &progress);
        part(&mut hasher, "round", &self.recorded.round);
        let marks = (self.recorded.finished_step, self.recorded.finished_round, self.recorded.run_finished);
        part(&mut hasher, "finished", &marks);
        hasher.finalize().to_hex().to_string()
    }
}

/// A step in progress for the digest: rollouts without their tokens, which the facts digest covers.
#[derive(Serialize)]
struct StepDigest<'a> {
    plan: &'a Option<crate::event::BatchPlanned>,
    rollouts: Vec<(&'a RolloutKey, u32, &'a Reward, Vec<String>)>,
    raised: &'a [Raised],
    logged: &'a std::collections::BTreeSet<(RolloutKey, crate::event::SignalKind)>,
    updates: &'a BTreeMap<u32, crate::event::GradientStepTaken>,
    skipped: &'a BTreeMap<u32, crate::event::StepSkipped>,
    published: &'a Option<crate::event::PolicyPublished>,
}

impl<'a> StepDigest<'a> {
    fn of(step: &'a RecordedStep) -> StepDigest<'a> {
        let light = |(key, r): (&'a RolloutKey, &'a crate::event::RolloutFinished)| {
            (key, r.policy_version, &r.reward, Attempt::of(r).calls)
        };
        StepDigest {
            plan: &step.plan,
            rollouts: step.rollouts.iter().map(light).collect(),
            raised: &step.raised,
            logged: &step.logged,
            updates: &step.updates,
            skipped: &step.skipped,
            published: &step.published,
        }
    }
}

/// Hashes one part under its name. Writing to a hasher cannot fail, and every type here has string, number
/// or enum keys only; should serialisation ever fail, the message enters the digest instead, so that it
/// cannot equal that of a complete one.
fn part(hasher: &mut blake3::Hasher, name: &str, value: &impl Serialize) {
    hasher.update(&(name.len() as u64).to_le_bytes());
    hasher.update(name.as_bytes());
    let mut buffered = std::io::BufWriter::with_capacity(64 * 1024, &mut *hasher);
    let written = serde_json::to_writer(&mut buffered, value).map_err(|e| e.to_string());
    let flushed = buffered.flush().map_err(|e| e.to_string());
    drop(buffered);
    if let Err(fault) = written.and(flushed) {
        hasher.update(fault.as_bytes());
    }
    hasher.update(&[0]);
}
