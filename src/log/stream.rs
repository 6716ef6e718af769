//! `export` and `import`: a run's events and payloads as one stream, verbatim and checksummed.
//!
//! ```text
//!  header                                  entry
//!  offset size field                       offset size field (integers little-endian)
//!       0    4  magic "CVXP"                    0    1  kind: 1 record, 2 payload, 3 end
//!       4    2  format (1)                      1    8  length of the body, bytes
//!       6    2  reserved, 0                     9    4  crc32c of 0..9 and of the body
//!       8   16  journal id                     13       body
//!      24    4  crc32c of 0..24
//! ```
//!
//! The body of a record is the journal's record, byte for byte; a payload stands before the first record that refers
//! to it; the end holds the number of events (u64), of records (u64) and the BLAKE3 of everything before its entry.
//! The stream can be written to a pipe and read from one. It holds what was durable when the export began, so it
//! is consistent while the run goes on; caches (checkpoints, the sled copy) are left out.

use super::blob;
use super::error::{Error, Result};
use super::journal::Journal;
use super::making::make_folder;
use super::options::Faults;
use super::rebuild::SEGMENT_BYTES;
use super::record::{self, JournalId, RECORD_HEADER, RecordHeader, u32_le, u64_le};
use super::segments;
use super::verify::verify;
use super::{BranchId, Reader};
use crate::event::digest::Digest;
use std::collections::{BTreeMap, BTreeSet};
use std::io::{ErrorKind, Read, Write};
use std::path::Path;
use std::sync::Arc;

const MAGIC: [u8; 4] = *b"CVXP";
const FORMAT: u16 = 1;
const HEADER: usize = 28;
const ENTRY: usize = 13;
const RECORD: u8 = 1;
const PAYLOAD: u8 = 2;
const END: u8 = 3;
/// No body is longer than this, bytes.
const MAX_BODY: u64 = 128 << 20;

/// What went through a stream.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub struct Streamed {
    /// Events of all branches.
    pub events: u64,
    /// Records.
    pub records: u64,
    /// Payload files.
    pub blobs: u64,
    /// Length of the stream, bytes.
    pub bytes: u64,
}

/// Writes and hashes.
struct Sink<'a> {
    out: &'a mut dyn Write,
    hash: blake3::Hasher,
    done: Streamed,
}

impl Sink<'_> {
    fn put(&mut self, bytes: &[u8]) -> Result<()> {
        self.out.write_all(bytes).map_err(Error::io("write", Path::new("the export")))?;
        self.hash.update(bytes);
        self.done.bytes += bytes.len() as u64;
        Ok(())
    }

    fn entry(&mut self, kind: u8, body: &[u8]) -> Result<()> {
        let mut head = [0; ENTRY];
        head[0] = kind;
        head[1..9].copy_from_slice(&(body.len() as u64).to_le_bytes());
        let crc = crc32c::crc32c_append(crc32c::crc32c(&head[..9]), body);
        head[9..].copy_from_slice(&crc.to_le_bytes());
        self.put(&head)?;
        self.put(body)
    }
}

/// Writes what is durable in `dir` now. Takes no lock. `progress` is told the events done and their number.
///
/// # Errors
/// [`Error::Short`] and [`Error::Corrupt`] when something that was acknowledged cannot be read (`verify --repair`
/// first), [`Error::Blob`] for a payload, as [`Reader::open`], I/O.
pub fn export(dir: &Path, out: &mut dyn Write, progress: &mut dyn FnMut(u64, u64)) -> Result<Streamed> {
    let reader = Reader::open(dir)?;
    reader.complete()?;
    let (id, records, files) = reader.journal()?;
    let total = records.last().map_or(0, |r| r.ordinal + u64::from(r.header.count));
    let mut sink = Sink { out, hash: blake3::Hasher::new(), done: Streamed::default() };
    let mut head = [0; HEADER];
    head[..4].copy_from_slice(&MAGIC);
    head[4..6].copy_from_slice(&FORMAT.to_le_bytes());
    head[8..24].copy_from_slice(&id);
    let crc = crc32c::crc32c(&head[..24]);
    head[24..].copy_from_slice(&crc.to_le_bytes());
    sink.put(&head)?;
    let mut payloads: BTreeSet<Digest> = BTreeSet::new();
    for place in records {
        let bytes = files.read(place.segment, place.offset, place.header.record_len() as usize)?;
        let bad = |what| Error::corrupt(&files.path(place.segment), place.offset, what);
        for frame in record::frames(&place.header, &bytes[RECORD_HEADER..]).map_err(bad)? {
            let Some((digest, len)) = frame.blob() else { continue };
            if payloads.insert(digest) {
                let payload = blob::read(dir, &digest, len).map_err(|what| Error::Blob {
                    digest,
                    branch: frame.header.branch,
                    seq: frame.header.seq,
                    path: blob::path(dir, &digest),
                    what,
                })?;
                sink.entry(PAYLOAD, &payload)?;
                sink.done.blobs += 1;
            }
        }
        sink.entry(RECORD, &bytes)?;
        sink.done.records += 1;
        sink.done.events += u64::from(place.header.count);
        progress(sink.done.events, total);
    }
    let mut end = [0; 48];
    end[..8].copy_from_slice(&sink.done.events.to_le_bytes());
    end[8..16].copy_from_slice(&sink.done.records.to_le_bytes());
    end[16..].copy_from_slice(sink.hash.finalize().as_bytes());
    sink.entry(END, &end)?;
    sink.out.flush().map_err(Error::io("write", Path::new("the export")))?;
    Ok(sink.done)
}

/// Reads and hashes.
struct Source<'a> {
    input: &'a mut dyn Read,
    hash: blake3::Hasher,
    done: Streamed,
}

impl Source<'_> {
    fn bad<T>(&self, what: impl Into<String>) -> Result<T> {
        Err(Error::Stream { offset: self.done.bytes, what: what.into() })
    }

    fn take(&mut self, len: usize) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        // Grows with what is there, not with what a damaged length says.
        let read = self.input.take(len as u64).read_to_end(&mut bytes);
        match read {
            Ok(_) if bytes.len() == len => {}
            Ok(_) => return self.bad("the stream ends here, before its end mark: it was cut off"),
            Err(e) if e.kind() == ErrorKind::Interrupted => return self.bad("reading was interrupted"),
            Err(e) => return Err(Error::Io { action: "read", path: "the stream".into(), source: Arc::new(e) }),
        }
        self.done.bytes += len as u64;
        Ok(bytes)
    }

    /// Whether anything follows.
    fn more(&mut self) -> Result<bool> {
        match self.input.take(1).read_to_end(&mut Vec::new()) {
            Ok(n) => Ok(n > 0),
            Err(e) => Err(Error::Io { action: "read", path: "the stream".into(), source: Arc::new(e) }),
        }
    }

    fn header(&mut self) -> Result<JournalId> {
        let head = self.take(HEADER)?;
        if head[..4] != MAGIC {
            self.done.bytes = 0;
            return self.bad("this is no exported run");
        }
        if crc32c::crc32c(&head[..24]) != u32_le(&head, 24) {
            return self.bad("the header fails its checksum");
        }
        if head[4..6] != FORMAT.to_le_bytes() {
            return self.bad("a format that is newer than this program");
        }
        self.hash.update(&head);
        let mut id = [0; 16];
        id.copy_from_slice(&head[8..24]);
        Ok(id)
    }

    /// Kind and body of the next entry, and the hash of everything before it.
    fn entry(&mut self) -> Result<(u8, Vec<u8>, [u8; 32])> {
        let before = *self.hash.finalize().as_bytes();
        let head = self.take(ENTRY)?;
        let len = u64_le(&head, 1);
        if len > MAX_BODY {
            return self.bad(format!("an entry of {len} bytes"));
        }
        let body = self.take(len as usize)?;
        if crc32c::crc32c_append(crc32c::crc32c(&head[..9]), &body) != u32_le(&head, 9) {
            return self.bad("an entry fails its checksum");
        }
        self.hash.update(&head);
        self.hash.update(&body);
        Ok((head[0], body, before))
    }
}

/// Makes a run folder of a stream: `out` must not exist or be empty. Everything is checked; on an error nothing is
/// left. `progress` is told the events done.
///
/// # Errors
/// [`Error::Stream`] with the place and what is wrong there; [`Error::Exists`]; I/O.
pub fn import(input: &mut dyn Read, out: &Path, progress: &mut dyn FnMut(u64)) -> Result<Streamed> {
    make_folder(out, |folder| take_in(input, folder, progress))
}

fn take_in(input: &mut dyn Read, out: &Path, progress: &mut dyn FnMut(u64)) -> Result<Streamed> {
    let mut source = Source { input, hash: blake3::Hasher::new(), done: Streamed::default() };
    let id = source.header()?;
    std::fs::create_dir_all(out).map_err(Error::io("create folder", out))?;
    let mut journal = Journal::create(out, id, SEGMENT_BYTES, Faults::default())?;
    journal.flush_each = false;
    let mut heads: BTreeMap<BranchId, (u64, Digest)> = BTreeMap::new();
    let mut payloads: BTreeSet<Digest> = BTreeSet::new();
    loop {
        let (kind, body, before) = source.entry()?;
        match kind {
            PAYLOAD => {
                payloads.insert(blob::write(out, &body, 1)?);
                source.done.blobs += 1;
            }
            RECORD => {
                let header = match RecordHeader::decode(&body) {
                    Ok(header) if header.journal == id && header.number == source.done.records + 1 => header,
                    Ok(header) => return source.bad(format!("record {} does not belong here", header.number)),
                    Err(what) => return source.bad(what),
                };
                let frames = match record::frames(&header, &body[RECORD_HEADER..]) {
                    Ok(frames) => frames,
                    Err(what) => return source.bad(what),
                };
                // The first event of a fork is linked to its parent's by the check at the end.
                let linked = heads.get(&header.branch).is_none_or(|head| *head == (header.first_seq - 1, header.prev));
                if header.first_seq == 0 || !linked {
                    return source.bad(format!("event {}:{} does not link", header.branch, header.first_seq));
                }
                for frame in &frames {
                    if let Some((payload, _)) = frame.blob().filter(|(payload, _)| !payloads.contains(payload)) {
                        return source.bad(format!("payload {payload} of event {} is missing", frame.header.seq));
                    }
                }
                let last = header.first_seq + u64::from(header.count) - 1;
                heads.insert(header.branch, (last, Digest::of(&body[RECORD_HEADER..])));
                journal.epoch = header.epoch;
                journal.append(header, &body[RECORD_HEADER..])?;
                source.done.records += 1;
                source.done.events += u64::from(header.count);
                progress(source.done.events);
            }
            END => {
                let counts = (source.done.events, source.done.records);
                if body.len() != 48 || (u64_le(&body, 0), u64_le(&body, 8)) != counts || body[16..] != before {
                    return source.bad("what came does not add up to what its end mark says");
                }
                if source.more()? {
                    return source.bad("something follows its end mark");
                }
                break;
            }
            other => return source.bad(format!("an entry of unknown kind {other}")),
        }
    }
    if source.done.events == 0 {
        return source.bad("a run without events");
    }
    journal.sync()?;
    drop(journal);
    blob::sync_dir(&segments::folder(out))?;
    blob::sync_dir(out)?;
    let report = verify(out)?;
    match report.findings.first() {
        Some(finding) => source.bad(format!("the run in it is damaged: {}", finding.what)),
        None => Ok(source.done),
    }
}
