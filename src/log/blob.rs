//! Payloads too large for the journal: content-addressed files `blobs/ab/abcdef..`.
//!
//! Written to a temporary, flushed, renamed, folder flushed; only then does an event refer to them.

use super::error::{Error, Result};
use crate::event::digest::Digest;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

/// Path of a blob in a run folder.
pub fn path(dir: &Path, digest: &Digest) -> PathBuf {
    let hex = digest.to_string();
    dir.join("blobs").join(&hex[..2]).join(&hex)
}

/// Flushes a folder, so that names created or renamed in it survive a power loss.
pub(crate) fn sync_dir(dir: &Path) -> Result<()> {
    File::open(dir).and_then(|d| d.sync_all()).map_err(Error::io("flush folder", dir))
}

/// The second copy of a blob, where two are kept.
fn second(path: &Path) -> PathBuf {
    path.with_extension("2")
}

fn is_whole(path: &Path, digest: &Digest) -> bool {
    std::fs::read(path).is_ok_and(|bytes| Digest::of(&bytes) == *digest)
}

/// Makes a payload durable in `copies` files (1 or 2) and returns its digest. Equal payloads share them.
///
/// # Errors
/// I/O; nothing refers to what was left behind.
pub fn write(dir: &Path, payload: &[u8], copies: u32) -> Result<Digest> {
    let digest = Digest::of(payload);
    let first = path(dir, &digest);
    write_file(dir, &first, &digest, payload)?;
    if copies > 1 {
        write_file(dir, &second(&first), &digest, payload)?;
    }
    Ok(digest)
}

fn write_file(dir: &Path, target: &Path, digest: &Digest, payload: &[u8]) -> Result<()> {
    let root = dir.join("blobs");
    let folder = target.parent().unwrap_or(&root).to_path_buf();
    let flush_names = || [folder.as_path(), root.as_path(), dir].into_iter().try_for_each(sync_dir);
    // A file of that name that is whole was flushed before it got the name. The name may not have been: whoever gave it
    // was killed, had an error, or is about to.
    if is_whole(target, digest) {
        return flush_names();
    }
    std::fs::create_dir_all(&folder).map_err(Error::io("create folder", &folder))?;
    let temporary = folder.join(format!("{digest}.tmp.{:?}", std::thread::current().id()));
    let mut file = File::create(&temporary).map_err(Error::io("create", &temporary))?;
    file.write_all(payload).and_then(|()| file.sync_all()).map_err(Error::io("write", &temporary))?;
    std::fs::rename(&temporary, target).map_err(Error::io("rename to", target))?;
    flush_names()
}

fn read_file(path: &Path, digest: &Digest, len: u64) -> std::result::Result<Vec<u8>, String> {
    let bytes = std::fs::read(path).map_err(|e| e.to_string())?;
    if bytes.len() as u64 != len {
        return Err(format!("{} of {len} bytes", bytes.len()));
    }
    if Digest::of(&bytes) != *digest {
        return Err("content does not hash to its name".into());
    }
    Ok(bytes)
}

/// Reads a payload back, from whichever copy is whole; the error text says what is wrong with the first.
pub fn read(dir: &Path, digest: &Digest, len: u64) -> std::result::Result<Vec<u8>, String> {
    let first = path(dir, digest);
    read_file(&first, digest, len).or_else(|why| read_file(&second(&first), digest, len).map_err(|_| why))
}

/// Copies of a payload that are not whole although another one is, and why: what [`mend`] mends.
pub fn damaged_copies(dir: &Path, digest: &Digest, len: u64) -> Vec<(PathBuf, String)> {
    let first = path(dir, digest);
    let other = second(&first);
    if !other.exists() {
        return Vec::new();
    }
    let found: Vec<(PathBuf, String)> =
        [first, other].into_iter().filter_map(|p| read_file(&p, digest, len).err().map(|why| (p, why))).collect();
    if found.len() == 1 { found } else { Vec::new() }
}

/// Restores the copies that [`damaged_copies`] names from the whole one; returns how many.
///
/// # Errors
/// I/O.
pub fn mend(dir: &Path, digest: &Digest, len: u64) -> Result<usize> {
    let damaged = damaged_copies(dir, digest, len);
    let Ok(payload) = read(dir, digest, len) else { return Ok(0) };
    for (path, _) in &damaged {
        write_file(dir, path, digest, &payload)?;
    }
    Ok(damaged.len())
}

/// Every file below `blobs/` with its size: payloads by digest, `None` for what is no payload (left by a kill).
///
/// # Errors
/// I/O.
pub fn list(dir: &Path) -> Result<Vec<(PathBuf, u64, Option<Digest>)>> {
    let root = dir.join("blobs");
    let entries = |folder: &Path| match std::fs::read_dir(folder) {
        Ok(entries) => entries.collect::<std::io::Result<Vec<_>>>().map_err(Error::io("list", folder)),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(e) => Err(Error::io("list", folder)(e)),
    };
    let mut found = Vec::new();
    for folder in entries(&root)? {
        if !folder.path().is_dir() {
            continue;
        }
        for entry in entries(&folder.path())? {
            let path = entry.path();
            let bytes = entry.metadata().map_err(Error::io("stat", &path))?.len();
            let name = path.file_name().and_then(|n| n.to_str()).unwrap_or_default();
            let digest = Digest::from_hex(name.strip_suffix(".2").unwrap_or(name));
            found.push((path, bytes, digest));
        }
    }
    found.sort();
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn damage_is_named_and_rewritten() {
        let dir = tempfile::tempdir().unwrap();
        let payload = vec![5u8; 100_000];
        let digest = write(dir.path(), &payload, 1).unwrap();
        assert_eq!(read(dir.path(), &digest, 100_000).unwrap(), payload);
        let file = path(dir.path(), &digest);
        let mut bad = payload.clone();
        bad[77] = 6;
        std::fs::write(&file, &bad).unwrap();
        assert!(read(dir.path(), &digest, 100_000).unwrap_err().contains("hash"));
        std::fs::write(&file, &bad[..50]).unwrap();
        assert!(read(dir.path(), &digest, 100_000).unwrap_err().contains("50 of 100000"));
        assert_eq!(write(dir.path(), &payload, 1).unwrap(), digest);
        assert_eq!(read(dir.path(), &digest, 100_000).unwrap(), payload);
    }

    #[test]
    fn two_copies_mend_each_other() {
        let dir = tempfile::tempdir().unwrap();
        let payload: Vec<u8> = (0..100_000u32).map(|i| i as u8).collect();
        let (len, digest) = (100_000, write(dir.path(), &payload, 2).unwrap());
        let first = path(dir.path(), &digest);
        assert_eq!(list(dir.path()).unwrap().len(), 2);
        assert!(damaged_copies(dir.path(), &digest, len).is_empty());
        for damaged in [first.clone(), second(&first)] {
            std::fs::write(&damaged, &payload[..99]).unwrap();
            assert_eq!(read(dir.path(), &digest, len).unwrap(), payload);
            let named = damaged_copies(dir.path(), &digest, len);
            assert_eq!(named, [(damaged.clone(), "99 of 100000 bytes".to_string())]);
            assert_eq!(mend(dir.path(), &digest, len).unwrap(), 1);
            assert_eq!(std::fs::read(&damaged).unwrap(), payload);
        }
        std::fs::write(&first, b"").unwrap();
        std::fs::write(second(&first), b"").unwrap();
        assert!(read(dir.path(), &digest, len).is_err());
        assert_eq!(mend(dir.path(), &digest, len).unwrap(), 0);
    }
}
