//! Digests over events: the **chain digest** of a branch and the **facts digest** of a run.
//!
//! * *Chain digest* of an event: `BLAKE3(frame bytes)`. The frame holds the previous event's chain digest,
//!   so one digest vouches for everything before it, byte for byte (times and durations included). The
//!   event before the first one has the digest of 32 zero bytes.
//! * *Facts digest*: facts only, in canonical order, so that two runs with the same seed agree whatever
//!   order their threads logged in. See [`FactsDigest`].

use super::{Event, Kind, RolloutKey, RunStarted, SignalKind, codec};
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

/// The key of a fact; `None` for kinds that are not facts ([`Kind::is_fact`]).
pub fn fact_key(event: &Event) -> Option<FactKey> {
    Some(match event {
        Event::RunStarted(_) => FactKey::Run,
        Event::TaskAdmitted(e) => FactKey::Task { task: e.task.id.clone() },
        Event::BatchPlanned(e) => FactKey::Batch { step: e.step },
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
        | Event::BranchCreated(_)
        | Event::BranchUndone(_)
        | Event::BranchDeleted(_)
        | Event::GarbageCollected(_) => {
            return None;
        }
    })
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
    open: Vec<(FactKey, Digest)>,
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
        let Some(key) = fact_key(event) else { return Ok(()) };
        let bytes = match event {
            Event::RunStarted(e) => {
                codec::facts_bytes(&Event::RunStarted(RunStarted { run_id: String::new(), ..e.clone() }))?
            }
            other => codec::facts_bytes(other)?,
        };
        let kind = event.kind();
        let mut hasher = blake3::Hasher::new();
        hasher.update(&(kind as u16).to_le_bytes());
        hasher.update(&bytes);
        self.open.push((key, Digest(*hasher.finalize().as_bytes())));
        self.facts += 1;
        if kind == Kind::StepFinished {
            self.chain = self.value();
            self.open.clear();
        }
        Ok(())
    }

    /// The digest of everything added so far, the open step included.
    pub fn value(&self) -> Digest {
        if self.open.is_empty() {
            return self.chain;
        }
        let mut unit: Vec<&(FactKey, Digest)> = self.open.iter().collect();
        unit.sort();
        let mut hasher = blake3::Hasher::new();
        hasher.update(&self.chain.0);
        hasher.update(&(unit.len() as u64).to_le_bytes());
        for (_, digest) in unit {
            hasher.update(&digest.0);
        }
        Digest(*hasher.finalize().as_bytes())
    }

    /// The value and the number of facts where no step is open: from these two the digest goes on.
    pub fn closed(&self) -> Option<(Digest, u64)> {
        self.open.is_empty().then_some((self.chain, self.facts))
    }

    /// Goes on from [`FactsDigest::closed`].
    pub fn resumed(chain: Digest, facts: u64) -> FactsDigest {
        FactsDigest { chain, open: Vec::new(), facts }
    }

    /// How many facts were added.
    pub fn facts(&self) -> u64 {
        self.facts
    }
}
