//! `verify --repair`: each copy mends the other.
//!
//! The journal is rebuilt in `DIR/repair/` from its whole records and, for what is missing between them, the
//! sled copy's frames; every event must link to the one before it. Then the folders change places: HEAD is
//! removed, `journal/` moves to `quarantine/`, the new one takes its name, the new HEAD follows. A crash between
//! two of these steps is finished by the next opening.

use super::blob::sync_dir;
use super::error::{Error, Result};
use super::filler;
use super::index::{self, Segments};
use super::journal::Journal;
use super::lock::FolderLock;
use super::options::Faults;
use super::record::{self, JournalId, RECORD_HEADER, RecordHeader};
use super::sled_store::SledStore;
use super::survey::{Piece, Survey, survey};
use super::verify::{SledCheck, compare, whole_of};
use super::{BranchId, EventAt, LEDGER, MAIN, Reader, head};
use crate::event::digest::Digest;
use crate::event::{Event, codec, frame};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Length of rebuilt segments, bytes.
const SEGMENT_BYTES: u64 = 64 << 20;
/// Body length at which a rebuilt record is closed, bytes.
const BODY_BYTES: usize = 256 << 10;

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
    let _lock = FolderLock::take(dir)?;
    let mut done = Repair::default();
    finish_interrupted(dir, &mut done.notes)?;
    repair_journal(dir, &mut done)?;
    let survey = survey(dir)?;
    let path = SledStore::path(dir);
    let bad = match SledStore::open(&path).and_then(|store| compare(&store, &survey)) {
        Ok((SledCheck::Compared { behind: 0, .. }, None)) => None,
        Ok((SledCheck::Compared { behind, .. }, None)) => Some(format!("it was {behind} events behind")),
        Ok((_, Some((_, what)))) => Some(what),
        Ok((_, None)) => Some("it could not be compared".to_string()),
        Err(e) => Some(e.to_string()),
    };
    if let Some(why) = bad {
        filler::rebuild(&Reader::open(dir)?)?;
        done.sled_rebuilt = true;
        done.notes.push(format!("the sled copy was rebuilt from the journal ({why})"));
    }
    Ok(done)
}

/// Restores the journal of a folder whose segments are gone (the lock is held by the caller).
pub(crate) fn restore_lost_segments(dir: &Path, notes: &mut Vec<String>) -> Result<()> {
    finish_interrupted(dir, notes)?;
    if !Segments::new(dir).list()?.is_empty() || !SledStore::path(dir).is_dir() {
        return Ok(());
    }
    let mut done = Repair::default();
    repair_journal(dir, &mut done)?;
    notes.append(&mut done.notes);
    Ok(())
}

/// Ends a change of places that a crash interrupted.
fn finish_interrupted(dir: &Path, notes: &mut Vec<String>) -> Result<()> {
    let (new, journal) = (index::folder(&work(dir)), index::folder(dir));
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
    let survey = survey(dir)?;
    let lost_all = survey.segments == 0;
    if survey.holes.is_empty() && !lost_all {
        // Segment headers and HEAD are rewritten with the rest.
        if survey.blemishes.is_empty() {
            return Ok(());
        }
        let only_head = survey.blemishes.iter().all(|(path, ..)| *path == head::path(dir));
        if only_head {
            return rewrite_head(dir, &survey, done);
        }
    }
    let path = SledStore::path(dir);
    let store = if path.is_dir() { Some(SledStore::open(&path)?) } else { None };
    if lost_all && store.is_none() {
        return Err(Error::Empty { dir: dir.to_path_buf() });
    }
    let position = match &store {
        Some(store) => store.position()?,
        None => None,
    };
    let id = survey.journal.or(position.map(|(id, _)| id)).ok_or_else(|| Error::Empty { dir: dir.to_path_buf() })?;
    // A copy of another run is no help.
    let store = store.filter(|_| position.is_some_and(|(owner, _)| owner == id));
    let mut rebuild = Rebuild::new(dir, id, store, &survey)?;
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
        return Err(Error::Unrepairable { path: index::folder(dir), what });
    }
    done.restored_events = rebuild.restored;
    rebuild.finish()?;
    change_places(dir)?;
    done.journal_rebuilt = true;
    done.notes.push(format!(
        "the journal was rebuilt; {} events came back from the sled copy; the old one is in quarantine",
        done.restored_events
    ));
    Ok(())
}

fn rewrite_head(dir: &Path, survey: &Survey, done: &mut Repair) -> Result<()> {
    let path = head::path(dir);
    if let Some(mark) = survey.mark {
        let mut head = head::HeadFile::open(dir)?;
        head.write(&mark)?;
        head.write(&mark)?;
    } else {
        let (journal, ..) = Journal::open(dir, SEGMENT_BYTES, Faults::default())?;
        drop(journal);
        // The other slot may still hold the damage.
        let mark = head::read(dir)?.ok_or_else(|| Error::corrupt(&path, 0, "HEAD cannot be rewritten"))?;
        head::HeadFile::open(dir)?.write(&mark)?;
    }
    done.notes.push("HEAD was rewritten".into());
    Ok(())
}

fn change_places(dir: &Path) -> Result<()> {
    let (old, new) = (index::folder(dir), index::folder(&work(dir)));
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

/// A journal being built from both copies.
struct Rebuild {
    dir: PathBuf,
    journal: Journal,
    store: Option<SledStore>,
    heads: BTreeMap<BranchId, (u64, Digest)>,
    forks: BTreeMap<BranchId, EventAt>,
    /// Digests of the events at which branches are forked, once those were appended.
    fork_points: BTreeMap<EventAt, Option<Digest>>,
    events: u64,
    restored: u64,
    epoch: u64,
}

impl Rebuild {
    fn new(dir: &Path, id: JournalId, store: Option<SledStore>, survey: &Survey) -> Result<Rebuild> {
        let mut all_forks = survey.forks.clone();
        if let Some(store) = &store {
            all_forks.extend(super::reader::sled_branches(store)?.into_iter().map(|(id, b)| (id, (b.parent, b.at))));
        }
        let mut fork_points = BTreeMap::new();
        for &(parent, at) in all_forks.values() {
            let mut owner = parent;
            while let Some((above, _)) = all_forks.get(&owner).filter(|(_, shared)| at <= *shared) {
                owner = *above;
            }
            fork_points.insert((owner, at), None);
        }
        let target = work(dir);
        match std::fs::remove_dir_all(&target) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(Error::io("remove", &target)(e)),
            _ => {}
        }
        std::fs::create_dir_all(&target).map_err(Error::io("create folder", &target))?;
        let mut journal = Journal::create(&target, id, SEGMENT_BYTES, Faults::default())?;
        journal.flush_each = false;
        Ok(Rebuild {
            dir: dir.to_path_buf(),
            journal,
            store,
            heads: BTreeMap::new(),
            forks: BTreeMap::new(),
            fork_points,
            events: 0,
            restored: 0,
            epoch: 1,
        })
    }

    fn unrepairable<T>(&self, what: String) -> Result<T> {
        Err(Error::Unrepairable { path: index::folder(&self.dir), what })
    }

    /// Last seq of a branch so far and the digest there, if known.
    fn head(&self, branch: BranchId) -> (u64, Option<Digest>) {
        if let Some((seq, digest)) = self.heads.get(&branch) {
            return (*seq, Some(*digest));
        }
        match self.forks.get(&branch) {
            Some((_, at)) => (*at, self.fork_digest(branch)),
            None => (0, Some(Digest::ZERO)),
        }
    }

    /// The digest that the first event of a branch links to, when the event it was forked at is there already.
    fn fork_digest(&self, branch: BranchId) -> Option<Digest> {
        let (mut parent, at) = *self.forks.get(&branch)?;
        loop {
            if let Some(Some(digest)) = self.fork_points.get(&(parent, at)) {
                return Some(*digest);
            }
            parent = self.forks.get(&parent)?.0;
        }
    }

    fn append(&mut self, header: &RecordHeader, body: &[u8]) -> Result<()> {
        let frames = match record::frames(header, body) {
            Ok(frames) => frames,
            Err(what) => return self.unrepairable(what),
        };
        let (last, digest) = self.head(header.branch);
        let (branch, seq) = (header.branch, header.first_seq);
        if seq != last + 1 {
            return self.unrepairable(format!("event {branch}:{} is in neither copy", last + 1));
        }
        if digest.is_some_and(|d| d != header.prev) {
            return self.unrepairable(format!("event {branch}:{seq} does not link to the event before it"));
        }
        for (frame, digest) in &frames {
            self.heads.insert(branch, (frame.header.seq, *digest));
            if let Some(point) = self.fork_points.get_mut(&(branch, frame.header.seq)) {
                *point = Some(*digest);
            }
            if branch == LEDGER
                && let Ok(Event::BranchCreated(e)) =
                    codec::decode_facts(frame.header.kind, frame.header.version, frame.facts)
            {
                self.forks.insert(e.branch, (e.parent, e.at));
            }
        }
        self.epoch = header.epoch.max(self.epoch);
        self.journal.epoch = header.epoch;
        self.journal.append(*header, body)?;
        self.events += u64::from(header.count);
        Ok(())
    }

    /// Events of a branch before `next_seq` that are not there yet, from the sled copy.
    fn fill_up_to(&mut self, branch: BranchId, next_seq: u64) -> Result<()> {
        if !self.forks.contains_key(&branch) && branch != MAIN && branch != LEDGER {
            return self.unrepairable(format!("the creation of branch {branch} is in neither copy"));
        }
        while self.head(branch).0 + 1 < next_seq {
            let first = self.head(branch).0 + 1;
            if !self.fill_piece(branch, first, next_seq - 1)? {
                return self.unrepairable(format!("event {branch}:{first} is in neither copy"));
            }
        }
        Ok(())
    }

    fn fill_to_end(&mut self, branch: BranchId) -> Result<()> {
        loop {
            let first = self.head(branch).0 + 1;
            if !self.fill_piece(branch, first, u64::MAX)? {
                return Ok(());
            }
        }
    }

    fn fill_all(&mut self) -> Result<()> {
        self.fill_to_end(LEDGER)?;
        let Some(store) = &self.store else { return Ok(()) };
        // Ascending: a parent has a smaller number than its forks.
        for branch in store.branch_ids()? {
            self.fill_to_end(branch)?;
        }
        Ok(())
    }

    /// One record from the sled copy's frames; false when it has none.
    fn fill_piece(&mut self, branch: BranchId, first: u64, last: u64) -> Result<bool> {
        let Some(store) = &self.store else { return Ok(false) };
        let (mut body, mut count, mut prev) = (Vec::new(), 0u32, None);
        for (seq, bytes) in store.range(branch, first, last, BODY_BYTES)? {
            let Ok(frame) = frame::read(&bytes) else { break };
            if seq != first + u64::from(count) || frame.bytes.len() != bytes.len() {
                break;
            }
            prev.get_or_insert(frame.header.prev);
            body.extend_from_slice(&bytes);
            count += 1;
        }
        let Some(prev) = prev else { return Ok(false) };
        let header = RecordHeader {
            journal: [0; 16],
            epoch: self.epoch,
            number: 0,
            branch,
            count,
            first_seq: first,
            body_len: body.len() as u32,
            body_crc: crc32c::crc32c(&body),
            prev,
        };
        self.append(&header, &body)?;
        self.restored += u64::from(count);
        Ok(true)
    }

    fn finish(self) -> Result<()> {
        self.journal.sync()?;
        let target = work(&self.dir);
        sync_dir(&index::folder(&target))?;
        let mark = target.join(WHOLE);
        std::fs::File::create(&mark).and_then(|f| f.sync_all()).map_err(Error::io("create", &mark))?;
        sync_dir(&target)
    }
}
