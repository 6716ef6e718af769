//! State as a pure fold over the log: who is in D, what was forgotten, where tasks come from.
//!
//! [`State::apply`](state::State::apply) takes events one by one; every part of the state has its own
//! file. Nothing here reads a log, a file or a clock. Facts and non-facts are kept apart:
//! [`State::digest`](state::State::digest) covers what follows from facts only, so two runs with the same
//! seed, or a killed and resumed one, have equal digests although sequence numbers and times differ.
//!
//! **Order.** Samplers finish in any order, so rollouts of a step are buffered and *closed* (folded in
//! canonical order into signals, histories and metrics) by the first later-phase event of that step:
//! `SignalRaised`, `GradientStepTaken`, `StepSkipped`, `PolicyPublished`, `EvolutionStarted` or
//! `StepFinished` of that step or a later one, `EvaluationFinished` of that step or a later one,
//! `BatchPlanned` of a later one, `RunFinished`. Everything else that may interleave (contexts of an
//! evolution round, drafts, admissions) is kept in maps by id.

pub mod audit;
pub mod audit_tree;
pub mod distribution;
pub mod drafts;
pub mod ledger;
pub mod lineage;
pub mod metrics;
pub mod places;
pub mod recorded;
pub mod state;
pub mod times;

pub use audit::{Audit, AuditError, audit};
pub use distribution::{TaskDistribution, TaskEntry, TaskRow};
pub use drafts::{Draft, DraftState, Drafts};
pub use ledger::{PolicyLedger, Version};
pub use lineage::{Lineage, TrainedBy};
pub use metrics::{EvaluationMetrics, Metrics, RoundMetrics, StepMetrics};
pub use places::Places;
pub use recorded::{Recorded, RecordedRound, RecordedStep};
pub use state::{Logged, State, as_of};
pub use times::StageTimes;

#[cfg(test)]
mod tests;
