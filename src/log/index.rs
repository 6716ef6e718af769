//! Where every event of the journal stands: one small entry per record, built from record headers.

use super::error::{Error, Result};
use super::head::Watermark;
use super::record::{JournalId, MAX_SEQ, RECORD_HEADER, RecordHeader, SEGMENT_HEADER, SegmentHeader};
use super::{BranchId, LEDGER, MAIN};
use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

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

/// A branch other than main.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Branch {
    /// Name, unique in the run folder.
    pub name: String,
    /// Branch it was forked from.
    pub parent: BranchId,
    /// Last seq shared with the parent.
    pub at: u64,
    /// Settings changed from here on, canonical JSON text.
    pub settings: String,
}

/// Segment files of a run folder, opened once.
#[derive(Debug)]
pub struct Segments {
    folder: PathBuf,
    open: Mutex<BTreeMap<u64, Arc<File>>>,
}

impl Segments {
    /// Of a run folder; touches nothing.
    pub fn new(dir: &Path) -> Segments {
        Segments { folder: folder(dir), open: Mutex::new(BTreeMap::new()) }
    }

    /// Path of a segment.
    pub fn path(&self, segment: u64) -> PathBuf {
        self.folder.join(format!("{segment:012}.seg"))
    }

    /// The open file of a segment.
    pub fn file(&self, segment: u64) -> Result<Arc<File>> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(file) = open.get(&segment) {
            return Ok(file.clone());
        }
        let path = self.path(segment);
        let file = Arc::new(File::open(&path).map_err(Error::io("open", &path))?);
        open.insert(segment, file.clone());
        Ok(file)
    }

    /// Numbers of the segment files that exist, ascending.
    pub fn list(&self) -> Result<Vec<u64>> {
        let entries = match std::fs::read_dir(&self.folder) {
            Ok(e) => e,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(e) => return Err(Error::io("list", &self.folder)(e)),
        };
        let mut numbers = Vec::new();
        for entry in entries {
            let name = entry.map_err(Error::io("list", &self.folder))?.file_name();
            let number = name.to_str().and_then(|n| n.strip_suffix(".seg")).and_then(|n| n.parse::<u64>().ok());
            numbers.extend(number);
        }
        numbers.sort_unstable();
        Ok(numbers)
    }

    /// Length of a segment file, bytes.
    pub fn len(&self, segment: u64) -> Result<u64> {
        let path = self.path(segment);
        Ok(self.file(segment)?.metadata().map_err(Error::io("stat", &path))?.len())
    }

    /// Bytes of a segment.
    pub fn read(&self, segment: u64, offset: u64, len: usize) -> Result<Vec<u8>> {
        let file = self.file(segment)?;
        let mut bytes = vec![0; len];
        file.read_exact_at(&mut bytes, offset).map_err(|e| self.short_read(segment, offset, len, e))?;
        Ok(bytes)
    }

    fn short_read(&self, segment: u64, offset: u64, len: usize, e: std::io::Error) -> Error {
        let path = self.path(segment);
        if e.kind() == std::io::ErrorKind::UnexpectedEof {
            return Error::corrupt(&path, offset, format!("the file ends inside the {len} bytes that belong here"));
        }
        Error::io("read", &path)(e)
    }

    /// Header of a segment.
    pub fn header(&self, segment: u64) -> Result<SegmentHeader> {
        let bytes = self.read(segment, 0, SEGMENT_HEADER)?;
        let header = SegmentHeader::decode(&bytes).map_err(|what| Error::corrupt(&self.path(segment), 0, what))?;
        if header.segment != segment {
            let what = format!("it says it is segment {}: the file was renamed", header.segment);
            return Err(Error::corrupt(&self.path(segment), 0, what));
        }
        Ok(header)
    }
}

/// Folder of the segments of a run.
pub fn folder(dir: &Path) -> PathBuf {
    dir.join("journal")
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
    branches: BTreeMap<BranchId, Branch>,
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

    /// Forked branches by id.
    pub fn branches(&self) -> &BTreeMap<BranchId, Branch> {
        &self.branches
    }

    /// Whether the branch exists (main and the ledger always do).
    pub fn has_branch(&self, branch: BranchId) -> bool {
        branch == MAIN || branch == LEDGER || self.branches.contains_key(&branch)
    }

    /// Last seq of a branch's history, 0 when empty; `None` when there is no such branch.
    pub fn last_seq(&self, branch: BranchId) -> Option<u64> {
        if !self.has_branch(branch) {
            return None;
        }
        let own = self.by_branch.get(&branch).and_then(|own| own.last()).map(|i| self.records[*i].last_seq());
        Some(own.unwrap_or_else(|| self.branches.get(&branch).map_or(0, |b| b.at)))
    }

    /// The stretches (branch, first seq, last seq) that make up a branch's history, oldest first.
    pub fn history(&self, branch: BranchId) -> Option<Vec<(BranchId, u64, u64)>> {
        let mut spans = Vec::new();
        let (mut branch, mut last) = (branch, self.last_seq(branch)?);
        loop {
            let Some(fork) = self.branches.get(&branch) else {
                spans.push((branch, 1, last));
                break;
            };
            spans.push((branch, fork.at + 1, last));
            // A fork of a fork taken before its parent's own first event shares less than `at` of the parent.
            last = last.min(fork.at);
            branch = fork.parent;
        }
        spans.reverse();
        spans.retain(|(_, first, last)| first <= last);
        Some(spans)
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

    /// Registers a branch (from its ledger event); the error says why it cannot be.
    pub fn add_branch(&mut self, id: BranchId, branch: Branch) -> std::result::Result<(), String> {
        let fits = self.has_branch(branch.parent) && branch.parent != LEDGER && branch.at <= MAX_SEQ;
        if self.has_branch(id) || !fits {
            return Err(format!("branch {id} forked from {} does not fit the branches known", branch.parent));
        }
        self.branches.insert(id, branch);
        Ok(())
    }

    /// Goes on building up to `limit` (to the end of what is there without one). Bodies are not read,
    /// except of the ledger. Stops before the first thing that does not fit and says what it is.
    pub fn scan(&mut self, files: &Segments, limit: Option<&Watermark>) -> Result<Option<Bad>> {
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
            let bytes = match files.read(self.segment, self.offset, RECORD_HEADER) {
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
            let mut created = Vec::new();
            if header.branch == LEDGER {
                let body = files.read(segment, offset + RECORD_HEADER as u64, header.body_len as usize)?;
                match ledger_branches(&header, &body) {
                    Ok(branches) => created = branches,
                    Err(what) => return bad(what),
                }
            }
            if let Err(what) = self.push(segment, offset, header) {
                return Ok(Some(Bad { segment, offset, what }));
            }
            for (id, branch) in created {
                if let Err(what) = self.add_branch(id, branch) {
                    return Ok(Some(Bad { segment, offset, what }));
                }
            }
        }
    }
}

/// Branches that a ledger record creates.
fn ledger_branches(header: &RecordHeader, body: &[u8]) -> std::result::Result<Vec<(BranchId, Branch)>, String> {
    use crate::event::{Event, codec};
    let mut out = Vec::new();
    for (frame, _) in super::record::frames(header, body)? {
        let event = codec::decode_facts(frame.header.kind, frame.header.version, frame.facts)
            .map_err(|e| format!("ledger event {}: {e}", frame.header.seq))?;
        if let Event::BranchCreated(e) = event {
            out.push((e.branch, Branch { name: e.name, parent: e.parent, at: e.at, settings: e.settings }));
        }
    }
    Ok(out)
}
