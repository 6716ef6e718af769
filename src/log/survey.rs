//! A walk over all segments that goes on behind damage: what is whole, and what is missing between.

use super::branches::Branches;
use super::error::{Error, Result};
use super::head::{self, Watermark};
use super::journal::{damaged_above, next_record_after};
use super::record::{self, JournalId, RECORD_HEADER, RecordHeader, SEGMENT_HEADER};
use super::segments::Segments;
use super::{BranchId, EventAt, LEDGER, MAIN};
use crate::event::digest::Digest;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// A whole record.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Whole {
    pub segment: u64,
    pub offset: u64,
    pub header: RecordHeader,
}

/// A place where records are missing or damaged.
#[derive(Debug, Clone)]
pub(crate) struct Hole {
    pub path: PathBuf,
    pub offset: u64,
    pub what: String,
    /// First event known to be hit.
    pub event: Option<EventAt>,
    /// Events (branch, first, last) that the records behind it prove to be missing.
    pub missing: Vec<(BranchId, u64, u64)>,
}

#[derive(Debug, Clone)]
pub(crate) enum Piece {
    Record(Whole),
    Hole,
}

/// The journal, damage included.
#[derive(Debug)]
pub(crate) struct Survey {
    pub files: Segments,
    pub segments: u64,
    pub bytes: u64,
    pub journal: Option<JournalId>,
    pub mark: Option<Watermark>,
    /// In journal order.
    pub pieces: Vec<Piece>,
    pub holes: Vec<Hole>,
    /// Damage that costs no record: (file, offset, what).
    pub blemishes: Vec<(PathBuf, u64, String)>,
    /// Bytes above the watermark: a record being written, or a torn tail.
    pub unacknowledged: u64,
    /// Last seq and digest of each branch's own events.
    pub heads: BTreeMap<BranchId, (u64, Digest)>,
    pub events: u64,
    /// What the whole events of the ledger say about branches.
    pub branches: Branches,
}

struct Walk {
    survey: Survey,
    /// Where it ends.
    limit: Option<Watermark>,
    next_number: u64,
    /// Hole that the next whole record closes.
    open_hole: Option<usize>,
}

/// Surveys a run folder up to the watermark, and beyond it where something was flushed that is damaged now. Reads every
/// byte of the journal.
pub(crate) fn survey(dir: &Path) -> Result<Survey> {
    let limit = match head::read(dir)? {
        Some(mark) if !damaged_above(dir, &mark)? => Some(mark),
        _ => None,
    };
    walk(dir, limit)
}

/// The same with what is whole above the watermark, which may have been acknowledged: HEAD lags after a power loss. For
/// a folder that nobody writes to.
pub(crate) fn survey_all(dir: &Path) -> Result<Survey> {
    walk(dir, None)
}

fn walk(dir: &Path, limit: Option<Watermark>) -> Result<Survey> {
    let files = Segments::lenient(dir);
    let numbers = files.list()?;
    let mark = head::read(dir)?;
    let mut blemishes = Vec::new();
    let head_path = head::path(dir);
    if mark.is_none() {
        blemishes.push((head_path, 0, "HEAD is missing or neither of its slots is whole".to_string()));
    } else if head::bad_slots(dir)? > 0 {
        blemishes.push((head_path, 0, "one of HEAD's two slots fails its checksum".to_string()));
    }
    let mut starts: Vec<(u64, Option<u64>)> = Vec::new();
    let mut journal = None;
    for number in &numbers {
        match files.header(*number).and_then(|header| files.check_headers(*number).map(|()| header)) {
            Ok(header) => {
                journal = journal.or(Some(header.journal));
                starts.push((*number, Some(header.first_record)));
            }
            Err(Error::Corrupt { path, offset, what }) => {
                if limit.is_none_or(|m| *number <= m.segment) {
                    blemishes.push((path, offset, what));
                }
                starts.push((*number, None));
            }
            Err(e) => return Err(e),
        }
    }
    let survey = Survey {
        files,
        segments: numbers.len() as u64,
        bytes: 0,
        journal,
        mark,
        pieces: Vec::new(),
        holes: Vec::new(),
        blemishes,
        unacknowledged: 0,
        heads: BTreeMap::new(),
        events: 0,
        branches: Branches::default(),
    };
    let mut walk = Walk { survey, limit, next_number: 1, open_hole: None };
    for (i, (number, _)) in starts.iter().enumerate() {
        let taken_over = starts[i + 1..]
            .iter()
            .filter(|(n, _)| limit.is_none_or(|m| *n <= m.segment))
            .filter_map(|(_, first)| *first)
            .min();
        walk.segment(*number, taken_over)?;
    }
    walk.finish();
    Ok(walk.survey)
}

/// What is wrong at a place, and the first event known to be hit.
type Flaw = (String, Option<EventAt>);

impl Walk {
    fn segment(&mut self, number: u64, taken_over: Option<u64>) -> Result<()> {
        let len = match self.survey.files.len(number) {
            // A packed segment whose own header is damaged, which is known: what it held shows as missing.
            Err(Error::Corrupt { .. }) => return Ok(()),
            len => len?,
        };
        self.survey.bytes += len;
        let limit = match self.limit {
            Some(m) if number > m.segment => 0,
            Some(m) if number == m.segment => m.offset,
            _ => len,
        };
        self.survey.unacknowledged += len.saturating_sub(limit);
        let mut at = SEGMENT_HEADER as u64;
        while at < limit {
            match self.record(number, at, limit.min(len), taken_over) {
                Ok(None) => return Ok(()),
                Ok(Some(header)) => {
                    self.accept(Whole { segment: number, offset: at, header });
                    at += header.record_len();
                }
                Err((what, event)) => {
                    self.hole(number, at, what, event);
                    match next_record_after(&self.survey.files, number, at + 1)? {
                        Some((next, _)) if next < limit => at = next,
                        _ => return Ok(()),
                    }
                }
            }
        }
        Ok(())
    }

    /// The whole record at a place (none when a later segment holds it from here on), or why there is none
    /// and the first event known to be hit.
    fn record(
        &mut self,
        number: u64,
        at: u64,
        limit: u64,
        taken_over: Option<u64>,
    ) -> std::result::Result<Option<RecordHeader>, Flaw> {
        let files = &self.survey.files;
        let ends = |n: u64| (format!("the file ends {n} bytes into a record"), None);
        if at + RECORD_HEADER as u64 > limit {
            return Err(ends(limit.saturating_sub(at)));
        }
        let bytes = files.read(number, at, RECORD_HEADER).map_err(|e| (e.to_string(), None))?;
        let header = RecordHeader::decode(&bytes).map_err(|what| (what, None))?;
        if self.survey.journal.is_some_and(|id| id != header.journal) {
            return Err(("record of another run".into(), None));
        }
        if taken_over.is_some_and(|first| header.number >= first) {
            return Ok(None);
        }
        let first = Some((header.branch, header.first_seq));
        if at + header.record_len() > limit {
            return Err((ends(limit - at).0, first));
        }
        let body = files
            .read(number, at + RECORD_HEADER as u64, header.body_len as usize)
            .map_err(|e| (e.to_string(), first))?;
        let bad_event = |what| (what, Some((header.branch, record::first_bad_event(&header, &body))));
        let frames = record::frames(&header, &body).map_err(bad_event)?;
        let last = Digest::of(&body);
        if header.branch == LEDGER {
            for frame in &frames {
                // What does not fit follows something that is lost.
                let _ = self.survey.branches.apply_frame(frame);
            }
        }
        if header.number < self.next_number {
            return Err((format!("record {} where record {} belongs", header.number, self.next_number), first));
        }
        let (expected, prev) = self.expected(header.branch);
        if header.first_seq == expected && prev.is_some_and(|p| p != header.prev) {
            return Err(("its events do not link to the event before them".into(), first));
        }
        self.survey.journal.get_or_insert(header.journal);
        self.survey.heads.insert(header.branch, (header.first_seq + u64::from(header.count) - 1, last));
        self.gap(number, at, &header, expected);
        Ok(Some(header))
    }

    /// Next seq of a branch, and the digest before it where known.
    fn expected(&self, branch: BranchId) -> (u64, Option<Digest>) {
        if let Some((seq, digest)) = self.survey.heads.get(&branch) {
            return (seq + 1, Some(*digest));
        }
        match self.survey.branches.forks().get(&branch) {
            Some(fork) => (fork.at + 1, None),
            None if branch == MAIN || branch == LEDGER => (1, Some(Digest::ZERO)),
            // Its creation is lost: whatever it begins with.
            None => (0, None),
        }
    }

    fn gap(&mut self, segment: u64, offset: u64, header: &RecordHeader, expected: u64) {
        let lost = header.number > self.next_number;
        let gap = expected > 0 && header.first_seq > expected;
        if (lost || gap) && self.open_hole.is_none() {
            let what = format!("records {}..{} are missing before this one", self.next_number, header.number);
            self.hole(segment, offset, what, None);
        }
        if let Some(hole) = self.last_hole().filter(|_| gap) {
            hole.missing.push((header.branch, expected, header.first_seq - 1));
            hole.event.get_or_insert((header.branch, expected));
        }
    }

    fn last_hole(&mut self) -> Option<&mut Hole> {
        self.survey.holes.last_mut()
    }

    fn hole(&mut self, segment: u64, offset: u64, what: String, event: Option<EventAt>) {
        if self.open_hole.is_none() {
            let path = self.survey.files.path(segment);
            self.open_hole = Some(self.survey.holes.len());
            self.survey.pieces.push(Piece::Hole);
            self.survey.holes.push(Hole { path, offset, what, event, missing: Vec::new() });
        }
    }

    fn accept(&mut self, record: Whole) {
        self.open_hole = None;
        self.next_number = record.header.number + 1;
        self.survey.events += u64::from(record.header.count);
        self.survey.pieces.push(Piece::Record(record));
    }

    fn finish(&mut self) {
        let Some(mark) = self.survey.mark else { return };
        if mark.next_record > self.next_number && self.open_hole.is_none() {
            let what = format!("records {}..{} are missing at the end", self.next_number, mark.next_record);
            let segment = mark.segment;
            self.hole(segment, mark.offset, what, None);
        }
        // The end of the journal is lost: the next event of the branch written last is hit.
        if self.open_hole.is_some() {
            let last = self.survey.pieces.iter().rev().find_map(|p| match p {
                Piece::Record(r) => Some((r.header.branch, r.header.first_seq + u64::from(r.header.count))),
                Piece::Hole => None,
            });
            let event = last.unwrap_or((MAIN, 1));
            if let Some(hole) = self.last_hole() {
                hole.event.get_or_insert(event);
            }
        }
    }
}
