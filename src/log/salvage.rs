//! `salvage`: what is intact of a damaged run, as a run of its own.
//!
//! For each branch the longest prefix of its history whose events are in one of the two copies, link to each
//! other, decode, and have their payloads. A branch whose fork point is not in that prefix of its parent is lost.
//! The damaged folder is left as it is (but for sled, which recovers when it is opened).

use super::error::{Error, Result};
use super::lock::{FolderLock, is_run};
use super::making::make_folder;
use super::reader::sled_branches;
use super::rebuild::Rebuild;
use super::record::{self, RECORD_HEADER, RecordHeader};
use super::segments;
use super::sled_store::SledStore;
use super::survey::{Piece, Survey, Whole, survey_all};
use super::verify::whole_of;
use super::{BranchId, EventAt, LEDGER, MAIN, Reader, blob};
use crate::event::digest::Digest;
use crate::event::{BranchCreated, Event, codec, frame};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// What was saved, and what was not.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize)]
pub struct Salvage {
    /// Events of all branches in the new folder.
    pub events: u64,
    /// Events that HEAD says were acknowledged; 0 = it does not say. Damage at the very end of the journal leaves
    /// nothing behind it that shows which branch they belonged to.
    pub acknowledged: u64,
    /// Events of the new folder that came from the sled copy alone.
    pub from_sled: u64,
    /// Payload files copied.
    pub blobs: u64,
    /// One entry a branch, main first.
    pub branches: Vec<SalvagedBranch>,
}

/// What became of a branch.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct SalvagedBranch {
    /// Number.
    pub branch: BranchId,
    /// Name.
    pub name: String,
    /// Last seq of its history in the new folder; 0 when the branch is lost.
    pub kept: u64,
    /// Highest seq that either copy shows to have existed.
    pub of: u64,
    /// Why it ends there; empty when nothing is lost.
    pub why: String,
}

impl Salvage {
    /// Whether events were lost.
    pub fn lost(&self) -> bool {
        self.acknowledged > self.events || self.branches.iter().any(|b| !b.why.is_empty())
    }
}

/// Copies what is intact in `dir` to `out`, which must not exist or be empty.
///
/// # Errors
/// [`Error::Exists`] when `out` holds something; [`Error::Unrepairable`] when not even the first event is intact;
/// [`Error::Locked`] while the run is being written; I/O.
pub fn salvage(dir: &Path, out: &Path) -> Result<Salvage> {
    if !is_run(dir) {
        return Err(Error::Empty { dir: dir.to_path_buf() });
    }
    make_folder(out, |folder| save(dir, folder))
}

fn save(dir: &Path, out: &Path) -> Result<Salvage> {
    let _lock = match FolderLock::take(dir) {
        // A folder that cannot be written to has no writer.
        Err(Error::Io { .. }) => None,
        lock => Some(lock?),
    };
    let survey = survey_all(dir)?;
    let path = SledStore::path(dir);
    let store = if path.is_dir() { SledStore::open(&path).ok() } else { None };
    let position = store.as_ref().and_then(|store| store.position().ok().flatten());
    let id = survey.journal.or(position.map(|(id, _)| id)).ok_or_else(|| Error::nothing_in(dir))?;
    // A copy of another run, or one whose branches cannot be told, is no help.
    let store = store.filter(|s| position.is_some_and(|(owner, _)| owner == id) && sled_branches(s).is_ok());
    let (creations, others) = ledger(&survey, store.as_ref())?;
    let last = last_seen(&survey, store.as_ref());
    let (ended, blobs) = (BTreeMap::new(), BTreeSet::new());
    let mut saved = Saved { rebuild: Rebuild::new(dir, out, id, store, &survey)?, dir, out, creations, ended, blobs };
    for piece in &survey.pieces {
        match piece {
            Piece::Record(record) if record.header.branch != LEDGER => saved.record(&survey, record)?,
            // Branches are created when their first event asks for it; holes are filled by what follows.
            Piece::Record(_) | Piece::Hole => {}
        }
    }
    let branches: BTreeSet<BranchId> =
        [MAIN].into_iter().chain(last.keys().copied()).chain(saved.creations.keys().copied()).collect();
    for branch in &branches {
        saved.fill(*branch, u64::MAX)?;
    }
    if saved.rebuild.head(MAIN).0 == 0 {
        let what = saved.ended.remove(&MAIN).unwrap_or_else(|| "the first event is in neither copy".into());
        return Err(Error::Unrepairable { path: segments::folder(dir), what });
    }
    for fact in others {
        saved.fact(fact)?;
    }
    let report = saved.report(&survey, &branches, &last);
    saved.rebuild.finish()?;
    copy_caches(dir, out)?;
    // The new folder answers for itself before this is believed.
    let reader = Reader::open(out)?;
    for branch in reader.branches().keys().chain(&[MAIN]) {
        reader.read(*branch, 1)?.try_for_each(|event| event.map(drop))?;
    }
    Ok(report)
}

/// The creation of a branch, as its ledger event says.
struct Creation {
    event: BranchCreated,
    header: frame::Header,
    facts: Vec<u8>,
    meta: Vec<u8>,
}

/// Another event of the ledger.
struct Fact {
    event: Event,
    header: frame::Header,
    meta: Vec<u8>,
}

/// The events of the ledger that either copy still has: creations by branch, the others in order.
fn ledger(survey: &Survey, store: Option<&SledStore>) -> Result<(BTreeMap<BranchId, Creation>, Vec<Fact>)> {
    let (mut found, mut others) = (BTreeMap::new(), BTreeMap::new());
    let mut add = |frame: &frame::Frame| {
        let header = frame.header;
        match codec::decode_facts(header.kind, header.version, frame.facts) {
            Ok(Event::BranchCreated(event)) => {
                let (facts, meta) = (frame.facts.to_vec(), frame.meta.to_vec());
                found.entry(event.branch).or_insert(Creation { event, header, facts, meta });
            }
            Ok(event) => {
                others.entry(header.seq).or_insert(Fact { event, header, meta: frame.meta.to_vec() });
            }
            Err(_) => {}
        }
    };
    for record in whole_of(&survey.pieces).filter(|r| r.header.branch == LEDGER) {
        let body =
            survey.files.read(record.segment, record.offset + RECORD_HEADER as u64, record.header.body_len as usize)?;
        record::frames(&record.header, &body).iter().flatten().for_each(&mut add);
    }
    if let Some(store) = store {
        for (_, bytes) in store.range(LEDGER, 1, u64::MAX, usize::MAX)? {
            frame::read(&bytes).iter().for_each(&mut add);
        }
    }
    Ok((found, others.into_values().collect()))
}

/// The highest seq of each branch that either copy shows to have existed.
fn last_seen(survey: &Survey, store: Option<&SledStore>) -> BTreeMap<BranchId, u64> {
    let mut last: BTreeMap<BranchId, u64> = BTreeMap::new();
    let mut see = |(branch, seq): EventAt| {
        let entry = last.entry(branch).or_default();
        *entry = seq.max(*entry);
    };
    survey.heads.iter().for_each(|(branch, (seq, _))| see((*branch, *seq)));
    survey.holes.iter().flat_map(|h| &h.missing).for_each(|(branch, _, to)| see((*branch, *to)));
    for branch in store.and_then(|s| s.branch_ids().ok()).unwrap_or_default() {
        see((branch, store.and_then(|s| s.last(branch).ok().flatten()).unwrap_or(0)));
    }
    last.remove(&LEDGER);
    last
}

/// The new folder while it is made.
struct Saved<'a> {
    rebuild: Rebuild,
    dir: &'a Path,
    out: &'a Path,
    creations: BTreeMap<BranchId, Creation>,
    /// Branches that go no further, and why.
    ended: BTreeMap<BranchId, String>,
    blobs: BTreeSet<Digest>,
}

impl Saved<'_> {
    fn end(&mut self, branch: BranchId, why: String) {
        self.ended.entry(branch).or_insert(why);
    }

    /// Whether a branch is in the new folder; creates it there with the first call.
    fn is_there(&mut self, branch: BranchId) -> Result<bool> {
        if branch == MAIN || self.rebuild.forks.contains_key(&branch) {
            return Ok(true);
        }
        if self.ended.contains_key(&branch) {
            return Ok(false);
        }
        let Some(creation) = self.creations.get(&branch) else {
            self.end(branch, "its creation is in neither copy".into());
            return Ok(false);
        };
        let BranchCreated { parent, at, .. } = creation.event;
        self.fill(parent, at + 1)?;
        if !self.is_there(parent)? || self.rebuild.head(parent).0 < at {
            self.end(branch, format!("event {at} of branch {parent}, where it was forked, is lost"));
            return Ok(false);
        }
        let Some(Creation { header, facts, meta, .. }) = self.creations.get(&branch) else { return Ok(false) };
        let (header, facts, meta) = (*header, facts.clone(), meta.clone());
        self.append_to_ledger(header, &facts, &meta)?;
        Ok(true)
    }

    /// Events of the ledger that are lost leave no gap: the ledger of the new folder is numbered anew.
    fn append_to_ledger(&mut self, header: frame::Header, facts: &[u8], meta: &[u8]) -> Result<()> {
        let (last, digest) = self.rebuild.head(LEDGER);
        let prev = digest.unwrap_or(Digest::ZERO);
        let mut body = Vec::new();
        frame::write(&mut body, &frame::Header { seq: last + 1, prev, ..header }, facts, meta)?;
        self.rebuild.append(&Rebuild::header(LEDGER, last + 1, 1, &body, prev), &body)
    }

    /// Takes over what the ledger says beside creations, as far as it is about what was saved.
    fn fact(&mut self, fact: Fact) -> Result<()> {
        let mut event = fact.event;
        let kept = |saved: &Self, branch| match branch == MAIN || saved.rebuild.forks.contains_key(&branch) {
            true => saved.rebuild.head(branch).0,
            false => 0,
        };
        let about = match &mut event {
            Event::BranchUndone(undone) => {
                // What was hidden may be saved in part.
                undone.at = undone.at.min(kept(self, undone.branch));
                undone.to <= undone.at
            }
            Event::BranchDeleted(deleted) => kept(self, deleted.branch) > 0,
            _ => true,
        };
        if !about {
            return Ok(());
        }
        let header = frame::Header { version: codec::newest_version(event.kind()), ..fact.header };
        self.append_to_ledger(header, &codec::facts_bytes(&event)?, &fact.meta)
    }

    /// Takes over a whole record, as far as its events are good.
    fn record(&mut self, survey: &Survey, record: &Whole) -> Result<()> {
        let RecordHeader { branch, first_seq, body_len, .. } = record.header;
        self.fill(branch, first_seq)?;
        if self.ended.contains_key(&branch) || !self.is_there(branch)? {
            return Ok(());
        }
        let body = survey.files.read(record.segment, record.offset + RECORD_HEADER as u64, body_len as usize)?;
        self.append(&record.header, &body)
    }

    /// Events of a branch before `next_seq` that are not there yet, from the sled copy.
    fn fill(&mut self, branch: BranchId, next_seq: u64) -> Result<()> {
        if !self.is_there(branch)? {
            return Ok(());
        }
        while !self.ended.contains_key(&branch) && self.rebuild.head(branch).0 + 1 < next_seq {
            let first = self.rebuild.head(branch).0 + 1;
            let records = self.rebuild.records(branch, first, next_seq - 1)?;
            if records.is_empty() {
                if next_seq == u64::MAX {
                    break;
                }
                self.end(branch, format!("event {first} is in neither copy"));
            }
            for (header, body) in records {
                let before = self.rebuild.events;
                if !self.ended.contains_key(&branch) {
                    self.append(&header, &body)?;
                }
                self.rebuild.restored += self.rebuild.events - before;
            }
        }
        Ok(())
    }

    fn append(&mut self, header: &RecordHeader, body: &[u8]) -> Result<()> {
        let branch = header.branch;
        let frames = match record::frames(header, body) {
            Ok(frames) => frames,
            Err(why) => {
                self.end(branch, why);
                return Ok(());
            }
        };
        let (mut count, mut len) = (0, 0);
        for frame in frames {
            if let Err(why) = self.take(&frame)? {
                self.end(branch, why);
                break;
            }
            count += 1;
            len += frame.bytes.len();
        }
        if count == 0 {
            return Ok(());
        }
        let header = Rebuild::header(branch, header.first_seq, count, &body[..len], header.prev);
        match self.rebuild.append(&header, &body[..len]) {
            Err(Error::Unrepairable { what, .. }) => {
                self.end(branch, what);
                Ok(())
            }
            done => done,
        }
    }

    /// Whether an event decodes and has its payload, which is copied.
    fn take(&mut self, frame: &frame::Frame) -> Result<std::result::Result<(), String>> {
        let frame::Header { kind, version, seq, .. } = frame.header;
        let payload = match frame.blob() {
            None => None,
            Some((digest, len)) => match blob::read(self.dir, &digest, len) {
                Ok(payload) => Some(payload),
                Err(what) => return Ok(Err(format!("payload {digest} of event {seq}: {what}"))),
            },
        };
        if let Err(error) = codec::decode_facts(kind, version, payload.as_deref().unwrap_or(frame.facts)) {
            return Ok(Err(format!("event {seq}: {error}")));
        }
        if let Some(payload) = payload {
            self.blobs.insert(blob::write(self.out, &payload, 1)?);
        }
        Ok(Ok(()))
    }

    fn report(&mut self, survey: &Survey, branches: &BTreeSet<BranchId>, last: &BTreeMap<BranchId, u64>) -> Salvage {
        let (events, from_sled) = (self.rebuild.events, self.rebuild.restored);
        let (blobs, acknowledged) = (self.blobs.len() as u64, survey.mark.map_or(0, |mark| mark.events));
        let mut report = Salvage { events, acknowledged, from_sled, blobs, branches: Vec::new() };
        for &branch in branches {
            let there = branch == MAIN || self.rebuild.forks.contains_key(&branch);
            let kept = if there { self.rebuild.head(branch).0 } else { 0 };
            let of = last.get(&branch).copied().unwrap_or(0).max(kept);
            let name = self.creations.get(&branch).map(|c| c.event.name.clone());
            let name = name.unwrap_or_else(|| if branch == MAIN { "main".into() } else { branch.to_string() });
            let why = self.ended.remove(&branch).unwrap_or_default();
            let why = if why.is_empty() && kept < of { format!("event {} is in neither copy", kept + 1) } else { why };
            report.branches.push(SalvagedBranch { branch, name, kept, of, why });
        }
        report
    }
}

/// What a run keeps beside its log: settings and checkpoints, which are checked when they are used.
fn copy_caches(dir: &Path, out: &Path) -> Result<()> {
    for name in ["settings.json", "checkpoints"] {
        copy(&dir.join(name), &out.join(name))?;
    }
    blob::sync_dir(out)
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    if from.is_dir() {
        std::fs::create_dir_all(to).map_err(Error::io("create folder", to))?;
        for entry in std::fs::read_dir(from).map_err(Error::io("list", from))? {
            let name = entry.map_err(Error::io("list", from))?.file_name();
            copy(&from.join(&name), &to.join(&name))?;
        }
    } else if from.is_file() {
        std::fs::copy(from, to).map_err(Error::io("copy", from))?;
    }
    Ok(())
}
