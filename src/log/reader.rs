//! Reading a run folder: no lock, nothing written, also while another process trains in it.

use super::branches::{Branch, Branches, Span, owner};
use super::error::{Error, Result};
use super::index::{Index, RecordRef};
use super::packed;
use super::record::{self, Chain, JournalId, RECORD_HEADER};
use super::segments::Segments;
use super::sled_store::SledStore;
use super::{BranchId, LEDGER, MAIN, Stamped, blob, head};
use crate::event::digest::{Digest, FactsDigest};
use crate::event::{Event, codec, frame};
use std::collections::{BTreeMap, VecDeque};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard};
use std::time::Duration;

/// Events are taken from sled in pieces of about this many bytes.
const SLED_PIECE_BYTES: usize = 1 << 20;

/// How often a follower looks for more.
const POLL: Duration = Duration::from_millis(20);

#[derive(Debug)]
enum Source {
    /// The segments, as far as HEAD says they are durable.
    Journal {
        files: Segments,
        index: RwLock<Index>,
        /// The writer of this process keeps the index up to date, and nobody else does.
        kept: bool,
    },
    /// All segments are gone: the sled copy answers.
    Sled { store: SledStore, branches: Branches },
}

#[derive(Debug)]
struct Inner {
    dir: PathBuf,
    source: Source,
    /// One thread at a time compresses.
    packing: Mutex<()>,
}

/// A handle to the durable events of a run folder. Clones share it.
#[derive(Debug, Clone)]
pub struct Reader {
    inner: Arc<Inner>,
}

impl Reader {
    /// Opens a run folder for reading. Takes no lock and writes nothing, so it works on a folder that
    /// another process trains in, on a full disk and on a read-only folder. When all segments are gone the
    /// sled copy answers (this one case needs sled's lock and a writable folder).
    ///
    /// # Errors
    /// [`Error::Empty`] when no event was ever durable here, [`Error::Gone`], [`Error::Corrupt`] for a record header below the
    /// watermark that does not fit, I/O.
    pub fn open(dir: &Path) -> Result<Reader> {
        let files = Segments::new(dir);
        if files.list()?.is_empty() {
            let path = SledStore::path(dir);
            if !path.is_dir() {
                return Err(Error::nothing_in(dir));
            }
            let store = SledStore::open(&path)?;
            let branches = sled_branches(&store)?;
            if store.last(MAIN)?.is_none() {
                return Err(Error::nothing_in(dir));
            }
            let source = Source::Sled { store, branches };
            return Ok(Reader { inner: Arc::new(Inner { dir: dir.to_path_buf(), source, packing: Mutex::new(()) }) });
        }
        let reader = Reader::of_journal(dir, files, Index::default(), false);
        reader.refresh()?;
        if reader.events() == 0 {
            return Err(Error::nothing_in(dir));
        }
        Ok(reader)
    }

    /// Whether everything that HEAD says was acknowledged can be read here.
    ///
    /// # Errors
    /// [`Error::Short`]; [`Error::Corrupt`] when a part of HEAD is damaged, so that it may not say all; as
    /// [`Reader::refresh`].
    pub fn complete(&self) -> Result<()> {
        let dir = &self.inner.dir;
        let mut tries = 3;
        // A writer may be in the middle of a slot.
        while head::bad_slots(dir)? > 0 {
            if tries == 0 {
                let what = "one of its two slots fails its checksum: the last commit may be missing here";
                return Err(Error::corrupt(&head::path(dir), 0, what));
            }
            tries -= 1;
            std::thread::sleep(POLL);
        }
        let Some(mark) = head::read(dir)? else { return Ok(()) };
        let there = match &self.inner.source {
            // HEAD tells a little before the writer's index does, and nothing of what that does not know was acknowledged.
            Source::Journal { kept: true, .. } => return Ok(()),
            Source::Journal { .. } => self.refresh()?,
            Source::Sled { store, .. } => store.position()?.map_or(0, |(_, events)| events),
        };
        match there < mark.events {
            true => Err(Error::Short { dir: dir.clone(), there, events: mark.events }),
            false => Ok(()),
        }
    }

    /// Id, records and files of the journal as it is known now.
    pub(crate) fn journal(&self) -> Result<(JournalId, Vec<RecordRef>, &Segments)> {
        match &self.inner.source {
            Source::Journal { files, index, .. } => {
                let index = index.read().unwrap_or_else(PoisonError::into_inner);
                let id = index.journal.ok_or_else(|| Error::nothing_in(&self.inner.dir))?;
                Ok((id, index.records().to_vec(), files))
            }
            Source::Sled { .. } => {
                Err(Error::corrupt(&super::segments::folder(&self.inner.dir), 0, "there are no segments"))
            }
        }
    }

    /// Over an index that the caller keeps up to date (the writer).
    pub(crate) fn over(dir: &Path, files: Segments, index: Index) -> Reader {
        Reader::of_journal(dir, files, index, true)
    }

    fn of_journal(dir: &Path, files: Segments, index: Index, kept: bool) -> Reader {
        let source = Source::Journal { files, index: RwLock::new(index), kept };
        Reader { inner: Arc::new(Inner { dir: dir.to_path_buf(), source, packing: Mutex::new(()) }) }
    }

    /// The run folder.
    pub fn dir(&self) -> &Path {
        &self.inner.dir
    }

    /// Whether the answers come from the sled copy because all segments are gone.
    pub fn is_from_sled(&self) -> bool {
        matches!(self.inner.source, Source::Sled { .. })
    }

    /// Looks for events that became durable since; returns the number of events of all branches. The reader of a log that
    /// is open for writing needs no looking.
    ///
    /// # Errors
    /// [`Error::Corrupt`] when what follows below the watermark does not fit, I/O.
    pub fn refresh(&self) -> Result<u64> {
        let Source::Journal { files, index, kept: false } = &self.inner.source else { return Ok(self.events()) };
        let mark = head::read(&self.inner.dir)?;
        let mut index = index.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(bad) = index.scan(files, mark.as_ref())?
            // Without a watermark what does not fit is taken for a record being written.
            && mark.is_some()
        {
            return Err(Error::corrupt(&files.path(bad.segment), bad.offset, bad.what));
        }
        Ok(index.events())
    }

    /// Waits (polling) until more than `events` events of all branches are durable, at most `timeout`; returns their
    /// number. For following a run that another process writes.
    ///
    /// # Errors
    /// As [`Reader::refresh`].
    pub fn wait_beyond(&self, events: u64, timeout: Duration) -> Result<u64> {
        let tries = (timeout.as_millis() / POLL.as_millis()).max(1);
        for _ in 0..tries {
            if self.refresh()? > events {
                break;
            }
            std::thread::sleep(POLL);
        }
        self.refresh()
    }

    fn index(&self) -> Option<RwLockReadGuard<'_, Index>> {
        match &self.inner.source {
            Source::Journal { index, .. } => Some(index.read().unwrap_or_else(PoisonError::into_inner)),
            Source::Sled { .. } => None,
        }
    }

    /// Changes the index (the writer, after a flush).
    pub(crate) fn with_index<T>(&self, f: impl FnOnce(&mut Index) -> T) -> Option<T> {
        match &self.inner.source {
            Source::Journal { index, .. } => Some(f(&mut index.write().unwrap_or_else(PoisonError::into_inner))),
            Source::Sled { .. } => None,
        }
    }

    /// Number of durable events of all branches (0 when read from sled).
    pub fn events(&self) -> u64 {
        self.index().map_or(0, |i| i.events())
    }

    /// Bytes of the frames of all durable events, as they are before anything is compressed (0 when read from sled).
    pub fn frame_bytes(&self) -> u64 {
        self.index().map_or(0, |i| i.records().iter().map(|r| u64::from(r.header.body_len)).sum())
    }

    /// Every record known, in journal order.
    pub(crate) fn records(&self) -> Vec<RecordRef> {
        self.index().map_or_else(Vec::new, |i| i.records().to_vec())
    }

    /// Which run the segments belong to.
    pub(crate) fn journal_id(&self) -> Option<JournalId> {
        self.index().and_then(|i| i.journal)
    }

    /// The frame of one event of a branch itself.
    pub(crate) fn raw(&self, branch: BranchId, seq: u64) -> Result<Option<Vec<u8>>> {
        let mut found = None;
        self.visit(branch, seq, seq, |frame| {
            if frame.header.seq == seq {
                found = Some(frame.bytes.to_vec());
            }
            Ok(())
        })?;
        Ok(found)
    }

    /// Branches other than main that are not deleted, by id.
    pub fn branches(&self) -> BTreeMap<BranchId, Branch> {
        self.with_branches(Branches::live)
    }

    pub(crate) fn with_branches<T>(&self, f: impl FnOnce(&Branches) -> T) -> T {
        match (&self.inner.source, self.index()) {
            (Source::Sled { branches, .. }, _) => f(branches),
            (Source::Journal { .. }, Some(index)) => f(index.branches()),
            (Source::Journal { .. }, None) => f(&Branches::default()),
        }
    }

    /// Id of a branch by its name (`main` is 0, `ledger` holds the branch facts) or its number.
    ///
    /// # Errors
    /// [`Error::NoBranch`].
    pub fn branch(&self, name: &str) -> Result<BranchId> {
        match name {
            "main" => return Ok(MAIN),
            "ledger" => return Ok(LEDGER),
            _ => {}
        }
        let branches = self.branches();
        if let Some((id, _)) = branches.iter().find(|(_, b)| b.name == name) {
            return Ok(*id);
        }
        match name.parse::<BranchId>() {
            Ok(id) if id == MAIN || branches.contains_key(&id) => Ok(id),
            _ => Err(Error::NoBranch { branch: name.to_string() }),
        }
    }

    /// Last seq of a branch's history as it stands; 0 when it is empty. After an undo, the event it went back to.
    ///
    /// # Errors
    /// [`Error::NoBranch`]; sled.
    pub fn head(&self, branch: BranchId) -> Result<u64> {
        if !self.with_branches(|b| b.is_live(branch)) {
            return Err(Error::NoBranch { branch: branch.to_string() });
        }
        let last = self.last(branch)?;
        Ok(self.with_branches(|b| b.head(branch, last)))
    }

    /// Seq of the last event ever written to a branch, undone or not: the next one has the seq after it.
    ///
    /// # Errors
    /// [`Error::NoBranch`]; sled.
    pub fn last(&self, branch: BranchId) -> Result<u64> {
        let none = || Error::NoBranch { branch: branch.to_string() };
        match &self.inner.source {
            Source::Journal { .. } => self.index().and_then(|i| i.last_seq(branch)).ok_or_else(none),
            Source::Sled { store, branches } => match store.last(branch)? {
                _ if !branches.has(branch) => Err(none()),
                Some(seq) => Ok(seq),
                None => Ok(branches.base(branch)),
            },
        }
    }

    /// The stretches (branch, first seq, last seq) that make up a branch's history, oldest first.
    ///
    /// # Errors
    /// [`Error::NoBranch`]; sled.
    pub fn history(&self, branch: BranchId) -> Result<Vec<Span>> {
        let head = self.head(branch)?;
        Ok(self.view(branch, head))
    }

    /// The same as of event `seq` of it, also one that was undone later.
    pub fn view(&self, branch: BranchId, seq: u64) -> Vec<Span> {
        self.with_branches(|b| b.view(branch, seq))
    }

    /// Durable events of a branch's history with seq >= `from`, in order, up to its present head. Every record's
    /// checksum and the chain of digests are checked on the way; the iterator ends after its first error.
    ///
    /// # Errors
    /// [`Error::NoBranch`].
    pub fn read(&self, branch: BranchId, from: u64) -> Result<Events> {
        Ok(self.read_view(self.history(branch)?, from))
    }

    /// The same for a branch as of event `upto`, also one that was undone later.
    ///
    /// # Errors
    /// [`Error::NoBranch`], [`Error::NoEvent`].
    pub fn read_as_of(&self, branch: BranchId, from: u64, upto: u64) -> Result<Events> {
        self.head(branch)?;
        let last = self.last(branch)?;
        if upto > last {
            return Err(Error::NoEvent { branch, seq: upto, head: last });
        }
        Ok(self.read_view(self.view(branch, upto), from))
    }

    fn read_view(&self, spans: Vec<Span>, from: u64) -> Events {
        let mut spans: VecDeque<_> = spans.into();
        for span in &mut spans {
            span.1 = span.1.max(from);
        }
        spans.retain(|(_, first, last)| first <= last);
        Events { reader: self.clone(), spans, ready: VecDeque::new(), last: 0, chain: Chain::default(), failed: false }
    }

    /// Facts digest of a branch's history up to its present head.
    ///
    /// # Errors
    /// As [`Reader::sweep`].
    pub fn facts_digest(&self, branch: BranchId) -> Result<Digest> {
        let mut facts = FactsDigest::new();
        self.sweep(branch, 1, u64::MAX, |swept| facts.add_view(&swept.view).map_err(Error::from))?;
        Ok(facts.value())
    }

    /// The branch whose own event `seq` of a branch is, undone or not.
    fn owner(&self, branch: BranchId, seq: u64) -> Result<BranchId> {
        let head = self.last(branch)?;
        let owner = (seq <= head).then(|| owner(&self.view(branch, seq), seq)).flatten();
        owner.ok_or(Error::NoEvent { branch, seq, head })
    }

    /// One event of a branch, also one that was undone.
    ///
    /// # Errors
    /// [`Error::NoBranch`], [`Error::NoEvent`], damage, I/O.
    pub fn event(&self, branch: BranchId, seq: u64) -> Result<Stamped> {
        let owner = self.owner(branch, seq)?;
        let mut found = None;
        self.visit(owner, seq, seq, |frame| {
            if frame.header.seq == seq {
                found = Some(self.stamp(&frame)?);
            }
            Ok(())
        })?;
        found.ok_or(Error::NoEvent { branch, seq, head: seq })
    }

    /// Chain digest after event `seq` of a branch, also one that was undone; zero for seq 0.
    ///
    /// # Errors
    /// As [`Reader::event`].
    pub fn digest(&self, branch: BranchId, seq: u64) -> Result<Digest> {
        if seq == 0 {
            return Ok(Digest::ZERO);
        }
        let owner = self.owner(branch, seq)?;
        let frames = match &self.inner.source {
            Source::Journal { .. } => {
                let mut frames = Vec::new();
                self.visit(owner, seq, seq, |frame| {
                    frames.extend_from_slice(frame.bytes);
                    Ok(())
                })?;
                frames
            }
            Source::Sled { store, .. } => store.record_up_to(owner, seq)?,
        };
        if frames.is_empty() {
            return Err(Error::NoEvent { branch, seq, head: seq });
        }
        Ok(Digest::of(&frames))
    }

    /// Compresses the first closed segment that is not; returns its bytes before and after, `None` when there is none.
    /// For the writer's process only.
    pub(crate) fn pack_next(&self) -> Result<Option<(u64, u64)>> {
        let Source::Journal { files, .. } = &self.inner.source else { return Ok(None) };
        let _one_at_a_time = self.inner.packing.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(open) = self.index().map(|i| i.segment) else { return Ok(None) };
        let next = files.list()?.into_iter().find(|n| *n < open && files.plain_path(*n).exists());
        let Some(segment) = next else { return Ok(None) };
        let bytes = packed::pack(&self.inner.dir, segment)?;
        files.close(segment);
        Ok(Some(bytes))
    }

    /// Closed segments that are not compressed, and their bytes.
    ///
    /// # Errors
    /// I/O.
    pub fn plain_segments(&self) -> Result<(u64, u64)> {
        let Source::Journal { files, .. } = &self.inner.source else { return Ok((0, 0)) };
        let open = self.index().map_or(0, |i| i.segment);
        let sizes = files.list()?.into_iter().filter(|n| *n < open).map(|n| files.plain_path(n).metadata().ok());
        let sizes: Vec<u64> = sizes.flatten().map(|m| m.len()).collect();
        Ok((sizes.len() as u64, sizes.iter().sum()))
    }

    /// Events in journal order (all branches) from an ordinal on: at most `max_records` records.
    ///
    /// # Errors
    /// Damage, I/O.
    pub fn journal_order(&self, from: u64, max_records: usize) -> Result<Vec<Stamped>> {
        let mut out = Vec::new();
        self.frames_from(from, max_records, |frame| {
            out.push(self.stamp(&frame)?);
            Ok(())
        })?;
        Ok(out)
    }

    /// Verified frames in journal order from an ordinal on: at most `max_records` records. Returns the ordinal
    /// after the last one.
    pub(crate) fn frames_from(
        &self,
        from: u64,
        max_records: usize,
        mut f: impl FnMut(frame::Frame<'_>) -> Result<()>,
    ) -> Result<u64> {
        let mut at = from;
        for _ in 0..max_records {
            let record = self.index().and_then(|i| i.at_ordinal(at).copied());
            let Some(record) = record else { break };
            let skip = (at - record.ordinal) as usize;
            let bytes = self.body(&record)?;
            for frame in self.check(&record, &bytes)?.into_iter().skip(skip) {
                f(frame)?;
            }
            at = record.ordinal + u64::from(record.header.count);
        }
        Ok(at)
    }

    fn body(&self, record: &RecordRef) -> Result<Vec<u8>> {
        let Source::Journal { files, .. } = &self.inner.source else { return Err(Error::Closed) };
        files.read(record.segment, record.offset + RECORD_HEADER as u64, record.header.body_len as usize)
    }

    fn check<'a>(&self, record: &RecordRef, body: &'a [u8]) -> Result<Vec<frame::Frame<'a>>> {
        record::frames(&record.header, body).map_err(|what| {
            let Source::Journal { files, .. } = &self.inner.source else { return Error::Closed };
            Error::corrupt(&files.path(record.segment), record.offset, what)
        })
    }

    /// The segments, unless they are gone.
    pub(super) fn segments(&self) -> Option<&Segments> {
        match &self.inner.source {
            Source::Journal { files, .. } => Some(files),
            Source::Sled { .. } => None,
        }
    }

    /// The record that holds an event of a branch itself.
    pub(super) fn record_of(&self, branch: BranchId, seq: u64) -> Result<RecordRef> {
        let record = self.index().and_then(|i| i.locate(branch, seq).copied());
        let head = self.last(branch)?;
        record.ok_or(Error::NoEvent { branch, seq, head })
    }

    /// Frames `first..=last` of one branch itself, as far as one record (or one sled piece) reaches; from a record, also
    /// those before `first`.
    pub(super) fn visit(
        &self,
        branch: BranchId,
        first: u64,
        last: u64,
        mut f: impl FnMut(frame::Frame<'_>) -> Result<()>,
    ) -> Result<()> {
        match &self.inner.source {
            Source::Journal { .. } => {
                let record = self.record_of(branch, first)?;
                let bytes = self.body(&record)?;
                for frame in self.check(&record, &bytes)?.into_iter().take_while(|f| f.header.seq <= last) {
                    f(frame)?;
                }
            }
            Source::Sled { store, .. } => {
                let stored = store.range(branch, first, last, SLED_PIECE_BYTES)?;
                for (expected, (seq, bytes)) in (first..).zip(stored) {
                    let bad = |what: String| Error::Sled { path: SledStore::path(&self.inner.dir), what };
                    let frame = frame::read(&bytes).map_err(|e| bad(format!("event {branch}:{seq}: {e}")))?;
                    if seq != expected || frame.header.seq != seq || frame.header.branch != branch {
                        return Err(bad(format!("event {branch}:{expected} is missing")));
                    }
                    f(frame)?;
                }
            }
        }
        Ok(())
    }

    pub(crate) fn stamp(&self, frame: &frame::Frame<'_>) -> Result<Stamped> {
        let frame::Header { branch, seq, kind, version, .. } = frame.header;
        let codec_error = |source| Error::Codec { branch, seq, source };
        let event: Event = match frame.blob() {
            None => codec::decode_facts(kind, version, frame.facts),
            Some((blob_digest, len)) => {
                let payload = blob::read(&self.inner.dir, &blob_digest, len).map_err(|what| Error::Blob {
                    digest: blob_digest,
                    branch,
                    seq,
                    path: blob::path(&self.inner.dir, &blob_digest),
                    what,
                })?;
                codec::decode_facts(kind, version, &payload)
            }
        }
        .map_err(codec_error)?;
        let meta = codec::decode_meta(frame.header.meta_version, frame.meta).map_err(codec_error)?;
        Ok(Stamped { seq, branch, event, meta })
    }
}

pub(crate) fn sled_branches(store: &SledStore) -> Result<Branches> {
    let mut out = Branches::default();
    let mut from = 1;
    loop {
        let piece = store.range(LEDGER, from, u64::MAX, SLED_PIECE_BYTES)?;
        let Some((last, _)) = piece.last() else { return Ok(out) };
        from = last + 1;
        for (seq, bytes) in piece {
            let bad = |what: String| Error::Sled { path: store.folder().to_path_buf(), what };
            let frame = frame::read(&bytes).map_err(|e| bad(format!("ledger event {seq}: {e}")))?;
            out.apply_frame(&frame).map_err(bad)?;
        }
    }
}

/// Iterator over durable events, see [`Reader::read`].
#[derive(Debug)]
pub struct Events {
    reader: Reader,
    spans: VecDeque<(BranchId, u64, u64)>,
    ready: VecDeque<Stamped>,
    /// Seq of the last event given out or buffered.
    last: u64,
    chain: Chain,
    failed: bool,
}

impl Events {
    fn fill(&mut self) -> Result<()> {
        let Some((branch, first, last)) = self.spans.front().copied() else { return Ok(()) };
        let mut ready = std::mem::take(&mut self.ready);
        let reader = &self.reader;
        if self.last + 1 != first {
            // What it links to was undone, and is not read.
            self.chain = Chain::default();
        }
        let (chain, seen) = (&mut self.chain, self.last);
        let mut next = first;
        let from_journal = reader.segments().is_some();
        reader.visit(branch, first, last, |frame| {
            let seq = frame.header.seq;
            if seq <= seen && seq < first {
                return Ok(());
            }
            if !chain.follow(&frame, from_journal) {
                let what = format!("event {branch}:{seq} does not link to the event before it");
                return Err(Error::corrupt(reader.dir(), 0, what));
            }
            if seq >= first {
                next = seq + 1;
                ready.push_back(reader.stamp(&frame)?);
            }
            Ok(())
        })?;
        if next == first {
            return Err(Error::NoEvent { branch, seq: first, head: first - 1 });
        }
        self.ready = ready;
        self.last = next - 1;
        match self.spans.front_mut() {
            Some(span) if next <= last => span.1 = next,
            _ => {
                self.spans.pop_front();
            }
        }
        Ok(())
    }
}

impl Iterator for Events {
    type Item = Result<Stamped>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.failed {
            return None;
        }
        if self.ready.is_empty()
            && let Err(error) = self.fill()
        {
            self.failed = true;
            return Some(Err(error));
        }
        self.ready.pop_front().map(Ok)
    }
}
