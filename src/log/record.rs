//! Bytes of the journal: segment headers and records.
//!
//! A segment file is a 64-byte header followed by records; a record is one group commit:
//!
//! ```text
//!  segment header                          record
//!  offset size field                       offset size field (integers little-endian)
//!       0    4  magic "CVSG"                    0    4  magic "CVJR"
//!       4    2  format (1)                      4    2  format (1)
//!       6    2  reserved, 0                     6    2  reserved, 0
//!       8   16  journal id                      8   16  journal id
//!      24    8  segment number, from 1         24    8  writer epoch (one per open for writing)
//!      32    8  number of its first record     32    8  record number, from 1, contiguous over segments
//!      40   20  reserved, 0                    40    4  branch
//!      60    4  crc32c of 0..60                44    4  count of events
//!                                              48    8  seq of the first event
//!                                              56    4  body length, bytes
//!                                              60    4  crc32c of the body
//!                                              64   32  chain digest before the first event
//!                                              96    4  place: records before it in the same flush
//!                                             100    4  crc32c of 0..100
//!                                             104       body: `count` frames
//! ```
//!
//! Several records can wait for one flush. A record at place 0 was begun after the flush of all before it had succeeded.
//!
//! The journal id is the first 16 bytes of BLAKE3(run id): a record of another run is never taken for one
//! of this one.

use crate::event::digest::Digest;
use crate::event::frame;

/// Length of a segment header.
pub const SEGMENT_HEADER: usize = 64;
/// Length of a record header.
pub const RECORD_HEADER: usize = 104;
/// Longest record body: one group commit never grows beyond it.
pub const MAX_BODY: usize = 64 << 20;
/// No event and no record has a number beyond this, so that sums of such numbers and of counts do not overflow.
pub const MAX_SEQ: u64 = u64::MAX >> 8;
/// Layout version of both.
pub const FORMAT: u16 = 1;
/// First bytes of a record.
pub const RECORD_MAGIC: [u8; 4] = *b"CVJR";
const SEGMENT_MAGIC: [u8; 4] = *b"CVSG";

/// Which run a segment belongs to.
pub type JournalId = [u8; 16];

/// The journal id of a run.
pub fn journal_id(run_id: &str) -> JournalId {
    let mut id = [0; 16];
    id.copy_from_slice(&Digest::of(run_id.as_bytes()).0[..16]);
    id
}

fn array<const N: usize>(b: &[u8], at: usize) -> [u8; N] {
    let mut out = [0; N];
    out.copy_from_slice(&b[at..at + N]);
    out
}

pub(crate) fn u32_le(b: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(array(b, at))
}

pub(crate) fn u64_le(b: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(array(b, at))
}

/// First bytes of a segment file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SegmentHeader {
    /// Run.
    pub journal: JournalId,
    /// Segment number, from 1; also the file name.
    pub segment: u64,
    /// Number of the first record that belongs to it.
    pub first_record: u64,
}

impl SegmentHeader {
    /// Its bytes.
    pub fn encode(&self) -> [u8; SEGMENT_HEADER] {
        let mut b = [0; SEGMENT_HEADER];
        b[..4].copy_from_slice(&SEGMENT_MAGIC);
        b[4..6].copy_from_slice(&FORMAT.to_le_bytes());
        b[8..24].copy_from_slice(&self.journal);
        b[24..32].copy_from_slice(&self.segment.to_le_bytes());
        b[32..40].copy_from_slice(&self.first_record.to_le_bytes());
        let crc = crc32c::crc32c(&b[..60]);
        b[60..].copy_from_slice(&crc.to_le_bytes());
        b
    }

    /// Reads it; the error says what is wrong.
    pub fn decode(b: &[u8]) -> Result<SegmentHeader, String> {
        if b.len() < SEGMENT_HEADER {
            return Err(format!("segment header needs {SEGMENT_HEADER} bytes, {} are there", b.len()));
        }
        if b[..4] != SEGMENT_MAGIC {
            return Err("not a segment: magic is not \"CVSG\"".into());
        }
        if crc32c::crc32c(&b[..60]) != u32_le(b, 60) {
            return Err("segment header fails its checksum".into());
        }
        if b[4..6] != FORMAT.to_le_bytes() {
            return Err(format!("segment format {} is newer than this program", u16::from_le_bytes(array(b, 4))));
        }
        Ok(SegmentHeader { journal: array(b, 8), segment: u64_le(b, 24), first_record: u64_le(b, 32) })
    }
}

/// The fixed part of a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecordHeader {
    /// Run.
    pub journal: JournalId,
    /// Which opening of the log wrote it.
    pub epoch: u64,
    /// Record number, from 1.
    pub number: u64,
    /// Branch of all its events.
    pub branch: u32,
    /// Number of events, at least 1.
    pub count: u32,
    /// Seq of its first event.
    pub first_seq: u64,
    /// Length of the body, bytes.
    pub body_len: u32,
    /// crc32c of the body.
    pub body_crc: u32,
    /// Chain digest before the first event.
    pub prev: Digest,
    /// Records before it that were made durable by the same flush; 0: everything before it was durable already.
    pub place: u32,
}

impl RecordHeader {
    /// Its bytes.
    pub fn encode(&self) -> [u8; RECORD_HEADER] {
        let mut b = [0; RECORD_HEADER];
        b[..4].copy_from_slice(&RECORD_MAGIC);
        b[4..6].copy_from_slice(&FORMAT.to_le_bytes());
        b[8..24].copy_from_slice(&self.journal);
        b[24..32].copy_from_slice(&self.epoch.to_le_bytes());
        b[32..40].copy_from_slice(&self.number.to_le_bytes());
        b[40..44].copy_from_slice(&self.branch.to_le_bytes());
        b[44..48].copy_from_slice(&self.count.to_le_bytes());
        b[48..56].copy_from_slice(&self.first_seq.to_le_bytes());
        b[56..60].copy_from_slice(&self.body_len.to_le_bytes());
        b[60..64].copy_from_slice(&self.body_crc.to_le_bytes());
        b[64..96].copy_from_slice(&self.prev.0);
        b[96..100].copy_from_slice(&self.place.to_le_bytes());
        let crc = crc32c::crc32c(&b[..100]);
        b[100..].copy_from_slice(&crc.to_le_bytes());
        b
    }

    /// Reads it; the error says what is wrong.
    pub fn decode(b: &[u8]) -> Result<RecordHeader, String> {
        if b.len() < RECORD_HEADER {
            return Err(format!("record header needs {RECORD_HEADER} bytes, {} are there", b.len()));
        }
        if b[..4] != RECORD_MAGIC {
            return Err("record magic is not \"CVJR\"".into());
        }
        if crc32c::crc32c(&b[..100]) != u32_le(b, 100) {
            return Err("record header fails its checksum".into());
        }
        if b[4..6] != FORMAT.to_le_bytes() {
            return Err(format!("record format {} is newer than this program", u16::from_le_bytes(array(b, 4))));
        }
        let header = RecordHeader {
            journal: array(b, 8),
            epoch: u64_le(b, 24),
            number: u64_le(b, 32),
            branch: u32_le(b, 40),
            count: u32_le(b, 44),
            first_seq: u64_le(b, 48),
            body_len: u32_le(b, 56),
            body_crc: u32_le(b, 60),
            prev: Digest(array(b, 64)),
            place: u32_le(b, 96),
        };
        if header.count == 0 || header.body_len as usize > MAX_BODY {
            return Err(format!("record of {} events and {} bytes", header.count, header.body_len));
        }
        if header.first_seq == 0 || header.first_seq > MAX_SEQ || header.number == 0 || header.number > MAX_SEQ {
            return Err(format!("record {} of events from {} on", header.number, header.first_seq));
        }
        Ok(header)
    }

    /// Whole length, bytes.
    pub fn record_len(&self) -> u64 {
        RECORD_HEADER as u64 + u64::from(self.body_len)
    }
}

/// Checks a record's body against its header and gives its frames. The error says which event is wrong.
pub fn frames<'a>(header: &RecordHeader, body: &'a [u8]) -> Result<Vec<frame::Frame<'a>>, String> {
    if body.len() != header.body_len as usize {
        return Err(format!("record body has {} of {} bytes", body.len(), header.body_len));
    }
    let crc = crc32c::crc32c(body);
    if crc != header.body_crc {
        return Err(format!(
            "record {} (events {}:{}..={}) fails its checksum",
            header.number,
            header.branch,
            header.first_seq,
            header.first_seq + u64::from(header.count) - 1
        ));
    }
    let mut out = Vec::with_capacity(header.count.min(4096) as usize);
    let mut rest = body;
    for i in 0..u64::from(header.count) {
        let seq = header.first_seq + i;
        let frame = frame::read(rest).map_err(|e| format!("event {}:{seq}: {e}", header.branch))?;
        if frame.header.branch != header.branch || frame.header.seq != seq {
            return Err(format!(
                "event {}:{} where {}:{seq} belongs",
                frame.header.branch, frame.header.seq, header.branch
            ));
        }
        if frame.header.prev != header.prev {
            return Err(format!("event {}:{seq} does not belong to its record", header.branch));
        }
        rest = &rest[frame.bytes.len()..];
        out.push(frame);
    }
    if !rest.is_empty() {
        return Err(format!("record {} has {} bytes after its last event", header.number, rest.len()));
    }
    Ok(out)
}

/// Chain digest after one of a body's frames.
pub fn digest_after(body: &[u8], frames: &[frame::Frame<'_>], at: usize) -> Digest {
    Digest::of(&body[..frames.iter().take(at + 1).map(|f| f.bytes.len()).sum::<usize>().min(body.len())])
}

/// Seq of the first event of a damaged body that is not a whole frame of it.
pub fn first_bad_event(header: &RecordHeader, body: &[u8]) -> u64 {
    let mut rest = body;
    for seq in header.first_seq..header.first_seq + u64::from(header.count) {
        match frame::read(rest) {
            Ok(f) if f.header.seq == seq && f.header.branch == header.branch && f.header.prev == header.prev => {
                rest = &rest[f.bytes.len()..];
            }
            _ => return seq,
        }
    }
    header.first_seq
}

/// Follows the chain over frames that come one by one, in order.
#[derive(Debug, Clone, Default)]
pub struct Chain {
    /// Chain digest before the record at hand.
    prev: Option<Digest>,
    /// Its frames so far; `None` when it was not seen from its beginning.
    hasher: Option<blake3::Hasher>,
}

impl Chain {
    /// Takes the next frame, which is the first of its record if `begins` or if the one before was of another record.
    /// Whether it links to what came before, as far as that is known.
    pub fn follow(&mut self, frame: &frame::Frame<'_>, begins: bool) -> bool {
        let known = self.prev.is_some();
        let mut linked = true;
        if self.prev != Some(frame.header.prev) {
            if let Some(hasher) = &self.hasher {
                linked = hasher.finalize().as_bytes() == &frame.header.prev.0;
            }
            self.prev = Some(frame.header.prev);
            self.hasher = (known || begins).then(blake3::Hasher::new);
        }
        if let Some(hasher) = &mut self.hasher {
            hasher.update(frame.bytes);
        }
        linked
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_round_trip_and_every_flipped_bit_is_seen() {
        let segment = SegmentHeader { journal: [7; 16], segment: 3, first_record: 99 };
        let bytes = segment.encode();
        assert_eq!(SegmentHeader::decode(&bytes), Ok(segment));
        for bit in 0..bytes.len() * 8 {
            let mut bad = bytes;
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(SegmentHeader::decode(&bad).is_err(), "bit {bit}");
        }
        let record = RecordHeader {
            journal: [9; 16],
            epoch: 2,
            number: 5,
            branch: 1,
            count: 3,
            first_seq: 17,
            body_len: 300,
            body_crc: 0xdead_beef,
            prev: Digest([3; 32]),
            place: 2,
        };
        let bytes = record.encode();
        assert_eq!(RecordHeader::decode(&bytes), Ok(record));
        assert_eq!(record.record_len(), 404);
        for bit in 0..bytes.len() * 8 {
            let mut bad = bytes;
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(RecordHeader::decode(&bad).is_err(), "bit {bit}");
        }
    }
}
