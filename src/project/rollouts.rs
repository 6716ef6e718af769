//! Rollouts of a step in progress: their archives side by side in one buffer, and beside them the little that the fold
//! looks at. The buffers are used again for the next step, so a rollout costs a copy of its bytes and no allocation;
//! an owned [`RolloutFinished`] is made only when somebody asks (a learner that resumes).

use serde::{Deserialize, Serialize};

use super::series::end;
use crate::decide::refill::teaches;
use crate::decide::signals::Tried;
use crate::event::view::{Archived, EventRef, View};
use crate::event::{ArchivedRolloutFinished, EndReason, Event, Kind, RolloutFinished, RolloutKey, SignalKind, codec};

/// A stretch of a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Span {
    start: usize,
    end: usize,
}

impl Span {
    /// Appends bytes to a buffer; where they stand in it.
    pub fn push(buffer: &mut Vec<u8>, bytes: &[u8]) -> Span {
        let start = buffer.len();
        buffer.extend_from_slice(bytes);
        Span { start, end: buffer.len() }
    }

    /// Appends a text.
    pub fn push_text(buffer: &mut String, text: &str) -> Span {
        let start = buffer.len();
        buffer.push_str(text);
        Span { start, end: buffer.len() }
    }

    /// The bytes; none where the buffer is not the one they were put into.
    pub fn of(self, buffer: &[u8]) -> &[u8] {
        buffer.get(self.start..self.end).unwrap_or_default()
    }

    /// The text.
    pub fn of_text(self, buffer: &str) -> &str {
        buffer.get(self.start..self.end).unwrap_or_default()
    }

    /// The stretch of a list.
    pub fn of_list<T>(self, list: &[T]) -> &[T] {
        list.get(self.start..self.end).unwrap_or_default()
    }

    /// A stretch of a list from one length to another.
    pub fn between(start: usize, end: usize) -> Span {
        Span { start, end }
    }
}

/// What the fold looks at in one rollout.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Entry {
    step: u32,
    draw: u32,
    k: u32,
    policy_version: u32,
    /// Place in `tasks`.
    task: u32,
    /// Names of the tools called, in `calls`.
    calls: Span,
    /// The archive, in `bytes`.
    facts: Span,
    score: Option<f64>,
    env_steps: u32,
    end: EndReason,
    /// One bit per [`SignalKind`]: raised by it, and in the log.
    raised: u8,
    logged: u8,
    sampled_tokens: u64,
}

/// A task of the step.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
struct Task {
    /// Its id, in `text`.
    id: Span,
    /// How many ids of the step are smaller.
    rank: u32,
}

/// The finished rollouts of one step.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Rollouts {
    bytes: Vec<u8>,
    text: String,
    calls: Vec<Span>,
    /// In the order in which they came. So that a rollout is found by comparing numbers.
    tasks: Vec<Task>,
    /// [`tail`] of each: most ids differ there.
    tails: Vec<u64>,
    entries: Vec<Entry>,
    /// Places in `entries`, by canonical order of the keys.
    order: Vec<u32>,
}

/// The last eight bytes of an id.
fn tail(id: &str) -> u64 {
    let mut bytes = [0; 8];
    let tail = &id.as_bytes()[id.len().saturating_sub(8)..];
    bytes[..tail.len()].copy_from_slice(tail);
    u64::from_le_bytes(bytes)
}

fn bit(kind: SignalKind) -> u8 {
    1 << kind as u8
}

impl Rollouts {
    /// Takes a rollout; `false` when one with its key is there.
    pub fn insert(&mut self, facts: &[u8], e: &ArchivedRolloutFinished) -> bool {
        let key = &e.key;
        let (step, draw, k) = (key.step.to_native(), key.draw.to_native(), key.k.to_native());
        let task = self.task(&key.task).unwrap_or_else(|| self.add_task(&key.task));
        let Err(place) = self.find(step, task, draw, k) else { return false };
        let first_call = self.calls.len();
        for call in e.actions.iter().flat_map(|a| a.calls.iter()) {
            let name = Span::push_text(&mut self.text, &call.name);
            self.calls.push(name);
        }
        self.order.insert(place, self.entries.len() as u32);
        self.entries.push(Entry {
            step,
            draw,
            k,
            policy_version: e.policy_version.to_native(),
            task,
            calls: Span::between(first_call, self.calls.len()),
            facts: Span::push(&mut self.bytes, facts),
            score: e.reward.score().filter(|s| s.is_finite()),
            env_steps: e.env_steps.to_native(),
            end: end(&e.end),
            raised: 0,
            logged: 0,
            sampled_tokens: e.sampled.iter().map(|run| u64::from(run.1.to_native())).sum(),
        });
        true
    }

    /// The place of a task in `tasks`.
    fn task(&self, id: &str) -> Option<u32> {
        let tail = tail(id);
        let alike =
            self.tails.iter().zip(&self.tasks).position(|(t, task)| *t == tail && task.id.of_text(&self.text) == id);
        alike.map(|i| i as u32)
    }

    fn add_task(&mut self, id: &str) -> u32 {
        let mut rank = 0;
        for task in &mut self.tasks {
            // The order of the rollouts that are there stays what it is.
            match task.id.of_text(&self.text) < id {
                true => rank += 1,
                false => task.rank += 1,
            }
        }
        self.tails.push(tail(id));
        let id = Span::push_text(&mut self.text, id);
        self.tasks.push(Task { id, rank });
        self.tasks.len() as u32 - 1
    }

    /// The place of a rollout of a known task in canonical order, or where it would be.
    fn find(&self, step: u32, task: u32, draw: u32, k: u32) -> Result<usize, usize> {
        let wanted = (step, self.tasks[task as usize].rank, draw, k);
        self.order.binary_search_by(|i| {
            let e = &self.entries[*i as usize];
            (e.step, self.tasks[e.task as usize].rank, e.draw, e.k).cmp(&wanted)
        })
    }

    /// The place of a rollout in canonical order.
    pub fn place(&self, step: u32, task: &str, draw: u32, k: u32) -> Option<usize> {
        self.find(step, self.task(task)?, draw, k).ok()
    }

    /// Whether a rollout is there.
    pub fn contains(&self, key: &RolloutKey) -> bool {
        self.place(key.step, &key.task, key.draw, key.k).is_some()
    }

    /// How many.
    pub fn len(&self) -> usize {
        self.order.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.order.is_empty()
    }

    /// The rollout at a place in canonical order; a place is below [`Rollouts::len`].
    pub fn at(&self, place: usize) -> Finished<'_> {
        self.finished(self.order[place])
    }

    fn finished(&self, index: u32) -> Finished<'_> {
        Finished { of: self, entry: &self.entries[index as usize] }
    }

    /// All, in canonical order.
    pub fn iter(&self) -> impl Iterator<Item = Finished<'_>> {
        (0..self.len()).map(|place| self.at(place))
    }

    /// How many groups teach something ([`teaches`]).
    pub fn teaching_groups(&self) -> usize {
        let same_group = |a: &u32, b: &u32| self.finished(*a).same_group(&self.finished(*b));
        let groups = self.order.chunk_by(same_group);
        groups.filter(|group| teaches(group.iter().filter_map(|i| self.finished(*i).score()))).count()
    }

    /// Keys in canonical order.
    pub fn keys(&self) -> impl Iterator<Item = RolloutKey> {
        self.iter().map(|r| r.key())
    }

    /// Owned rollouts in canonical order.
    ///
    /// # Errors
    /// Never for what was applied: it was validated then.
    pub fn native(&self) -> Result<Vec<RolloutFinished>, codec::Error> {
        self.iter().map(|r| r.archived().map(Archived::native)).collect()
    }

    /// Notes that the rollout at a place raised a signal.
    pub fn note_raised(&mut self, place: usize, kind: SignalKind) {
        self.entries[self.order[place] as usize].raised |= bit(kind);
    }

    /// Notes that a signal of the rollout at a place is in the log.
    pub fn note_logged(&mut self, place: usize, kind: SignalKind) {
        self.entries[self.order[place] as usize].logged |= bit(kind);
    }

    /// Forgets all; keeps the buffers.
    pub fn clear(&mut self) {
        self.bytes.clear();
        self.text.clear();
        self.calls.clear();
        self.tasks.clear();
        self.tails.clear();
        self.entries.clear();
        self.order.clear();
    }
}

/// One of [`Rollouts`].
#[derive(Debug, Clone, Copy)]
pub struct Finished<'a> {
    of: &'a Rollouts,
    entry: &'a Entry,
}

impl<'a> Finished<'a> {
    /// Policy version that sampled it.
    pub fn policy_version(&self) -> u32 {
        self.entry.policy_version
    }

    /// Environment steps taken.
    pub fn env_steps(&self) -> u32 {
        self.entry.env_steps
    }

    /// Tokens sampled.
    pub fn sampled_tokens(&self) -> u64 {
        self.entry.sampled_tokens
    }

    /// How it ended.
    pub fn end(&self) -> EndReason {
        self.entry.end
    }

    /// Whether it raised a signal of this kind.
    pub fn has_raised(&self, kind: SignalKind) -> bool {
        self.entry.raised & bit(kind) != 0
    }

    /// Whether its signal of this kind is in the log.
    pub fn has_logged(&self, kind: SignalKind) -> bool {
        self.entry.logged & bit(kind) != 0
    }

    /// The event, archived.
    ///
    /// # Errors
    /// Never for what was applied: it was validated then.
    pub fn archived(&self) -> Result<&'a ArchivedRolloutFinished, codec::Error> {
        let kind = Kind::RolloutFinished;
        match View::access(kind, self.entry.facts.of(&self.of.bytes)).map(|view| view.event()) {
            Ok(EventRef::RolloutFinished(e)) => Ok(e),
            Ok(_) => Err(malformed(kind, "another kind".into())),
            Err(why) => Err(malformed(kind, why)),
        }
    }
}

impl Tried for Finished<'_> {
    fn step(&self) -> u32 {
        self.entry.step
    }
    fn task(&self) -> &str {
        self.of.tasks[self.entry.task as usize].id.of_text(&self.of.text)
    }
    fn draw(&self) -> u32 {
        self.entry.draw
    }
    fn k(&self) -> u32 {
        self.entry.k
    }
    fn score(&self) -> Option<f64> {
        self.entry.score
    }
    fn calls(&self) -> impl Iterator<Item = &str> {
        self.entry.calls.of_list(&self.of.calls).iter().map(|name| name.of_text(&self.of.text))
    }
    fn same_group(&self, other: &Self) -> bool {
        let group = |e: &Entry| (e.step, e.task, e.draw);
        group(self.entry) == group(other.entry)
    }
}

/// An owned event of bytes that were validated when they were kept.
///
/// # Errors
/// When they are no archive of this kind after all.
pub(super) fn native(kind: Kind, facts: &[u8]) -> Result<Event, codec::Error> {
    View::access(kind, facts).map(|view| view.native()).map_err(|why| malformed(kind, why))
}

fn malformed(kind: Kind, why: String) -> codec::Error {
    codec::Error::Malformed { kind, version: codec::newest_version(kind), why }
}
