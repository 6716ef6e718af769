//! The writer's side of the segments: append, flush, roll, recover.

use super::blob::sync_dir;
use super::error::{Error, Result};
use super::head::{self, HeadFile, Watermark};
use super::index::Index;
use super::options::Faults;
use super::packed;
use super::record::{self, JournalId, RECORD_HEADER, RecordHeader, SEGMENT_HEADER, SegmentHeader};
use super::segments::{self, Segments};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Bytes read at once while looking for the next record after a bad one.
const RESYNC_BYTES: usize = 1 << 20;

/// The open end of the journal.
#[derive(Debug)]
pub(crate) struct Journal {
    dir: PathBuf,
    segments: Segments,
    id: JournalId,
    /// Which opening this is.
    pub epoch: u64,
    segment: u64,
    file: File,
    offset: u64,
    next_record: u64,
    events: u64,
    /// Records that wait for the next flush.
    unflushed: u32,
    segment_bytes: u64,
    /// Whether a flush is one; only a rebuild that flushes at its end goes without.
    pub flush_each: bool,
    head: HeadFile,
    faults: Faults,
}

fn create_segment(segments: &Segments, header: &SegmentHeader, dir: &Path) -> Result<File> {
    let path = segments.path(header.segment);
    let file =
        File::options().create(true).truncate(true).write(true).open(&path).map_err(Error::io("create", &path))?;
    file.write_all_at(&header.encode(), 0).and_then(|()| file.sync_all()).map_err(Error::io("write", &path))?;
    sync_dir(&segments::folder(dir))?;
    Ok(file)
}

/// Makes a segment of records that stand elsewhere, too. It overrides those as soon as it has its name, so it gets that
/// when it is whole and flushed: a crash or a full disk in the middle leaves the others to count.
fn create_copy(segments: &Segments, header: &SegmentHeader, dir: &Path, records: &[u8]) -> Result<()> {
    let path = segments.plain_path(header.segment);
    let beside = path.with_extension("seg.new");
    let file = File::create(&beside).map_err(Error::io("create", &beside))?;
    let written = file
        .write_all_at(&header.encode(), 0)
        .and_then(|()| file.write_all_at(records, SEGMENT_HEADER as u64))
        .and_then(|()| file.sync_all());
    if let Err(error) = written {
        // It only takes room, perhaps that which was missing.
        let _ = std::fs::remove_file(&beside);
        return Err(Error::io("write", &beside)(error));
    }
    std::fs::rename(&beside, &path).map_err(Error::io("rename to", &path))?;
    sync_dir(&segments::folder(dir))
}

impl Journal {
    /// Starts a journal in a folder that has none.
    pub(crate) fn create(dir: &Path, id: JournalId, segment_bytes: u64, faults: Faults) -> Result<Journal> {
        let folder = segments::folder(dir);
        std::fs::create_dir_all(&folder).map_err(Error::io("create folder", &folder))?;
        sync_dir(dir)?;
        let segments = Segments::new(dir);
        let header = SegmentHeader { journal: id, segment: 1, first_record: 1 };
        let file = create_segment(&segments, &header, dir)?;
        let mut head = HeadFile::open(dir)?;
        let offset = SEGMENT_HEADER as u64;
        head.write(&Watermark { segment: 1, offset, next_record: 1, events: 0 })?;
        sync_dir(dir)?;
        Ok(Journal {
            dir: dir.to_path_buf(),
            segments,
            id,
            epoch: 1,
            segment: 1,
            file,
            offset,
            next_record: 1,
            events: 0,
            unflushed: 0,
            flush_each: true,
            segment_bytes,
            head,
            faults,
        })
    }

    /// Opens the journal behind everything that is durable. What a crash left above the watermark is
    /// verified: whole records move to a fresh segment that is flushed now (they may never have been), a
    /// torn rest moves to `quarantine/`. Notes say what was done.
    pub(crate) fn open(dir: &Path, segment_bytes: u64, faults: Faults) -> Result<(Journal, Index, Vec<String>)> {
        let segments = Segments::new(dir);
        let mut notes = Vec::new();
        let mut index = Index::default();
        let mark = match head::read(dir)? {
            Some(mark) => mark,
            None => {
                notes.push("HEAD was missing or damaged; the last segment was checked instead".to_string());
                start_of_last_segment(&segments)?
            }
        };
        if let Some(bad) = index.scan(&segments, Some(&mark))? {
            return Err(Error::corrupt(&segments.path(bad.segment), bad.offset, bad.what));
        }
        let tail = Tail::read(&segments, &index, &mark)?;
        if tail.dirty() {
            let id = index.journal.or(tail.journal).unwrap_or_default();
            tail.settle(dir, &segments, id, &mark, &mut notes)?;
            index = Index::default();
            let segments = Segments::new(dir);
            let mark = head::read(dir)?;
            if let Some(bad) = index.scan(&segments, mark.as_ref())? {
                return Err(Error::corrupt(&segments.path(bad.segment), bad.offset, bad.what));
            }
        }
        let segments = Segments::new(dir);
        let (Some(id), Some(last)) = (index.journal, index.records().last().copied()) else {
            return Err(Error::nothing_in(dir));
        };
        if segments.is_packed(index.segment) {
            packed::unpack(dir, index.segment)?;
        }
        let path = segments.path(index.segment);
        let file = File::options().write(true).open(&path).map_err(Error::io("open", &path))?;
        let mut head = HeadFile::open(dir)?;
        let next_record = index.next_record();
        head.write(&Watermark { segment: index.segment, offset: index.offset, next_record, events: index.events() })?;
        let journal = Journal {
            dir: dir.to_path_buf(),
            segments,
            id,
            epoch: last.header.epoch + 1,
            segment: index.segment,
            file,
            offset: index.offset,
            next_record,
            events: index.events(),
            unflushed: 0,
            flush_each: true,
            segment_bytes,
            head,
            faults,
        };
        Ok((journal, index, notes))
    }

    /// Appends one record, durable, that keeps its place. The header's journal, epoch, number, body length and checksum are
    /// filled in here.
    pub(crate) fn append(&mut self, mut header: RecordHeader, body: &[u8]) -> Result<()> {
        header.body_crc = crc32c::crc32c(body);
        let mut record = vec![0; RECORD_HEADER];
        record.extend_from_slice(body);
        self.make_room()?;
        self.write(&mut header, &mut record)?;
        self.flush()
    }

    /// Writes one record that the next [`Journal::flush`] makes durable, and returns where it stands. Its body stands behind room
    /// for the header, whose checksum of it is filled in already.
    pub(crate) fn append_unflushed(
        &mut self,
        mut header: RecordHeader,
        record: &mut [u8],
    ) -> Result<(u64, u64, RecordHeader)> {
        self.make_room()?;
        header.place = self.unflushed;
        let at = (self.segment, self.offset);
        self.write(&mut header, record)?;
        Ok((at.0, at.1, header))
    }

    /// A full segment is flushed before the next one is made: that one stands for all before it.
    pub(super) fn make_room(&mut self) -> Result<()> {
        if self.offset >= self.segment_bytes.max(SEGMENT_HEADER as u64 + 1) {
            self.flush()?;
            self.roll()?;
        }
        Ok(())
    }

    fn write(&mut self, header: &mut RecordHeader, bytes: &mut [u8]) -> Result<()> {
        let (head, body) = bytes.split_at_mut(RECORD_HEADER);
        header.journal = self.id;
        header.epoch = self.epoch;
        header.number = self.next_record;
        header.body_len = body.len() as u32;
        head.copy_from_slice(&header.encode());
        let writable = self.faults.torn(bytes.len());
        let mut written = self.file.write_all_at(&bytes[..writable], self.offset);
        if written.is_ok() && writable < bytes.len() {
            written = Err(std::io::Error::new(std::io::ErrorKind::StorageFull, "write torn by the fault plan"));
        }
        written.map_err(|e| Error::io("write", &self.segments.path(self.segment))(e))?;
        self.offset += bytes.len() as u64;
        self.next_record += 1;
        self.events += u64::from(header.count);
        self.unflushed += 1;
        Ok(())
    }

    /// Makes durable what was appended.
    pub(crate) fn flush(&mut self) -> Result<()> {
        if self.unflushed == 0 {
            return Ok(());
        }
        if self.flush_each {
            let path = || self.segments.path(self.segment);
            self.faults.sync().and_then(|()| self.file.sync_data()).map_err(|e| Error::io("flush", &path())(e))?;
        }
        self.unflushed = 0;
        // The acknowledgement rests on the flush above; HEAD only tells readers about it.
        self.head.write(&self.mark())
    }

    fn mark(&self) -> Watermark {
        Watermark { segment: self.segment, offset: self.offset, next_record: self.next_record, events: self.events }
    }

    /// Flushes the open segment.
    pub(crate) fn sync(&self) -> Result<()> {
        self.file.sync_all().map_err(Error::io("flush", &self.segments.path(self.segment)))
    }

    fn roll(&mut self) -> Result<()> {
        if !self.flush_each {
            self.sync()?;
        }
        let header = SegmentHeader { journal: self.id, segment: self.segment + 1, first_record: self.next_record };
        self.faults.sync().map_err(Error::io("flush", &self.segments.path(header.segment)))?;
        self.file = create_segment(&self.segments, &header, &self.dir)?;
        self.segment += 1;
        self.offset = SEGMENT_HEADER as u64;
        Ok(())
    }
}

/// Whether something above the watermark is damaged that was flushed once: HEAD lags, as it may after a power loss. What a
/// writer is just writing is not taken for that.
pub(crate) fn damaged_above(dir: &Path, mark: &Watermark) -> Result<bool> {
    let segments = Segments::new(dir);
    let mut index = Index::default();
    match index.scan(&segments, Some(mark)) {
        Ok(None) => {}
        // Damage below it is another matter.
        Ok(Some(_)) | Err(Error::Corrupt { .. }) => return Ok(false),
        Err(e) => return Err(e),
    }
    match Tail::read(&segments, &index, mark) {
        Ok(_) => Ok(false),
        // A writer moves HEAD before it begins what would show that the record was flushed.
        Err(Error::Corrupt { .. }) => Ok(head::read(dir)?.as_ref() == Some(mark)),
        Err(e) => Err(e),
    }
}

fn start_of_last_segment(segments: &Segments) -> Result<Watermark> {
    let mut numbers = segments.list()?;
    while let Some(number) = numbers.pop() {
        // A last segment whose header never became whole holds nothing.
        if let Ok(header) = segments.header(number) {
            return Ok(Watermark {
                segment: number,
                offset: SEGMENT_HEADER as u64,
                next_record: header.first_record,
                events: 0,
            });
        }
    }
    Ok(Watermark { segment: 0, offset: 0, next_record: 1, events: 0 })
}

/// What stands above the watermark.
struct Tail {
    journal: Option<JournalId>,
    /// Whole records, verbatim.
    whole: Vec<u8>,
    records: u64,
    /// Events of all branches up to the last whole record.
    events: u64,
    /// (segment, from offset, why): a torn rest of that file.
    torn: Option<(u64, u64, String)>,
    /// Segments that begin above the watermark.
    later: Vec<u64>,
    /// Length of the watermark's segment file.
    len: u64,
}

impl Tail {
    fn read(segments: &Segments, durable: &Index, mark: &Watermark) -> Result<Tail> {
        let later: Vec<u64> = segments.list()?.into_iter().filter(|n| *n > mark.segment).collect();
        let len = if mark.segment == 0 { 0 } else { segments.len(mark.segment)? };
        let mut tail =
            Tail { journal: None, whole: Vec::new(), records: 0, events: durable.events(), torn: None, later, len };
        let mut index = durable.clone();
        let bad = index.scan(segments, None)?;
        tail.journal = index.journal;
        for record in &index.records()[durable.records().len()..] {
            let bytes = segments.read(record.segment, record.offset, record.header.record_len() as usize)?;
            if let Err(what) = record::frames(&record.header, &bytes[RECORD_HEADER..]) {
                tail.stop(segments, (record.segment, record.offset, record.header.number), what)?;
                return Ok(tail);
            }
            tail.whole.extend_from_slice(&bytes);
            tail.records += 1;
            tail.events += u64::from(record.header.count);
        }
        if let Some(bad) = bad {
            tail.stop(segments, (bad.segment, bad.offset, index.next_record()), bad.what)?;
        }
        Ok(tail)
    }

    /// The record with this number, at this place, is not whole: what is from there on was torn by a crash, unless something
    /// shows that it was flushed once.
    fn stop(&mut self, segments: &Segments, at: (u64, u64, u64), what: String) -> Result<()> {
        let (segment, offset, number) = at;
        let mut from = offset + 1;
        while let Some((at, header)) = next_record_after(segments, segment, from)? {
            // A record says when its flush began: after everything before that was flushed.
            let begun = header.number.saturating_sub(u64::from(header.place));
            if begun > number {
                let what = format!("{what} (a record that was written after its flush follows at byte {at})");
                return Err(Error::corrupt(&segments.path(segment), offset, what));
            }
            from = at + header.record_len();
        }
        let later = self.later.iter().filter(|n| **n > segment);
        if let Some(later) = later.copied().find(|n| segments.header(*n).is_ok_and(|h| h.first_record > number)) {
            let what = format!("{what} (segment {later} was made after its flush)");
            return Err(Error::corrupt(&segments.path(segment), offset, what));
        }
        self.torn = Some((segment, offset, what));
        Ok(())
    }

    fn dirty(&self) -> bool {
        !self.whole.is_empty() || self.torn.is_some() || !self.later.is_empty()
    }

    /// Makes the whole records durable in a fresh segment, moves the torn rest away, cuts what was copied.
    /// The order lets a crash in the middle lose nothing: a later segment overrides the records it repeats.
    fn settle(
        &self,
        dir: &Path,
        segments: &Segments,
        id: JournalId,
        mark: &Watermark,
        notes: &mut Vec<String>,
    ) -> Result<()> {
        if let Some((segment, offset, what)) = &self.torn {
            let kept = quarantine(dir, segments, *segment, *offset)?;
            notes.push(format!(
                "a torn record was moved to {} ({what}, byte {offset} of segment {segment}); it was never acknowledged",
                kept.display()
            ));
        }
        let mut head = HeadFile::open(dir)?;
        if self.records > 0 {
            let number = self.later.last().copied().unwrap_or(mark.segment) + 1;
            let header = SegmentHeader { journal: id, segment: number, first_record: mark.next_record };
            create_copy(segments, &header, dir, &self.whole)?;
            let offset = SEGMENT_HEADER as u64 + self.whole.len() as u64;
            let next_record = mark.next_record + self.records;
            head.write(&Watermark { segment: number, offset, next_record, events: self.events })?;
            notes.push(format!("{} whole records above the watermark were made durable", self.records));
        } else {
            head.write(mark)?;
        }
        for number in &self.later {
            let path = segments.path(*number);
            std::fs::remove_file(&path).map_err(Error::io("remove", &path))?;
        }
        if self.len > mark.offset && mark.segment > 0 {
            if segments.is_packed(mark.segment) {
                // Without HEAD and behind a last segment that never became whole: nothing is torn in it.
                packed::unpack(dir, mark.segment)?;
            }
            let path = segments.path(mark.segment);
            let file = File::options().write(true).open(&path).map_err(Error::io("open", &path))?;
            file.set_len(mark.offset).and_then(|()| file.sync_all()).map_err(Error::io("cut", &path))?;
        }
        sync_dir(&segments::folder(dir))
    }
}

/// Copies the bytes of a segment from an offset on into `quarantine/`; returns the copy's path.
pub(crate) fn quarantine(dir: &Path, segments: &Segments, segment: u64, offset: u64) -> Result<PathBuf> {
    let folder = dir.join("quarantine");
    std::fs::create_dir_all(&folder).map_err(Error::io("create folder", &folder))?;
    let len = segments.len(segment)?.saturating_sub(offset);
    let bytes = segments.read(segment, offset, len as usize)?;
    let path = folder.join(format!("{segment:012}-{offset}-{}.bytes", &blake3::hash(&bytes).to_hex()[..8]));
    let file = File::create(&path).map_err(Error::io("create", &path))?;
    file.write_all_at(&bytes, 0).and_then(|()| file.sync_all()).map_err(Error::io("write", &path))?;
    sync_dir(&folder)?;
    sync_dir(dir)?;
    Ok(path)
}

/// The next whole record of a segment at or after `from`: its offset and header.
pub(crate) fn next_record_after(segments: &Segments, segment: u64, from: u64) -> Result<Option<(u64, RecordHeader)>> {
    let len = segments.len(segment)?;
    let mut at = from;
    while at + RECORD_HEADER as u64 <= len {
        let size = RESYNC_BYTES.min((len - at) as usize);
        let bytes = segments.read(segment, at, size)?;
        for i in 0..=size - record::RECORD_MAGIC.len() {
            if bytes[i..i + 4] != record::RECORD_MAGIC {
                continue;
            }
            let offset = at + i as u64;
            if offset + RECORD_HEADER as u64 > len {
                return Ok(None);
            }
            let Ok(header) = RecordHeader::decode(&segments.read(segment, offset, RECORD_HEADER)?) else { continue };
            if offset + header.record_len() > len {
                continue;
            }
            let body = segments.read(segment, offset + RECORD_HEADER as u64, header.body_len as usize)?;
            if record::frames(&header, &body).is_ok() {
                return Ok(Some((offset, header)));
            }
        }
        // Overlap, so that a magic across the border is seen.
        at += (size - record::RECORD_MAGIC.len() + 1) as u64;
    }
    Ok(None)
}
