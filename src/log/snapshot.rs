//! Snapshots of a fold: caches beside the log, so that opening a long run reads its tail and not all of it.
//!
//! A file `DIR/snapshots/BRANCH-SEQ.snap` is a header and a body that this room does not look into:
//!
//! ```text
//!  offset size field (integers little-endian)
//!       0    4  magic "CVSN"
//!       4    2  format (1)
//!       6    2  reserved, 0
//!       8    8  seq of the last event folded
//!      16   32  chain digest of that event: vouches for it and everything before
//!      48   32  version of the fold
//!      80   32  BLAKE3 of the body
//!     112    8  length of the body, bytes
//!     120    4  crc32c of 0..120
//!     124       body
//! ```
//!
//! A snapshot counts only for a log whose event `seq` has that digest, and for the same fold; so one that was copied from
//! elsewhere, outlived a repair or was written by another version of the program is passed over. Losing
//! one costs time and nothing else.

use super::blob::sync_dir;
use super::branches::owner;
use super::error::{Error, Result};
use super::record::u64_le;
use super::{BranchId, Reader};
use crate::event::digest::Digest;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

const MAGIC: [u8; 4] = *b"CVSN";
const FORMAT: u16 = 1;
const HEADER: usize = 124;
/// Snapshots kept of a branch; the older one helps when the newer one is damaged.
const KEPT: usize = 2;

/// A fold as of an event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snapshot {
    /// The last event folded.
    pub seq: u64,
    /// What the fold wrote.
    pub body: Vec<u8>,
}

fn folder(dir: &Path) -> PathBuf {
    dir.join("snapshots")
}

/// Branch and seq of the snapshots of a folder, in no order.
fn list(dir: &Path) -> Result<Vec<(BranchId, u64, PathBuf)>> {
    let folder = folder(dir);
    let entries = match std::fs::read_dir(&folder) {
        Ok(entries) => entries,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(Error::io("list", &folder)(e)),
    };
    let mut found = Vec::new();
    for entry in entries {
        let path = entry.map_err(Error::io("list", &folder))?.path();
        let name = path.file_name().and_then(|n| n.to_str()).and_then(|n| n.strip_suffix(".snap"));
        if let Some((branch, seq)) = name.and_then(|n| n.split_once('-'))
            && let (Ok(branch), Ok(seq)) = (branch.parse(), seq.parse())
        {
            found.push((branch, seq, path));
        }
    }
    Ok(found)
}

/// Writes a snapshot of `branch` as of event `seq` with chain digest `digest`, and removes those it makes superfluous.
///
/// # Errors
/// I/O; what was there stays.
pub fn write(dir: &Path, branch: BranchId, seq: u64, digest: &Digest, fold: &Digest, body: &[u8]) -> Result<()> {
    let folder = folder(dir);
    std::fs::create_dir_all(&folder).map_err(Error::io("create folder", &folder))?;
    let mut head = [0; HEADER];
    head[..4].copy_from_slice(&MAGIC);
    head[4..6].copy_from_slice(&FORMAT.to_le_bytes());
    head[8..16].copy_from_slice(&seq.to_le_bytes());
    head[16..48].copy_from_slice(&digest.0);
    head[48..80].copy_from_slice(&fold.0);
    head[80..112].copy_from_slice(&Digest::of(body).0);
    head[112..120].copy_from_slice(&(body.len() as u64).to_le_bytes());
    let crc = crc32c::crc32c(&head[..120]);
    head[120..].copy_from_slice(&crc.to_le_bytes());
    let target = folder.join(format!("{branch}-{seq}.snap"));
    let temporary = folder.join(format!("{branch}-{seq}.tmp"));
    let written = File::create(&temporary).and_then(|mut file| {
        file.write_all(&head)?;
        file.write_all(body)?;
        file.sync_all()
    });
    if let Err(e) = written {
        let _ = std::fs::remove_file(&temporary);
        return Err(Error::io("write", &temporary)(e));
    }
    std::fs::rename(&temporary, &target).map_err(Error::io("rename to", &target))?;
    sync_dir(&folder)?;
    // What a kill in the middle of this left.
    for entry in std::fs::read_dir(&folder).map_err(Error::io("list", &folder))? {
        let path = entry.map_err(Error::io("list", &folder))?.path();
        if path.extension().is_some_and(|e| e == "tmp") {
            std::fs::remove_file(&path).map_err(Error::io("remove", &path))?;
        }
    }
    let mut own: Vec<(u64, PathBuf)> =
        list(dir)?.into_iter().filter(|(b, ..)| *b == branch).map(|(_, seq, path)| (seq, path)).collect();
    own.sort();
    for (_, path) in own.iter().rev().skip(KEPT) {
        std::fs::remove_file(path).map_err(Error::io("remove", path))?;
    }
    Ok(())
}

/// What a file holds: (seq, chain digest, fold, body); the error says what is wrong with it.
fn read(path: &Path) -> std::result::Result<(u64, Digest, Digest, Vec<u8>), String> {
    decode(std::fs::read(path).map_err(|e| e.to_string())?)
}

/// As [`read`], of the file's bytes.
pub(super) fn decode(mut bytes: Vec<u8>) -> std::result::Result<(u64, Digest, Digest, Vec<u8>), String> {
    if bytes.len() < HEADER || bytes[..4] != MAGIC {
        return Err("it is no snapshot".into());
    }
    if crc32c::crc32c(&bytes[..120]).to_le_bytes() != bytes[120..HEADER] {
        return Err("its header fails its checksum".into());
    }
    if bytes[4..6] != FORMAT.to_le_bytes() {
        return Err("its format is newer than this program".into());
    }
    let digest = |at: usize| {
        let mut digest = [0; 32];
        digest.copy_from_slice(&bytes[at..at + 32]);
        Digest(digest)
    };
    let (seq, chain, fold, content, len) = (u64_le(&bytes, 8), digest(16), digest(48), digest(80), u64_le(&bytes, 112));
    let body = bytes.split_off(HEADER);
    if body.len() as u64 != len || Digest::of(&body) != content {
        return Err("its body is not what the header says".into());
    }
    Ok((seq, chain, fold, body))
}

/// The newest usable snapshot for events 1..=`upto` of a branch's history. A damaged one is passed over.
pub fn newest(reader: &Reader, branch: BranchId, fold: &Digest, upto: u64) -> Option<Snapshot> {
    let mut found = list(reader.dir()).ok()?;
    found.retain(|(_, seq, _)| *seq <= upto);
    found.sort_by_key(|(_, seq, _)| std::cmp::Reverse(*seq));
    let view = reader.view(branch, upto);
    found.into_iter().find_map(|(_, _, path)| {
        let (seq, chain, of, body) = read(&path).ok()?;
        // The chain digest decides, not the name: a fork shares the snapshots of its parent's history.
        let fits = of == *fold
            && owner(&view, seq).is_some()
            && reader.digest(branch, seq).is_ok_and(|digest| digest == chain);
        fits.then_some(Snapshot { seq, body })
    })
}

/// Every file of the folder; the branch of a snapshot, `None` for what a kill left.
pub(crate) fn files(dir: &Path) -> Result<Vec<(Option<BranchId>, PathBuf)>> {
    let named = list(dir)?;
    let folder = folder(dir);
    let entries = match std::fs::read_dir(&folder) {
        Ok(entries) => entries.collect::<std::io::Result<Vec<_>>>().map_err(Error::io("list", &folder))?,
        Err(_) => Vec::new(),
    };
    let branch = |path: &PathBuf| named.iter().find(|(.., p)| p == path).map(|(branch, ..)| *branch);
    Ok(entries.into_iter().map(|e| (branch(&e.path()), e.path())).collect())
}

/// Snapshot files that are not as they were written, and why.
pub(crate) fn damaged(dir: &Path) -> Result<Vec<(PathBuf, String)>> {
    Ok(list(dir)?.into_iter().filter_map(|(.., path)| read(&path).err().map(|why| (path, why))).collect())
}
