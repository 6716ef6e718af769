//! The log as the loop sees it: record facts once, fold only what is durable.

use super::RunError;
use super::answers::answers;
use super::policy::{Trainee, Update};
use crate::config;
use crate::decide::refill::used;
use crate::event::digest::{Digest, FactKey, FactsDigest, content_hash, fact_key, key_bytes};
use crate::event::view::View;
use crate::event::{Event, GradientStepTaken, Kind, Meta, RolloutFinished, RolloutKey, RunStarted, codec};
use crate::evolve::asking::{Keep, Told};
use crate::log::{
    BranchId, Collect, Error as LogError, EventStore, Log, MAIN, Options, Reader, Subscription, Swept, snapshot,
};
use crate::project::{State, fold_version};
use crate::world::{Stopwatch, now_ms};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;
use std::sync::Arc;

/// A log opened for writing, with the state that its durable events fold to.
pub(super) struct Ledger {
    log: Arc<Log>,
    inbox: Subscription,
    state: State,
    facts: FactsDigest,
    /// Facts of the unfinished step, recorded or on their way: key ([`key_bytes`]) -> hash. Only looked up by key, so
    /// the order of a `HashMap` does not matter.
    open: HashMap<Vec<u8>, Digest>,
}

impl Ledger {
    /// Starts a log.
    pub(super) fn create(dir: &Path, started: RunStarted, settings: &config::Log) -> Result<Ledger, RunError> {
        let log = Log::create(dir, started, meta(0), options(settings))?;
        Ledger::over(log)
    }

    /// Opens a log and folds what it holds.
    pub(super) fn open(dir: &Path, settings: &config::Log) -> Result<Ledger, RunError> {
        match Log::open(dir, options(settings)) {
            Ok(log) => Ledger::over(log),
            Err(LogError::Empty { dir }) => Err(RunError::NothingToResume { dir }),
            Err(other) => Err(other.into()),
        }
    }

    fn over(log: Log) -> Result<Ledger, RunError> {
        let inbox = log.published();
        let (mut state, mut facts) = folded(log.reader(), log.branch(), log.head());
        let from = state.last_seq.map_or(1, |seq| seq + 1);
        // A kept state is one between two steps: what is open comes after it.
        let mut open = HashMap::new();
        log.reader().sweep(log.branch(), from, log.head(), |Swept { seq, view, meta }| {
            state.apply_view(seq, &view, &meta);
            let mut key = Vec::new();
            if key_bytes(&view, &mut key) {
                open.insert(key, content_hash(&view)?);
            }
            if view.kind() == Kind::StepFinished {
                open.clear();
            }
            facts.add_view(&view).map_err(LogError::from)
        })?;
        Ok(Ledger { inbox, state, facts, open, log: Arc::new(log) })
    }

    /// Takes in an event that became durable.
    fn fold(&mut self, seq: u64, event: &Event, meta: &Meta) -> Result<(), RunError> {
        if self.state.last_seq.is_some_and(|last| seq <= last) {
            return Ok(());
        }
        let facts = serialised(event)?;
        let view = View::access(event.kind(), &facts).map_err(|e| RunError::internal("a fact", e))?;
        self.state.apply_view(seq, &view, meta);
        // Facts are in `open` since they were recorded.
        self.facts.add_view(&view).map_err(|e| RunError::internal("facts digest", e))?;
        if event.kind() == Kind::StepFinished {
            self.open.clear();
        }
        Ok(())
    }

    /// Keeps the state for the next opening, between two steps. A cache: that it cannot be written (a full disk) is
    /// no reason to stop; the next append says so if nothing fits any more.
    pub(super) fn snapshot(&self) -> Result<(), RunError> {
        let (Some(seq), Some((chain, facts))) = (self.state.last_seq, self.facts.closed()) else { return Ok(()) };
        let kept = KeptRef { facts_chain: chain.0, facts, state: &self.state };
        let body = serde_json::to_vec(&kept).map_err(|e| RunError::internal("a snapshot", e))?;
        let reader = self.log.reader();
        let digest = reader.digest(self.log.branch(), seq)?;
        let _ = snapshot::write(reader.dir(), self.log.branch(), seq, &digest, &fold_version(), &body);
        Ok(())
    }

    /// The state after the last durable event that was taken in.
    pub(super) fn state(&self) -> &State {
        &self.state
    }

    /// The facts digest, hex.
    pub(super) fn facts_digest(&self) -> String {
        self.facts.value().to_string()
    }

    /// Durable events of the branch.
    pub(super) fn events(&self) -> u64 {
        self.log.head()
    }

    /// Appends a fact unless it is recorded; `duration_us` is what the work took. Returns before it is durable.
    ///
    /// # Errors
    /// [`RunError::Diverged`] when a fact with the same coordinates but another content is recorded.
    pub(super) fn record(&mut self, event: impl Into<Event>, duration_us: u64) -> Result<(), RunError> {
        let (event, meta) = (event.into(), meta(duration_us));
        let (mut key, facts) = (Vec::new(), serialised(&event)?);
        let view = View::access(event.kind(), &facts).map_err(|e| RunError::internal("a fact", e))?;
        if !key_bytes(&view, &mut key) {
            return self.append(event, meta);
        }
        let new = content_hash(&view).map_err(|e| RunError::internal("serialising a fact", e))?;
        match self.open.get(&key) {
            Some(old) if *old == new => Ok(()),
            Some(old) => Err(RunError::Diverged {
                what: fact_key(&event).map_or_else(String::new, |key| format!("{key:?}")),
                recorded: old.to_string(),
                computed: new.to_string(),
            }),
            None => {
                self.open.insert(key, new);
                self.append(event, meta)
            }
        }
    }

    /// Appends an event that is no fact.
    pub(super) fn note(&mut self, event: impl Into<Event>) -> Result<(), RunError> {
        self.append(event.into(), meta(0))
    }

    /// Records answers of LLMs, durable on return. They are folded at the next [`Ledger::settle`].
    pub(super) fn scribe(&self) -> Keep {
        let log = self.log.clone();
        Box::new(move |asked, duration_us| {
            // Nothing was sent for an answer that another run recorded.
            let tokens = |n: u64| if asked.attempts > 0 { n } else { 0 };
            let meta = Meta {
                llm_prompt_tokens: tokens(asked.prompt_tokens),
                llm_completion_tokens: tokens(asked.completion_tokens),
                ..meta(duration_us)
            };
            // The barrier does not wait for others to join the commit.
            log.append(asked.into(), meta).and_then(|_| log.barrier()).map(drop).map_err(|e| e.to_string())
        })
    }

    /// Answers of LLMs since event `from`, by digest of the request.
    pub(super) fn answers(&self, from: u64) -> Result<BTreeMap<String, Told>, RunError> {
        Ok(answers(self.log.reader(), self.log.branch(), from, self.log.head())?)
    }

    fn append(&mut self, event: Event, meta: Meta) -> Result<(), RunError> {
        // Nobody waits for a single ticket: `settle` is the barrier, and reports a failed flush.
        let _ = self.log.append(event, meta)?;
        Ok(())
    }

    /// Waits until everything recorded is durable and folds it; returns the microseconds waited.
    pub(super) fn settle(&mut self) -> Result<u64, RunError> {
        let watch = Stopwatch::start();
        self.log.barrier()?;
        let waited = watch.micros();
        for stamped in self.inbox.drain()? {
            if stamped.branch == self.log.branch() {
                self.fold(stamped.seq, &stamped.event, &stamped.meta)?;
            }
        }
        Ok(waited)
    }

    /// Removes files that nothing needs any more and records it.
    pub(super) fn remove(&self, also: Vec<(String, String)>) -> Result<(), RunError> {
        self.log.collect(&Collect { also, ..Collect::default() }, meta(0))?;
        Ok(())
    }

    /// Whether the folder has branches beside main.
    pub(super) fn has_forks(&self) -> bool {
        !self.log.reader().branches().is_empty()
    }

    /// A recorded rollout, from disk.
    pub(super) fn rollout(&self, key: &RolloutKey) -> Result<Option<RolloutFinished>, RunError> {
        let Some((first, last)) = self.state.stretch(key.step) else { return Ok(None) };
        match self.log.reader().fact(self.log.branch(), first, last, &FactKey::Rollout(key.clone()))? {
            Some((_, Event::RolloutFinished(rollout))) => Ok(Some(rollout)),
            Some((_, other)) => Err(RunError::internal("place of a rollout", other.kind().name())),
            None => Ok(None),
        }
    }
}

/// What a snapshot keeps: the state, and the facts digest between two steps.
#[derive(serde::Serialize)]
struct KeptRef<'a> {
    facts_chain: [u8; 32],
    facts: u64,
    state: &'a State,
}

#[derive(serde::Deserialize)]
struct Kept {
    facts_chain: [u8; 32],
    facts: u64,
    state: State,
}

/// The state of a branch after event `upto`, by way of the newest snapshot that serves.
///
/// # Errors
/// Those of reading the log.
pub fn state_at(reader: &Reader, branch: BranchId, upto: u64) -> Result<State, RunError> {
    let (mut state, _) = folded(reader, branch, upto);
    reader.sweep(branch, state.last_seq.map_or(1, |seq| seq + 1), upto, |Swept { seq, view, meta }| {
        state.apply_view(seq, &view, &meta);
        Ok::<_, RunError>(())
    })?;
    Ok(state)
}

/// The newest snapshot that serves for events 1..=`upto`, or the state before the first event.
fn folded(reader: &Reader, branch: BranchId, upto: u64) -> (State, FactsDigest) {
    let nothing = || (State::new(), FactsDigest::new());
    let Some(found) = snapshot::newest(reader, branch, &fold_version(), upto) else { return nothing() };
    let Ok(kept) = serde_json::from_slice::<Kept>(&found.body) else { return nothing() };
    match kept.state.last_seq == Some(found.seq) {
        true => (kept.state, FactsDigest::resumed(Digest(kept.facts_chain), kept.facts)),
        false => nothing(),
    }
}

/// A run as it stands, read without taking it over: what a learner is rebuilt from.
pub(super) struct Past {
    reader: Reader,
    /// The state after the last durable event.
    pub(super) state: State,
}

impl Past {
    /// Reads the main branch of a run folder.
    pub(super) fn read(dir: &Path) -> Result<Past, RunError> {
        let reader = Reader::open(dir)?;
        let state = state_at(&reader, MAIN, reader.head(MAIN)?)?;
        Ok(Past { reader, state })
    }

    /// Brings a learner to where the log stands: the nearest usable checkpoint, then the logged gradient
    /// steps again, each compared with what is recorded.
    pub(super) fn restore(&self, dir: &Path, trainee: &mut dyn Trainee) -> Result<(), RunError> {
        let mut from = 0;
        for saved in self.state.places.checkpoints.values().rev() {
            // A checkpoint is a cache: one that is gone or damaged is passed over.
            if trainee.load(&dir.join(&saved.path), &saved.weights_hash).is_ok() {
                from = saved.step;
                break;
            }
        }
        let mut open: BTreeMap<u32, BTreeMap<RolloutKey, RolloutFinished>> = BTreeMap::new();
        let mut refilled = BTreeSet::new();
        // Nothing of a later step stands before the end of this one.
        let begin = self.state.places.steps.get(&from).map_or(1, |place| place.last);
        for stamped in self.reader.read(MAIN, begin)? {
            match stamped?.event {
                Event::RolloutFinished(r) if r.key.step > from => {
                    open.entry(r.key.step).or_default().insert(r.key.clone(), r);
                }
                Event::BatchRefilled(e) => {
                    refilled.insert(e.step);
                }
                Event::PolicyPublished(p) if p.step > from => {
                    let rollouts = open.remove(&p.step).unwrap_or_default().into_values().collect();
                    let rollouts = if refilled.remove(&p.step) { used(rollouts) } else { rollouts };
                    for update in trainee.learn(p.step, rollouts)? {
                        if let Update::Taken(e) = update {
                            self.compare(&e)?;
                        }
                    }
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Compares a recomputed gradient step with the recorded one.
    fn compare(&self, computed: &GradientStepTaken) -> Result<(), RunError> {
        let what = format!("gradient step {}/{}", computed.step, computed.update);
        let diverged = |recorded: String| RunError::Diverged {
            what: what.clone(),
            recorded,
            computed: computed.weights_hash.clone(),
        };
        let Some(seq) = self.state.places.updates.get(&(computed.step, computed.update)) else {
            return Err(diverged("nothing".into()));
        };
        match self.reader.event(MAIN, *seq)?.event {
            Event::GradientStepTaken(r) if r == *computed => Ok(()),
            Event::GradientStepTaken(r) => Err(diverged(r.weights_hash)),
            other => Err(RunError::internal("place of a gradient step", other.kind().name())),
        }
    }
}

fn serialised(event: &Event) -> Result<Vec<u8>, RunError> {
    codec::facts_bytes(event).map_err(|e| RunError::internal("serialising a fact", e))
}

fn meta(duration_us: u64) -> Meta {
    Meta { time_ms: now_ms(), duration_us, ..Meta::default() }
}

fn options(settings: &config::Log) -> Options {
    Options {
        group_events: settings.group_commit_events as usize,
        group_bytes: settings.group_commit_bytes as usize,
        group_wait_us: settings.group_commit_us,
        segment_bytes: u64::from(settings.segment_mib) << 20,
        compress: settings.compress,
        blob_copies: settings.blob_copies,
        ..Options::default()
    }
}
