//! The forgetting history of every task (METHOD, after Toneva et al. 2019).
//!
//! With m the mean score of a group: a task is *learnt* at the first step with m >= 0.5; a *forgetting
//! event* is a group with m < 0.5 whose predecessor had m >= 0.5; the next group with m >= 0.5 after one
//! is *relearning*. Groups without a scored rollout leave no trace here.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::signals::{Attempt, SOLVED, Tried, for_each_group, with_entry};

/// History of one task.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct TaskHistory {
    /// Finished rollouts, scored or not.
    pub attempts: u64,
    /// Rollouts without a score.
    pub unscored: u64,
    /// Scored rollouts with a score >= 0.5.
    pub solved: u64,
    /// Groups with at least one scored rollout.
    pub groups: u64,
    /// First step with m >= 0.5.
    pub learnt_at: Option<u32>,
    /// Steps of the forgetting events, in order.
    pub forgotten_at: Vec<u32>,
    /// Steps at which it was solved again after a forgetting event, in order.
    pub relearnt_at: Vec<u32>,
    /// Mean score of the last group with a score.
    pub last_mean: Option<f64>,
    /// Step of the last finished rollout.
    pub last_step: Option<u32>,
}

impl TaskHistory {
    /// Whether the task was learnt and its last group failed.
    pub fn is_forgotten(&self) -> bool {
        self.learnt_at.is_some() && self.last_mean.is_some_and(|m| m < SOLVED)
    }

    /// Takes the mean score of the next group.
    pub fn observe(&mut self, step: u32, mean: f64) {
        let before = self.last_mean.is_some_and(|m| m >= SOLVED);
        let now = mean >= SOLVED;
        match (before, now) {
            (false, true) if self.learnt_at.is_none() => self.learnt_at = Some(step),
            (false, true) => self.relearnt_at.push(step),
            (true, false) => self.forgotten_at.push(step),
            _ => {}
        }
        self.groups += 1;
        self.last_mean = Some(mean);
    }
}

/// Histories by task id.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct ForgettingHistory {
    /// One entry per task that was ever rolled out in training.
    pub tasks: BTreeMap<String, TaskHistory>,
}

impl ForgettingHistory {
    /// Folds whole groups, in any order; walks them in canonical (step, task, draw, k) order.
    pub fn fold(&mut self, attempts: &[Attempt]) {
        let mut ordered: Vec<&Attempt> = attempts.iter().collect();
        ordered.sort_by(|a, b| a.key.cmp(&b.key));
        self.fold_ordered(ordered.len(), &|i| ordered[i]);
    }

    /// As [`ForgettingHistory::fold`] for `n` rollouts that `at` gives in canonical order. Allocates only for tasks
    /// that were never seen.
    pub fn fold_ordered<A: Tried>(&mut self, n: usize, at: &impl Fn(usize) -> A) {
        for_each_group(n, at, |group| {
            let first = at(group.start);
            with_entry(&mut self.tasks, first.task(), |task| {
                let scores = || group.clone().filter_map(|i| at(i).score());
                let scored = scores().count();
                task.attempts += group.len() as u64;
                task.unscored += (group.len() - scored) as u64;
                task.solved += scores().filter(|s| *s >= SOLVED).count() as u64;
                task.last_step = Some(first.step());
                if scored > 0 {
                    task.observe(first.step(), scores().sum::<f64>() / scored as f64);
                }
            });
        });
    }

    /// History of one task.
    pub fn get(&self, task: &str) -> Option<&TaskHistory> {
        self.tasks.get(task)
    }
}
