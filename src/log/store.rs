//! The log of a run folder, opened for writing.

use super::error::{Error, Result};
use super::filler::{Filler, SledStatus};
use super::head;
use super::index::Index;
use super::journal::Journal;
use super::lock::{FolderLock, is_run, refuse_foreign};
use super::options::Options;
use super::record::journal_id;
use super::repair;
use super::segments::{self, Segments};
use super::tail::{Subscription, Tail};
use super::ticket::Ticket;
use super::writer::Writer;
use super::{BranchId, EventIter, EventStore, LEDGER, MAIN, Reader, sled_store::SledStore};
use crate::event::{BranchCreated, BranchDeleted, BranchUndone, Event, Meta, RunStarted};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

/// The log of a run folder, opened for writing. Dropping it commits what is queued, lets the sled copy catch up and
/// releases the folder.
#[derive(Debug)]
pub struct Log {
    reader: Reader,
    tail: Arc<Tail>,
    writer: Writer,
    filler: Option<Filler>,
    branch: BranchId,
    notes: Vec<String>,
    forking: Mutex<()>,
    // Last: released after the threads ended.
    _lock: FolderLock,
}

impl Log {
    /// Starts a run in a folder (created if missing) with its first event, durable on return. What a kill before the
    /// first event left there is removed.
    ///
    /// # Errors
    /// [`Error::Exists`] when the folder holds a run, [`Error::Gone`] when it held one, [`Error::Foreign`],
    /// [`Error::Locked`], I/O.
    pub fn create(dir: &Path, started: RunStarted, meta: Meta, options: Options) -> Result<Log> {
        refuse_foreign(dir)?;
        std::fs::create_dir_all(dir).map_err(Error::io("create folder", dir))?;
        let lock = FolderLock::take(dir)?;
        if holds_events(dir)? {
            let gone = Segments::new(dir).list()?.is_empty() && !SledStore::path(dir).is_dir();
            return Err(if gone { Error::nothing_in(dir) } else { Error::Exists { dir: dir.to_path_buf() } });
        }
        for leftover in [segments::folder(dir), SledStore::path(dir)] {
            match std::fs::remove_dir_all(&leftover) {
                Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(Error::io("remove", &leftover)(e)),
                _ => {}
            }
        }
        let journal = Journal::create(dir, journal_id(&started.run_id), options.segment_bytes, options.faults.clone())?;
        let log = Log::start(dir, lock, journal, Index::default(), Vec::new(), &Options { branch: MAIN, ..options })?;
        log.append(started.into(), meta)?.wait()?;
        Ok(log)
    }

    /// Opens the log of a run for writing: takes the folder's lock, recovers what a crash left (see
    /// [`Log::notes`]), restores lost segments from the sled copy.
    ///
    /// # Errors
    /// [`Error::Locked`] naming the holder, [`Error::Empty`] when the folder never held a durable event,
    /// [`Error::Corrupt`] for damage below the watermark, [`Error::NoBranch`], I/O.
    pub fn open(dir: &Path, options: Options) -> Result<Log> {
        if !is_run(dir) {
            return Err(Error::Empty { dir: dir.to_path_buf() });
        }
        let lock = FolderLock::take(dir)?;
        let mut notes = Vec::new();
        repair::restore_lost_segments(dir, &mut notes)?;
        let (journal, index, recovered) = Journal::open(dir, options.segment_bytes, options.faults.clone())?;
        notes.extend(recovered);
        if !index.branches().is_live(options.branch) || options.branch == LEDGER {
            return Err(Error::NoBranch { branch: options.branch.to_string() });
        }
        Log::start(dir, lock, journal, index, notes, &options)
    }

    fn start(
        dir: &Path,
        lock: FolderLock,
        journal: Journal,
        index: Index,
        notes: Vec<String>,
        options: &Options,
    ) -> Result<Log> {
        let tail = Arc::new(Tail::new(index.events(), options.ring_events.max(1), options.ring_bytes));
        let reader = Reader::over(dir, Segments::new(dir), index);
        let writer = Writer::start(journal, reader.clone(), tail.clone(), options)?;
        let filler =
            if options.sled { Some(Filler::start(reader.clone(), tail.clone(), options.compress)?) } else { None };
        let branch = options.branch;
        Ok(Log { reader, tail, writer, filler, branch, notes, forking: Mutex::new(()), _lock: lock })
    }

    /// What was found and done when the log was opened (torn tails moved away, and so on).
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// A handle for reading what is durable.
    pub fn reader(&self) -> &Reader {
        &self.reader
    }

    /// How the sled copy is doing; `None` when it is switched off.
    pub fn sled_status(&self) -> Option<SledStatus> {
        self.filler.as_ref().map(Filler::status)
    }

    /// Queues an event for any branch.
    ///
    /// # Errors
    /// [`Error::NoBranch`]; [`Error::BranchFact`] for what only [`Log::create_branch`], [`Log::undo`] and
    /// [`Log::delete_branch`] may write to the ledger; as [`EventStore::append`].
    pub fn append_to(&self, branch: BranchId, event: Event, meta: Meta) -> Result<Ticket> {
        if branch == LEDGER
            && matches!(event, Event::BranchCreated(_) | Event::BranchUndone(_) | Event::BranchDeleted(_))
        {
            return Err(Error::BranchFact);
        }
        self.reader.head(branch)?;
        self.writer.append(branch, event, meta)
    }

    /// Writes a fact about branches that was seen to fit; the caller sees to it that there is one at a time.
    fn branch_fact(&self, fact: Event, meta: Meta) -> Result<()> {
        self.writer.append(LEDGER, fact, meta)?.wait().map(drop)
    }

    /// Creates a branch that shares events 1..=`at` of its parent's history; O(1). Durable on return. `at` may be an
    /// event that was undone: the fork goes on as if it had not been.
    ///
    /// # Errors
    /// [`Error::BranchName`] for a name that is empty, a number, `main`, or taken; [`Error::NoBranch`],
    /// [`Error::NoEvent`] when the parent has no durable event `at`; as [`Ticket::wait`].
    pub fn create_branch(&self, name: &str, parent: BranchId, at: u64, settings: &str, meta: Meta) -> Result<BranchId> {
        let _one_at_a_time = self.forking.lock().unwrap_or_else(PoisonError::into_inner);
        let refuse = |why| Err(Error::BranchName { name: name.to_string(), why });
        if name.is_empty() || name == "main" || name == "ledger" {
            return refuse("is reserved");
        }
        if name.chars().all(|c| c.is_ascii_digit()) || name.chars().any(char::is_control) {
            return refuse("must not be a number or hold control characters");
        }
        if self.reader.branches().values().any(|b| b.name == name) {
            return refuse("exists already");
        }
        self.branch_of_training(parent)?;
        let head = self.reader.last(parent)?;
        if at == 0 || at > head {
            return Err(Error::NoEvent { branch: parent, seq: at, head });
        }
        let branch = self.reader.with_branches(|b| b.forks().keys().next_back().map_or(1, |last| last + 1));
        let created = BranchCreated { name: name.to_string(), branch, parent, at, settings: settings.to_string() };
        self.branch_fact(created.into(), meta)?;
        Ok(branch)
    }

    /// Takes a branch to what it was as of event `to`: it goes on from there, and what came after is hidden from then
    /// on. Appends one event and removes nothing: forks keep what they saw, and an undo to a hidden event brings that
    /// history back. Durable on return. Nothing else may append to the branch meanwhile.
    ///
    /// # Errors
    /// [`Error::NoBranch`]; [`Error::NoEvent`] when the branch never had an event `to`; as [`Ticket::wait`].
    pub fn undo(&self, branch: BranchId, to: u64, reason: &str, meta: Meta) -> Result<()> {
        let _one_at_a_time = self.forking.lock().unwrap_or_else(PoisonError::into_inner);
        self.branch_of_training(branch)?;
        self.writer.barrier(branch)?;
        let (at, head) = (self.reader.last(branch)?, self.reader.head(branch)?);
        if to == 0 || to > at {
            return Err(Error::NoEvent { branch, seq: to, head: at });
        }
        if to == head {
            return Ok(());
        }
        self.branch_fact(BranchUndone { branch, to, at, reason: reason.to_string() }.into(), meta)
    }

    /// Hides a branch. Its events stay for the branches forked from it, its number is not used again, its name is free.
    ///
    /// # Errors
    /// [`Error::NoBranch`]; [`Error::BranchName`] for main and for the branch this log writes to; as [`Ticket::wait`].
    pub fn delete_branch(&self, branch: BranchId, reason: &str, meta: Meta) -> Result<()> {
        let _one_at_a_time = self.forking.lock().unwrap_or_else(PoisonError::into_inner);
        self.branch_of_training(branch)?;
        if branch == MAIN || branch == self.branch {
            let why = if branch == MAIN { "cannot be deleted" } else { "is being written to" };
            let name = self.reader.branches().get(&branch).map_or_else(|| "main".into(), |b| b.name.clone());
            return Err(Error::BranchName { name, why });
        }
        self.branch_fact(BranchDeleted { branch, reason: reason.to_string() }.into(), meta)
    }

    /// Compresses all closed segments; returns how many, and their bytes before and after.
    ///
    /// # Errors
    /// Damage in a segment, I/O; what was compressed stays so.
    pub fn pack(&self) -> Result<(u64, u64, u64)> {
        let mut done = (0, 0, 0);
        while let Some((before, after)) = self.reader.pack_next()? {
            done = (done.0 + 1, done.1 + before, done.2 + after);
        }
        Ok(done)
    }

    /// Refuses what is no branch, or the ledger.
    fn branch_of_training(&self, branch: BranchId) -> Result<()> {
        match branch == LEDGER || self.reader.head(branch).is_err() {
            true => Err(Error::NoBranch { branch: branch.to_string() }),
            false => Ok(()),
        }
    }

    /// Events from an ordinal of the journal on, then those that become durable.
    pub fn published_from(&self, ordinal: u64) -> Subscription {
        Subscription::new(self.tail.clone(), Arc::new(self.reader.clone()), ordinal)
    }

    /// Commits what is queued, lets the sled copy catch up, ends the threads.
    fn stop(&mut self) {
        self.writer.stop();
        if let Some(filler) = &mut self.filler {
            filler.stop();
        }
    }
}

impl Drop for Log {
    fn drop(&mut self) {
        self.stop();
    }
}

impl EventStore for Log {
    fn append(&self, event: Event, meta: Meta) -> Result<Ticket> {
        self.writer.append(self.branch, event, meta)
    }

    fn barrier(&self) -> Result<u64> {
        self.writer.barrier(self.branch)
    }

    fn branch(&self) -> BranchId {
        self.branch
    }

    fn head(&self) -> u64 {
        self.reader.head(self.branch).unwrap_or(0)
    }

    fn read(&self, branch: BranchId, from: u64) -> Result<EventIter> {
        Ok(Box::new(self.reader.read(branch, from)?))
    }

    fn published(&self) -> Subscription {
        self.published_from(self.tail.next())
    }
}

/// Whether any event was ever durable in a folder, as far as its files tell.
pub(crate) fn holds_events(dir: &Path) -> Result<bool> {
    if head::read(dir)?.is_some_and(|mark| mark.next_record > 1) {
        return Ok(true);
    }
    let files = Segments::new(dir);
    let segments = files.list()?;
    let mut index = Index::default();
    // Anything that stands where the first record belongs was never acknowledged, unless it is whole.
    index.scan(&files, None)?;
    if index.events() > 0 || segments.len() > 1 {
        return Ok(true);
    }
    let path = SledStore::path(dir);
    Ok(segments.is_empty() && path.is_dir() && SledStore::open(&path)?.last(MAIN)?.is_some())
}
