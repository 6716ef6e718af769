//! The whole state of a run and its fold.

use std::collections::VecDeque;
use std::io::Write;

use serde::{Deserialize, Serialize};

use super::distribution::{TaskDistribution, TaskRow};
use super::drafts::Drafts;
use super::ledger::PolicyLedger;
use super::lineage::Lineage;
use super::marks::Marks;
use super::metrics::{Metrics, RoundMetrics};
use super::places::Places;
use super::recorded::{Recorded, RecordedRound, RecordedStep, StepDigest};
use super::series::Uncompared;
use super::times::StageTimes;
use crate::decide::contexts::Mark;
use crate::decide::history::ForgettingHistory;
use crate::decide::signals::{Raised, Scratch, SignalState, SignalsConfig, Tried};
use crate::event::view::{Archived, EventRef, View};
use crate::event::{ArchivedRolloutFinished, Event, Meta, codec};

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
    pub marks: Marks,
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
    #[serde(skip)]
    scratch: Uncompared<Scratch>,
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

    /// Applies the next event, one that is not serialised yet. See [`State::apply_view`].
    pub fn apply(&mut self, seq: u64, event: &Event, meta: &Meta) {
        let kind = event.kind();
        let facts = codec::facts_bytes(event).map_err(|e| e.to_string());
        match facts.as_deref().map_err(Clone::clone).and_then(|facts| View::access(kind, facts)) {
            Ok(view) => self.apply_view(seq, &view, meta),
            // Beyond what a log can hold.
            Err(why) => self.note(format!("event {seq}: {} cannot be serialised: {why}", kind.name())),
        }
    }

    /// Applies the next event. Events at or before [`State::last_seq`] are in already and ignored. A fact
    /// that is recorded already (same coordinates), or about a step that is finished, is ignored and noted as an
    /// anomaly. Allocates only for what the state has to remember for good.
    pub fn apply_view(&mut self, seq: u64, view: &View<'_>, meta: &Meta) {
        if self.last_seq.is_some_and(|last| seq <= last) {
            return;
        }
        self.last_seq = Some(seq);
        self.times.apply(view, meta);
        let event = view.event();
        if let EventRef::RolloutFinished(e) = event {
            self.take_rollout(seq, view.facts(), e);
            return;
        }
        if self.is_repeated(event) {
            self.note(format!("event {seq}: {} repeats a recorded fact", view.kind().name()));
            return;
        }
        self.close_before(event);
        self.fold(seq, view);
        self.places.apply(seq, event);
    }

    fn note(&mut self, what: String) {
        self.anomaly_count += 1;
        if self.anomalies.len() < MAX_ANOMALIES {
            self.anomalies.push_back(what);
        }
    }

    fn take_rollout(&mut self, seq: u64, facts: &[u8], e: &ArchivedRolloutFinished) {
        let step = e.key.step.to_native();
        let fault = match self.open_step(step, seq) {
            None => "comes after the step was finished",
            Some(open) if open.closed => "comes after the step was closed",
            Some(open) => match open.rollouts.insert(facts, e) {
                true => return,
                false => "repeats a recorded fact",
            },
        };
        self.note(format!("event {seq}: a rollout of step {step} {fault}"));
    }

    /// Whether a fact is in already. Of a finished step everything is.
    fn is_repeated(&self, event: EventRef<'_>) -> bool {
        let places = &self.places;
        let draft = |id: &str| places.drafts.get(id);
        let context = |id: &str| places.contexts.get(id);
        let in_step = |step: u32, is_in: &dyn Fn(&RecordedStep) -> bool| {
            places.steps.contains_key(&step) || self.recorded.steps.get(&step).is_some_and(is_in)
        };
        match event {
            EventRef::RunStarted(_) => places.run.is_some(),
            EventRef::TaskAdmitted(e) => places.tasks.contains_key(e.task.id.as_str()),
            EventRef::BatchPlanned(e) => in_step(e.step.to_native(), &RecordedStep::is_planned),
            EventRef::BatchRefilled(e) => {
                in_step(e.step.to_native(), &|open| (1..=open.rounds()).contains(&e.round.to_native()))
            }
            EventRef::SignalRaised(e) => {
                let (key, kind) = (&e.key, e.kind.native());
                let (step, draw, k) = (key.step.to_native(), key.draw.to_native(), key.k.to_native());
                in_step(step, &|open| open.has_logged(step, &key.task, draw, k, kind))
            }
            EventRef::GradientStepTaken(e) => {
                in_step(e.step.to_native(), &|open| open.has_update(e.update.to_native()))
            }
            EventRef::StepSkipped(e) => in_step(e.step.to_native(), &|open| open.has_skipped(e.update.to_native())),
            EventRef::EvaluationFinished(e) => {
                let of_step = self.metrics.evaluations.get(&e.step.to_native());
                of_step.is_some_and(|of| of.contains_key(e.split.as_str()))
            }
            EventRef::EvolutionStarted(e) => places.rounds.contains_key(&e.round.to_native()),
            EventRef::ReflectionWritten(e) => context(&e.context).is_some_and(|c| c.reflection.is_some()),
            EventRef::ExplorationStepTaken(e) => {
                let at = (e.round.to_native(), e.step.to_native());
                context(&e.context).is_some_and(|c| c.exploration.contains_key(&at))
            }
            EventRef::DraftProposed(e) => draft(&e.draft).is_some_and(|d| d.proposed.is_some()),
            EventRef::DraftValidated(e) => draft(&e.draft).is_some_and(|d| d.validated.is_some()),
            EventRef::DraftRejected(e) => draft(&e.draft).is_some_and(|d| d.rejected.is_some()),
            EventRef::StepFinished(e) => places.steps.contains_key(&e.step.to_native()),
            _ => false,
        }
    }

    /// Closes the steps whose rollouts are complete now that this event is here (see the room's page).
    fn close_before(&mut self, event: EventRef<'_>) {
        let through = match event {
            EventRef::SignalRaised(e) => e.key.step.to_native(),
            EventRef::GradientStepTaken(e) => e.step.to_native(),
            EventRef::StepSkipped(e) => e.step.to_native(),
            EventRef::PolicyPublished(e) => e.step.to_native(),
            EventRef::EvaluationFinished(e) => e.step.to_native(),
            EventRef::EvolutionStarted(e) => e.step.to_native(),
            EventRef::StepFinished(e) => e.step.to_native(),
            EventRef::BatchPlanned(e) => e.step.to_native().saturating_sub(1),
            EventRef::BatchRefilled(e) => e.step.to_native().saturating_sub(1),
            EventRef::RunFinished(_) => u32::MAX,
            _ => return,
        };
        let is_due = |open: &RecordedStep| !open.closed && (open.is_planned() || !open.rollouts.is_empty());
        while let Some(step) = {
            let mut upto = self.recorded.steps.range(..=through);
            upto.find(|(_, open)| is_due(open)).map(|(step, _)| *step)
        } {
            self.close(step);
        }
    }

    fn close(&mut self, step: u32) {
        let Some(open) = self.recorded.steps.get_mut(&step) else { return };
        let RecordedStep { rollouts, raised, closed, .. } = open;
        let (n, at) = (rollouts.len(), |place| rollouts.at(place));
        let scratch = &mut self.scratch.0;
        self.signals.fold_ordered(&self.signals_config, scratch, n, &at, &mut |place, mean, because| {
            raised.push(place, at(place).score().unwrap_or_default(), mean, &because);
        });
        self.history.fold_ordered(n, &at);
        self.metrics.close(step, rollouts);
        self.marks.close(step, raised, rollouts);
        for (place, kind) in raised.kinds() {
            rollouts.note_raised(place, kind);
        }
        *closed = true;
    }

    fn fold(&mut self, seq: u64, view: &View<'_>) {
        match view.event() {
            EventRef::RunStarted(e) => {
                let e = e.native();
                let changed = self.change_settings(&e.settings);
                self.run = Some(RunInfo {
                    run_id: e.run_id,
                    seed: e.seed,
                    settings: e.settings,
                    code_version: e.code_version,
                    policy_digest: e.policy_digest,
                    environment: e.environment,
                });
                if let Err(fault) = changed {
                    self.note(format!("event {seq}: {fault}"));
                }
            }
            EventRef::TaskAdmitted(e) => {
                self.tasks.admit(e);
                if let Some(draft) = e.draft.as_ref() {
                    self.drafts.admit(draft);
                    self.in_round_of_draft(draft, |round| round.admitted += 1);
                    if let Some(round) = &mut self.recorded.round {
                        round.admitted.insert(draft.as_str().to_owned());
                    }
                }
            }
            EventRef::BatchPlanned(e) => {
                let step = e.step.to_native();
                self.tasks.plan(e.groups.iter().map(|group| group.0.as_str()));
                let metrics = self.metrics.steps.get_or_default(step);
                metrics.policy_version = e.policy_version.to_native();
                metrics.groups = e.groups.len() as u32;
                if let Some(open) = self.open_step(step, seq) {
                    open.keep_plan(view.facts());
                }
            }
            EventRef::BatchRefilled(e) => {
                let (step, round) = (e.step.to_native(), e.round.to_native());
                if self.open_step(step, seq).is_some_and(|open| open.keep_refill(round, view.facts())) {
                    self.tasks.plan(e.groups.iter().map(|group| group.0.as_str()));
                    let metrics = self.metrics.steps.get_or_default(step);
                    metrics.groups += e.groups.len() as u32;
                    metrics.refill_rounds = round;
                } else {
                    self.note(format!(
                        "event {seq}: round {round} of step {step} does not follow from what is recorded"
                    ));
                }
            }
            // Taken before: nothing else concerns it.
            EventRef::RolloutFinished(_) => {}
            EventRef::SignalRaised(e) => {
                let (key, kind) = (&e.key, e.kind.native());
                let (step, draw, k) = (key.step.to_native(), key.draw.to_native(), key.k.to_native());
                self.metrics.steps.get_or_default(step).signals.add(kind);
                let open = self.open_step(step, seq);
                if open.is_some_and(|open| !open.note_logged(step, &key.task, draw, k, kind)) {
                    self.note(format!("event {seq}: a {kind:?} signal that does not follow from the rollouts"));
                }
            }
            EventRef::GradientStepTaken(e) => {
                self.lineage.train(e);
                self.ledger.update(e);
                self.metrics.update(e);
                if let Some(open) = self.open_step(e.step.to_native(), seq) {
                    open.keep_update(e.update.to_native(), view.facts());
                }
            }
            EventRef::StepSkipped(e) => {
                self.metrics.steps.get_or_default(e.step.to_native()).skipped += 1;
                if let Some(open) = self.open_step(e.step.to_native(), seq) {
                    open.keep_skipped(e.update.to_native(), view.facts());
                }
            }
            EventRef::PolicyPublished(e) => {
                self.ledger.publish(e);
                if e.step.to_native() > 0
                    && let Some(open) = self.open_step(e.step.to_native(), seq)
                {
                    open.keep_published(view.facts());
                }
            }
            EventRef::EvaluationFinished(e) => self.metrics.evaluate(e),
            EventRef::EvolutionStarted(_)
            | EventRef::ReflectionWritten(_)
            | EventRef::ExplorationStepTaken(_)
            | EventRef::DraftProposed(_)
            | EventRef::DraftValidated(_)
            | EventRef::DraftRejected(_)
            | EventRef::EvolutionFinished(_) => self.fold_evolution(view.event()),
            EventRef::StepFinished(e) => {
                let step = e.step.to_native();
                let tasks = self.tasks.tally();
                let metrics = self.metrics.steps.get_or_default(step);
                metrics.tasks = tasks;
                metrics.finished = true;
                let first = self.recorded.finish(step);
                self.places.finish(step, first, seq);
            }
            EventRef::RunFinished(_) => self.recorded.run_finished = true,
            EventRef::CheckpointSaved(_)
            | EventRef::RunResumed(_)
            | EventRef::FailureNoted(_)
            | EventRef::LlmAsked(_)
            | EventRef::BranchCreated(_)
            | EventRef::BranchUndone(_)
            | EventRef::BranchDeleted(_)
            | EventRef::GarbageCollected(_) => {}
        }
    }

    fn fold_evolution(&mut self, event: EventRef<'_>) {
        let round = self.recorded.round.as_mut();
        match event {
            EventRef::EvolutionStarted(e) => {
                // Marks of later steps, should there be any, wait for the next round.
                self.marks.forget_through(e.step.to_native());
                self.lineage.start(e);
                self.metrics.start_round(e);
                self.recorded.round = Some(RecordedRound::new(e.native()));
            }
            EventRef::ReflectionWritten(e) => {
                self.lineage.reflect(e);
                if let Some(round) = round {
                    round.reflections.insert(e.context.as_str().to_owned(), e.native());
                }
            }
            EventRef::ExplorationStepTaken(e) => {
                self.lineage.explore(e);
                if let Some(round) = round {
                    let at = (e.context.as_str().to_owned(), e.round.to_native(), e.step.to_native());
                    round.exploration.insert(at, e.native());
                }
                self.in_round_of_context(&e.context, |round| round.exploration_steps += 1);
            }
            EventRef::DraftProposed(e) => {
                self.lineage.propose(e);
                self.drafts.propose(e);
                if let Some(round) = round {
                    round.drafts.insert(e.draft.as_str().to_owned(), e.native());
                }
                self.in_round_of_context(&e.context, |round| round.drafts += 1);
            }
            EventRef::DraftValidated(e) => {
                self.drafts.validate(e);
                if let Some(round) = round {
                    round.validated.insert(e.draft.as_str().to_owned(), e.native());
                }
            }
            EventRef::DraftRejected(e) => {
                self.drafts.reject(e);
                if let Some(round) = round {
                    round.rejected.insert(e.draft.as_str().to_owned(), e.native());
                }
                let reason = e.reason.as_str().to_owned();
                self.in_round_of_draft(&e.draft, |round| *round.rejected.entry(reason).or_insert(0) += 1);
            }
            EventRef::EvolutionFinished(e) => {
                self.metrics.finish_round(e);
                self.recorded.round = None;
                self.recorded.finished_round = Some(e.round.to_native());
            }
            _ => {}
        }
    }

    /// The record of an unfinished step, made when missing; `None` for finished ones.
    fn open_step(&mut self, step: u32, seq: u64) -> Option<&mut RecordedStep> {
        if self.places.steps.contains_key(&step) {
            return None;
        }
        Some(self.recorded.open(step, seq))
    }

    fn in_round_of_context(&mut self, context: &str, change: impl FnOnce(&mut RoundMetrics)) {
        if let Some(round) = self.lineage.contexts.get(context).map(|c| c.round) {
            change(self.metrics.rounds.entry(round).or_default());
        }
    }

    fn in_round_of_draft(&mut self, draft: &str, change: impl FnOnce(&mut RoundMetrics)) {
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
        let Some(open) = self.recorded.steps.get(&step) else { return Vec::new() };
        let mut raised = if open.closed {
            open.raised()
        } else {
            let (mut raised, at) = (Vec::new(), |place| open.rollouts.at(place));
            let (mut signals, mut scratch) = (self.signals.clone(), Scratch::default());
            signals.fold_ordered(
                &self.signals_config,
                &mut scratch,
                open.rollouts.len(),
                &at,
                &mut |place, group_mean, because| {
                    let rollout = at(place);
                    raised.push(Raised {
                        key: rollout.key(),
                        kind: because.kind(),
                        because: because.json(),
                        score: rollout.score().unwrap_or_default(),
                        group_mean,
                    });
                },
            );
            raised
        };
        raised.retain(|r| !open.has_logged(r.key.step, &r.key.task, r.key.draw, r.key.k, r.kind));
        raised
    }

    /// The events (first, last) among which everything about a step stands: for a finished step up to its end, for one
    /// in progress up to the last event; `None` for a step the log knows nothing of.
    pub fn stretch(&self, step: u32) -> Option<(u64, u64)> {
        match (self.places.steps.get(&step), self.recorded.steps.get(&step)) {
            (Some(place), _) => Some((place.first, place.last)),
            (None, Some(open)) => Some((open.first_seq, self.last_seq.unwrap_or(open.first_seq))),
            (None, None) => None,
        }
    }

    /// Marked rollouts since the last evolution round, for
    /// [`select_contexts`](crate::decide::contexts::select_contexts).
    pub fn marked(&self) -> Vec<Mark> {
        self.marks.native()
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
        let steps = self.recorded.steps.iter().map(|(step, open)| Ok((step, StepDigest::of(open)?)));
        match steps.collect::<Result<Vec<_>, codec::Error>>() {
            Ok(progress) => part(&mut hasher, "steps", &progress),
            Err(fault) => part(&mut hasher, "steps", &fault.to_string()),
        }
        part(&mut hasher, "round", &self.recorded.round);
        let marks = (self.recorded.finished_step, self.recorded.finished_round, self.recorded.run_finished);
        part(&mut hasher, "finished", &marks);
        hasher.finalize().to_hex().to_string()
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
