//! The in-memory twin of the log: same trait, same stamps and digests, no files.
//!
//! For tests of whatever uses a log. Everything is "durable" at once unless the fault plan says that the
//! n-th flush fails; from then on nothing is acknowledged, as on disk.

use super::error::{Error, Result};
use super::options::Faults;
use super::tail::{Backlog, Subscription, Tail};
use super::ticket::{Ticket, slot};
use super::{BranchId, EventAt, EventIter, EventStore, MAIN, Stamped};
use crate::event::digest::Digest;
use crate::event::{Event, Meta, codec, frame};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

#[derive(Debug, Default)]
struct State {
    /// In publication order.
    events: Vec<Arc<Stamped>>,
    /// (parent, at) of each branch but main.
    branches: BTreeMap<BranchId, EventAt>,
    faults: Faults,
    failed: Option<Error>,
}

impl State {
    fn last(&self, branch: BranchId) -> Option<u64> {
        let own = self.events.iter().rev().find(|e| e.branch == branch).map(|e| e.seq);
        own.or_else(|| if branch == MAIN { Some(0) } else { self.branches.get(&branch).map(|(_, at)| *at) })
    }

    /// Chain digest after event `seq` of a branch's history.
    fn digest(&self, branch: BranchId, seq: u64) -> Digest {
        let mut at = branch;
        loop {
            if let Some(e) = self.events.iter().rev().find(|e| e.branch == at && e.seq == seq) {
                return e.digest;
            }
            let Some((parent, _)) = self.branches.get(&at) else { return Digest::ZERO };
            at = *parent;
        }
    }

    fn history(&self, branch: BranchId, from: u64) -> Option<Vec<Arc<Stamped>>> {
        let mut last = self.last(branch)?;
        let (mut at, mut out) = (branch, Vec::new());
        loop {
            let fork = self.branches.get(&at).copied();
            let first = fork.map_or(1, |(_, at)| at + 1).max(from);
            let own = self.events.iter().filter(|e| e.branch == at && (first..=last).contains(&e.seq));
            out.extend(own.rev().cloned());
            let Some((parent, shared)) = fork else { break };
            last = last.min(shared);
            at = parent;
        }
        out.reverse();
        Some(out)
    }
}

#[derive(Debug, Default)]
struct Shared(Mutex<State>);

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Backlog for Shared {
    fn events_from(&self, ordinal: u64) -> Result<Vec<Arc<Stamped>>> {
        Ok(self.lock().events.iter().skip(ordinal as usize).take(64).cloned().collect())
    }
}

/// The in-memory log.
#[derive(Debug)]
pub struct MemoryLog {
    shared: Arc<Shared>,
    tail: Arc<Tail>,
    branch: BranchId,
}

impl Default for MemoryLog {
    fn default() -> MemoryLog {
        MemoryLog::new()
    }
}

impl MemoryLog {
    /// An empty log.
    pub fn new() -> MemoryLog {
        MemoryLog::with_faults(Faults::default())
    }

    /// An empty log in which things go wrong as planned. Each append is one write and one flush.
    pub fn with_faults(faults: Faults) -> MemoryLog {
        let shared = Arc::new(Shared(Mutex::new(State { faults, ..State::default() })));
        // A small ring, so that subscribers exercise the backlog too.
        MemoryLog { shared, tail: Arc::new(Tail::new(0, 64, usize::MAX)), branch: MAIN }
    }

    /// Forks a branch; the same rules as [`super::Log::create_branch`], without a ledger.
    ///
    /// # Errors
    /// [`Error::NoBranch`], [`Error::NoEvent`].
    pub fn create_branch(&self, parent: BranchId, at: u64) -> Result<BranchId> {
        let mut state = self.shared.lock();
        let head = state.last(parent).ok_or_else(|| Error::NoBranch { branch: parent.to_string() })?;
        if at == 0 || at > head {
            return Err(Error::NoEvent { branch: parent, seq: at, head });
        }
        let id = state.branches.keys().next_back().map_or(1, |last| last + 1);
        state.branches.insert(id, (parent, at));
        Ok(id)
    }

    /// A handle that writes to another branch of the same log.
    ///
    /// # Errors
    /// [`Error::NoBranch`].
    pub fn on_branch(&self, branch: BranchId) -> Result<MemoryLog> {
        self.shared.lock().last(branch).ok_or_else(|| Error::NoBranch { branch: branch.to_string() })?;
        Ok(MemoryLog { shared: self.shared.clone(), tail: self.tail.clone(), branch })
    }
}

impl EventStore for MemoryLog {
    fn append(&self, event: Event, meta: Meta) -> Result<Ticket> {
        let encoded = codec::encode(&event, &meta)?;
        let mut state = self.shared.lock();
        let (slot, waiter) = slot();
        let written = state.faults.torn(usize::MAX) == usize::MAX;
        if state.failed.is_none() && (!written || state.faults.sync().is_err()) {
            let error = Error::Failed { reason: "flush failed by the fault plan".into() };
            self.tail.close(error.clone());
            state.failed = Some(error);
        }
        if let Some(error) = &state.failed {
            slot.answer(Err(error.clone()));
            return Ok(Ticket(waiter));
        }
        let last = state.last(self.branch).unwrap_or(0);
        let prev = state.digest(self.branch, last);
        let header = frame::Header {
            kind: encoded.kind as u16,
            version: encoded.version,
            flags: 0,
            branch: self.branch,
            seq: last + 1,
            prev,
            meta_version: codec::META_VERSION,
        };
        let digest = frame::write(&mut Vec::new(), &header, &encoded.facts, &encoded.meta)?;
        let stamped = Arc::new(Stamped { seq: last + 1, branch: self.branch, event, meta, digest });
        state.events.push(stamped.clone());
        self.tail.publish([(stamped.clone(), 0)]);
        drop(state);
        slot.answer(Ok(stamped));
        Ok(Ticket(waiter))
    }

    fn barrier(&self) -> Result<u64> {
        let state = self.shared.lock();
        match &state.failed {
            Some(error) => Err(error.clone()),
            None => Ok(state.last(self.branch).unwrap_or(0)),
        }
    }

    fn branch(&self) -> BranchId {
        self.branch
    }

    fn head(&self) -> u64 {
        self.shared.lock().last(self.branch).unwrap_or(0)
    }

    fn read(&self, branch: BranchId, from: u64) -> Result<EventIter> {
        let history = self.shared.lock().history(branch, from);
        let history = history.ok_or_else(|| Error::NoBranch { branch: branch.to_string() })?;
        Ok(Box::new(history.into_iter().map(|e| Ok((*e).clone()))))
    }

    fn published(&self) -> Subscription {
        Subscription::new(self.tail.clone(), self.shared.clone(), self.tail.next())
    }
}
