//! Signals that the rollouts of a step raise, as numbers; the JSON of the evidence is made when somebody asks.

use serde::{Deserialize, Serialize};

use super::rollouts::{Rollouts, Span};
use crate::decide::signals::{Because, Raised, Tried};
use crate::event::SignalKind;

/// Evidence; windows and scores stand in `numbers`, patterns in `patterns`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
enum Evidence {
    Forgetting { window: Span, last_solved_step: u32 },
    Boundary { scores: Span, above: usize, below: usize },
    Rare { pattern: Span, count: u64, total: u64, theta: f64 },
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
struct One {
    /// Place of the rollout in canonical order.
    rollout: u32,
    score: f64,
    group_mean: f64,
    evidence: Evidence,
}

/// All signals of a step, in canonical order. The buffers are used again.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct RaisedSignals {
    list: Vec<One>,
    numbers: Vec<f64>,
    patterns: Vec<u8>,
}

impl RaisedSignals {
    /// Takes the next one: place and score of its rollout, mean of the group, evidence.
    pub fn push(&mut self, rollout: usize, score: f64, group_mean: f64, because: &Because<'_>) {
        let numbers = &mut self.numbers;
        let mut keep = |list: &[f64]| {
            let start = numbers.len();
            numbers.extend_from_slice(list);
            Span::between(start, numbers.len())
        };
        let evidence = match *because {
            Because::Forgetting { window, last_solved_step, .. } => {
                Evidence::Forgetting { window: keep(window), last_solved_step }
            }
            Because::Boundary { scores, above, below, .. } => Evidence::Boundary { scores: keep(scores), above, below },
            Because::Rare { pattern, count, total, theta } => {
                Evidence::Rare { pattern: Span::push(&mut self.patterns, pattern), count, total, theta }
            }
        };
        self.list.push(One { rollout: rollout as u32, score, group_mean, evidence });
    }

    /// (place of the rollout, its score, mean of its group, evidence) of each.
    pub fn iter(&self) -> impl Iterator<Item = (usize, f64, f64, Because<'_>)> {
        self.list.iter().map(|one| {
            let because = match one.evidence {
                Evidence::Forgetting { window, last_solved_step } => {
                    Because::Forgetting { score: one.score, window: window.of_list(&self.numbers), last_solved_step }
                }
                Evidence::Boundary { scores, above, below } => {
                    Because::Boundary { scores: scores.of_list(&self.numbers), mean: one.group_mean, above, below }
                }
                Evidence::Rare { pattern, count, total, theta } => {
                    Because::Rare { pattern: pattern.of(&self.patterns), count, total, theta }
                }
            };
            (one.rollout as usize, one.score, one.group_mean, because)
        })
    }

    /// (place of the rollout, kind) of each.
    pub fn kinds(&self) -> impl Iterator<Item = (usize, SignalKind)> {
        self.iter().map(|(place, _, _, because)| (place, because.kind()))
    }

    /// With their evidence as JSON; `rollouts` are those of the step.
    pub fn native(&self, rollouts: &Rollouts) -> Vec<Raised> {
        let one = |(place, score, group_mean, because): (usize, f64, f64, Because<'_>)| Raised {
            key: rollouts.at(place).key(),
            kind: because.kind(),
            because: because.json(),
            score,
            group_mean,
        };
        self.iter().map(one).collect()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// Forgets all; keeps the buffers.
    pub fn clear(&mut self) {
        self.list.clear();
        self.numbers.clear();
        self.patterns.clear();
    }
}
