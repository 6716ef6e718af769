//! `gc`: removes what nothing needs, and says so in the log.
//!
//! Events are never removed, so nothing here can break a replay: on request it takes payload files that no event refers
//! to, what a kill left half written, snapshots of deleted branches and what damage left in `quarantine/`; and what
//! the caller names (checkpoints, which this room knows nothing about). The event is durable before the first file goes:
//! what the log says was removed may still be there after a kill, never the other way round.

use super::error::{Error, Result};
use super::store::Log;
use super::{EventStore, LEDGER, blob, snapshot};
use crate::event::digest::Digest;
use crate::event::{GarbageCollected, Meta, RemovedFile};
use std::collections::BTreeSet;
use std::path::{Component, Path, PathBuf};

/// What to remove.
#[derive(Debug, Clone, Default)]
pub struct Collect {
    /// Whether payload files that no event refers to go, and snapshots of deleted branches, and what kills left.
    /// Reads the whole journal.
    pub orphans: bool,
    /// Whether `quarantine/` goes: torn tails and replaced copies that nothing reads.
    pub quarantine: bool,
    /// Files and folders that the caller knows to be superfluous: path in the run folder, and why.
    pub also: Vec<(String, String)>,
    /// Only say what would be removed.
    pub dry_run: bool,
}

/// Bytes of a file, or of everything in a folder; 0 for what is not there.
pub(crate) fn size(path: &Path) -> u64 {
    match std::fs::symlink_metadata(path) {
        Ok(meta) if meta.is_dir() => {
            std::fs::read_dir(path).map_or(0, |entries| entries.flatten().map(|e| size(&e.path())).sum())
        }
        Ok(meta) => meta.len(),
        Err(_) => 0,
    }
}

fn remove(path: &Path) -> Result<()> {
    let removed = if path.is_dir() { std::fs::remove_dir_all(path) } else { std::fs::remove_file(path) };
    match removed {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(Error::io("remove", path)(e)),
        _ => Ok(()),
    }
}

impl Log {
    /// Removes what nothing needs and records it; returns what went, or would. Nothing may be appended meanwhile: a
    /// payload that is written before its event would be taken for one that no event refers to.
    ///
    /// # Errors
    /// Damage in the journal (what it refers to cannot be told then); as [`super::Ticket::wait`]; I/O.
    pub fn collect(&self, what: &Collect, meta: Meta) -> Result<Vec<RemovedFile>> {
        self.barrier()?;
        let dir = self.reader().dir().to_path_buf();
        let mut found: Vec<(PathBuf, String)> = Vec::new();
        if what.orphans {
            self.orphans(&dir, &mut found)?;
        }
        let quarantine = dir.join("quarantine");
        if what.quarantine && quarantine.exists() {
            found.push((quarantine, "nothing reads it".into()));
        }
        for (path, why) in &what.also {
            let inside = Path::new(path).components().all(|c| matches!(c, Component::Normal(_))) && !path.is_empty();
            let path = dir.join(path);
            if inside && path.exists() {
                found.push((path, why.clone()));
            }
        }
        let named = |(path, reason): &(PathBuf, String)| RemovedFile {
            path: path.strip_prefix(&dir).unwrap_or(path).to_string_lossy().into_owned(),
            bytes: size(path),
            reason: reason.clone(),
        };
        let removed: Vec<RemovedFile> = found.iter().map(named).collect();
        if removed.is_empty() || what.dry_run {
            return Ok(removed);
        }
        self.append_to(LEDGER, GarbageCollected { removed: removed.clone() }.into(), meta)?.wait()?;
        for (path, _) in &found {
            remove(path)?;
        }
        Ok(removed)
    }

    fn orphans(&self, dir: &Path, found: &mut Vec<(PathBuf, String)>) -> Result<()> {
        const HALF: &str = "left half written by a kill";
        let needed = self.payloads()?;
        for (path, _, digest) in blob::list(dir)? {
            match digest {
                Some(digest) if needed.contains(&digest) => {}
                Some(_) => found.push((path, "no event refers to it".into())),
                None => found.push((path, HALF.into())),
            }
        }
        let live = self.reader().branches();
        for (branch, path) in snapshot::files(dir)? {
            match branch {
                None => found.push((path, HALF.into())),
                Some(branch) if branch == super::MAIN || live.contains_key(&branch) => {}
                Some(branch) => found.push((path, format!("branch {branch} is deleted"))),
            }
        }
        Ok(())
    }

    /// Payload files that events of any branch refer to, undone and deleted ones included.
    fn payloads(&self) -> Result<BTreeSet<Digest>> {
        let (mut needed, mut at) = (BTreeSet::new(), 0);
        while at < self.reader().events() {
            at = self.reader().frames_from(at, 64, |frame| {
                needed.extend(frame.blob().map(|(digest, _)| digest));
                Ok(())
            })?;
        }
        Ok(needed)
    }
}
