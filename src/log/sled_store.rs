//! The sled copy of the log: the only file that knows sled.
//!
//! The same frames as in the journal, in *groups* of consecutive events of a branch (sled's cost is per value), each
//! cut into values of at most 8 KiB (larger ones end in side files that sled never flushes). Key = branch (u32) | seq of
//! the group's first event (u64) | part (u16), big-endian, so that a range is a stretch of a branch. A group is:
//!
//! ```text
//!  offset size field (integers little-endian)
//!       0    1  0 = frames as they are, 1 = one zstd frame of them
//!       1    2  number of parts
//!       3    4  length of the frames, bytes
//!       7       the frames
//! ```
//!
//! Groups may overlap where filling was interrupted; the frames in them are the same then. Filled behind the journal's
//! acknowledgement; never what an acknowledgement rests on. sled panics on some damage, so every call runs
//! under `catch_unwind`.

use super::BranchId;
use super::error::{Error, Result};
use super::record::{JournalId, u32_le};
use crate::event::frame;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Longest sled value, bytes.
pub const CHUNK_BYTES: usize = 8 << 10;
/// A group is closed once its frames reach this length, bytes.
const GROUP_BYTES: usize = 32 << 10;
/// Longest frames of a group that are believed, bytes: one event and its neighbours.
const MAX_GROUP_BYTES: usize = 2 * frame::MAX_SECTION_LEN + GROUP_BYTES + frame::HEADER_LEN;
const GROUP_HEADER: usize = 7;
/// How many groups back an event is looked for.
const OVERLAPPING: usize = 3;
const LEVEL: i32 = 1;
/// Layout of keys and values; a copy of another one is rebuilt.
const FORMAT: u64 = 2;
const CACHE_BYTES: u64 = 16 << 20;
/// A store that was just closed may still hold its lock for some milliseconds.
const OPEN_TRIES: u32 = 100;
const OPEN_WAIT: Duration = Duration::from_millis(20);

/// An open sled copy.
pub struct SledStore {
    folder: PathBuf,
    db: sled::Db,
    events: sled::Tree,
    meta: sled::Tree,
}

/// Frames on their way into a store, gathered to groups.
pub struct Filling<'a> {
    store: &'a SledStore,
    compress: bool,
    branch: BranchId,
    first: u64,
    next: u64,
    frames: Vec<u8>,
}

impl<'a> Filling<'a> {
    /// Nothing yet.
    pub fn new(store: &'a SledStore, compress: bool) -> Filling<'a> {
        Filling { store, compress, branch: 0, first: 0, next: 0, frames: Vec::new() }
    }

    /// Takes a frame.
    ///
    /// # Errors
    /// [`Error::Sled`].
    pub fn put(&mut self, branch: BranchId, seq: u64, bytes: &[u8]) -> Result<()> {
        let fits = self.branch == branch && self.next == seq && self.frames.len() + bytes.len() <= GROUP_BYTES;
        if !fits {
            self.flush()?;
            (self.branch, self.first) = (branch, seq);
        }
        self.frames.extend_from_slice(bytes);
        self.next = seq + 1;
        Ok(())
    }

    /// Stores what was taken.
    ///
    /// # Errors
    /// [`Error::Sled`].
    pub fn flush(&mut self) -> Result<()> {
        if !self.frames.is_empty() {
            self.store.put(self.branch, self.first, &self.frames, self.compress)?;
            self.frames.clear();
        }
        Ok(())
    }
}

impl std::fmt::Debug for SledStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "SledStore({})", self.folder.display())
    }
}

fn key(branch: BranchId, seq: u64, part: u16) -> [u8; 14] {
    let mut key = [0; 14];
    key[..4].copy_from_slice(&branch.to_be_bytes());
    key[4..12].copy_from_slice(&seq.to_be_bytes());
    key[12..].copy_from_slice(&part.to_be_bytes());
    key
}

fn parse(key: &[u8]) -> Option<(BranchId, u64, u16)> {
    let key: &[u8; 14] = key.try_into().ok()?;
    let (branch, rest) = key.split_at(4);
    let (seq, part) = rest.split_at(8);
    Some((
        u32::from_be_bytes(branch.try_into().ok()?),
        u64::from_be_bytes(seq.try_into().ok()?),
        u16::from_be_bytes(part.try_into().ok()?),
    ))
}

/// Runs sled code; a panic or error of it is a typed error.
fn guarded<T>(folder: &Path, what: &str, f: impl FnOnce() -> sled::Result<T>) -> Result<T> {
    let fail = |why: String| Error::Sled { path: folder.to_path_buf(), what: format!("{what}: {why}") };
    match catch_unwind(AssertUnwindSafe(f)) {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(error)) => Err(fail(error.to_string())),
        Err(panic) => {
            let text = panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied());
            Err(fail(format!("sled panicked: {}", text.unwrap_or("no message"))))
        }
    }
}

impl SledStore {
    /// Folder of the sled copy in a run folder.
    pub fn path(dir: &Path) -> PathBuf {
        dir.join("events.sled")
    }

    /// The folder of this store.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Opens or creates a store.
    ///
    /// # Errors
    /// [`Error::Sled`] when sled refuses, panics, or another process holds it.
    pub fn open(folder: &Path) -> Result<SledStore> {
        SledStore::open_within(folder, OPEN_TRIES)
    }

    /// As [`SledStore::open`], waiting for another holder at most `max_tries` times 20 ms.
    pub fn open_within(folder: &Path, max_tries: u32) -> Result<SledStore> {
        let config = sled::Config::default().path(folder).cache_capacity(CACHE_BYTES);
        let mut tries = 0;
        let db = loop {
            tries += 1;
            match guarded(folder, "open", || config.open()) {
                Ok(db) => break db,
                Err(Error::Sled { what, .. }) if tries < max_tries && what.contains("WouldBlock") => {
                    std::thread::sleep(OPEN_WAIT);
                }
                Err(e) => return Err(e),
            }
        };
        let events = guarded(folder, "open events", || db.open_tree("events"))?;
        let meta = guarded(folder, "open meta", || db.open_tree("meta"))?;
        Ok(SledStore { folder: folder.to_path_buf(), db, events, meta })
    }

    /// Stores a group of frames, the first of which has seq `first`.
    fn put(&self, branch: BranchId, first: u64, frames: &[u8], compress: bool) -> Result<()> {
        let packed = compress.then(|| zstd::bulk::compress(frames, LEVEL).ok()).flatten();
        let packed = packed.filter(|p| p.len() < frames.len());
        let body = packed.as_deref().unwrap_or(frames);
        let parts = (GROUP_HEADER + body.len()).div_ceil(CHUNK_BYTES);
        let mut group = Vec::with_capacity(GROUP_HEADER + body.len());
        group.push(u8::from(packed.is_some()));
        group.extend_from_slice(&(parts as u16).to_le_bytes());
        group.extend_from_slice(&(frames.len() as u32).to_le_bytes());
        group.extend_from_slice(body);
        guarded(&self.folder, "insert", || {
            for (part, chunk) in group.chunks(CHUNK_BYTES).enumerate() {
                self.events.insert(key(branch, first, part as u16), chunk)?;
            }
            Ok(())
        })
    }

    /// The frames of the group that begins at a key; `None` when they are not all there.
    fn group(&self, branch: BranchId, first: u64) -> Result<Option<Vec<u8>>> {
        let part = |n: u16| guarded(&self.folder, "read", || self.events.get(key(branch, first, n)));
        let Some(head) = part(0)? else { return Ok(None) };
        if head.len() < GROUP_HEADER {
            return Ok(None);
        }
        let (packed, parts) = (head[0] == 1, u16::from_le_bytes([head[1], head[2]]));
        let len = u32_le(&head, 3) as usize;
        if head[0] > 1 || len > MAX_GROUP_BYTES {
            return Ok(None);
        }
        let mut body = head[GROUP_HEADER..].to_vec();
        for n in 1..parts {
            let Some(chunk) = part(n)? else { return Ok(None) };
            body.extend_from_slice(&chunk);
        }
        if packed {
            let Ok(frames) = zstd::bulk::decompress(&body, len) else { return Ok(None) };
            body = frames;
        }
        Ok(Some(body).filter(|body| body.len() == len))
    }

    /// First seq of the last group that begins at or before `seq`.
    fn group_of(&self, branch: BranchId, seq: u64) -> Result<Option<u64>> {
        guarded(&self.folder, "read", || {
            let before = self.events.range(key(branch, 0, 0)..=key(branch, seq, u16::MAX)).next_back();
            Ok(before.transpose()?.and_then(|(k, _)| parse(&k)).map(|(_, first, _)| first))
        })
    }

    /// The frames of a group that holds event `seq`, from that event on; `None` when no whole group does.
    fn frames_from(&self, branch: BranchId, seq: u64) -> Result<Option<Vec<u8>>> {
        let mut group = self.group_of(branch, seq)?;
        // Behind a group that an interrupted filling left, an earlier one may reach further.
        for _ in 0..OVERLAPPING {
            let Some(first) = group else { return Ok(None) };
            if let Some(mut frames) = self.group(branch, first)? {
                let mut skip = 0;
                while let Ok(frame) = frame::read(&frames[skip..]) {
                    if frame.header.seq == seq {
                        frames.drain(..skip);
                        return Ok(Some(frames));
                    }
                    skip += frame.bytes.len();
                }
            }
            group = match first.checked_sub(1) {
                Some(before) => self.group_of(branch, before)?,
                None => None,
            };
        }
        Ok(None)
    }

    /// Frames of one branch itself, `first..=last`, until about `max_bytes` are gathered (at least one frame
    /// if there is one). Stops before a frame that is damaged or not there.
    ///
    /// # Errors
    /// [`Error::Sled`].
    pub fn range(&self, branch: BranchId, first: u64, last: u64, max_bytes: usize) -> Result<Vec<(u64, Vec<u8>)>> {
        let mut out: Vec<(u64, Vec<u8>)> = Vec::new();
        let (mut total, mut next) = (0, first);
        while next <= last && total < max_bytes {
            let Some(frames) = self.frames_from(branch, next)? else { break };
            let mut rest = frames.as_slice();
            while next <= last
                && let Ok(frame) = frame::read(rest)
                && frame.header.seq == next
            {
                rest = &rest[frame.bytes.len()..];
                total += frame.bytes.len();
                out.push((next, frame.bytes.to_vec()));
                next += 1;
            }
        }
        Ok(out)
    }

    /// The frames of the record that holds an event, up to and including its own; empty when that is not there.
    ///
    /// # Errors
    /// [`Error::Sled`].
    pub fn record_up_to(&self, branch: BranchId, seq: u64) -> Result<Vec<u8>> {
        let prev_of = |bytes: &[u8]| frame::read(bytes).ok().map(|f| f.header.prev);
        let Some(own) = self.get(branch, seq)? else { return Ok(Vec::new()) };
        let prev = prev_of(&own);
        let mut frames = vec![own];
        while let Some(before) = self.get(branch, seq.saturating_sub(frames.len() as u64))?
            && prev_of(&before) == prev
        {
            frames.push(before);
        }
        Ok(frames.into_iter().rev().flatten().collect())
    }

    /// One frame, if all of it is there and its checksum holds.
    ///
    /// # Errors
    /// [`Error::Sled`].
    pub fn get(&self, branch: BranchId, seq: u64) -> Result<Option<Vec<u8>>> {
        Ok(self.range(branch, seq, seq, usize::MAX)?.pop().filter(|(at, _)| *at == seq).map(|(_, bytes)| bytes))
    }

    /// Last seq stored for a branch itself.
    ///
    /// # Errors
    /// [`Error::Sled`].
    pub fn last(&self, branch: BranchId) -> Result<Option<u64>> {
        let Some(group) = self.group_of(branch, u64::MAX)? else { return Ok(None) };
        // A group that is damaged says at least that its first event was there.
        let frames = self.group(branch, group)?.unwrap_or_default();
        let (mut rest, mut last) = (frames.as_slice(), group);
        while let Ok(frame) = frame::read(rest) {
            last = last.max(frame.header.seq);
            rest = &rest[frame.bytes.len()..];
        }
        Ok(Some(last))
    }

    /// Branches that have events of their own, ascending.
    ///
    /// # Errors
    /// [`Error::Sled`].
    pub fn branch_ids(&self) -> Result<Vec<BranchId>> {
        let mut out = Vec::new();
        let mut from = Some(0);
        while let Some(start) = from {
            let first = guarded(&self.folder, "read branches", || {
                Ok(self.events.range(key(start, 0, 0)..).next().transpose()?.and_then(|(k, _)| parse(&k)))
            })?;
            let Some((branch, ..)) = first else { break };
            out.push(branch);
            from = branch.checked_add(1);
        }
        Ok(out)
    }

    /// Which run it belongs to and how many events of the journal it holds; `None` for a new store.
    ///
    /// # Errors
    /// [`Error::Sled`].
    pub fn position(&self) -> Result<Option<(JournalId, u64)>> {
        let value = guarded(&self.folder, "read position", || self.meta.get("position"))?;
        Ok(value.and_then(|v| {
            let (id, ordinal) = v.split_at_checked(16)?;
            Some((id.try_into().ok()?, u64::from_le_bytes(ordinal.try_into().ok()?)))
        }))
    }

    /// Whether keys and values have the layout of this program; a new store has.
    ///
    /// # Errors
    /// [`Error::Sled`].
    pub fn is_current(&self) -> Result<bool> {
        let value = guarded(&self.folder, "read format", || self.meta.get("format"))?;
        match value {
            Some(format) => Ok(format == FORMAT.to_le_bytes()),
            None => guarded(&self.folder, "read", || Ok(self.events.is_empty())),
        }
    }

    /// Records the position, after the events before it were stored.
    ///
    /// # Errors
    /// [`Error::Sled`].
    pub fn set_position(&self, journal: &JournalId, ordinal: u64) -> Result<()> {
        let mut value = journal.to_vec();
        value.extend_from_slice(&ordinal.to_le_bytes());
        guarded(&self.folder, "write position", || {
            self.meta.insert("format", &FORMAT.to_le_bytes())?;
            self.meta.insert("position", value)
        })
        .map(|_| ())
    }

    /// Writes sled's buffers and flushes its file (sled's own flush is no fsync).
    ///
    /// # Errors
    /// [`Error::Sled`], I/O.
    pub fn flush(&self) -> Result<()> {
        guarded(&self.folder, "flush", || self.db.flush())?;
        let file = self.folder.join("db");
        match std::fs::File::open(&file).and_then(|f| f.sync_data()) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(Error::io("flush", &file)(e)),
            _ => Ok(()),
        }
    }
}
