//! The in-memory twin of the log: same trait, same stamps and digests, no files.
//!
//! For tests of whatever uses a log. Everything is "durable" at once unless the fault plan says that the
//! n-th flush fails; from then on nothing is acknowledged, as on disk.

use super::error::{Error, Result};
use super::options::Faults;
use super::tail::{Backlog, Subscription, Tail};
use super::ticket::Ticket;
use super::{BranchId, EventIter, EventStore, MAIN, Stamped};
use crate::event::{Event, Meta, codec};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A branch, told the long way: what its history was after each event, written out in full.
#[derive(Debug, Clone, Default)]
struct Told {
    /// History as of each seq, as places in [`State::events`]; what was shared at the fork is taken over.
    views: BTreeMap<u64, Vec<usize>>,
    /// Seq of the history as it stands; an undo sets it back.
    head: u64,
    deleted: bool,
}

impl Told {
    fn last(&self) -> u64 {
        self.views.keys().next_back().copied().unwrap_or(0)
    }

    fn view(&self, seq: u64) -> Vec<usize> {
        self.views.get(&seq).cloned().unwrap_or_default()
    }
}

#[derive(Debug)]
struct State {
    /// In publication order.
    events: Vec<Arc<Stamped>>,
    branches: BTreeMap<BranchId, Told>,
    faults: Faults,
    failed: Option<Error>,
}

impl Default for State {
    fn default() -> State {
        let branches = BTreeMap::from([(MAIN, Told::default())]);
        State { events: Vec::new(), branches, faults: Faults::default(), failed: None }
    }
}

impl State {
    fn live(&self, branch: BranchId) -> Result<&Told> {
        let found = self.branches.get(&branch).filter(|b| !b.deleted);
        found.ok_or_else(|| Error::NoBranch { branch: branch.to_string() })
    }

    fn history(&self, branch: BranchId, from: u64) -> Result<Vec<Arc<Stamped>>> {
        let told = self.live(branch)?;
        let events = told.view(told.head).into_iter().map(|at| self.events[at].clone());
        Ok(events.filter(|e| e.seq >= from).collect())
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
        let told = state.live(parent)?;
        if !told.views.contains_key(&at) {
            return Err(Error::NoEvent { branch: parent, seq: at, head: told.last() });
        }
        let views = told.views.range(..=at).map(|(seq, view)| (*seq, view.clone())).collect();
        let id = state.branches.keys().next_back().map_or(1, |last| last + 1);
        state.branches.insert(id, Told { views, head: at, deleted: false });
        Ok(id)
    }

    /// Takes a branch back; the same rules as [`super::Log::undo`].
    ///
    /// # Errors
    /// [`Error::NoBranch`], [`Error::NoEvent`].
    pub fn undo(&self, branch: BranchId, to: u64) -> Result<()> {
        let mut state = self.shared.lock();
        let told = state.live(branch)?;
        if !told.views.contains_key(&to) {
            return Err(Error::NoEvent { branch, seq: to, head: told.last() });
        }
        if let Some(told) = state.branches.get_mut(&branch) {
            told.head = to;
        }
        Ok(())
    }

    /// Hides a branch; the same rules as [`super::Log::delete_branch`].
    ///
    /// # Errors
    /// [`Error::NoBranch`], [`Error::BranchName`].
    pub fn delete_branch(&self, branch: BranchId) -> Result<()> {
        let mut state = self.shared.lock();
        state.live(branch)?;
        if branch == MAIN {
            return Err(Error::BranchName { name: "main".into(), why: "cannot be deleted" });
        }
        if let Some(told) = state.branches.get_mut(&branch) {
            told.deleted = true;
        }
        Ok(())
    }

    /// A handle that writes to another branch of the same log.
    ///
    /// # Errors
    /// [`Error::NoBranch`].
    pub fn on_branch(&self, branch: BranchId) -> Result<MemoryLog> {
        self.shared.lock().live(branch)?;
        Ok(MemoryLog { shared: self.shared.clone(), tail: self.tail.clone(), branch })
    }
}

impl EventStore for MemoryLog {
    fn append(&self, event: Event, meta: Meta) -> Result<Ticket> {
        // What cannot be serialised is refused, as by the log on disk.
        codec::encode(&event, &meta)?;
        let mut state = self.shared.lock();
        let written = state.faults.torn(usize::MAX) == usize::MAX;
        if state.failed.is_none() && (!written || state.faults.sync().is_err()) {
            let error = Error::Failed { reason: "flush failed by the fault plan".into() };
            self.tail.close(error.clone());
            state.failed = Some(error);
        }
        if let Some(error) = &state.failed {
            return Ok(Ticket::answered(Err(error.clone())));
        }
        let Some(told) = state.branches.get(&self.branch) else {
            return Err(Error::NoBranch { branch: self.branch.to_string() });
        };
        let (last, head) = (told.last(), told.head);
        let stamped = Arc::new(Stamped { seq: last + 1, branch: self.branch, event, meta });
        let place = state.events.len();
        state.events.push(stamped.clone());
        if let Some(told) = state.branches.get_mut(&self.branch) {
            let mut view = told.view(head);
            view.push(place);
            told.views.insert(last + 1, view);
            told.head = last + 1;
        }
        self.tail.publish([(stamped.clone(), 0)]);
        drop(state);
        Ok(Ticket::answered(Ok(stamped)))
    }

    fn barrier(&self) -> Result<u64> {
        let state = self.shared.lock();
        match &state.failed {
            Some(error) => Err(error.clone()),
            None => Ok(state.live(self.branch)?.head),
        }
    }

    fn branch(&self) -> BranchId {
        self.branch
    }

    fn head(&self) -> u64 {
        self.shared.lock().live(self.branch).map_or(0, |told| told.head)
    }

    fn read(&self, branch: BranchId, from: u64) -> Result<EventIter> {
        let history = self.shared.lock().history(branch, from)?;
        Ok(Box::new(history.into_iter().map(|e| Ok((*e).clone()))))
    }

    fn published(&self) -> Subscription {
        Subscription::new(self.tail.clone(), self.shared.clone(), self.tail.next())
    }
}
