//! A journal built anew out of the whole records of a damaged one and the frames of its sled copy.
//!
//! Nothing is taken on trust: every event has to link to the one before it.

use super::blob::sync_dir;
use super::error::{Error, Result};
use super::journal::Journal;
use super::options::Faults;
use super::record::{self, JournalId, RecordHeader};
use super::segments;
use super::sled_store::SledStore;
use super::survey::Survey;
use super::{BranchId, EventAt, LEDGER, MAIN};
use crate::event::digest::Digest;
use crate::event::{Event, codec, frame};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Length of rebuilt segments, bytes.
pub(crate) const SEGMENT_BYTES: u64 = 64 << 20;
/// Body length at which a rebuilt record is closed, bytes.
const BODY_BYTES: usize = 256 << 10;

/// A journal being built from both copies.
#[derive(Debug)]
pub(crate) struct Rebuild {
    /// The folder that is read, for messages.
    dir: PathBuf,
    target: PathBuf,
    journal: Journal,
    store: Option<SledStore>,
    heads: BTreeMap<BranchId, (u64, Digest)>,
    pub(crate) forks: BTreeMap<BranchId, EventAt>,
    /// Digests of the events at which branches are forked, once those were appended.
    fork_points: BTreeMap<EventAt, Option<Digest>>,
    pub(crate) events: u64,
    pub(crate) restored: u64,
    epoch: u64,
}

impl Rebuild {
    /// Builds in `target`, an empty folder or none yet, from the folder `dir`.
    pub(crate) fn new(
        dir: &Path,
        target: &Path,
        id: JournalId,
        store: Option<SledStore>,
        survey: &Survey,
    ) -> Result<Rebuild> {
        let mut all_forks: BTreeMap<BranchId, EventAt> = BTreeMap::new();
        let sled = store.as_ref().map(super::reader::sled_branches).transpose()?;
        for branches in [Some(&survey.branches), sled.as_ref()].into_iter().flatten() {
            all_forks.extend(branches.forks().iter().map(|(id, b)| (*id, (b.parent, b.at))));
        }
        let mut fork_points = BTreeMap::new();
        for &(parent, at) in all_forks.values() {
            let mut owner = parent;
            while let Some((above, _)) = all_forks.get(&owner).filter(|(_, shared)| at <= *shared) {
                owner = *above;
            }
            fork_points.insert((owner, at), None);
        }
        std::fs::create_dir_all(target).map_err(Error::io("create folder", target))?;
        let mut journal = Journal::create(target, id, SEGMENT_BYTES, Faults::default())?;
        journal.flush_each = false;
        Ok(Rebuild {
            dir: dir.to_path_buf(),
            target: target.to_path_buf(),
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
        Err(Error::Unrepairable { path: segments::folder(&self.dir), what })
    }

    /// Last seq of a branch so far and the digest there, if known.
    pub(crate) fn head(&self, branch: BranchId) -> (u64, Option<Digest>) {
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

    pub(crate) fn append(&mut self, header: &RecordHeader, body: &[u8]) -> Result<()> {
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
        self.heads.insert(branch, (seq + u64::from(header.count) - 1, Digest::of(body)));
        for (at, frame) in frames.iter().enumerate() {
            if let Some(point) = self.fork_points.get_mut(&(branch, frame.header.seq)) {
                *point = Some(record::digest_after(body, &frames, at));
            }
            if branch == LEDGER
                && let Ok(Event::BranchCreated(e)) =
                    codec::decode_facts(frame.header.kind, frame.header.version, frame.facts)
            {
                self.forks.insert(e.branch, (e.parent, e.at));
            }
        }
        self.epoch = header.epoch.max(self.epoch);
        self.journal.epoch = self.epoch;
        self.journal.append(*header, body)?;
        self.events += u64::from(header.count);
        Ok(())
    }

    /// Events of a branch before `next_seq` that are not there yet, from the sled copy.
    pub(crate) fn fill_up_to(&mut self, branch: BranchId, next_seq: u64) -> Result<()> {
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

    pub(crate) fn fill_to_end(&mut self, branch: BranchId) -> Result<()> {
        loop {
            let first = self.head(branch).0 + 1;
            if !self.fill_piece(branch, first, u64::MAX)? {
                return Ok(());
            }
        }
    }

    pub(crate) fn fill_all(&mut self) -> Result<()> {
        self.fill_to_end(LEDGER)?;
        let Some(store) = &self.store else { return Ok(()) };
        // Ascending: a parent has a smaller number than its forks.
        for branch in store.branch_ids()? {
            self.fill_to_end(branch)?;
        }
        Ok(())
    }

    /// Some records from the sled copy's frames; false when it has none.
    fn fill_piece(&mut self, branch: BranchId, first: u64, last: u64) -> Result<bool> {
        let records = self.records(branch, first, last)?;
        for (header, body) in &records {
            self.append(header, body)?;
            self.restored += u64::from(header.count);
        }
        Ok(!records.is_empty())
    }

    /// Some of the records that the sled copy's frames from `first` on were in: whole ones, but for the last before a
    /// frame that is damaged or not there. Empty when there is none at `first`.
    pub(crate) fn records(&self, branch: BranchId, first: u64, last: u64) -> Result<Vec<(RecordHeader, Vec<u8>)>> {
        let Some(store) = &self.store else { return Ok(Vec::new()) };
        // First seq, chain digest before it, count, frames.
        let mut records: Vec<(u64, Digest, u32, Vec<u8>)> = Vec::new();
        let mut next = first;
        // The last record may go on after what was read.
        let mut open = true;
        while open && records.len() < 2 && next <= last {
            let frames = store.range(branch, next, last, BODY_BYTES)?;
            open = !frames.is_empty();
            for (seq, bytes) in frames {
                let whole = frame::read(&bytes).ok().filter(|f| seq == next && f.bytes.len() == bytes.len());
                let Some(prev) = whole.map(|f| f.header.prev) else {
                    open = false;
                    break;
                };
                match records.last_mut().filter(|r| r.1 == prev) {
                    Some(record) => {
                        record.2 += 1;
                        record.3.extend_from_slice(&bytes);
                    }
                    None => records.push((seq, prev, 1, bytes)),
                }
                next = seq + 1;
            }
        }
        if open && next <= last {
            records.pop();
        }
        let header = |(first, prev, count, body): (u64, Digest, u32, Vec<u8>)| {
            (Rebuild::header(branch, first, count, &body, prev), body)
        };
        Ok(records.into_iter().map(header).collect())
    }

    /// The header of a record of these frames; the journal fills in the rest.
    pub(crate) fn header(branch: BranchId, first_seq: u64, count: u32, body: &[u8], prev: Digest) -> RecordHeader {
        let (body_len, body_crc) = (body.len() as u32, crc32c::crc32c(body));
        RecordHeader {
            journal: [0; 16],
            epoch: 0,
            number: 0,
            branch,
            count,
            first_seq,
            body_len,
            body_crc,
            prev,
            place: 0,
        }
    }

    /// Flushes what was built.
    pub(crate) fn finish(self) -> Result<()> {
        self.journal.sync()?;
        sync_dir(&segments::folder(&self.target))
    }
}
