//! State as a pure fold over the log: who is in D, what was forgotten, where tasks come from.
//!
//! [`State::apply_view`](state::State::apply_view) takes events one by one as they lie in the log, borrowed; every part
//! of the state has its own file. What is kept is owned and small: a step in progress as archives in buffers that are
//! used again, of a finished one its figures and its place. Nothing here reads a log, a file or a clock. Facts and non-facts are kept apart:
//! [`State::digest`](state::State::digest) covers what follows from facts only, so two runs with the same
//! seed, or a killed and resumed one, have equal digests although sequence numbers and times differ.
//!
//! **Order.** Samplers finish in any order, so rollouts of a step are buffered and *closed* (folded in
//! canonical order into signals, histories and metrics) by the first later-phase event of that step:
//! `SignalRaised`, `GradientStepTaken`, `StepSkipped`, `PolicyPublished`, `EvolutionStarted` or
//! `StepFinished` of that step or a later one, `EvaluationFinished` of that step or a later one,
//! `BatchPlanned` or `BatchRefilled` of a later one, `RunFinished`. Of a finished step nothing more is taken. Everything else that may interleave (contexts of an
//! evolution round, drafts, admissions) is kept in maps by id.

use crate::event::digest::Digest;

pub mod audit;
pub mod audit_tree;
pub mod distribution;
pub mod drafts;
pub mod ledger;
pub mod lineage;
pub mod marks;
pub mod metrics;
pub mod places;
pub mod raised;
pub mod recorded;
pub mod references;
pub mod rollouts;
pub mod series;
pub mod state;
pub mod times;

pub use audit::{Audit, AuditError, Lookup, audit};
pub use distribution::{TaskDistribution, TaskEntry, TaskRow};
pub use drafts::{Draft, DraftState, Drafts};
pub use ledger::{PolicyLedger, Version};
pub use lineage::{Lineage, TrainedBy};
pub use metrics::{EvaluationMetrics, Metrics, RoundMetrics, StepMetrics};
pub use places::{Places, StepPlace};
pub use recorded::{Recorded, RecordedRound, RecordedStep};
pub use references::References;
pub use state::{Logged, State, as_of};
pub use times::{LlmTotals, StageTimes};

/// Everything that decides what a log folds to.
const SOURCES: &[(&str, &str)] = &[
    ("project/distribution.rs", include_str!("distribution.rs")),
    ("project/drafts.rs", include_str!("drafts.rs")),
    ("project/ledger.rs", include_str!("ledger.rs")),
    ("project/lineage.rs", include_str!("lineage.rs")),
    ("project/marks.rs", include_str!("marks.rs")),
    ("project/metrics.rs", include_str!("metrics.rs")),
    ("project/places.rs", include_str!("places.rs")),
    ("project/raised.rs", include_str!("raised.rs")),
    ("project/recorded.rs", include_str!("recorded.rs")),
    ("project/rollouts.rs", include_str!("rollouts.rs")),
    ("project/series.rs", include_str!("series.rs")),
    ("project/state.rs", include_str!("state.rs")),
    ("project/times.rs", include_str!("times.rs")),
    ("decide/contexts.rs", include_str!("../decide/contexts.rs")),
    ("decide/curriculum.rs", include_str!("../decide/curriculum.rs")),
    ("decide/history.rs", include_str!("../decide/history.rs")),
    ("decide/pairs.rs", include_str!("../decide/pairs.rs")),
    ("decide/refill.rs", include_str!("../decide/refill.rs")),
    ("decide/signals.rs", include_str!("../decide/signals.rs")),
    ("event/codec.rs", include_str!("../event/codec.rs")),
    ("event/digest.rs", include_str!("../event/digest.rs")),
    ("event/order.rs", include_str!("../event/order.rs")),
    ("event/v1.rs", include_str!("../event/v1.rs")),
    ("event/v2.rs", include_str!("../event/v2.rs")),
    ("event/view.rs", include_str!("../event/view.rs")),
];

/// Version of the fold: a snapshot of the state that was written by other code than this is of no use, and nobody can
/// forget to say that the code has changed.
pub fn fold_version() -> Digest {
    let mut all = String::new();
    for (name, source) in SOURCES {
        all += &format!("{name} {}\n{source}", source.len());
    }
    Digest::of(all.as_bytes())
}

#[cfg(test)]
mod tests;
