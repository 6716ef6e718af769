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

/// Makes a payload durable and returns its digest. Equal payloads share one file.
///
/// # Errors
/// I/O; nothing refers to what was left behind.
pub fn write(dir: &Path, payload: &[u8]) -> Result<Digest> {
    let digest = Digest::of(payload);
    let target = path(dir, &digest);
    // A file of that name that is whole was flushed before it got the name.
    if std::fs::read(&target).is_ok_and(|b| Digest::of(&b) == digest) {
        return Ok(digest);
    }
    let root = dir.join("blobs");
    let folder = target.parent().unwrap_or(&root).to_path_buf();
    std::fs::create_dir_all(&folder).map_err(Error::io("create folder", &folder))?;
    let temporary = folder.join(format!("{digest}.tmp.{:?}", std::thread::current().id()));
    let mut file = File::create(&temporary).map_err(Error::io("create", &temporary))?;
    file.write_all(payload).and_then(|()| file.sync_all()).map_err(Error::io("write", &temporary))?;
    std::fs::rename(&temporary, &target).map_err(Error::io("rename to", &target))?;
    for d in [folder.as_path(), root.as_path(), dir] {
        sync_dir(d)?;
    }
    Ok(digest)
}

/// Reads a payload back and checks it; the error text says what is wrong with the file.
pub fn read(dir: &Path, digest: &Digest, len: u64) -> std::result::Result<Vec<u8>, String> {
    let bytes = std::fs::read(path(dir, digest)).map_err(|e| e.to_string())?;
    if bytes.len() as u64 != len {
        return Err(format!("{} of {len} bytes", bytes.len()));
    }
    if Digest::of(&bytes) != *digest {
        return Err("content does not hash to its name".into());
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn damage_is_named_and_rewritten() {
        let dir = tempfile::tempdir().unwrap();
        let payload = vec![5u8; 100_000];
        let digest = write(dir.path(), &payload).unwrap();
        assert_eq!(read(dir.path(), &digest, 100_000).unwrap(), payload);
        let file = path(dir.path(), &digest);
        let mut bad = payload.clone();
        bad[77] = 6;
        std::fs::write(&file, &bad).unwrap();
        assert!(read(dir.path(), &digest, 100_000).unwrap_err().contains("hash"));
        std::fs::write(&file, &bad[..50]).unwrap();
        assert!(read(dir.path(), &digest, 100_000).unwrap_err().contains("50 of 100000"));
        assert_eq!(write(dir.path(), &payload).unwrap(), digest);
        assert_eq!(read(dir.path(), &digest, 100_000).unwrap(), payload);
    }
}
