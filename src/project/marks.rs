//! Rollouts that signals marked since the last evolution round, of the latest steps: what the next round chooses from.

use std::collections::{BTreeMap, VecDeque};

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::raised::RaisedSignals;
use super::rollouts::{Rollouts, Span};
use super::series::Uncompared;
use crate::decide::contexts::Mark;
use crate::decide::signals::Tried;
use crate::event::{RolloutKey, SignalKind};

/// Marked rollouts of at most this many steps are kept for the next evolution round.
pub const MAX_MARKED_STEPS: usize = 64;

/// A [`Mark`] of a step; its task id stands in the step's text.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Marked {
    task: Span,
    draw: u32,
    k: u32,
    kind: SignalKind,
    score: f64,
    group_mean: f64,
}

#[derive(Debug, Clone, Default, PartialEq)]
struct MarkedStep {
    step: u32,
    marks: Vec<Marked>,
    text: String,
}

impl MarkedStep {
    fn push(&mut self, task: &str, (draw, k): (u32, u32), kind: SignalKind, score: f64, group_mean: f64) {
        let known = self.marks.last().map(|last| last.task).filter(|span| span.of_text(&self.text) == task);
        let task = known.unwrap_or_else(|| Span::push_text(&mut self.text, task));
        self.marks.push(Marked { task, draw, k, kind, score, group_mean });
    }

    fn native(&self) -> impl Iterator<Item = Mark> {
        self.marks.iter().map(|m| Mark {
            key: RolloutKey { step: self.step, task: m.task.of_text(&self.text).to_owned(), draw: m.draw, k: m.k },
            kind: m.kind,
            score: m.score,
            group_mean: m.group_mean,
        })
    }
}

/// The marks by step, at most [`MAX_MARKED_STEPS`] steps. Buffers of steps that left are used again. In JSON a map from
/// steps to lists of [`Mark`]s.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Marks {
    steps: VecDeque<MarkedStep>,
    spare: Uncompared<Vec<MarkedStep>>,
}

impl Marks {
    /// Takes the signals of a step that was closed.
    pub fn close(&mut self, step: u32, raised: &RaisedSignals, rollouts: &Rollouts) {
        if !raised.is_empty() {
            let marked = self.open(step);
            for (place, score, group_mean, because) in raised.iter() {
                let rollout = rollouts.at(place);
                marked.push(rollout.task(), (rollout.draw(), rollout.k()), because.kind(), score, group_mean);
            }
        }
        while self.steps.len() > MAX_MARKED_STEPS {
            self.forget_first();
        }
    }

    /// The empty record of a step.
    fn open(&mut self, step: u32) -> &mut MarkedStep {
        let place = self.steps.partition_point(|s| s.step < step);
        if self.steps.get(place).is_none_or(|s| s.step != step) {
            let mut fresh = self.spare.0.pop().unwrap_or_default();
            fresh.step = step;
            self.steps.insert(place, fresh);
        }
        let marked = &mut self.steps[place];
        marked.marks.clear();
        marked.text.clear();
        marked
    }

    fn forget_first(&mut self) {
        self.spare.0.extend(self.steps.pop_front());
    }

    /// Forgets the marks of steps up to and including `step`.
    pub fn forget_through(&mut self, step: u32) {
        while self.steps.front().is_some_and(|s| s.step <= step) {
            self.forget_first();
        }
    }

    /// All marks, by step and in canonical order.
    pub fn native(&self) -> Vec<Mark> {
        self.steps.iter().flat_map(MarkedStep::native).collect()
    }
}

impl Serialize for Marks {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_map(self.steps.iter().map(|s| (s.step, s.native().collect::<Vec<_>>())))
    }
}

impl<'de> Deserialize<'de> for Marks {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Marks, D::Error> {
        let mut marks = Marks::default();
        for (step, list) in BTreeMap::<u32, Vec<Mark>>::deserialize(from)? {
            let marked = marks.open(step);
            for m in list {
                marked.push(&m.key.task, (m.key.draw, m.key.k), m.kind, m.score, m.group_mean);
            }
        }
        Ok(marks)
    }
}
