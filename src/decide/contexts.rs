//! Which weaknesses an evolution round explores (METHOD: stage 2).

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::signals::Raised;
use crate::event::{ContextSpec, RolloutKey, SignalKind};

/// Default of `evolve.max_contexts`.
pub const MAX_CONTEXTS: usize = 32;

/// A context names at most this many marked rollouts; the hardest are kept.
pub const MAX_CONTEXT_ROLLOUTS: usize = 32;

/// A rollout marked by a signal, as context selection sees it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Mark {
    /// The rollout.
    pub key: RolloutKey,
    /// The signal.
    pub kind: SignalKind,
    /// The rollout's score.
    pub score: f64,
    /// Mean score of its group.
    pub group_mean: f64,
}

impl From<&Raised> for Mark {
    fn from(raised: &Raised) -> Mark {
        Mark { key: raised.key.clone(), kind: raised.kind, score: raised.score, group_mean: raised.group_mean }
    }
}

/// Chooses the contexts of a round: at most `max_contexts`, one per (task, kind), hardest first: lowest
/// mean score of the marked group, then the most recent, then task id and kind. Among several marked
/// groups of one (task, kind) the hardest, then most recent, stands for it and its lowest-scored
/// rollout comes first in `rollouts`. Ids are `c<round>.<index>`. Does not depend on the order of `marks`.
pub fn select_contexts(marks: &[Mark], round: u32, max_contexts: usize) -> Vec<ContextSpec> {
    let mut by_target: BTreeMap<(&str, SignalKind), Vec<&Mark>> = BTreeMap::new();
    for mark in marks {
        by_target.entry((&mark.key.task, mark.kind)).or_default().push(mark);
    }
    for marked in by_target.values_mut() {
        marked.sort_by(|a, b| {
            a.group_mean
                .total_cmp(&b.group_mean)
                .then(b.key.step.cmp(&a.key.step))
                .then(a.key.draw.cmp(&b.key.draw))
                .then(a.score.total_cmp(&b.score))
                .then(a.key.k.cmp(&b.key.k))
        });
    }
    let mut targets: Vec<((&str, SignalKind), Vec<&Mark>)> = by_target.into_iter().collect();
    // The map iterates by (task, kind) and the sort is stable: ties stay in that order.
    targets.sort_by(|(_, a), (_, b)| match (a.first(), b.first()) {
        (Some(a), Some(b)) => a.group_mean.total_cmp(&b.group_mean).then(b.key.step.cmp(&a.key.step)),
        _ => std::cmp::Ordering::Equal,
    });
    targets
        .into_iter()
        .take(max_contexts)
        .enumerate()
        .map(|(index, ((task, kind), marked))| ContextSpec {
            id: format!("c{round}.{index}"),
            task: Some(task.to_owned()),
            kind: Some(kind),
            rollouts: marked.iter().take(MAX_CONTEXT_ROLLOUTS).map(|m| m.key.clone()).collect(),
        })
        .collect()
}
