//! One writer per run folder.
//!
//! An advisory lock on the file `LOCK`, released by the kernel when its holder dies however it dies, so a
//! stale lock cannot exist. The file's text only names the holder for the error message.

use super::error::{Error, Result};
use std::fs::{File, TryLockError};
use std::io::{Read, Seek, Write};
use std::path::Path;

/// What only a run folder holds; the last two are what a kill before the first event may leave.
const MARKS: [&str; 5] = ["HEAD", "journal", "events.sled", "settings.json", "settings.json.new"];

/// Whether a folder holds a run or the beginnings of one. What is none is not touched.
pub fn is_run(dir: &Path) -> bool {
    MARKS.iter().any(|mark| dir.join(mark).exists())
}

/// Refuses a folder that holds something else.
///
/// # Errors
/// [`Error::Foreign`] naming one entry, I/O.
pub fn refuse_foreign(dir: &Path) -> Result<()> {
    if is_run(dir) || !dir.is_dir() {
        return Ok(());
    }
    for entry in std::fs::read_dir(dir).map_err(Error::io("list", dir))? {
        let name = entry.map_err(Error::io("list", dir))?.file_name();
        if name != "LOCK" {
            return Err(Error::Foreign { dir: dir.to_path_buf(), name: name.to_string_lossy().into_owned() });
        }
    }
    Ok(())
}

/// The held lock; dropping it releases the folder.
#[derive(Debug)]
pub struct FolderLock {
    _file: File,
}

fn host() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname")
        .map(|h| h.trim().to_string())
        .unwrap_or_else(|_| "unknown host".into())
}

impl FolderLock {
    /// Takes the lock of a run folder.
    ///
    /// # Errors
    /// [`Error::Locked`] naming the holder; I/O.
    pub fn take(dir: &Path) -> Result<FolderLock> {
        let path = dir.join("LOCK");
        let mut file = File::options()
            .create(true)
            .truncate(false)
            .read(true)
            .write(true)
            .open(&path)
            .map_err(Error::io("open", &path))?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let mut holder = String::new();
                let _ = file.read_to_string(&mut holder);
                let holder = if holder.trim().is_empty() { "another process".into() } else { holder.trim().into() };
                return Err(Error::Locked { dir: dir.to_path_buf(), holder });
            }
            Err(TryLockError::Error(e)) => return Err(Error::io("lock", &path)(e)),
        }
        let text = format!("process {} on {}\n", std::process::id(), host());
        file.set_len(0)
            .and_then(|()| file.rewind())
            .and_then(|()| file.write_all(text.as_bytes()))
            .map_err(Error::io("write", &path))?;
        Ok(FolderLock { _file: file })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn second_writer_is_refused_with_the_holder() {
        let dir = tempfile::tempdir().unwrap();
        let held = FolderLock::take(dir.path()).unwrap();
        let error = FolderLock::take(dir.path()).unwrap_err().to_string();
        assert!(error.contains(&format!("process {}", std::process::id())), "{error}");
        drop(held);
        FolderLock::take(dir.path()).unwrap();
    }
}
