//! What happened: one past-tense event per fact, and the frame that carries it.
//!
//! The native structs *are* the newest frozen ones ([`v1`], and [`v2`] of the kinds that have one): code makes them, the
//! codec writes them, folds read them where they lie ([`view`]). Older ones are brought there by an upcast.

pub mod codec;
pub mod digest;
pub mod frame;
pub mod json;
pub mod order;
#[cfg(test)]
mod recipe_tests;
#[cfg(test)]
pub(crate) mod samples;
#[cfg(test)]
mod tests;
pub mod v1;
pub mod v2;
pub mod view;

pub use v1::*;
pub use v2::{ArchivedBatchPlanned, ArchivedRolloutFinished, BatchPlanned, RolloutFinished};

/// Observations about an event that are not facts: they differ between two equal runs.
#[derive(
    rkyv::Archive,
    rkyv::Serialize,
    rkyv::Deserialize,
    serde::Serialize,
    serde::Deserialize,
    Debug,
    Clone,
    Default,
    PartialEq,
)]
pub struct Meta {
    /// Wall clock when the event was decided, milliseconds since the Unix epoch.
    pub time_ms: u64,
    /// What the work took, microseconds; 0 = not measured.
    pub duration_us: u64,
    /// Tokens sent to an external LLM.
    pub llm_prompt_tokens: u64,
    /// Tokens received from an external LLM.
    pub llm_completion_tokens: u64,
}

macro_rules! events {
    ($($(#[$doc:meta])* $kind:ident = $code:literal, $name:literal, fact $fact:literal;)*) => {
        /// Any event. The enum is never serialised with rkyv: kind and version stand in the frame. In JSON the
        /// kind's name is the field `event` (`kind` is a field of [`v1::SignalRaised`]).
        #[derive(serde::Serialize, serde::Deserialize, Debug, Clone, PartialEq)]
        #[serde(tag = "event", rename_all = "snake_case")]
        pub enum Event { $($(#[$doc])* $kind($kind),)* }

        /// The kind of an event, its code in the frame.
        #[derive(serde::Serialize, serde::Deserialize, Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[serde(rename_all = "snake_case")]
        #[repr(u16)]
        pub enum Kind { $($(#[$doc])* $kind = $code,)* }

        impl Kind {
            /// Every kind, by code.
            pub const ALL: &'static [Kind] = &[$(Kind::$kind),*];
            /// Name as printed and accepted by the command line.
            pub fn name(self) -> &'static str { match self { $(Kind::$kind => $name,)* } }
            /// Whether it enters the facts digest.
            pub fn is_fact(self) -> bool { match self { $(Kind::$kind => $fact,)* } }
            /// From the frame's code.
            pub fn from_code(code: u16) -> Option<Kind> { match code { $($code => Some(Kind::$kind),)* _ => None } }
            /// From a printed name.
            pub fn from_name(name: &str) -> Option<Kind> { match name { $($name => Some(Kind::$kind),)* _ => None } }
        }

        impl Event {
            /// The kind of this event.
            pub fn kind(&self) -> Kind { match self { $(Event::$kind(_) => Kind::$kind,)* } }
        }

        $(impl From<$kind> for Event { fn from(e: $kind) -> Event { Event::$kind(e) } })*
    };
}

#[cfg(test)]
pub(crate) use events;

events! {
    /// See [`v1::RunStarted`].
    RunStarted = 1, "run_started", fact true;
    /// See [`v1::TaskAdmitted`].
    TaskAdmitted = 2, "task_admitted", fact true;
    /// See [`v2::BatchPlanned`].
    BatchPlanned = 3, "batch_planned", fact true;
    /// See [`v2::RolloutFinished`].
    RolloutFinished = 4, "rollout_finished", fact true;
    /// See [`v1::SignalRaised`].
    SignalRaised = 5, "signal_raised", fact true;
    /// See [`v1::GradientStepTaken`].
    GradientStepTaken = 6, "gradient_step_taken", fact true;
    /// See [`v1::StepSkipped`].
    StepSkipped = 7, "step_skipped", fact true;
    /// See [`v1::PolicyPublished`].
    PolicyPublished = 8, "policy_published", fact true;
    /// See [`v1::CheckpointSaved`]. A cache, not a fact.
    CheckpointSaved = 9, "checkpoint_saved", fact false;
    /// See [`v1::EvaluationFinished`].
    EvaluationFinished = 10, "evaluation_finished", fact true;
    /// See [`v1::EvolutionStarted`].
    EvolutionStarted = 11, "evolution_started", fact true;
    /// See [`v1::ReflectionWritten`].
    ReflectionWritten = 12, "reflection_written", fact true;
    /// See [`v1::ExplorationStepTaken`].
    ExplorationStepTaken = 13, "exploration_step_taken", fact true;
    /// See [`v1::DraftProposed`].
    DraftProposed = 14, "draft_proposed", fact true;
    /// See [`v1::DraftValidated`].
    DraftValidated = 15, "draft_validated", fact true;
    /// See [`v1::DraftRejected`].
    DraftRejected = 16, "draft_rejected", fact true;
    /// See [`v1::EvolutionFinished`].
    EvolutionFinished = 17, "evolution_finished", fact true;
    /// See [`v1::StepFinished`].
    StepFinished = 18, "step_finished", fact true;
    /// See [`v1::RunFinished`].
    RunFinished = 19, "run_finished", fact true;
    /// See [`v1::RunResumed`].
    RunResumed = 20, "run_resumed", fact false;
    /// See [`v1::FailureNoted`].
    FailureNoted = 21, "failure_noted", fact false;
    /// See [`v1::BranchCreated`].
    BranchCreated = 22, "branch_created", fact false;
    /// See [`v1::BranchUndone`].
    BranchUndone = 23, "branch_undone", fact false;
    /// See [`v1::BranchDeleted`].
    BranchDeleted = 24, "branch_deleted", fact false;
    /// See [`v1::GarbageCollected`].
    GarbageCollected = 25, "garbage_collected", fact false;
    /// See [`v1::BatchRefilled`].
    BatchRefilled = 26, "batch_refilled", fact true;
    /// See [`v1::LlmAsked`].
    LlmAsked = 27, "llm_asked", fact false;
}
