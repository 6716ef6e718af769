//! Digests over events: the **chain digest** of a branch and the **facts digest** of a run.
//!
//! * *Chain digest* of an event: `BLAKE3(frames of its record up to and including its own)`. The frames hold the chain
//!   digest before the record, so one digest vouches for everything before it, byte for byte (times and durations
//!   included). Before the first record it is 32 zero bytes.
//! * *Facts digest*: facts only, in canonical order, so that two runs with the same seed agree whatever
//!   order their threads logged in. See [`FactsDigest`].

use super::order::{push_text, push_u32};
use super::view::{Archived, EventRef, View};
use super::{ArchivedRolloutKey, ArchivedSignalKind, Event, Kind, RolloutKey, RunStarted, SignalKind, codec};
use std::fmt;

/// 32 bytes of BLAKE3.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Digest(pub [u8; 32]);

impl Digest {
    /// The digest before the first event of a run.
    pub const ZERO: Digest = Digest([0; 32]);

    /// BLAKE3 of some bytes.
    pub fn of(bytes: &[u8]) -> Digest {
        Digest(*blake3::hash(bytes).as_bytes())
    }

    /// From 64 hex digits; `None` for anything else.
    pub fn from_hex(text: &str) -> Option<Digest> {
        blake3::Hash::from_hex(text.as_bytes()).ok().map(|h| Digest(*h.as_bytes()))
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&blake3::Hash::from_bytes(self.0).to_hex())
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Digest({self})")
    }
}

/// What a fact is about: unique per fact of a branch, and the canonical order of facts within a step.
///
/// Variants stand in the order of the phases of a step; inside a phase the coordinates decide. A resumed
/// run asks "is this recorded already?" with it, and never records a key twice.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum FactKey {
    /// [`RunStarted`].
    Run,
    /// [`super::BatchPlanned`].
    Batch {
        /// Training step.
        step: u32,
    },
    /// [`super::BatchRefilled`].
    Refill {
        /// Training step.
        step: u32,
        /// Round within the step.
        round: u32,
    },
    /// [`super::RolloutFinished`].
    Rollout(RolloutKey),
    /// [`super::SignalRaised`].
    Signal(RolloutKey, SignalKind),
    /// [`super::GradientStepTaken`].
    GradientStep {
        /// Training step.
        step: u32,
        /// Update within the step.
        update: u32,
    },
    /// [`super::StepSkipped`].
    StepSkipped {
        /// Training step.
        step: u32,
        /// Update within the step.
        update: u32,
    },
    /// [`super::PolicyPublished`].
    Policy {
        /// Policy version.
        version: u32,
    },
    /// [`super::EvolutionStarted`].
    EvolutionStarted {
        /// Evolution round.
        round: u32,
    },
    /// [`super::ReflectionWritten`].
    Reflection {
        /// Context id.
        context: String,
    },
    /// [`super::ExplorationStepTaken`].
    Exploration {
        /// Context id.
        context: String,
        /// Exploration round within the context.
        round: u32,
        /// Step within the round.
        step: u32,
    },
    /// [`super::DraftProposed`].
    Draft {
        /// Draft id.
        draft: String,
    },
    /// [`super::DraftValidated`].
    Validation {
        /// Draft id.
        draft: String,
    },
    /// [`super::DraftRejected`].
    Rejection {
        /// Draft id.
        draft: String,
    },
    /// [`super::TaskAdmitted`]: a task joins D once.
    Task {
        /// Task id.
        task: String,
    },
    /// [`super::EvolutionFinished`].
    EvolutionFinished {
        /// Evolution round.
        round: u32,
    },
    /// [`super::EvaluationFinished`].
    Evaluation {
        /// Training step after which.
        step: u32,
        /// Split name.
        split: String,
        /// Policy version.
        version: u32,
    },
    /// [`super::StepFinished`].
    Step {
        /// Training step.
        step: u32,
    },
    /// [`super::RunFinished`].
    RunFinished {
        /// Last step.
        step: u32,
    },
}

impl FactKey {
    /// Appends the key as bytes in the order of keys: the same as [`key_bytes`] of its event.
    pub fn bytes(&self, out: &mut Vec<u8>) {
        let rollout = |out: &mut Vec<u8>, key: &RolloutKey| {
            push_u32(out, key.step);
            push_text(out, &key.task);
            push_u32(out, key.draw);
            push_u32(out, key.k);
        };
        let (variant, numbers): (u8, [Option<u32>; 2]) = match self {
            FactKey::Run => (0, [None, None]),
            FactKey::Batch { step } => (1, [Some(*step), None]),
            FactKey::Refill { step, round } => (2, [Some(*step), Some(*round)]),
            FactKey::Rollout(_) => (3, [None, None]),
            FactKey::Signal(..) => (4, [None, None]),
            FactKey::GradientStep { step, update } => (5, [Some(*step), Some(*update)]),
            FactKey::StepSkipped { step, update } => (6, [Some(*step), Some(*update)]),
            FactKey::Policy { version } => (7, [Some(*version), None]),
            FactKey::EvolutionStarted { round } => (8, [Some(*round), None]),
            FactKey::Reflection { .. } => (9, [None, None]),
            FactKey::Exploration { .. } => (10, [None, None]),
            FactKey::Draft { .. } => (11, [None, None]),
            FactKey::Validation { .. } => (12, [None, None]),
            FactKey::Rejection { .. } => (13, [None, None]),
            FactKey::Task { .. } => (14, [None, None]),
            FactKey::EvolutionFinished { round } => (15, [Some(*round), None]),
            FactKey::Evaluation { step, .. } => (16, [Some(*step), None]),
            FactKey::Step { step } => (17, [Some(*step), None]),
            FactKey::RunFinished { step } => (18, [Some(*step), None]),
        };
        out.push(variant);
        numbers.into_iter().flatten().for_each(|n| push_u32(out, n));
        match self {
            FactKey::Rollout(key) => rollout(out, key),
            FactKey::Signal(key, kind) => {
                rollout(out, key);
                out.push(*kind as u8);
            }
            FactKey::Reflection { context: text }
            | FactKey::Draft { draft: text }
            | FactKey::Validation { draft: text }
            | FactKey::Rejection { draft: text }
            | FactKey::Task { task: text } => push_text(out, text),
            FactKey::Exploration { context, round, step } => {
                push_text(out, context);
                push_u32(out, *round);
                push_u32(out, *step);
            }
            FactKey::Evaluation { split, version, .. } => {
                push_text(out, split);
                push_u32(out, *version);
            }
            _ => {}
        }
    }
}

/// The key of a fact; `None` for kinds that are not facts ([`Kind::is_fact`]).
pub fn fact_key(event: &Event) -> Option<FactKey> {
    Some(match event {
        Event::RunStarted(_) => FactKey::Run,
        Event::TaskAdmitted(e) => FactKey::Task { task: e.task.id.clone() },
        Event::BatchPlanned(e) => FactKey::Batch { step: e.step },
        Event::BatchRefilled(e) => FactKey::Refill { step: e.step, round: e.round },
        Event::RolloutFinished(e) => FactKey::Rollout(e.key.clone()),
        Event::SignalRaised(e) => FactKey::Signal(e.key.clone(), e.kind),
        Event::GradientStepTaken(e) => FactKey::GradientStep { step: e.step, update: e.update },
        Event::StepSkipped(e) => FactKey::StepSkipped { step: e.step, update: e.update },
        Event::PolicyPublished(e) => FactKey::Policy { version: e.version },
        Event::EvaluationFinished(e) => {
            FactKey::Evaluation { step: e.step, split: e.split.clone(), version: e.policy_version }
        }
        Event::EvolutionStarted(e) => FactKey::EvolutionStarted { round: e.round },
        Event::ReflectionWritten(e) => FactKey::Reflection { context: e.context.clone() },
        Event::ExplorationStepTaken(e) => {
            FactKey::Exploration { context: e.context.clone(), round: e.round, step: e.step }
        }
        Event::DraftProposed(e) => FactKey::Draft { draft: e.draft.clone() },
        Event::DraftValidated(e) => FactKey::Validation { draft: e.draft.clone() },
        Event::DraftRejected(e) => FactKey::Rejection { draft: e.draft.clone() },
        Event::EvolutionFinished(e) => FactKey::EvolutionFinished { round: e.round },
        Event::StepFinished(e) => FactKey::Step { step: e.step },
        Event::RunFinished(e) => FactKey::RunFinished { step: e.step },
        Event::CheckpointSaved(_)
        | Event::RunResumed(_)
        | Event::FailureNoted(_)
        | Event::LlmAsked(_)
        | Event::BranchCreated(_)
        | Event::BranchUndone(_)
        | Event::BranchDeleted(_)
        | Event::GarbageCollected(_) => {
            return None;
        }
    })
}

/// Appends the key of a fact as bytes whose order is that of [`FactKey`]; `false` (and nothing appended) for kinds that
/// are not facts. Unlike [`fact_key`] it makes no owned strings.
pub fn key_bytes(view: &View<'_>, out: &mut Vec<u8>) -> bool {
    let rollout = |out: &mut Vec<u8>, key: &ArchivedRolloutKey| {
        push_u32(out, key.step.to_native());
        push_text(out, &key.task);
        push_u32(out, key.draw.to_native());
        push_u32(out, key.k.to_native());
    };
    // The first byte is the place of the variant in `FactKey`.
    match view.event() {
        EventRef::RunStarted(_) => out.push(0),
        EventRef::BatchPlanned(e) => {
            out.push(1);
            push_u32(out, e.step.to_native());
        }
        EventRef::BatchRefilled(e) => {
            out.push(2);
            push_u32(out, e.step.to_native());
            push_u32(out, e.round.to_native());
        }
        EventRef::RolloutFinished(e) => {
            out.push(3);
            rollout(out, &e.key);
        }
        EventRef::SignalRaised(e) => {
            out.push(4);
            rollout(out, &e.key);
            out.push(match e.kind {
                ArchivedSignalKind::Forgetting => 0,
                ArchivedSignalKind::Boundary => 1,
                ArchivedSignalKind::Rare => 2,
            });
        }
        EventRef::GradientStepTaken(e) => {
            out.push(5);
            push_u32(out, e.step.to_native());
            push_u32(out, e.update.to_native());
        }
        EventRef::StepSkipped(e) => {
            out.push(6);
            push_u32(out, e.step.to_native());
            push_u32(out, e.update.to_native());
        }
        EventRef::PolicyPublished(e) => {
            out.push(7);
            push_u32(out, e.version.to_native());
        }
        EventRef::EvolutionStarted(e) => {
            out.push(8);
            push_u32(out, e.round.to_native());
        }
        EventRef::ReflectionWritten(e) => {
            out.push(9);
            push_text(out, &e.context);
        }
        EventRef::ExplorationStepTaken(e) => {
            out.push(10);
            push_text(out, &e.context);
            push_u32(out, e.round.to_native());
            push_u32(out, e.step.to_native());
        }
        EventRef::DraftProposed(e) => {
            out.push(11);
            push_text(out, &e.draft);
        }
        EventRef::DraftValidated(e) => {
            out.push(12);
            push_text(out, &e.draft);
        }
        EventRef::DraftRejected(e) => {
            out.push(13);
            push_text(out, &e.draft);
        }
        EventRef::TaskAdmitted(e) => {
            out.push(14);
            push_text(out, &e.task.id);
        }
        EventRef::EvolutionFinished(e) => {
            out.push(15);
            push_u32(out, e.round.to_native());
        }
        EventRef::EvaluationFinished(e) => {
            out.push(16);
            push_u32(out, e.step.to_native());
            push_text(out, &e.split);
            push_u32(out, e.policy_version.to_native());
        }
        EventRef::StepFinished(e) => {
            out.push(17);
            push_u32(out, e.step.to_native());
        }
        EventRef::RunFinished(e) => {
            out.push(18);
            push_u32(out, e.step.to_native());
        }
        EventRef::CheckpointSaved(_)
        | EventRef::RunResumed(_)
        | EventRef::FailureNoted(_)
        | EventRef::LlmAsked(_)
        | EventRef::BranchCreated(_)
        | EventRef::BranchUndone(_)
        | EventRef::BranchDeleted(_)
        | EventRef::GarbageCollected(_) => return false,
    }
    true
}

/// The hash of a fact: `BLAKE3(kind code as u16 LE ‖ facts bytes)`, of [`RunStarted`] with an empty `run_id`. The bytes are
/// those that were written, in whichever version: a newer program finds the digest of an old run unchanged.
///
/// # Errors
/// When a [`RunStarted`] cannot be serialised (a string beyond 2 GiB).
pub fn fact_hash(view: &View<'_>) -> Result<Digest, codec::Error> {
    hash(view, view.stored())
}

/// The same of the bytes in the newest version: equal for a fact that an older program wrote and the same fact today.
///
/// # Errors
/// As [`fact_hash`].
pub fn content_hash(view: &View<'_>) -> Result<Digest, codec::Error> {
    hash(view, view.facts())
}

fn hash(view: &View<'_>, facts: &[u8]) -> Result<Digest, codec::Error> {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&(view.kind() as u16).to_le_bytes());
    match view.event() {
        EventRef::RunStarted(e) => {
            let nameless = RunStarted { run_id: String::new(), ..e.native() };
            hasher.update(&codec::facts_bytes(&Event::RunStarted(nameless))?);
        }
        _ => {
            hasher.update(facts);
        }
    }
    Ok(Digest(*hasher.finalize().as_bytes()))
}

/// The facts digest of a branch, built event by event in log order.
///
/// Facts gather in a *unit*; [`super::StepFinished`] closes it. A closed unit is sorted by
/// ([`FactKey`], hash) and chained: `chain = BLAKE3(chain ‖ n as u64 LE ‖ hash_1 ‖ .. ‖ hash_n)` with
/// `hash_i = BLAKE3(kind code as u16 LE ‖ facts bytes)`, the first chain being 32 zero bytes. Everything of a step
/// stands in the log before its `StepFinished`, so the order *within* a step does not matter, and only the
/// hashes of one open step are kept in memory.
///
/// The random `run_id` of [`RunStarted`] is no fact: it is hashed as the empty string.
#[derive(Debug, Clone, Default)]
pub struct FactsDigest {
    chain: Digest,
    /// The open unit: where its key stands in `keys`, and its hash. The buffers are used again for every unit.
    open: Vec<(usize, usize, Digest)>,
    keys: Vec<u8>,
    facts: u64,
}

impl FactsDigest {
    /// Nothing yet.
    pub fn new() -> FactsDigest {
        FactsDigest::default()
    }

    /// Takes the next event of the branch; events that are not facts change nothing.
    ///
    /// # Errors
    /// When the event cannot be serialised (a string or list beyond 2 GiB).
    pub fn add(&mut self, event: &Event) -> Result<(), codec::Error> {
        let (kind, facts) = (event.kind(), codec::facts_bytes(event)?);
        self.add_view(&codec::view(kind as u16, codec::newest_version(kind), &facts, &mut Vec::new())?)
    }

    /// The same for an event as it lies in the log.
    ///
    /// # Errors
    /// As [`fact_hash`].
    pub fn add_view(&mut self, view: &View<'_>) -> Result<(), codec::Error> {
        let start = self.keys.len();
        if !key_bytes(view, &mut self.keys) {
            return Ok(());
        }
        self.open.push((start, self.keys.len(), fact_hash(view)?));
        self.facts += 1;
        if view.kind() == Kind::StepFinished {
            let FactsDigest { chain, open, keys, .. } = self;
            // The order of `open` says nothing, so it may stay sorted.
            open.sort_unstable_by(|a, b| (&keys[a.0..a.1], a.2).cmp(&(&keys[b.0..b.1], b.2)));
            *chain = chained(chain, open.iter().map(|(.., hash)| hash));
            open.clear();
            keys.clear();
        }
        Ok(())
    }

    /// The digest of everything added so far, the open step included.
    pub fn value(&self) -> Digest {
        if self.open.is_empty() {
            return self.chain;
        }
        let mut unit: Vec<(&[u8], Digest)> = self.open().collect();
        unit.sort_unstable();
        chained(&self.chain, unit.iter().map(|(_, hash)| hash))
    }

    /// The facts of the open unit: key ([`key_bytes`]) and hash, in no order.
    fn open(&self) -> impl Iterator<Item = (&[u8], Digest)> {
        self.open.iter().map(|(start, end, hash)| (&self.keys[*start..*end], *hash))
    }

    /// The value and the number of facts where no step is open: from these two the digest goes on.
    pub fn closed(&self) -> Option<(Digest, u64)> {
        self.open.is_empty().then_some((self.chain, self.facts))
    }

    /// Goes on from [`FactsDigest::closed`].
    pub fn resumed(chain: Digest, facts: u64) -> FactsDigest {
        FactsDigest { chain, facts, ..FactsDigest::default() }
    }

    /// How many facts were added.
    pub fn facts(&self) -> u64 {
        self.facts
    }
}

fn chained<'a>(chain: &Digest, unit: impl ExactSizeIterator<Item = &'a Digest>) -> Digest {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&chain.0);
    hasher.update(&(unit.len() as u64).to_le_bytes());
    for hash in unit {
        hasher.update(&hash.0);
    }
    Digest(*hasher.finalize().as_bytes())
}
