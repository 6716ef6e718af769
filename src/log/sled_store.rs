//! The sled copy of the log: the only file that knows sled.
//!
//! The same frames as in the journal, cut into chunks of at most 8 KiB (larger sled values end in side
//! files that are never flushed), key = branch (u32) | seq (u64) | part (u16), big-endian, so that a range is
//! a stretch of a branch. Filled behind the journal's acknowledgement; never what an acknowledgement
//! rests on. sled panics on some damage, so every call runs under `catch_unwind`.

use super::BranchId;
use super::error::{Error, Result};
use super::record::JournalId;
use crate::event::frame;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Longest sled value, bytes.
pub const CHUNK_BYTES: usize = 8 << 10;
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

    /// Stores one frame in chunks.
    ///
    /// # Errors
    /// [`Error::Sled`].
    pub fn put(&self, branch: BranchId, seq: u64, bytes: &[u8]) -> Result<()> {
        guarded(&self.folder, "insert", || {
            for (part, chunk) in bytes.chunks(CHUNK_BYTES).enumerate() {
                self.events.insert(key(branch, seq, part as u16), chunk)?;
            }
            Ok(())
        })
    }

    /// Frames of one branch itself, `first..=last`, until about `max_bytes` are gathered (at least one frame
    /// if there is one). Stops before a frame whose chunks are not all there.
    ///
    /// # Errors
    /// [`Error::Sled`].
    pub fn range(&self, branch: BranchId, first: u64, last: u64, max_bytes: usize) -> Result<Vec<(u64, Vec<u8>)>> {
        let mut out: Vec<(u64, Vec<u8>)> = Vec::new();
        let mut total = 0;
        guarded(&self.folder, "read", || {
            let mut current: Option<(u64, u16, Vec<u8>)> = None;
            for item in self.events.range(key(branch, first, 0)..=key(branch, last, u16::MAX)) {
                let (k, value) = item?;
                let Some((_, seq, part)) = parse(&k) else { continue };
                match &mut current {
                    Some((at, parts, bytes)) if *at == seq && *parts == part => {
                        *parts += 1;
                        bytes.extend_from_slice(&value);
                    }
                    _ if part == 0 => {
                        if let Some((at, _, bytes)) = current.take() {
                            total += bytes.len();
                            out.push((at, bytes));
                            if total >= max_bytes {
                                return Ok(());
                            }
                        }
                        current = Some((seq, 1, value.to_vec()));
                    }
                    // A chunk is missing: the reader names the event.
                    _ => break,
                }
            }
            if let Some((at, _, bytes)) = current {
                out.push((at, bytes));
            }
            Ok(())
        })?;
        Ok(out)
    }

    /// One frame, if all of it is there and its checksum holds.
    ///
    /// # Errors
    /// [`Error::Sled`].
    pub fn get(&self, branch: BranchId, seq: u64) -> Result<Option<Vec<u8>>> {
        let found = self.range(branch, seq, seq, usize::MAX)?.pop().map(|(_, bytes)| bytes);
        Ok(found.filter(|b| frame::read(b).is_ok_and(|f| f.bytes.len() == b.len())))
    }

    /// Last seq stored for a branch itself.
    ///
    /// # Errors
    /// [`Error::Sled`].
    pub fn last(&self, branch: BranchId) -> Result<Option<u64>> {
        guarded(&self.folder, "read last", || {
            let last = self.events.range(key(branch, 0, 0)..=key(branch, u64::MAX, u16::MAX)).next_back();
            Ok(last.transpose()?.and_then(|(k, _)| parse(&k)).map(|(_, seq, _)| seq))
        })
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

    /// Records the position, after the events before it were stored.
    ///
    /// # Errors
    /// [`Error::Sled`].
    pub fn set_position(&self, journal: &JournalId, ordinal: u64) -> Result<()> {
        let mut value = journal.to_vec();
        value.extend_from_slice(&ordinal.to_le_bytes());
        guarded(&self.folder, "write position", || self.meta.insert("position", value)).map(|_| ())
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
