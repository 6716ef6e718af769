//! The training set D: who is in it, why, and how often it was planned.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::series::{Tally, Uncompared, origin};
use crate::decide::curriculum::{self, Candidate};
use crate::event::view::Archived;
use crate::event::{ArchivedTaskAdmitted, Origin, TaskSpec};

/// A task of D.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TaskEntry {
    /// The task.
    pub task: TaskSpec,
    /// Why it is here.
    pub origin: Origin,
    /// Sampling weight.
    pub weight: f64,
    /// Draft it came from.
    pub draft: Option<String>,
    /// Step after which it joined; 0 = before training.
    pub admitted_step: u32,
    /// Groups planned for it so far.
    pub planned: u64,
    /// Epoch of D when it joined (see [`curriculum`]).
    pub base_epoch: u64,
}

impl TaskEntry {
    fn epoch(&self) -> Option<u64> {
        curriculum::task_epoch(self.weight, self.planned, self.base_epoch)
    }

    fn candidate(&self) -> Candidate {
        Candidate {
            id: self.task.id.clone(),
            weight: self.weight,
            planned: self.planned,
            base_epoch: self.base_epoch,
            admitted_step: self.admitted_step,
        }
    }
}

/// D by task id. It only grows.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct TaskDistribution {
    /// The tasks.
    pub tasks: BTreeMap<String, TaskEntry>,
    /// Epoch of D right after the last batch was planned; the `base_epoch` of what joins next.
    pub epoch: u64,
    #[serde(skip)]
    counts: Uncompared<Counts>,
}

/// What follows from the tasks, kept so that a batch or a step need not walk all of them.
#[derive(Debug, Default)]
struct Counts {
    /// |D| by origin, of `tasks` tasks.
    origins: Tally<Origin, 3>,
    /// Tasks counted in `origins`; another number than |D| = not counted.
    tasks: usize,
    /// How many drawable tasks are in [`TaskDistribution::epoch`]; `None` = not counted.
    lowest: Option<usize>,
}

/// A row of `coevolve tasks`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TaskRow {
    /// Task id.
    pub id: String,
    /// Why it is in D.
    pub origin: Origin,
    /// Step after which it joined; 0 = before training.
    pub admitted_at: u32,
    /// Sequence number of its admission.
    pub admitted_seq: Option<u64>,
    /// Sampling weight.
    pub weight: f64,
    /// Finished rollouts.
    pub attempts: u64,
    /// Share of its window that was solved; `None` without a scored attempt.
    pub success_rate: Option<f64>,
    /// How often it was forgotten (events, after Toneva et al.).
    pub forgotten: u32,
    /// First step at which a group's mean score was >= 0.5.
    pub learnt_at: Option<u32>,
    /// The environment's label of its composition.
    pub family: String,
    /// Its first query.
    pub query: String,
}

impl TaskDistribution {
    /// A task joined. One that is there already stays as it is (D never replaces).
    pub fn admit(&mut self, event: &ArchivedTaskAdmitted) {
        if self.tasks.contains_key(event.task.id.as_str()) {
            return;
        }
        let entry = TaskEntry {
            task: event.task.native(),
            origin: origin(&event.origin),
            weight: event.weight.to_native(),
            draft: event.draft.as_ref().map(|d| d.as_str().to_owned()),
            admitted_step: event.step.to_native(),
            planned: 0,
            base_epoch: self.epoch,
        };
        let counts = &mut self.counts.0;
        if counts.tasks == self.tasks.len() {
            counts.origins.add(entry.origin);
            counts.tasks += 1;
        }
        // It starts in the epoch of D.
        if let Some(lowest) = counts.lowest.as_mut().filter(|_| entry.epoch().is_some()) {
            *lowest += 1;
        }
        self.tasks.insert(entry.task.id.clone(), entry);
    }

    /// A batch, or a further round of one, was planned: the task of each group.
    pub fn plan<'a>(&mut self, tasks: impl Iterator<Item = &'a str>) {
        let mut left = 0;
        for task in tasks {
            if let Some(entry) = self.tasks.get_mut(task) {
                let before = entry.epoch();
                entry.planned += 1;
                left += usize::from(before == Some(self.epoch) && entry.epoch() != before);
            }
        }
        // D stays in its epoch until the last of its tasks has left it.
        let lowest = self.counts.0.lowest.filter(|lowest| *lowest > left).map(|lowest| lowest - left);
        self.counts.0.lowest = lowest.or_else(|| {
            let epochs = || self.tasks.values().filter_map(TaskEntry::epoch);
            self.epoch = epochs().min().unwrap_or(0);
            Some(epochs().filter(|e| *e == self.epoch).count())
        });
    }

    /// D as batch planning wants it, by id.
    pub fn candidates(&self) -> Vec<Candidate> {
        self.tasks.values().map(TaskEntry::candidate).collect()
    }

    /// |D| by origin.
    pub fn by_origin(&self) -> BTreeMap<Origin, u64> {
        let mut counts = BTreeMap::new();
        for entry in self.tasks.values() {
            *counts.entry(entry.origin).or_insert(0) += 1;
        }
        counts
    }

    /// As [`TaskDistribution::by_origin`], counted as tasks join.
    pub(super) fn tally(&mut self) -> Tally<Origin, 3> {
        let counts = &mut self.counts.0;
        if counts.tasks != self.tasks.len() {
            counts.origins = Tally::default();
            self.tasks.values().for_each(|entry| counts.origins.add(entry.origin));
            counts.tasks = self.tasks.len();
        }
        counts.origins
    }

    /// |D|.
    pub fn len(&self) -> usize {
        self.tasks.len()
    }

    /// Whether D is empty.
    pub fn is_empty(&self) -> bool {
        self.tasks.is_empty()
    }
}
