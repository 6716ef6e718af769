//! One writer per run folder.
//!
//! An advisory lock on the file `LOCK`, released by the kernel when its holder dies however it dies, so a
//! stale lock cannot exist. The file's text names the holder for the error message. A child process holds a copy of the
//! lock between its fork and its exec, and a dead process until the kernel has cleaned up: where nobody else can be
//! the holder, the lock is waited for.

use super::error::{Error, Result};
use std::collections::BTreeSet;
use std::fs::{File, TryLockError};
use std::io::{Read, Seek, Write};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// How often, and how long between, a lock is tried again that nobody can be holding.
const TRIES: u32 = 500;
const WAIT: Duration = Duration::from_millis(10);

/// Lock files held by this process, by device and inode.
static HELD: Mutex<BTreeSet<(u64, u64)>> = Mutex::new(BTreeSet::new());

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
    file: File,
    id: (u64, u64),
}

impl Drop for FolderLock {
    fn drop(&mut self) {
        HELD.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.id);
    }
}

/// Whether the holder that the text names may still be there.
fn may_hold(holder: &str, id: (u64, u64)) -> bool {
    let pid = holder.strip_prefix("process ").and_then(|rest| rest.split(' ').next()?.parse::<u32>().ok());
    match pid {
        Some(pid) if pid == std::process::id() => HELD.lock().unwrap_or_else(PoisonError::into_inner).contains(&id),
        // A process of another host, should its number be free here, gets the lock's benefit of the doubt for a while.
        Some(pid) => Path::new(&format!("/proc/{pid}")).exists(),
        None => true,
    }
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
        let meta = file.metadata().map_err(Error::io("stat", &path))?;
        let id = (meta.dev(), meta.ino());
        for tried in 0.. {
            match file.try_lock() {
                Ok(()) => break,
                Err(TryLockError::WouldBlock) => {
                    let mut holder = String::new();
                    let _ = file.rewind().and_then(|()| file.read_to_string(&mut holder));
                    if may_hold(&holder, id) || tried >= TRIES {
                        let holder = holder.trim();
                        let holder = if holder.is_empty() { "another process" } else { holder }.to_string();
                        return Err(Error::Locked { dir: dir.to_path_buf(), holder });
                    }
                    std::thread::sleep(WAIT);
                }
                Err(TryLockError::Error(e)) => return Err(Error::io("lock", &path)(e)),
            }
        }
        HELD.lock().unwrap_or_else(PoisonError::into_inner).insert(id);
        let lock = FolderLock { file, id };
        let text = format!("process {} on {}\n", std::process::id(), host());
        let mut file = &lock.file;
        file.set_len(0)
            .and_then(|()| file.rewind())
            .and_then(|()| file.write_all(text.as_bytes()))
            .map_err(Error::io("write", &path))?;
        Ok(lock)
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

    #[test]
    fn a_copy_of_the_lock_that_a_child_holds_for_a_moment_is_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let held = FolderLock::take(dir.path()).unwrap();
        // What a fork does: another descriptor of the same lock.
        let copy = held.file.try_clone().unwrap();
        drop(held);
        let waiting = std::thread::spawn({
            let dir = dir.path().to_path_buf();
            move || FolderLock::take(&dir).map(drop)
        });
        std::thread::sleep(Duration::from_millis(50));
        assert!(!waiting.is_finished());
        drop(copy);
        waiting.join().unwrap().unwrap();
        // A holder that is gone, too; one that may live is named at once.
        let copy = File::options().read(true).write(true).open(dir.path().join("LOCK")).unwrap();
        copy.lock().unwrap();
        std::fs::write(dir.path().join("LOCK"), "process 1 on here\n").unwrap();
        let error = FolderLock::take(dir.path()).unwrap_err().to_string();
        assert!(error.contains("process 1 on here"), "{error}");
    }
}
