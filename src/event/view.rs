//! Events as they lie in the log: borrowed, checked, nothing copied.
//!
//! The fold reads millions of events and keeps little of each, so it takes a [`View`]: the facts bytes of the newest
//! frozen struct of a kind, validated once (`bytecheck`), with the archived struct over them. [`super::codec::view`]
//! makes one from a frame (an older version is brought to the newest first); [`View::access`] from facts that were
//! just serialised. Archived numbers give their value with `to_native`, texts with `as_str`.

use super::*;
use rkyv::api::high;
use rkyv::rancor::{self, ResultExt};

/// An archived value of the log that can become an owned one.
pub trait Archived {
    /// What it is the archive of.
    type Native;
    /// The owned value.
    fn native(&self) -> Self::Native;
}

// Making an owned value of a validated archive cannot fail (`Panic` is never made): only shared pointers, of which there
// are none here, and lengths beyond the address space could.
macro_rules! natives {
    ($($archived:ty => $native:ty),* $(,)?) => {$(
        impl Archived for $archived {
            type Native = $native;
            fn native(&self) -> $native {
                high::deserialize::<$native, rancor::Panic>(self).always_ok()
            }
        }
    )*};
}

natives! {
    ArchivedRolloutKey => RolloutKey,
    ArchivedSignalKind => SignalKind,
    ArchivedOrigin => Origin,
    ArchivedEndReason => EndReason,
    ArchivedReward => Reward,
    ArchivedTaskSpec => TaskSpec,
    ArchivedCheck => Check,
    ArchivedContextSpec => ContextSpec,
}

impl ArchivedRolloutKey {
    /// Whether it is this key.
    pub fn is(&self, key: &RolloutKey) -> bool {
        self.step.to_native() == key.step
            && self.task.as_str() == key.task
            && self.draw.to_native() == key.draw
            && self.k.to_native() == key.k
    }
}

impl ArchivedReward {
    /// The score, if there is one.
    pub fn score(&self) -> Option<f64> {
        match self {
            ArchivedReward::Scored(score) => Some(score.to_native()),
            ArchivedReward::Unscored(_) => None,
        }
    }
}

macro_rules! views {
    ($($kind:ident),* $(,)?) => {
        /// An archived event of the newest version of its kind.
        #[derive(Clone, Copy)]
        pub enum EventRef<'a> {
            $(
                #[doc = concat!("See [`", stringify!($kind), "`].")]
                $kind(&'a rkyv::Archived<$kind>),
            )*
        }

        $(natives! { rkyv::Archived<$kind> => $kind })*

        impl<'a> View<'a> {
            /// Over facts bytes of the newest version of a kind; the error says why they are none.
            ///
            /// # Errors
            /// What the validation said.
            pub fn access(kind: Kind, facts: &'a [u8]) -> Result<View<'a>, String> {
                let event = match kind {
                    $(Kind::$kind => EventRef::$kind(
                        rkyv::access::<rkyv::Archived<$kind>, rancor::Error>(facts).map_err(|e| e.to_string())?,
                    ),)*
                };
                Ok(View { kind, facts, stored: facts, event })
            }

            /// The owned event.
            pub fn native(&self) -> Event {
                match self.event { $(EventRef::$kind(e) => Event::$kind(e.native()),)* }
            }
        }
    };
}

views! {
    RunStarted, TaskAdmitted, BatchPlanned, RolloutFinished, SignalRaised, GradientStepTaken, StepSkipped,
    PolicyPublished, CheckpointSaved, EvaluationFinished, EvolutionStarted, ReflectionWritten, ExplorationStepTaken,
    DraftProposed, DraftValidated, DraftRejected, EvolutionFinished, StepFinished, RunFinished, RunResumed,
    FailureNoted, BranchCreated, BranchUndone, BranchDeleted, GarbageCollected, BatchRefilled,
    LlmAsked,
}

/// One event, borrowed: its facts bytes, and the archived struct in them.
#[derive(Clone, Copy)]
pub struct View<'a> {
    kind: Kind,
    facts: &'a [u8],
    stored: &'a [u8],
    event: EventRef<'a>,
}

impl<'a> View<'a> {
    /// The kind.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// The facts bytes, newest version.
    pub fn facts(&self) -> &'a [u8] {
        self.facts
    }

    /// The facts bytes as they lie in the log, in whichever version they were written.
    pub fn stored(&self) -> &'a [u8] {
        self.stored
    }

    /// The same view of facts that are stored like this.
    pub(super) fn of_stored(self, stored: &'a [u8]) -> View<'a> {
        View { stored, ..self }
    }

    /// The archived event.
    pub fn event(&self) -> EventRef<'a> {
        self.event
    }
}

impl std::fmt::Debug for View<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "View({}, {} bytes)", self.kind.name(), self.facts.len())
    }
}
