//! A run folder that is there whole or not at all: made beside its place, then renamed.

use super::blob::sync_dir;
use super::error::{Error, Result};
use super::lock::is_run;
use std::path::Path;

/// Makes `out`, which must not exist or be an empty folder, with what `build` puts into the folder it is given. A kill
/// leaves nothing at `out`, and beside it what the next call removes.
///
/// # Errors
/// [`Error::Exists`] and [`Error::Foreign`] when `out` is taken; those of `build`; I/O.
pub(crate) fn make_folder<T>(out: &Path, build: impl FnOnce(&Path) -> Result<T>) -> Result<T> {
    if is_run(out) {
        return Err(Error::Exists { dir: out.to_path_buf() });
    }
    let taken = match std::fs::read_dir(out) {
        Ok(mut entries) => entries.next().and_then(|e| e.ok()).map(|e| e.file_name()),
        Err(_) => out.exists().then(|| out.file_name().unwrap_or_default().to_os_string()),
    };
    if let Some(name) = taken {
        return Err(Error::Foreign { dir: out.to_path_buf(), name: name.to_string_lossy().into_owned() });
    }
    let parent = match out.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    std::fs::create_dir_all(parent).map_err(Error::io("create folder", parent))?;
    let name = out.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let (start, end) = (format!(".{name}."), ".making");
    for entry in std::fs::read_dir(parent).map_err(Error::io("list", parent))? {
        let path = entry.map_err(Error::io("list", parent))?.path();
        let left =
            path.file_name().and_then(|n| n.to_str()?.strip_prefix(&start)?.strip_suffix(end)?.parse::<u32>().ok());
        if left.is_some_and(|pid| !Path::new(&format!("/proc/{pid}")).exists()) {
            std::fs::remove_dir_all(&path).map_err(Error::io("remove", &path))?;
        }
    }
    let temporary = parent.join(format!("{start}{}{end}", std::process::id()));
    std::fs::create_dir(&temporary).map_err(Error::io("create folder", &temporary))?;
    let made = build(&temporary).and_then(|made| {
        sync_dir(&temporary)?;
        std::fs::rename(&temporary, out).map_err(Error::io("rename to", out))?;
        sync_dir(parent)?;
        Ok(made)
    });
    if made.is_err() {
        // Nothing but what this made.
        let _ = std::fs::remove_dir_all(&temporary);
    }
    made
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_is_there_whole_or_not_at_all() {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("deep/run");
        // What a kill of a process that is gone left.
        std::fs::create_dir_all(dir.path().join("deep/.run.4294967295.making/journal")).unwrap();
        let refused: Result<()> = make_folder(&out, |folder| {
            std::fs::write(folder.join("half"), b"x").unwrap();
            assert!(!out.exists());
            Err(Error::Closed)
        });
        assert!(refused.is_err() && std::fs::read_dir(dir.path().join("deep")).unwrap().next().is_none());
        make_folder(&out, |folder| std::fs::write(folder.join("HEAD"), b"x").map_err(Error::io("write", folder)))
            .unwrap();
        assert!(out.join("HEAD").exists());
        assert!(matches!(make_folder(&out, |_| Ok(())), Err(Error::Exists { .. })));
        std::fs::write(dir.path().join("file"), b"x").unwrap();
        assert!(matches!(make_folder(&dir.path().join("file"), |_| Ok(())), Err(Error::Foreign { .. })));
        assert!(matches!(make_folder(dir.path(), |_| Ok(())), Err(Error::Foreign { .. })));
        std::fs::create_dir(dir.path().join("empty")).unwrap();
        make_folder(&dir.path().join("empty"), |_| Ok(())).unwrap();
    }
}
