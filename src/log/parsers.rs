//! The parsers of the log's files on bytes in memory: for `tests/mutations.rs` and the fuzz targets.

use super::packed::Packed;
use super::record::{self, RECORD_HEADER, RecordHeader, SEGMENT_HEADER, SegmentHeader};
use super::{head, snapshot};
use crate::event::frame;
use std::path::Path;

/// A record: its number, the seq of its first event, its frames and its length in bytes.
#[derive(Debug)]
pub struct Record<'a> {
    /// Number.
    pub number: u64,
    /// Branch of all its events.
    pub branch: u32,
    /// Seq of its first event.
    pub first_seq: u64,
    /// Its events.
    pub frames: Vec<frame::Frame<'a>>,
    /// Whole length, bytes.
    pub len: usize,
}

/// Reads the record at the start of `bytes`; the error says what is wrong.
pub fn record(bytes: &[u8]) -> Result<Record<'_>, String> {
    let header = RecordHeader::decode(bytes)?;
    let len = header.record_len() as usize;
    let Some(body) = bytes.get(RECORD_HEADER..len) else {
        return Err(format!("record of {len} bytes, {} are left", bytes.len()));
    };
    let read = record::frames(&header, body);
    // What a damaged record is asked besides: where the damage begins.
    let bad = record::first_bad_event(&header, body);
    assert!((header.first_seq..header.first_seq + u64::from(header.count)).contains(&bad));
    Ok(Record { number: header.number, branch: header.branch, first_seq: header.first_seq, frames: read?, len })
}

/// Reads a segment: its number and the records up to the first that is not whole, with what is wrong there.
pub fn segment(bytes: &[u8]) -> Result<(u64, Vec<Record<'_>>, Option<String>), String> {
    let header = SegmentHeader::decode(bytes)?;
    let (mut records, mut at) = (Vec::new(), SEGMENT_HEADER);
    while at < bytes.len() {
        match record(&bytes[at..]) {
            Ok(record) => {
                at += record.len;
                records.push(record);
            }
            Err(what) => return Ok((header.segment, records, Some(what))),
        }
    }
    Ok((header.segment, records, None))
}

/// Reads a packed segment: the segment's bytes; the error says what is wrong.
pub fn packed(bytes: &[u8]) -> Result<Vec<u8>, String> {
    let packed = Packed::over(Path::new("packed"), Box::new(bytes.to_vec()), false).map_err(|e| e.to_string())?;
    // Lengths that no file of this size can hold are not believed.
    if packed.len() > (bytes.len() as u64).saturating_mul(1 << 12) {
        return Err("longer than anything that packs to this".into());
    }
    packed.check_list().map_err(|e| e.to_string())?;
    let mut segment = vec![0; packed.len() as usize];
    packed.read_into(0, &mut segment).map_err(|e| e.to_string())?;
    Ok(segment)
}

/// Reads HEAD: (segment, durable bytes of it, next record, events) of the newer whole slot.
pub fn head(bytes: &[u8]) -> Option<(u64, u64, u64, u64)> {
    head::newest(bytes).map(|(_, m)| (m.segment, m.offset, m.next_record, m.events))
}

/// Reads a snapshot file: seq and body; the error says what is wrong.
pub fn snapshot(bytes: &[u8]) -> Result<(u64, Vec<u8>), String> {
    snapshot::decode(bytes.to_vec()).map(|(seq, _, _, body)| (seq, body))
}
