//! `verify`: is every byte of a run what it was when it was acknowledged?

use super::branches::{Span, owner};
use super::collect::size;
use super::error::{Error, Result};
use super::record::{self, RECORD_HEADER};
use super::sled_store::SledStore;
use super::survey::{Piece, Survey, Whole, survey};
use super::{BranchId, EventAt, MAIN, Reader, blob, snapshot};
use crate::event::digest::{Digest, FactsDigest};
use crate::event::{codec, frame};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Tries of 20 ms to get at a sled copy that may be in use.
const SLED_TRIES: u32 = 5;

/// Something that is not as it should be.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Finding {
    /// The file or folder.
    pub path: PathBuf,
    /// Where in it, bytes.
    pub offset: Option<u64>,
    /// First event (branch, seq) that is hit, as far as known.
    pub event: Option<EventAt>,
    /// What was found.
    pub what: String,
    /// What to do.
    pub remedy: &'static str,
}

/// How the sled copy compares with the journal.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum SledCheck {
    /// There is none; the next opening for writing makes it.
    Absent,
    /// It could not be opened, usually because the run is being written.
    Skipped(String),
    /// Compared event by event.
    Compared {
        /// Events that are equal.
        equal: u64,
        /// Events it does not hold yet (it is filled behind the journal).
        behind: u64,
    },
}

impl std::fmt::Display for SledCheck {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            SledCheck::Absent => write!(f, "no sled copy yet"),
            SledCheck::Skipped(why) => write!(f, "sled copy not compared: {why}"),
            SledCheck::Compared { equal, behind: 0 } => write!(f, "sled copy equal in all {equal} events"),
            SledCheck::Compared { equal, behind } => {
                write!(
                    f,
                    "sled copy equal in {equal} events, {behind} not filled yet (the next resume or --repair does)"
                )
            }
        }
    }
}

/// Bytes on disk, by what they are for.
#[derive(Debug, Clone, Default, PartialEq, serde::Serialize)]
pub struct Space {
    /// Frames of all whole events, as they are written.
    pub frames: u64,
    /// Segment files.
    pub journal: u64,
    /// The sled copy.
    pub sled: u64,
    /// Payload files.
    pub blobs: u64,
    /// Snapshots and checkpoints: caches.
    pub caches: u64,
    /// What damage and repairs left.
    pub quarantine: u64,
    /// (journal + sled) / frames; 0 without events.
    pub factor: f64,
}

impl Space {
    fn of(dir: &Path, frames: u64) -> Space {
        let of = |name: &str| size(&dir.join(name));
        let (journal, sled) = (size(&super::segments::folder(dir)), size(&SledStore::path(dir)));
        let factor = if frames == 0 { 0.0 } else { (journal + sled) as f64 / frames as f64 };
        let caches = of("snapshots") + of("checkpoints");
        Space { frames, journal, sled, blobs: of("blobs"), caches, quarantine: of("quarantine"), factor }
    }
}

/// What `verify` found.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct Report {
    /// Segment files.
    pub segments: u64,
    /// Whole records.
    pub records: u64,
    /// Whole events of all branches.
    pub events: u64,
    /// Bytes of the segments, as they are before they are compressed.
    pub bytes: u64,
    /// Bytes on disk.
    pub space: Space,
    /// Payload files that events refer to.
    pub blobs: u64,
    /// Bytes above the watermark: being written, or a torn tail that the next opening moves away.
    pub unacknowledged_bytes: u64,
    /// Own events of each branch: (branch, last seq, chain digest in hex).
    pub heads: Vec<(BranchId, u64, String)>,
    /// Facts digest of main, hex; empty when main has damage.
    pub facts_digest: String,
    /// The sled copy.
    pub sled: SledCheck,
    /// Everything wrong, the first bad event first.
    pub findings: Vec<Finding>,
}

impl Report {
    /// Nothing is wrong.
    pub fn is_ok(&self) -> bool {
        self.findings.is_empty()
    }

    /// First event that is hit by damage.
    pub fn first_bad_event(&self) -> Option<EventAt> {
        self.findings.iter().find_map(|f| f.event)
    }
}

const REPAIR: &str = "run `coevolve verify --repair`";
const DELETE: &str = "it is a cache: delete it, or run `coevolve verify --repair`";
const RESTORE: &str = "restore the file from a copy of the run";

/// Reads every byte of a run folder and compares the sled copy. Takes no lock and changes nothing of the run.
///
/// # Errors
/// [`Error::Empty`] and [`Error::Gone`] when there is nothing to look at, I/O; damage is in the report.
pub fn verify(dir: &Path) -> Result<Report> {
    let survey = survey(dir)?;
    if survey.segments == 0 && !SledStore::path(dir).is_dir() {
        return Err(Error::nothing_in(dir));
    }
    let mut findings: Vec<Finding> = Vec::new();
    for (path, offset, what) in &survey.blemishes {
        let (path, what) = (path.clone(), what.clone());
        findings.push(Finding { path, offset: Some(*offset), event: None, what, remedy: REPAIR });
    }
    for hole in &survey.holes {
        let (path, what) = (hole.path.clone(), hole.what.clone());
        findings.push(Finding { path, offset: Some(hole.offset), event: hole.event, what, remedy: REPAIR });
    }
    if survey.segments == 0 {
        let what = "there are no segments".to_string();
        let path = super::segments::folder(dir);
        findings.push(Finding { path, offset: None, event: Some((MAIN, 1)), what, remedy: REPAIR });
    }
    let last = survey.heads.get(&MAIN).map_or(0, |(seq, _)| *seq);
    let history = survey.branches.view(MAIN, survey.branches.head(MAIN, last));
    let facts = Some(FactsDigest::new());
    let mut contents = Contents { facts, history, blobs: BTreeSet::new(), findings: Vec::new() };
    let mut records = 0;
    for record in whole(&survey) {
        records += 1;
        contents.check(dir, &survey, record)?;
    }
    findings.append(&mut contents.findings);
    if survey.holes.is_empty() && survey.segments > 0 {
        check_forks(dir, &survey, &mut findings)?;
    }
    let sled = compare_sled(dir, &survey, &mut findings)?;
    for (path, what) in snapshot::damaged(dir)? {
        findings.push(Finding { path, offset: None, event: None, what, remedy: DELETE });
    }
    // Findings that name an event come first, in order of seq.
    findings.sort_by_key(|f| (f.event.is_none(), f.event.map(|(branch, seq)| (seq, branch))));
    let facts = contents.facts.filter(|_| survey.holes.is_empty() && survey.segments > 0);
    Ok(Report {
        segments: survey.segments,
        records,
        events: survey.events,
        bytes: survey.bytes,
        space: Space::of(dir, whole(&survey).map(|r| u64::from(r.header.body_len)).sum()),
        blobs: contents.blobs.len() as u64,
        unacknowledged_bytes: survey.unacknowledged,
        heads: survey.heads.iter().map(|(b, (seq, digest))| (*b, *seq, digest.to_string())).collect(),
        facts_digest: facts.map(|f| f.value().to_string()).unwrap_or_default(),
        sled,
        findings,
    })
}

/// Whether the first record of every fork links to the event it was forked at.
fn check_forks(dir: &Path, survey: &Survey, findings: &mut Vec<Finding>) -> Result<()> {
    let mut first: BTreeMap<BranchId, &Whole> = BTreeMap::new();
    for record in whole(survey) {
        first.entry(record.header.branch).or_insert(record);
    }
    let reader = match Reader::open(dir) {
        Ok(reader) => reader,
        // What keeps it from being read was found already.
        Err(_) if !findings.is_empty() => return Ok(()),
        Err(error) => return Err(error),
    };
    for (&branch, fork) in survey.branches.forks() {
        let Some(record) = first.get(&branch).filter(|r| r.header.first_seq == fork.at + 1) else { continue };
        if reader.digest(branch, fork.at)? != record.header.prev {
            let event = (branch, fork.at + 1);
            let what = format!("event {}:{} does not link to the event it was forked at", event.0, event.1);
            let (path, offset) = (survey.files.path(record.segment), Some(record.offset));
            findings.push(Finding { path, offset, event: Some(event), what, remedy: REPAIR });
        }
    }
    Ok(())
}

fn whole(survey: &Survey) -> impl Iterator<Item = &Whole> {
    whole_of(&survey.pieces)
}

/// The whole records among pieces.
pub(crate) fn whole_of(pieces: &[Piece]) -> impl Iterator<Item = &Whole> {
    pieces.iter().filter_map(|p| match p {
        Piece::Record(r) => Some(r),
        Piece::Hole => None,
    })
}

/// What is inside the frames: payloads that decode, blobs that are there.
struct Contents {
    /// `None` after an event of main that does not decode.
    facts: Option<FactsDigest>,
    /// Events of main as it stands.
    history: Vec<Span>,
    blobs: BTreeSet<Digest>,
    findings: Vec<Finding>,
}

impl Contents {
    fn check(&mut self, dir: &Path, survey: &Survey, record: &Whole) -> Result<()> {
        let body =
            survey.files.read(record.segment, record.offset + RECORD_HEADER as u64, record.header.body_len as usize)?;
        // Checked by the survey; a run that is being written does not change below the watermark.
        let Ok(frames) = record::frames(&record.header, &body) else { return Ok(()) };
        for frame in frames {
            let frame::Header { branch, seq, kind, version, .. } = frame.header;
            let payload = match frame.blob() {
                None => Ok(None),
                Some((digest, len)) => {
                    self.blobs.insert(digest);
                    for (path, what) in blob::damaged_copies(dir, &digest, len) {
                        let event = Some((branch, seq));
                        self.findings.push(Finding { path, offset: None, event, what, remedy: REPAIR });
                    }
                    blob::read(dir, &digest, len).map(Some).map_err(|what| (blob::path(dir, &digest), what, RESTORE))
                }
            };
            let (mut scratch, blob) = (Vec::new(), payload);
            let decoded = blob.as_ref().map_err(Clone::clone).and_then(|blob| {
                let facts = blob.as_deref().unwrap_or(frame.facts);
                let view = codec::view(kind, version, facts, &mut scratch);
                let meta = codec::decode_meta(frame.header.meta_version, frame.meta);
                let named = |e: codec::Error| {
                    (survey.files.path(record.segment), e.to_string(), "use the coevolve that wrote it")
                };
                meta.map_err(named)?;
                view.map_err(named)
            });
            match decoded {
                Ok(view) => {
                    if branch == MAIN
                        && owner(&self.history, seq).is_some()
                        && let Some(facts) = &mut self.facts
                        && facts.add_view(&view).is_err()
                    {
                        self.facts = None;
                    }
                }
                Err((path, what, remedy)) => {
                    if branch == MAIN {
                        self.facts = None;
                    }
                    let offset = Some(record.offset).filter(|_| remedy != RESTORE);
                    self.findings.push(Finding { path, offset, event: Some((branch, seq)), what, remedy });
                }
            }
        }
        Ok(())
    }
}

fn compare_sled(dir: &Path, survey: &Survey, findings: &mut Vec<Finding>) -> Result<SledCheck> {
    let path = SledStore::path(dir);
    if !path.is_dir() {
        return Ok(SledCheck::Absent);
    }
    let store = match SledStore::open_within(&path, SLED_TRIES) {
        Ok(store) => store,
        Err(e) => {
            let text = e.to_string();
            // sled tells its reasons in words only.
            let busy = text.contains("WouldBlock");
            let barred = ["read-only", "readonly", "permission denied"].iter().any(|w| text.to_lowercase().contains(w));
            if busy || barred {
                let why = if busy { "another process has it open" } else { "the folder cannot be written to" };
                return Ok(SledCheck::Skipped(why.into()));
            }
            findings.push(Finding { path, offset: None, event: None, what: text, remedy: REPAIR });
            return Ok(SledCheck::Skipped("it does not open".into()));
        }
    };
    match compare(&store, survey) {
        Ok((check, None)) => Ok(check),
        Ok((check, Some((event, what)))) => {
            findings.push(Finding { path, offset: None, event: Some(event), what, remedy: REPAIR });
            Ok(check)
        }
        Err(e) => {
            findings.push(Finding { path, offset: None, event: None, what: e.to_string(), remedy: REPAIR });
            Ok(SledCheck::Skipped("it cannot be read".into()))
        }
    }
}

/// An event and how the two copies of it differ.
pub(crate) type Difference = (EventAt, String);

/// Compares event by event; the first one that should be there and is not, or differs.
pub(crate) fn compare(store: &SledStore, survey: &Survey) -> Result<(SledCheck, Option<Difference>)> {
    let position = store.position()?.filter(|(id, _)| Some(*id) == survey.journal);
    let filled = position.map_or(0, |(_, at)| at);
    let (mut equal, mut behind, mut bad) = (0u64, 0u64, None);
    if position.is_none() && !store.branch_ids()?.is_empty() {
        bad = Some(((MAIN, 1), "it belongs to another run, or its position is lost".to_string()));
    }
    let mut ordinal = 0;
    for record in whole(survey) {
        let body =
            survey.files.read(record.segment, record.offset + RECORD_HEADER as u64, record.header.body_len as usize)?;
        let Ok(frames) = record::frames(&record.header, &body) else { continue };
        let last = record.header.first_seq + u64::from(record.header.count) - 1;
        let copies = store.range(record.header.branch, record.header.first_seq, last, usize::MAX)?;
        let mut copies = copies.into_iter().peekable();
        for frame in frames {
            let seq = frame.header.seq;
            let copy = copies.next_if(|(s, _)| *s == seq);
            match copy {
                Some((_, bytes)) if bytes == frame.bytes => equal += 1,
                None if ordinal >= filled || !survey.holes.is_empty() => behind += 1,
                other => {
                    let what = if other.is_some() { "differs from the journal" } else { "is missing" };
                    let what = format!("event {}:{seq} {what} in the sled copy", record.header.branch);
                    bad.get_or_insert(((record.header.branch, seq), what));
                }
            }
            ordinal += 1;
        }
    }
    if survey.holes.is_empty() && survey.segments > 0 {
        for branch in store.branch_ids()? {
            let ours = survey.heads.get(&branch).map_or(0, |(seq, _)| *seq);
            if let Some(last) = store.last(branch)?.filter(|last| *last > ours) {
                let what = format!("event {branch}:{last} is not in the journal, which ends at {ours}");
                bad.get_or_insert(((branch, ours + 1), what));
            }
        }
    }
    Ok((SledCheck::Compared { equal, behind }, bad))
}
