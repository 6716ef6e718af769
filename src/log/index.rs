//! Where every event of the journal stands: one small entry per record, built from record headers.

use super::branches::Branches;
use super::error::{Error, Result};
use super::head::Watermark;
use super::record::{JournalId, RECORD_HEADER, RecordHeader, SEGMENT_HEADER, SegmentHeader};
use super::segments::Segments;
use super::{BranchId, LEDGER};
use crate::event::Event;
use std::collections::BTreeMap;

/// One record: where it is and which events it holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecordRef {
    /// Segment number.
    pub segment: u64,
    /// Offset of the record in it, bytes.
    pub offset: u64,
    /// Its header.
    pub header: RecordHeader,
    /// Number of events before it in the journal.
    pub ordinal: u64,
}

impl RecordRef {
    /// Seq of its last event.
    pub fn last_seq(&self) -> u64 {
        self.header.first_seq + u64::from(self.header.count) - 1
    }
}

/// The place where a scan stopped before its limit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bad {
    /// Segment number.
    pub segment: u64,
    /// Offset, bytes.
    pub offset: u64,
    /// What is wrong there.
    pub what: String,
}

/// The index, and the position up to which it was built.
#[derive(Debug, Clone, Default)]
pub struct Index {
    records: Vec<RecordRef>,
    by_branch: BTreeMap<BranchId, Vec<usize>>,
    branches: Branches,
    events: u64,
    /// Run, known after the first segment header.
    pub journal: Option<JournalId>,
    /// Segment being scanned; 0 = none yet.
    pub segment: u64,
    /// Next byte in it.
    pub offset: u64,
}

impl Index {
    /// Number of the record that follows.
    pub fn next_record(&self) -> u64 {
        self.records.last().map_or(1, |r| r.header.number + 1)
    }

    /// Number of events of all branches.
    pub fn events(&self) -> u64 {
        self.events
    }

    /// All records in journal order.
    pub fn records(&self) -> &[RecordRef] {
        &self.records
    }

    /// The record that holds the event with this ordinal.
    pub fn at_ordinal(&self, ordinal: u64) -> Option<&RecordRef> {
        let after = self.records.partition_point(|r| r.ordinal <= ordinal);
        let record = self.records.get(after.checked_sub(1)?)?;
        (ordinal < record.ordinal + u64::from(record.header.count)).then_some(record)
    }

    /// The record of `branch` itself (not its ancestors) that holds `seq`.
    pub fn locate(&self, branch: BranchId, seq: u64) -> Option<&RecordRef> {
        let own = self.by_branch.get(&branch)?;
        let after = own.partition_point(|i| self.records[*i].header.first_seq <= seq);
        let record = &self.records[own[after.checked_sub(1)?]];
        (seq <= record.last_seq()).then_some(record)
    }

    /// What the ledger says about branches.
    pub fn branches(&self) -> &Branches {
        &self.branches
    }

    /// Seq of the last event ever written to a branch (of its fork point when it has none, 0 for an empty one), undone
    /// or not; `None` when there is no such branch.
    pub fn last_seq(&self, branch: BranchId) -> Option<u64> {
        if !self.branches.has(branch) {
            return None;
        }
        let own = self.by_branch.get(&branch).and_then(|own| own.last()).map(|i| self.records[*i].last_seq());
        Some(own.unwrap_or_else(|| self.branches.base(branch)))
    }

    /// Adds the next record of the journal; the error says why it cannot follow.
    pub fn push(&mut self, segment: u64, offset: u64, header: RecordHeader) -> std::result::Result<RecordRef, String> {
        if header.number != self.next_record() {
            return Err(format!("record {} where record {} belongs", header.number, self.next_record()));
        }
        let last = self.last_seq(header.branch).ok_or_else(|| format!("branch {} was never created", header.branch))?;
        if header.first_seq != last + 1 {
            return Err(format!("branch {} goes on with event {} after event {last}", header.branch, header.first_seq));
        }
        let record = RecordRef { segment, offset, header, ordinal: self.events };
        self.events += u64::from(header.count);
        self.by_branch.entry(header.branch).or_default().push(self.records.len());
        self.records.push(record);
        self.segment = segment;
        self.offset = offset + header.record_len();
        Ok(record)
    }

    /// Takes an event of the ledger; the error says why it cannot be.
    pub fn apply(&mut self, event: &Event) -> std::result::Result<(), String> {
        self.branches.apply(event)
    }

    /// Goes on building up to `limit` (to the end of what is there without one). Bodies are not read,
    /// except of the ledger. Stops before the first thing that does not fit and says what it is.
    pub fn scan(&mut self, files: &Segments, limit: Option<&Watermark>) -> Result<Option<Bad>> {
        // HEAD is not read at one moment: between two writes of it an older one may show, of a segment before.
        if limit.is_some_and(|l| l.segment < self.segment) {
            return Ok(None);
        }
        // Segment number and first record of every segment that may matter, from the current one on.
        let mut starts: Vec<(u64, Result<SegmentHeader>)> = Vec::new();
        if limit.is_none_or(|l| l.segment != self.segment) {
            for number in files.list()? {
                if number > self.segment && limit.is_none_or(|l| number <= l.segment) {
                    starts.push((number, files.header(number)));
                }
            }
        }
        loop {
            // The segment that takes over: the later one with the smallest first record.
            let successor = starts
                .iter()
                .filter(|(n, _)| *n > self.segment)
                .filter_map(|(n, h)| h.as_ref().ok().map(|h| (h.first_record, *n)))
                .min_by_key(|(first, n)| (*first, u64::MAX - n));
            let take_over = successor.filter(|(first, _)| *first <= self.next_record());
            if let Some((_, number)) = take_over {
                let header = files.header(number)?;
                if *self.journal.get_or_insert(header.journal) != header.journal {
                    return Ok(Some(Bad { segment: number, offset: 0, what: "segment of another run".into() }));
                }
                files.forget_headers(self.segment);
                self.segment = number;
                self.offset = SEGMENT_HEADER as u64;
                continue;
            }
            let broken = starts.iter().find(|(n, h)| *n > self.segment && h.is_err());
            let end = match limit {
                Some(l) if l.segment == self.segment => l.offset,
                _ if self.segment == 0 => 0,
                _ => files.len(self.segment)?,
            };
            if self.offset >= end {
                if let Some((first, number)) = successor {
                    let what = format!("records {}..{first} are missing before this segment", self.next_record());
                    return Ok(Some(Bad { segment: number, offset: 0, what }));
                }
                if let Some((number, Err(error))) = broken {
                    let what = match error {
                        Error::Corrupt { what, .. } => what.clone(),
                        other => other.to_string(),
                    };
                    return Ok(Some(Bad { segment: *number, offset: 0, what }));
                }
                if let Some(l) = limit.filter(|l| l.next_record > self.next_record()) {
                    let what = format!("records {}..{} are missing", self.next_record(), l.next_record);
                    return Ok(Some(Bad { segment: self.segment, offset: self.offset, what }));
                }
                return Ok(None);
            }
            let bad = |what: String| Ok(Some(Bad { segment: self.segment, offset: self.offset, what }));
            if end - self.offset < RECORD_HEADER as u64 {
                return bad(format!("{} bytes where a record belongs", end - self.offset));
            }
            let bytes = match files.record_header(self.segment, self.offset) {
                Ok(bytes) => bytes,
                Err(Error::Corrupt { what, .. }) => return bad(what),
                Err(e) => return Err(e),
            };
            let header = match RecordHeader::decode(&bytes) {
                Ok(header) => header,
                Err(what) => return bad(what),
            };
            if Some(header.journal) != self.journal {
                return bad("record of another run".into());
            }
            if header.record_len() > end - self.offset {
                return bad(format!("record of {} bytes, {} are left", header.record_len(), end - self.offset));
            }
            let (segment, offset) = (self.segment, self.offset);
            let mut branches = None;
            if header.branch == LEDGER {
                let body = files.read(segment, offset + RECORD_HEADER as u64, header.body_len as usize)?;
                let mut after = self.branches.clone();
                let taken = super::record::frames(&header, &body)
                    .and_then(|frames| frames.iter().try_for_each(|frame| after.apply_frame(frame)));
                match taken {
                    Ok(()) => branches = Some(after),
                    Err(what) => return bad(what),
                }
            }
            if let Err(what) = self.push(segment, offset, header) {
                return Ok(Some(Bad { segment, offset, what }));
            }
            if let Some(after) = branches {
                self.branches = after;
            }
        }
    }
}
