//! The checkpoint folders of a run: which are damaged, and which nothing needs any more; and the check of a whole run.

use super::{RunError, state_at};
use crate::learner::checkpoint;
use crate::log::{self, Finding, MAIN, Reader, Report};
use crate::project::References;
use std::collections::BTreeSet;
use std::path::Path;

/// Why a checkpoint goes.
pub(super) const SUPERSEDED: &str = "its weights follow from an older checkpoint, or the first weights, and the log";

/// Checkpoint folders that may go, with the reason: all but the newest `keep` of every branch, as it stands. Weights in
/// between are recomputed from the log, so `keep` = 0 only costs time.
///
/// # Errors
/// Those of reading the log; a folder that cannot be listed.
pub fn superseded(dir: &Path, keep: usize) -> Result<Vec<(String, String)>, RunError> {
    let reader = Reader::open(dir)?;
    let mut needed = BTreeSet::new();
    for branch in reader.branches().keys().copied().chain([MAIN]) {
        let state = state_at(&reader, branch, reader.head(branch)?)?;
        needed.extend(state.places.checkpoints.values().rev().take(keep).map(|saved| saved.path.clone()));
    }
    let mut found = Vec::new();
    for name in list(dir)? {
        let path = format!("checkpoints/{name}");
        match name.starts_with('.') {
            true => found.push((path, "left half written by a kill".to_string())),
            false if !needed.contains(&path) => found.push((path, SUPERSEDED.to_string())),
            false => {}
        }
    }
    Ok(found)
}

/// Names of what stands in `checkpoints/`, sorted.
fn list(dir: &Path) -> Result<Vec<String>, RunError> {
    let folder = dir.join("checkpoints");
    let failed = |e: std::io::Error| RunError::Folder { dir: folder.clone(), message: e.to_string() };
    let entries = match std::fs::read_dir(&folder) {
        Ok(entries) => entries.collect::<Result<Vec<_>, _>>().map_err(failed)?,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Vec::new(),
        Err(e) => return Err(failed(e)),
    };
    let mut names: Vec<String> = entries.iter().map(|e| e.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    Ok(names)
}

/// Checks a whole run folder: the log ([`log::verify`]), its checkpoints, and whether what events refer to is there.
///
/// # Errors
/// Those of [`log::verify`]; a folder that cannot be listed.
pub fn verify(dir: &Path) -> Result<Report, RunError> {
    let mut report = log::verify(dir)?;
    for (name, what) in damaged(dir)? {
        let path = dir.join("checkpoints").join(name);
        let remedy = "it is a cache: delete it, or run `coevolve verify --repair`; the weights follow from the log";
        report.findings.push(Finding { path, offset: None, event: None, what, remedy });
    }
    if report.is_ok() {
        report.findings.extend(dangling(&Reader::open(dir)?)?);
    }
    Ok(report)
}

/// The first event of each branch that refers to something that is not there.
fn dangling(reader: &Reader) -> Result<Vec<Finding>, RunError> {
    let mut found = Vec::new();
    for branch in reader.branches().keys().copied().chain([MAIN]) {
        let mut references = References::default();
        for stamped in reader.read(branch, 1)? {
            let stamped = stamped?;
            if let Some(what) = references.take(&stamped.event) {
                let (path, event) = (reader.dir().to_path_buf(), Some((stamped.branch, stamped.seq)));
                let remedy = "every byte is as it was written: the events were put together wrongly, by a program";
                found.push(Finding { path, offset: None, event, what, remedy });
                break;
            }
        }
    }
    Ok(found)
}

/// Mends what has a second copy ([`log::repair`]) and removes damaged checkpoints.
///
/// # Errors
/// Those of [`log::repair`]; I/O.
pub fn repair(dir: &Path) -> Result<log::Repair, RunError> {
    let mut done = log::repair(dir)?;
    for (name, what) in damaged(dir)? {
        let path = dir.join("checkpoints").join(&name);
        std::fs::remove_dir_all(&path).map_err(|e| RunError::Folder { dir: path.clone(), message: e.to_string() })?;
        done.notes.push(format!("checkpoint {name} was removed ({what}): it is a cache"));
    }
    Ok(done)
}

fn damaged(dir: &Path) -> Result<Vec<(String, String)>, RunError> {
    let mut found = Vec::new();
    // Those with a dot were being written when a kill came; nothing ever reads them.
    for name in list(dir)?.into_iter().filter(|name| !name.starts_with('.')) {
        let checked = checkpoint::check(&dir.join("checkpoints").join(&name));
        found.extend(checked.err().map(|why| (name, why.to_string())));
    }
    Ok(found)
}
