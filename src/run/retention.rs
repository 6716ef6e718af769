//! Which checkpoints nothing needs any more.

use super::{RunError, state_at};
use crate::log::{MAIN, Reader};
use std::collections::BTreeSet;
use std::path::Path;

/// Why a checkpoint goes.
pub(super) const SUPERSEDED: &str = "newer checkpoints are there; the weights follow from an older one and the log";

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
    let folder = dir.join("checkpoints");
    let failed = |e: std::io::Error| RunError::Folder { dir: folder.clone(), message: e.to_string() };
    let entries = match std::fs::read_dir(&folder) {
        Ok(entries) => entries.collect::<Result<Vec<_>, _>>().map_err(failed)?,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Vec::new(),
        Err(e) => return Err(failed(e)),
    };
    let mut found = Vec::new();
    for entry in entries {
        let name = entry.file_name().to_string_lossy().into_owned();
        let path = format!("checkpoints/{name}");
        match name.starts_with('.') {
            true => found.push((path, "left half written by a kill".to_string())),
            false if !needed.contains(&path) => found.push((path, SUPERSEDED.to_string())),
            false => {}
        }
    }
    found.sort();
    Ok(found)
}
