//! Tests of the pure decisions: given, when, then.

mod admission;
mod check_signals;
mod contexts;
mod curriculum;
mod history;
mod refill;
mod signals;
mod similarity;

use super::signals::Attempt;
use crate::event::RolloutKey;

/// Key of (step, task, draw, k).
pub fn key(step: u32, task: &str, draw: u32, k: u32) -> RolloutKey {
    RolloutKey { step, task: task.into(), draw, k }
}

/// A rollout of draw 0 that called `calls`.
pub fn attempt(step: u32, task: &str, k: u32, score: Option<f64>, calls: &[&str]) -> Attempt {
    Attempt { key: key(step, task, 0, k), score, calls: calls.iter().map(|c| c.to_string()).collect() }
}

/// A group with these scores and no calls.
pub fn group(step: u32, task: &str, scores: &[f64]) -> Vec<Attempt> {
    scores.iter().enumerate().map(|(k, s)| attempt(step, task, k as u32, Some(*s), &[])).collect()
}
