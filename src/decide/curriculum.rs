//! Which tasks a training step draws.
//!
//! Without replacement (the default) the training set is gone through in shuffled epochs. There is no
//! stored permutation: the n-th visit (from 0) of a task with weight w has the virtual time
//! `base_epoch + (n + u) / w`, u = draw(seed, "epoch", task, n) in [0, 1), and a step takes the smallest
//! times. With w = 1 every task is visited exactly once per unit of virtual time, in an order shuffled
//! anew for each epoch; w = 2 is visited twice. A task that joins later starts at the epoch of
//! its admission, so it is not made to catch up. Unvisited tasks that joined after training
//! began come first, in a bounded share of the batch. With replacement, every draw is independent
//! and proportional to the weights, beside the same fresh share.

use std::cmp::Ordering;
use std::collections::{BTreeMap, BinaryHeap};

use serde::{Deserialize, Serialize};

use crate::world;

/// Settings of batch planning (`batch.*`).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct BatchOptions {
    /// Groups per step. Default 32.
    pub tasks: usize,
    /// At most this share of a batch is reserved for tasks that joined during training and were never
    /// drawn, in [0, 1]. Default 0.5; rounded down.
    pub fresh_share: f64,
    /// Draw with replacement instead of in epochs. Default false.
    pub replacement: bool,
}

impl Default for BatchOptions {
    fn default() -> Self {
        BatchOptions { tasks: 32, fresh_share: 0.5, replacement: false }
    }
}

/// A task of D as planning sees it.
#[derive(Debug, Clone, PartialEq)]
pub struct Candidate {
    /// Task id.
    pub id: String,
    /// Sampling weight; tasks without a positive finite weight are never drawn.
    pub weight: f64,
    /// How often it was planned so far.
    pub planned: u64,
    /// Epoch of D when it joined ([`epoch`]).
    pub base_epoch: u64,
    /// Step after which it joined; 0 = before training.
    pub admitted_step: u32,
}

/// Epoch a task is in: whole units of virtual time that its visits have used up; `None` for one that is never drawn.
pub fn task_epoch(weight: f64, planned: u64, base_epoch: u64) -> Option<u64> {
    // A tiny weight could exceed u64; the cast saturates.
    let drawable = weight.is_finite() && weight > 0.0;
    drawable.then(|| base_epoch.saturating_add((planned as f64 / weight) as u64))
}

impl Candidate {
    fn drawable(&self) -> bool {
        self.epoch().is_some()
    }

    fn epoch(&self) -> Option<u64> {
        task_epoch(self.weight, self.planned, self.base_epoch)
    }
}

/// Epoch of a training set: that of its least visited task; 0 when nothing can be drawn.
/// What joins gets it as `base_epoch`.
pub fn epoch<'a>(tasks: impl IntoIterator<Item = &'a Candidate>) -> u64 {
    tasks.into_iter().filter_map(Candidate::epoch).min().unwrap_or(0)
}

/// Next visit of a task in the queue; the heap gives the earliest first.
struct Visit<'a> {
    time: f64,
    n: u64,
    task: &'a Candidate,
}

impl Visit<'_> {
    fn of(task: &Candidate, n: u64, seed: u64) -> Visit<'_> {
        let u = world::draw(seed, "epoch", &[&task.id, &n.to_string()]).unit();
        Visit { time: task.base_epoch as f64 + (n as f64 + u) / task.weight, n, task }
    }
}

impl PartialEq for Visit<'_> {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}
impl Eq for Visit<'_> {}
impl PartialOrd for Visit<'_> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Visit<'_> {
    fn cmp(&self, other: &Self) -> Ordering {
        // Reversed: BinaryHeap is a max-heap.
        other.time.total_cmp(&self.time).then_with(|| other.task.id.cmp(&self.task.id))
    }
}

/// The (task id, draw) of each group of a step, in sampling order. Depends on its arguments only, not on
/// the order of `tasks`. A task drawn twice in a step gets draws 0 and 1. Returns fewer groups than asked
/// for only when nothing can be drawn at all.
pub fn plan_batch(tasks: &[Candidate], step: u32, seed: u64, options: &BatchOptions) -> Vec<(String, u32)> {
    numbered(chosen(tasks, &[&step.to_string()], seed, options), &[])
}

/// The groups of a further round of a step, from 1, by the same rule: `tasks` are as they stand now, with the visits of
/// `planned`, the step's groups so far. Draws go on behind those of `planned`: no two groups of a step are the same.
pub fn plan_refill(
    tasks: &[Candidate],
    (step, round): (u32, u32),
    planned: &[(String, u32)],
    seed: u64,
    options: &BatchOptions,
) -> Vec<(String, u32)> {
    numbered(chosen(tasks, &[&step.to_string(), &round.to_string()], seed, options), planned)
}

/// Tasks in the order in which they are drawn; `ids` tell one independent draw from another.
fn chosen<'a>(tasks: &'a [Candidate], ids: &[&str], seed: u64, options: &BatchOptions) -> Vec<&'a Candidate> {
    let mut pool: Vec<&Candidate> = tasks.iter().filter(|t| t.drawable()).collect();
    pool.sort_by(|a, b| a.id.cmp(&b.id));
    pool.dedup_by(|a, b| a.id == b.id);
    if pool.is_empty() {
        return Vec::new();
    }
    let mut chosen: Vec<&'a Candidate> = fresh(&pool, seed, options);
    if options.replacement {
        let weights: Vec<f64> = pool.iter().map(|t| t.weight).collect();
        let mut draw = world::draw(seed, "batch", ids);
        while chosen.len() < options.tasks {
            let Some(i) = draw.weighted(&weights) else { break };
            chosen.push(pool[i]);
        }
    } else {
        let mut visits: BTreeMap<&str, u64> = pool.iter().map(|t| (t.id.as_str(), t.planned)).collect();
        for task in &chosen {
            *visits.entry(&task.id).or_insert(0) += 1;
        }
        let mut queue: BinaryHeap<Visit> =
            pool.iter().map(|t| Visit::of(t, visits.get(t.id.as_str()).copied().unwrap_or(0), seed)).collect();
        while chosen.len() < options.tasks {
            let Some(next) = queue.pop() else { break };
            chosen.push(next.task);
            queue.push(Visit::of(next.task, next.n + 1, seed));
        }
    }
    chosen
}

/// Each task with the number of its draw within the step, behind those of `planned`.
fn numbered(chosen: Vec<&Candidate>, planned: &[(String, u32)]) -> Vec<(String, u32)> {
    let mut draws: BTreeMap<&str, u32> = BTreeMap::new();
    for (task, draw) in planned {
        let next = draws.entry(task).or_insert(0);
        *next = (*next).max(draw + 1);
    }
    chosen
        .into_iter()
        .map(|task| {
            let draw = draws.entry(&task.id).or_insert(0);
            *draw += 1;
            (task.id.clone(), *draw - 1)
        })
        .collect()
}

/// Never-drawn tasks that joined during training: oldest first, shuffled among equals.
fn fresh<'a>(pool: &[&'a Candidate], seed: u64, options: &BatchOptions) -> Vec<&'a Candidate> {
    let share = if options.fresh_share.is_finite() { options.fresh_share.clamp(0.0, 1.0) } else { 0.0 };
    let room = (share * options.tasks as f64) as usize;
    let mut fresh: Vec<(u32, u64, &Candidate)> = pool
        .iter()
        .filter(|t| t.planned == 0 && t.admitted_step > 0)
        .map(|t| (t.admitted_step, world::draw(seed, "fresh", &[&t.id]).bits(), *t))
        .collect();
    fresh.sort_by(|a, b| (a.0, a.1, &a.2.id).cmp(&(b.0, b.1, &b.2.id)));
    fresh.into_iter().take(room).map(|(_, _, t)| t).collect()
}
