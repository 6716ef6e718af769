//! The writer thread: stamps, frames, group-commits, publishes.
//!
//! One thread takes events from a bounded queue. A group ends at `group_events`, `group_bytes`, after
//! `group_wait_us`, or at a barrier; it becomes one record, is flushed, and only then published and
//! acknowledged. After the first failure everything waiting and everything later is refused.

use super::error::{Error, Result};
use super::journal::Journal;
use super::options::Options;
use super::record::{RECORD_HEADER, RecordHeader};
use super::tail::Tail;
use super::ticket::{Slot, Ticket, Waiter, slot};
use super::{BranchId, LEDGER, Reader, Stamped, blob};
use crate::event::codec::{self, Encoded};
use crate::event::digest::Digest;
use crate::event::{Event, Meta, frame};
use crossbeam::channel::{Receiver, Sender, TryRecvError, after, bounded, never, select};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

enum Command {
    Append(Box<Pending>),
    /// Everything before it is durable when it is answered, with the branch's head.
    Barrier(BranchId, Slot<u64>),
}

struct Pending {
    branch: BranchId,
    event: Event,
    meta: Meta,
    encoded: Encoded,
    flags: u16,
    slot: Slot<Arc<Stamped>>,
}

/// Sending side of the writer thread.
#[derive(Debug)]
pub(crate) struct Writer {
    commands: Option<Sender<Command>>,
    thread: Option<JoinHandle<()>>,
    blob_bytes: usize,
    blob_copies: u32,
}

impl std::fmt::Debug for Command {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Command")
    }
}

impl Writer {
    pub(crate) fn start(journal: Journal, reader: Reader, tail: Arc<Tail>, options: &Options) -> Result<Writer> {
        let (commands, queue) = bounded(options.queue_events.max(1));
        let blob_bytes = options.blob_bytes.min(1 << 20);
        let mut state = Thread {
            journal,
            reader,
            tail,
            heads: BTreeMap::new(),
            stretch: Stretch::default(),
            group_events: options.group_events.max(1),
            group_bytes: options.group_bytes.min(32 << 20),
            group_wait: Duration::from_micros(options.group_wait_us),
            failed: None,
        };
        let thread = std::thread::Builder::new()
            .name("log-writer".into())
            .spawn(move || state.run(&queue))
            .map_err(Error::io("start the writer thread of", Path::new("the log")))?;
        Ok(Writer { commands: Some(commands), thread: Some(thread), blob_bytes, blob_copies: options.blob_copies })
    }

    /// Serialises in the caller's thread and queues; blocks while the queue is full, and for the flush of a
    /// payload that needs a blob.
    pub(crate) fn append(&self, dir: &Path, branch: BranchId, event: Event, meta: Meta) -> Result<Ticket> {
        let mut encoded = codec::encode(&event, &meta)?;
        let mut flags = 0;
        if encoded.facts.len() > self.blob_bytes {
            let digest = blob::write(dir, &encoded.facts, self.blob_copies)?;
            encoded.facts = frame::blob_ref(digest, encoded.facts.len() as u64).to_vec();
            flags = frame::FLAG_BLOB;
        }
        let (slot, waiter) = slot();
        let pending = Pending { branch, event, meta, encoded, flags, slot };
        self.send(Command::Append(Box::new(pending)))?;
        Ok(Ticket(waiter))
    }

    pub(crate) fn barrier(&self, branch: BranchId) -> Result<u64> {
        let (slot, waiter): (_, Waiter<u64>) = slot();
        self.send(Command::Barrier(branch, slot))?;
        waiter.wait()
    }

    fn send(&self, command: Command) -> Result<()> {
        self.commands.as_ref().ok_or(Error::Closed)?.send(command).map_err(|_| Error::Closed)
    }

    /// Commits what is queued and ends the thread.
    pub(crate) fn stop(&mut self) {
        self.commands = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

struct Thread {
    journal: Journal,
    reader: Reader,
    tail: Arc<Tail>,
    /// Last seq and chain digest of each branch written to.
    heads: BTreeMap<BranchId, (u64, Digest)>,
    stretch: Stretch,
    group_events: usize,
    group_bytes: usize,
    group_wait: Duration,
    failed: Option<Error>,
}

/// The record being made: events of one branch, framed as they arrive, so that little is left to do when the group is
/// full.
#[derive(Default)]
struct Stretch {
    branch: BranchId,
    /// Chain digest before its first event.
    prev: Digest,
    /// Seq and chain digest of its last event.
    seq: u64,
    digest: Digest,
    /// Room for the record's header, then the frames. Used again.
    record: Vec<u8>,
    /// What waits, with its stamps.
    pending: Vec<(Box<Pending>, Stamp)>,
}

/// Seq, chain digest, and bytes.
type Stamp = (u64, Digest, usize);

/// Closes the publication however the thread ends, so that nobody waits for a dead writer.
struct CloseOnExit(Arc<Tail>);

impl Drop for CloseOnExit {
    fn drop(&mut self) {
        self.0.close(Error::Closed);
    }
}

/// Asks for the head of a branch once everything queued before is durable.
type Barrier = (BranchId, Slot<u64>);

impl Thread {
    fn run(&mut self, queue: &Receiver<Command>) {
        let _close = CloseOnExit(self.tail.clone());
        while let Ok(first) = queue.recv() {
            let barrier = self.gather(first, queue);
            self.commit();
            if let Some((branch, slot)) = barrier {
                let head = match &self.failed {
                    Some(error) => Err(error.clone()),
                    None => self.reader.head(branch),
                };
                slot.answer(head);
            }
        }
    }

    /// Takes in the appends of one commit; the barrier that ended it.
    fn gather(&mut self, first: Command, queue: &Receiver<Command>) -> Option<Barrier> {
        let (mut events, mut bytes) = (0, 0);
        let deadline = if self.group_wait.is_zero() { never() } else { after(self.group_wait) };
        let mut next = Some(first);
        while let Some(command) = next.take() {
            match command {
                Command::Append(pending) => {
                    bytes += frame::HEADER_LEN + pending.encoded.facts.len() + pending.encoded.meta.len();
                    events += 1;
                    self.take(pending);
                }
                Command::Barrier(branch, slot) => return Some((branch, slot)),
            }
            if events >= self.group_events || bytes >= self.group_bytes {
                break;
            }
            next = match queue.try_recv() {
                Ok(command) => Some(command),
                Err(TryRecvError::Disconnected) => None,
                Err(TryRecvError::Empty) if self.group_wait.is_zero() => None,
                Err(TryRecvError::Empty) => select! {
                    recv(queue) -> command => command.ok(),
                    recv(deadline) -> _ => None,
                },
            };
        }
        None
    }

    /// Frames an event behind those that wait. One record per stretch of the same branch: what waits for another branch
    /// is committed first, so at most one record is ever in flight.
    fn take(&mut self, pending: Box<Pending>) {
        if !self.stretch.pending.is_empty() && self.stretch.branch != pending.branch {
            self.commit();
        }
        if let Some(error) = &self.failed {
            return pending.slot.answer(Err(error.clone()));
        }
        match self.frame(&pending) {
            Ok(stamp) => self.stretch.pending.push((pending, stamp)),
            Err(error) => {
                self.fail(&error);
                pending.slot.answer(Err(Error::Failed { reason: error.to_string() }));
            }
        }
    }

    /// Puts the event's frame behind those that wait.
    fn frame(&mut self, pending: &Pending) -> Result<Stamp> {
        if self.stretch.pending.is_empty() {
            let branch = pending.branch;
            let (seq, digest) = match self.heads.get(&branch) {
                Some(head) => *head,
                None => {
                    let seq = self.reader.last(branch)?;
                    (seq, self.reader.digest(branch, seq)?)
                }
            };
            let mut record = std::mem::take(&mut self.stretch.record);
            record.clear();
            record.resize(RECORD_HEADER, 0);
            self.stretch = Stretch {
                branch,
                prev: digest,
                seq,
                digest,
                record,
                pending: std::mem::take(&mut self.stretch.pending),
            };
        }
        let Stretch { branch, seq, digest, record, .. } = &mut self.stretch;
        let Encoded { kind, version, facts, meta } = &pending.encoded;
        let header = frame::Header {
            kind: *kind as u16,
            version: *version,
            flags: pending.flags,
            branch: *branch,
            seq: *seq + 1,
            prev: *digest,
            meta_version: codec::META_VERSION,
        };
        let start = record.len();
        *digest = frame::write(record, &header, facts, meta)?;
        *seq += 1;
        Ok((*seq, *digest, facts.len().max(record.len() - start)))
    }

    /// Refuses everything that waits and everything later.
    fn fail(&mut self, error: &Error) {
        let error = Error::Failed { reason: error.to_string() };
        self.failed = Some(error.clone());
        self.tail.close(error.clone());
        for (pending, _) in self.stretch.pending.drain(..) {
            pending.slot.answer(Err(error.clone()));
        }
    }

    /// Makes what waits durable, then known.
    fn commit(&mut self) {
        if self.stretch.pending.is_empty() {
            return;
        }
        if let Err(error) = self.write() {
            return self.fail(&error);
        }
        let mut answers = Vec::with_capacity(self.stretch.pending.len());
        let mut published = Vec::with_capacity(self.stretch.pending.len());
        for (pending, (seq, digest, bytes)) in self.stretch.pending.drain(..) {
            let Pending { branch, event, meta, slot, .. } = *pending;
            let stamped = Arc::new(Stamped { seq, branch, event, meta, digest });
            published.push((stamped.clone(), bytes));
            answers.push((slot, stamped));
        }
        self.tail.publish(published);
        for (slot, stamped) in answers {
            slot.answer(Ok(stamped));
        }
    }

    fn write(&mut self) -> Result<()> {
        let Stretch { branch, prev, seq, digest, record, pending } = &mut self.stretch;
        let count = pending.len() as u32;
        let header = RecordHeader {
            journal: [0; 16],
            epoch: 0,
            number: 0,
            branch: *branch,
            count,
            first_seq: *seq + 1 - u64::from(count),
            body_len: 0,
            body_crc: 0,
            prev: *prev,
        };
        let (segment, offset, header) = self.journal.append_record(header, record)?;
        let fits = self.reader.with_index(|index| {
            index.journal.get_or_insert(header.journal);
            index.push(segment, offset, header)?;
            for (pending, _) in pending.iter().filter(|(p, _)| p.branch == LEDGER) {
                index.apply(&pending.event)?;
            }
            Ok::<(), String>(())
        });
        if let Some(Err(what)) = fits {
            return Err(Error::Failed { reason: what });
        }
        self.heads.insert(*branch, (*seq, *digest));
        Ok(())
    }
}
