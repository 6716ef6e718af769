//! The training set D: who is in it, why, and how often it was planned.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::decide::curriculum::{self, Candidate};
use crate::event::{BatchPlanned, Origin, TaskAdmitted, TaskSpec};

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
    pub fn admit(&mut self, event: &TaskAdmitted) {
        let base_epoch = self.epoch;
        self.tasks.entry(event.task.id.clone()).or_insert_with(|| TaskEntry {
            task: event.task.clone(),
            origin: event.origin,
            weight: event.weight,
            draft: event.draft.clone(),
            admitted_step: event.step,
            planned: 0,
            base_epoch,
        });
    }

    /// A batch was planned.
    pub fn plan(&mut self, event: &BatchPlanned) {
        for (task, _) in &event.groups {
            if let Some(entry) = self.tasks.get_mut(task) {
                entry.planned += 1;
            }
        }
        self.epoch = curriculum::epoch(&self.candidates());
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

    /// |D|.
    pub fn len(&self) -> usize {
        self.tasks.len()
    }

    /// Whether D is empty.
    pub fn is_empty(&self) -> bool {
        self.tasks.is_empty()
    }
}
