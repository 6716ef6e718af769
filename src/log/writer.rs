//! Appending: events are serialised, stamped and framed in the threads that append them, and gathered in groups.
//!
//! A group is closed at `group_events`, `group_bytes`, after `group_wait_us`, at a barrier, or when the queue is full. It is
//! one record, and goes to the [committer](super::commit), which flushes and acknowledges it. The groups after it are
//! framed meanwhile: while a disk flushes, nothing else waits, and what was closed by then shares the next flush.

use super::commit::Committer;
use super::error::{Error, Result};
use super::journal::Journal;
use super::options::Options;
use super::record::RECORD_HEADER;
use super::tail::Tail;
use super::ticket::{Promise, Ticket};
use super::{BranchId, LEDGER, Reader, Stamped, blob};
use crate::event::codec::{self, Encoded};
use crate::event::digest::Digest;
use crate::event::{Event, Meta, frame};
use std::collections::{BTreeMap, VecDeque};
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Frames are hashed and summed in pieces of at least so many bytes, while they are in the cache: BLAKE3 takes 16 KiB at a
/// time with AVX-512.
const SUM_BYTES: usize = 32 << 10;
/// No group joins a flush of so many bytes: the first to wait for it are not to wait for much more than their own.
const FLUSH_BYTES: usize = 2 << 20;
/// Records whose memory is kept.
const SPARE: usize = 4;

/// A record to be: events of one branch, framed.
#[derive(Debug)]
pub(crate) struct Group {
    pub branch: BranchId,
    /// Chain digest before its first event.
    pub prev: Digest,
    /// Room for the record's header, then the frames.
    pub record: Vec<u8>,
    /// With their length, wherever their facts are.
    pub events: Vec<(Arc<Stamped>, usize)>,
    pub promise: Promise,
    /// crc32c of the frames, once it is closed.
    pub crc: u32,
    /// Of the frames, as far as they are summed.
    hasher: blake3::Hasher,
    summed: usize,
    /// Length of its events.
    bytes: usize,
    /// When it must be closed at the latest.
    deadline: Instant,
    /// Nothing is added any more.
    closed: bool,
}

impl Group {
    /// Takes what was framed since the last time into hash and checksum.
    fn sum(&mut self) {
        let more = &self.record[self.summed..];
        self.hasher.update(more);
        self.crc = crc32c::crc32c_append(self.crc, more);
        self.summed = self.record.len();
    }
}

/// What waits for the committer.
#[derive(Debug, Default)]
pub(crate) struct Queue {
    groups: VecDeque<Group>,
    /// Events in `groups`.
    events: usize,
    /// Last seq and chain digest of each branch written to, as of the groups that were closed.
    heads: BTreeMap<BranchId, (u64, Digest)>,
    /// A ticket of the last group that is being committed.
    taken: Option<Ticket>,
    /// Records' memory that may serve again.
    spare: Vec<Vec<u8>>,
    /// Events to forget: best in the threads that made them, whose allocator takes them back for less.
    gone: Vec<Arc<Stamped>>,
    /// No more appends will come.
    closed: bool,
    /// Why everything is refused.
    failed: Option<Error>,
}

impl Queue {
    /// Closes the last group, the only one that can be open.
    fn close(&mut self) {
        if let Some(group) = self.groups.back_mut().filter(|g| !g.closed) {
            group.closed = true;
            group.sum();
            let last = group.events.last().map_or(0, |(e, _)| e.seq);
            self.heads.insert(group.branch, (last, Digest(*group.hasher.finalize().as_bytes())));
        }
    }
}

/// What the committer gives back.
#[derive(Debug, Default)]
pub(crate) struct Done {
    /// The memory of records.
    pub records: Vec<Vec<u8>>,
    /// Events that fell out of the ring.
    pub gone: Vec<Arc<Stamped>>,
}

/// Between the threads that append and the committer.
#[derive(Debug)]
pub(crate) struct Shared {
    queue: Mutex<Queue>,
    /// The committer waits here for a group.
    filled: Condvar,
    /// Appenders wait here while the queue is full.
    room: Condvar,
    group_events: usize,
    group_bytes: usize,
    group_wait: Duration,
    queue_events: usize,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The groups that are closed, or the one that is due; `None` when the log was closed and nothing is left. What was taken
    /// before is done.
    pub(crate) fn next(&self, done: Done) -> Option<Vec<Group>> {
        let mut queue = self.lock();
        queue.taken = None;
        queue.gone.extend(done.gone);
        // What is larger was an exception.
        let usual = 2 * self.group_bytes + RECORD_HEADER;
        let room = SPARE.saturating_sub(queue.spare.len());
        queue.spare.extend(done.records.into_iter().filter(|r| r.capacity() <= usual).take(room));
        loop {
            let left = match queue.groups.front() {
                Some(group) if group.closed || queue.closed => Duration::ZERO,
                Some(group) => group.deadline.saturating_duration_since(Instant::now()),
                None if queue.closed => return None,
                None => Duration::MAX,
            };
            if left.is_zero() {
                if queue.groups.len() == 1 {
                    queue.close();
                }
                let (mut taken, mut bytes) = (Vec::new(), 0);
                while let Some(group) = queue.groups.pop_front_if(|g| g.closed && (bytes == 0 || bytes < FLUSH_BYTES)) {
                    queue.events -= group.events.len();
                    bytes += group.record.len();
                    taken.push(group);
                }
                queue.taken = taken.last().map(|group| group.promise.ticket(0));
                drop(queue);
                self.room.notify_all();
                return Some(taken);
            }
            queue = match left {
                Duration::MAX => self.filled.wait(queue).unwrap_or_else(PoisonError::into_inner),
                left => self.filled.wait_timeout(queue, left).unwrap_or_else(PoisonError::into_inner).0,
            };
        }
    }

    /// Refuses everything that waits and everything later.
    pub(crate) fn fail(&self, error: &Error) {
        let mut queue = self.lock();
        queue.failed.get_or_insert_with(|| error.clone());
        queue.events = 0;
        for group in std::mem::take(&mut queue.groups) {
            group.promise.answer(Err(error.clone()));
        }
        drop(queue);
        self.room.notify_all();
    }
}

/// The appending side.
#[derive(Debug)]
pub(crate) struct Writer {
    shared: Arc<Shared>,
    reader: Reader,
    thread: Option<JoinHandle<()>>,
    blob_bytes: usize,
    blob_copies: u32,
}

impl Writer {
    pub(crate) fn start(journal: Journal, reader: Reader, tail: Arc<Tail>, options: &Options) -> Result<Writer> {
        let shared = Arc::new(Shared {
            queue: Mutex::default(),
            filled: Condvar::new(),
            room: Condvar::new(),
            group_events: options.group_events.max(1),
            group_bytes: options.group_bytes.min(32 << 20),
            group_wait: Duration::from_micros(options.group_wait_us),
            queue_events: options.queue_events.max(1),
        });
        let mut committer = Committer::new(journal, reader.clone(), tail, shared.clone());
        let thread = std::thread::Builder::new()
            .name("log-commit".into())
            .spawn(move || committer.run())
            .map_err(Error::io("start the committing thread of", Path::new("the log")))?;
        let (blob_bytes, blob_copies) = (options.blob_bytes.min(1 << 20), options.blob_copies);
        Ok(Writer { shared, reader, thread: Some(thread), blob_bytes, blob_copies })
    }

    /// Serialises and frames an event; blocks while the queue is full, and for the flush of a payload that needs a blob.
    pub(crate) fn append(&self, branch: BranchId, event: Event, meta: Meta) -> Result<Ticket> {
        let mut encoded = codec::encode(&event, &meta)?;
        let (mut flags, facts_len) = (0, encoded.facts.len());
        // The journal is read without its payloads, and the ledger says how.
        if facts_len > self.blob_bytes && branch != LEDGER {
            let digest = blob::write(self.reader.dir(), &encoded.facts, self.blob_copies)?;
            encoded.facts = frame::blob_ref(digest, facts_len as u64).to_vec();
            flags = frame::FLAG_BLOB;
        }
        let shared = &*self.shared;
        let full = |q: &mut Queue| q.events >= shared.queue_events && !q.closed && q.failed.is_none();
        let mut queue = shared.room.wait_while(shared.lock(), full).unwrap_or_else(PoisonError::into_inner);
        if let Some(error) = &queue.failed {
            return Ok(Ticket::answered(Err(error.clone())));
        }
        if queue.closed {
            return Err(Error::Closed);
        }
        let (seq, prev) = self.group_of(&mut queue, branch)?;
        let Encoded { kind, version, facts, meta: observed } = &encoded;
        let header = frame::Header {
            kind: *kind as u16,
            version: *version,
            flags,
            branch,
            seq: seq + 1,
            prev,
            meta_version: codec::META_VERSION,
        };
        let Queue { groups, events, gone, .. } = &mut *queue;
        let group = groups.back_mut().expect("invariant: group_of left one");
        let first = group.events.is_empty();
        let gone = if first { std::mem::take(gone) } else { Vec::new() };
        if let Err(error) = frame::write(&mut group.record, &header, facts, observed) {
            if first {
                groups.pop_back();
            }
            return Err(error.into());
        }
        if group.record.len() - group.summed >= SUM_BYTES {
            group.sum();
        }
        let ticket = group.promise.ticket(group.events.len());
        let bytes = frame::HEADER_LEN + facts_len + observed.len();
        group.events.push((Arc::new(Stamped { seq: seq + 1, branch, event, meta }), bytes));
        group.bytes += bytes;
        *events += 1;
        let full = group.events.len() >= shared.group_events
            || group.bytes >= shared.group_bytes
            || *events >= shared.queue_events;
        if full {
            queue.close();
        }
        let wake = first || full;
        drop(queue);
        drop(gone);
        if wake {
            shared.filled.notify_one();
        }
        Ok(ticket)
    }

    /// Sees to it that the last group is open and of this branch; the last seq of the branch, and the chain digest before
    /// the group. A record holds events of one branch: a group of another one is closed.
    fn group_of(&self, queue: &mut Queue, branch: BranchId) -> Result<(u64, Digest)> {
        match queue.groups.back() {
            Some(group) if group.branch == branch && !group.closed => {
                let (last, _) = group.events.last().expect("invariant: a group is left with an event");
                return Ok((last.seq, group.prev));
            }
            _ => queue.close(),
        }
        let (seq, prev) = match queue.heads.get(&branch) {
            Some(head) => *head,
            None => {
                let seq = self.reader.last(branch)?;
                (seq, self.reader.digest(branch, seq)?)
            }
        };
        let mut record = queue.spare.pop().unwrap_or_default();
        record.clear();
        record.resize(RECORD_HEADER, 0);
        queue.groups.push_back(Group {
            branch,
            prev,
            record,
            events: Vec::with_capacity(self.shared.group_events.min(256)),
            crc: 0,
            hasher: blake3::Hasher::new(),
            summed: RECORD_HEADER,
            promise: Promise::default(),
            bytes: 0,
            deadline: Instant::now() + self.shared.group_wait,
            closed: false,
        });
        Ok((seq, prev))
    }

    /// Waits until everything appended so far is durable; the branch's head.
    pub(crate) fn barrier(&self, branch: BranchId) -> Result<u64> {
        let mut queue = self.shared.lock();
        if let Some(error) = &queue.failed {
            return Err(error.clone());
        }
        queue.close();
        let last = queue.groups.back().map(|g| g.promise.ticket(0)).or_else(|| queue.taken.clone());
        drop(queue);
        self.shared.filled.notify_one();
        if let Some(last) = last {
            last.wait()?;
        }
        self.reader.head(branch)
    }

    /// Commits what is queued and ends the thread.
    pub(crate) fn stop(&mut self) {
        self.shared.lock().closed = true;
        self.shared.filled.notify_one();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
