//! An independent run folder made of another one by hard links.
//!
//! Closed segments never change and payloads have content for a name, so both folders share the files; the open segment
//! is copied up to the watermark. It works while the run trains: what is acknowledged when it is called is in the
//! new folder. Either folder may be written to, repaired or removed without the other noticing.

use super::blob::sync_dir;
use super::error::{Error, Result};
use super::head::{HeadFile, Watermark};
use super::making::make_folder;
use super::segments::{self, Segments};
use super::{Log, MAIN, Options, Reader, head};
use crate::event::Meta;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Makes `out`, which must not exist or be empty, a run folder with the events of `dir`. Returns the number of events.
///
/// # Errors
/// [`Error::Exists`], [`Error::Foreign`]; damage in HEAD or record headers of `dir`; I/O.
pub fn link(dir: &Path, out: &Path) -> Result<u64> {
    make_folder(out, |folder| make(dir, folder))
}

/// The same with main taken back to event `at`, also one that was undone: a fork that trains on by itself.
///
/// # Errors
/// As [`link`]; [`Error::NoEvent`].
pub fn fork_folder(dir: &Path, out: &Path, at: u64, reason: &str, meta: Meta) -> Result<()> {
    make_folder(out, |folder| {
        make(dir, folder)?;
        let log = Log::open(folder, Options { sled: false, ..Options::default() })?;
        log.undo(MAIN, at, reason, meta)?;
        drop(log);
        // How it is to be run, until its own settings say otherwise.
        match std::fs::copy(dir.join("settings.json"), folder.join("settings.json")) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(Error::io("copy", &dir.join("settings.json"))(e)),
            _ => Ok(()),
        }
    })
}

/// A second name for a file; a copy where the file system has no hard links, or across file systems.
fn share(from: &Path, to: &Path) -> Result<()> {
    if std::fs::hard_link(from, to).is_ok() {
        return Ok(());
    }
    std::fs::copy(from, to).map_err(Error::io("copy", from))?;
    File::open(to).and_then(|f| f.sync_all()).map_err(Error::io("flush", to))
}

fn make(dir: &Path, out: &Path) -> Result<u64> {
    let reader = Reader::open(dir)?;
    reader.complete()?;
    let mark = head::read(dir)?.ok_or_else(|| Error::corrupt(&head::path(dir), 0, "it is missing or damaged"))?;
    let journal = segments::folder(out);
    std::fs::create_dir_all(&journal).map_err(Error::io("create folder", &journal))?;
    let (ours, theirs) = (Segments::new(dir), Segments::new(out));
    for number in ours.list()?.into_iter().filter(|n| *n < mark.segment) {
        let packed = || share(&ours.packed_path(number), &theirs.packed_path(number));
        let plain = |_| share(&ours.plain_path(number), &theirs.plain_path(number));
        // A segment may be compressed at this very moment.
        packed().or_else(plain).or_else(|_| packed())?;
    }
    copy_start(&ours, mark.segment, &theirs.plain_path(mark.segment), mark.offset)?;
    for name in ["blobs", "checkpoints", "snapshots"] {
        share_tree(&dir.join(name), &out.join(name))?;
    }
    sync_dir(&journal)?;
    // Last: without it the folder is no run.
    write_head(out, &mark)?;
    let made = Reader::open(out)?;
    made.complete()?;
    Ok(made.events())
}

/// The first `bytes` of a segment, whichever form it has by now.
fn copy_start(ours: &Segments, segment: u64, to: &Path, bytes: u64) -> Result<()> {
    let target = File::create(to).map_err(Error::io("create", to))?;
    let (mut at, mut piece) = (0, vec![0; 1 << 20]);
    while at < bytes {
        let n = (bytes - at).min(piece.len() as u64) as usize;
        ours.read_into(segment, at, &mut piece[..n])?;
        target.write_all_at(&piece[..n], at).map_err(Error::io("write", to))?;
        at += n as u64;
    }
    target.sync_all().map_err(Error::io("flush", to))
}

fn write_head(out: &Path, mark: &Watermark) -> Result<()> {
    HeadFile::open(out)?.write(mark)?;
    let path = head::path(out);
    File::open(&path).and_then(|f| f.sync_all()).map_err(Error::io("flush", &path))?;
    sync_dir(out)
}

fn share_tree(from: &Path, to: &Path) -> Result<()> {
    let entries = match std::fs::read_dir(from) {
        Ok(entries) => entries,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(Error::io("list", from)(e)),
    };
    std::fs::create_dir_all(to).map_err(Error::io("create folder", to))?;
    for entry in entries {
        let entry = entry.map_err(Error::io("list", from))?;
        let (source, target) = (entry.path(), to.join(entry.file_name()));
        let name = entry.file_name().to_string_lossy().into_owned();
        // What is being written has such a name until it is whole.
        if name.contains(".tmp") || name.starts_with('.') {
            continue;
        }
        if source.is_dir() { share_tree(&source, &target)? } else { share(&source, &target)? }
    }
    sync_dir(to)
}
