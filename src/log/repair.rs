//! `verify --repair`: each copy mends the other.
//!
//! The journal is rebuilt in `DIR/repair/` from its whole records and, for what is missing between them, the
//! sled copy's frames; every event must link to the one before it. Then the folders change places: HEAD is
//! removed, `journal/` moves to `quarantine/`, the new one takes its name, the new HEAD follows. A crash between
//! two of these steps is finished by the next opening.

use super::blob::sync_dir;
use super::error::{Error, Result};
use super::filler;
use super::journal::Journal;
use super::lock::{FolderLock, is_run};
use super::options::Faults;
use super::rebuild::{Rebuild, SEGMENT_BYTES};
use super::record::{self, RECORD_HEADER};
use super::segments::{self, Segments};
use super::sled_store::SledStore;
use super::survey::{Piece, Survey, survey, survey_all};
use super::verify::{SledCheck, compare, whole_of};
use super::{LEDGER, Reader, blob, head, snapshot};
use std::path::{Path, PathBuf};

/// File that says that the journal beside is whole and flushed.
const WHOLE: &str = "WHOLE";

/// What a repair did.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize)]
pub struct Repair {
    /// Events that came back from the sled copy.
    pub restored_events: u64,
    /// Whether the journal was rebuilt.
    pub journal_rebuilt: bool,
    /// Whether the sled copy was rebuilt.
    pub sled_rebuilt: bool,
    /// What was done, in words.
    pub notes: Vec<String>,
}

fn work(dir: &Path) -> PathBuf {
    dir.join("repair")
}

/// Mends the journal from the sled copy and the sled copy from the journal. Takes the folder's lock.
///
/// # Errors
/// [`Error::Unrepairable`] when neither copy has an event or they do not link (nothing is changed then);
/// [`Error::Locked`]; I/O.
pub fn repair(dir: &Path) -> Result<Repair> {
    if !is_run(dir) {
        return Err(Error::Empty { dir: dir.to_path_buf() });
    }
    let _lock = FolderLock::take(dir)?;
    let mut done = Repair::default();
    finish_interrupted(dir, &mut done.notes)?;
    repair_journal(dir, &mut done)?;
    for (path, why) in snapshot::damaged(dir)? {
        std::fs::remove_file(&path).map_err(Error::io("remove", &path))?;
        done.notes.push(format!("{} was removed ({why}): it is a cache", path.display()));
    }
    let survey = survey(dir)?;
    mend_blobs(dir, &survey, &mut done)?;
    let path = SledStore::path(dir);
    let bad = match SledStore::open(&path).and_then(|store| compare(&store, &survey)) {
        Ok((SledCheck::Compared { behind: 0, .. }, None)) => None,
        Ok((SledCheck::Compared { behind, .. }, None)) => Some(format!("it was {behind} events behind")),
        Ok((_, Some((_, what)))) => Some(what),
        Ok((_, None)) => Some("it could not be compared".to_string()),
        Err(e) => Some(e.to_string()),
    };
    if let Some(why) = bad {
        filler::rebuild(&Reader::open(dir)?, true)?;
        done.sled_rebuilt = true;
        done.notes.push(format!("the sled copy was rebuilt from the journal ({why})"));
    }
    Ok(done)
}

fn mend_blobs(dir: &Path, survey: &Survey, done: &mut Repair) -> Result<()> {
    for record in whole_of(&survey.pieces) {
        let at = record.offset + RECORD_HEADER as u64;
        let body = survey.files.read(record.segment, at, record.header.body_len as usize)?;
        for frame in record::frames(&record.header, &body).iter().flatten() {
            let Some((digest, len)) = frame.blob() else { continue };
            let mended = blob::mend(dir, &digest, len)?;
            if mended > 0 {
                done.notes.push(format!("payload {digest} was restored from its other copy"));
            }
        }
    }
    Ok(())
}

/// Restores the journal of a folder whose segments are gone (the lock is held by the caller).
pub(crate) fn restore_lost_segments(dir: &Path, notes: &mut Vec<String>) -> Result<()> {
    finish_interrupted(dir, notes)?;
    if !Segments::new(dir).list()?.is_empty() {
        return Ok(());
    }
    if !SledStore::path(dir).is_dir() {
        return Err(Error::nothing_in(dir));
    }
    let mut done = Repair::default();
    repair_journal(dir, &mut done)?;
    notes.append(&mut done.notes);
    Ok(())
}

/// Ends a change of places that a crash interrupted.
fn finish_interrupted(dir: &Path, notes: &mut Vec<String>) -> Result<()> {
    let (new, journal) = (segments::folder(&work(dir)), segments::folder(dir));
    if !journal.exists() && new.is_dir() && work(dir).join(WHOLE).exists() {
        std::fs::rename(&new, &journal).map_err(Error::io("rename", &new))?;
        sync_dir(dir)?;
        notes.push("a repair that was interrupted was finished".into());
    }
    match std::fs::remove_dir_all(work(dir)) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(Error::io("remove", &work(dir))(e)),
        _ => Ok(()),
    }
}

fn repair_journal(dir: &Path, done: &mut Repair) -> Result<()> {
    let mut survey = survey(dir)?;
    if !survey.holes.is_empty() {
        survey = survey_all(dir)?;
    }
    let lost_all = survey.segments == 0;
    if survey.holes.is_empty() && !lost_all {
        // Segment headers and HEAD are rewritten with the rest.
        if survey.blemishes.is_empty() {
            return Ok(());
        }
        let only_head = survey.blemishes.iter().all(|(path, ..)| *path == head::path(dir));
        if only_head {
            return rewrite_head(dir, done);
        }
    }
    let path = SledStore::path(dir);
    let store = if path.is_dir() { Some(SledStore::open(&path)?) } else { None };
    if lost_all && store.is_none() {
        return Err(Error::nothing_in(dir));
    }
    let position = match &store {
        Some(store) => store.position()?,
        None => None,
    };
    let id = survey.journal.or(position.map(|(id, _)| id)).ok_or_else(|| Error::nothing_in(dir))?;
    // A copy of another run is no help.
    let store = store.filter(|_| position.is_some_and(|(owner, _)| owner == id));
    let target = work(dir);
    match std::fs::remove_dir_all(&target) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(Error::io("remove", &target)(e)),
        _ => {}
    }
    let mut rebuild = Rebuild::new(dir, &target, id, store, &survey)?;
    for (i, piece) in survey.pieces.iter().enumerate() {
        match piece {
            Piece::Record(record) => {
                let at = record.offset + RECORD_HEADER as u64;
                let body = survey.files.read(record.segment, at, record.header.body_len as usize)?;
                rebuild.fill_up_to(record.header.branch, record.header.first_seq)?;
                rebuild.append(&record.header, &body)?;
            }
            // Branches first: what follows may belong to one.
            Piece::Hole => {
                let next = whole_of(&survey.pieces[i..]).find(|r| r.header.branch == LEDGER);
                match next {
                    Some(record) => rebuild.fill_up_to(LEDGER, record.header.first_seq)?,
                    None => rebuild.fill_to_end(LEDGER)?,
                }
            }
        }
    }
    // A branch may have lost its end although records of other branches follow.
    rebuild.fill_all()?;
    if let Some(mark) = survey.mark.filter(|m| m.events > rebuild.events) {
        let what = format!("of {} events, {} are in neither copy", mark.events, mark.events - rebuild.events);
        return Err(Error::Unrepairable { path: segments::folder(dir), what });
    }
    done.restored_events = rebuild.restored;
    rebuild.finish()?;
    let whole = target.join(WHOLE);
    std::fs::File::create(&whole).and_then(|f| f.sync_all()).map_err(Error::io("create", &whole))?;
    sync_dir(&target)?;
    change_places(dir)?;
    done.journal_rebuilt = true;
    done.notes.push(format!(
        "the journal was rebuilt; {} events came back from the sled copy; the old one is in quarantine",
        done.restored_events
    ));
    Ok(())
}

fn rewrite_head(dir: &Path, done: &mut Repair) -> Result<()> {
    let path = head::path(dir);
    // The slot that is damaged may be the newer one: what stands above the other one's watermark was acknowledged.
    let (journal, _, notes) = Journal::open(dir, SEGMENT_BYTES, Faults::default())?;
    drop(journal);
    done.notes.extend(notes);
    // Both slots: one may still hold the damage.
    let mark = head::read(dir)?.ok_or_else(|| Error::corrupt(&path, 0, "HEAD cannot be rewritten"))?;
    let mut head = head::HeadFile::open(dir)?;
    head.write(&mark)?;
    head.write(&mark)?;
    done.notes.push("HEAD was rewritten".into());
    Ok(())
}

fn change_places(dir: &Path) -> Result<()> {
    let (old, new) = (segments::folder(dir), segments::folder(&work(dir)));
    let head = head::path(dir);
    match std::fs::remove_file(&head) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(Error::io("remove", &head)(e)),
        _ => sync_dir(dir)?,
    }
    if old.exists() {
        let quarantine = dir.join("quarantine");
        std::fs::create_dir_all(&quarantine).map_err(Error::io("create folder", &quarantine))?;
        let free = (1..).map(|n| quarantine.join(format!("journal-{n}"))).find(|p| !p.exists());
        let Some(target) = free else { return Err(Error::Closed) };
        std::fs::rename(&old, &target).map_err(Error::io("rename", &old))?;
        sync_dir(&quarantine)?;
        sync_dir(dir)?;
    }
    std::fs::rename(&new, &old).map_err(Error::io("rename", &new))?;
    sync_dir(dir)?;
    let new_head = head::path(&work(dir));
    std::fs::rename(&new_head, &head).map_err(Error::io("rename", &new_head))?;
    let rest = work(dir);
    std::fs::remove_dir_all(&rest).map_err(Error::io("remove", &rest))?;
    sync_dir(dir)
}
