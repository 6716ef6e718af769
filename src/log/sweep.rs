//! Reading for a fold: every event of a stretch once, in order, where it lies in a buffer that is used again.
//!
//! [`Reader::sweep`] allocates per record at most (a buffer that grows), never per event, and checks what a fold has to
//! rely on: the checksum of each record over all its bytes, that each record links to the last event of the one before
//! it (one BLAKE3 per record), and that branch and sequence numbers go on without a gap. The link of each *event* to the
//! one before it is what [`Reader::read`] checks, and [`super::verify`] of the whole run: within a record whose
//! checksum holds it says nothing about damage, only about who wrote it.

use super::error::{Error, Result};
use super::index::RecordRef;
use super::record::{Chain, RECORD_HEADER};
use super::segments::Segments;
use super::{BranchId, Reader, blob};
use crate::event::digest::{Digest, FactKey, key_bytes};
use crate::event::view::View;
use crate::event::{Event, Meta, codec, frame};
use std::ops::ControlFlow;

/// An event as a sweep gives it out.
#[derive(Debug)]
pub struct Swept<'a> {
    /// Position in its branch's history, from 1.
    pub seq: u64,
    /// What happened, borrowed.
    pub view: View<'a>,
    /// Observations about it.
    pub meta: Meta,
}

/// Where a sweep is, and what it uses again from record to record.
#[derive(Default)]
struct Position {
    /// Sequence number of the next event to give out.
    next: u64,
    /// Chain digest of the last event of the record before.
    link: Option<Digest>,
    /// The same for frames that come without their records.
    chain: Chain,
    body: Vec<u8>,
    scratch: Vec<u8>,
}

impl Reader {
    /// Calls `f` for the events `from..=upto` of a branch's history as of `upto`, in order; as it stands for an `upto` beyond
    /// its last event. Stops at the first error. Checks each record's checksum and its link to the record before, and no
    /// gap in the numbers; [`Reader::read`] checks the link of every event as well.
    ///
    /// # Errors
    /// Those of `f`; [`Error::NoBranch`], damage, events of a newer program, I/O.
    pub fn sweep<E: From<Error>>(
        &self,
        branch: BranchId,
        from: u64,
        upto: u64,
        mut f: impl FnMut(Swept<'_>) -> std::result::Result<(), E>,
    ) -> std::result::Result<(), E> {
        self.sweep_until(branch, from, upto, |swept| f(swept).map(|()| ControlFlow::Continue(())))
    }

    /// The fact with a key among the events `first..=last` of a branch's history, with its sequence number.
    ///
    /// # Errors
    /// As [`Reader::sweep`].
    pub fn fact(&self, branch: BranchId, first: u64, last: u64, key: &FactKey) -> Result<Option<(u64, Event)>> {
        let (mut wanted, mut seen, mut found) = (Vec::new(), Vec::new(), None);
        key.bytes(&mut wanted);
        self.sweep_until(branch, first, last, |Swept { seq, view, .. }| {
            seen.clear();
            if key_bytes(&view, &mut seen) && seen == wanted {
                found = Some((seq, view.native()));
                return Ok::<_, Error>(ControlFlow::Break(()));
            }
            Ok(ControlFlow::Continue(()))
        })?;
        Ok(found)
    }

    fn sweep_until<E: From<Error>>(
        &self,
        branch: BranchId,
        from: u64,
        upto: u64,
        mut f: impl FnMut(Swept<'_>) -> std::result::Result<ControlFlow<()>, E>,
    ) -> std::result::Result<(), E> {
        let head = self.head(branch)?;
        // As of an event that was undone later it is part of the history.
        let upto = if upto <= self.last(branch)? { upto } else { head };
        let mut at = Position::default();
        for (owner, first, last) in self.view(branch, upto) {
            let next = first.max(from);
            if next != at.next {
                // What it links to was undone, and is not read.
                (at.link, at.chain) = (None, Chain::default());
            }
            at.next = next;
            while at.next <= last {
                let before = at.next;
                let flow = match self.segments() {
                    Some(files) => self.sweep_record(files, owner, last, &mut at, &mut f)?,
                    None => self.sweep_sled(owner, last, &mut at, &mut f)?,
                };
                if flow.is_break() {
                    return Ok(());
                }
                if at.next == before {
                    return Err(Error::NoEvent { branch: owner, seq: before, head: before - 1 }.into());
                }
            }
        }
        Ok(())
    }

    /// The events up to `last` of the record at hand.
    fn sweep_record<E: From<Error>>(
        &self,
        files: &Segments,
        owner: BranchId,
        last: u64,
        at: &mut Position,
        f: &mut impl FnMut(Swept<'_>) -> std::result::Result<ControlFlow<()>, E>,
    ) -> std::result::Result<ControlFlow<()>, E> {
        let record = self.record_of(owner, at.next)?;
        let rest = read_body(files, &record, &mut at.body)?;
        let mut frames = Frames { files, record: &record, rest, seq: record.header.first_seq };
        frames.check_link(at.link.filter(|_| record.header.first_seq == at.next))?;
        while let Some(frame) = frames.next()? {
            let seq = frame.header.seq;
            if seq < at.next {
                continue;
            }
            at.next = seq + 1;
            if self.give(&frame, &mut at.scratch, f)?.is_break() {
                return Ok(ControlFlow::Break(()));
            }
            if seq == last {
                break;
            }
        }
        let read = record.header.body_len as usize - frames.rest.len();
        at.link = Some(Digest::of(&at.body[..read]));
        Ok(ControlFlow::Continue(()))
    }

    /// Some events up to `last` from the sled copy, when all segments are gone; its frames are checked one by one.
    fn sweep_sled<E: From<Error>>(
        &self,
        owner: BranchId,
        last: u64,
        at: &mut Position,
        f: &mut impl FnMut(Swept<'_>) -> std::result::Result<ControlFlow<()>, E>,
    ) -> std::result::Result<ControlFlow<()>, E> {
        let mut flow = Ok(ControlFlow::Continue(()));
        self.visit(owner, at.next, last, |frame| {
            if !matches!(flow, Ok(ControlFlow::Continue(()))) {
                return Ok(());
            }
            if !at.chain.follow(&frame, false) {
                let what = format!("event {owner}:{} does not link to the event before it", frame.header.seq);
                return Err(Error::corrupt(self.dir(), 0, what));
            }
            at.next = frame.header.seq + 1;
            flow = self.give(&frame, &mut at.scratch, f);
            Ok(())
        })?;
        flow
    }

    /// Gives one event out.
    fn give<E: From<Error>>(
        &self,
        frame: &frame::Frame<'_>,
        scratch: &mut Vec<u8>,
        f: &mut impl FnMut(Swept<'_>) -> std::result::Result<ControlFlow<()>, E>,
    ) -> std::result::Result<ControlFlow<()>, E> {
        let frame::Header { branch, seq, kind, version, meta_version, .. } = frame.header;
        let codec_error = |source| Error::Codec { branch, seq, source };
        let meta = codec::decode_meta(meta_version, frame.meta).map_err(codec_error)?;
        let payload;
        let facts = match frame.blob() {
            None => frame.facts,
            Some((digest, len)) => {
                payload = blob::read(self.dir(), &digest, len).map_err(|what| {
                    let path = blob::path(self.dir(), &digest);
                    Error::Blob { digest, branch, seq, path, what }
                })?;
                &payload
            }
        };
        let view = codec::view(kind, version, facts, scratch).map_err(codec_error)?;
        f(Swept { seq, view, meta })
    }
}

/// The body of a record, in a buffer that is used again; its checksum holds.
fn read_body<'a>(files: &Segments, record: &RecordRef, buffer: &'a mut Vec<u8>) -> Result<&'a [u8]> {
    let len = record.header.body_len as usize;
    if buffer.len() < len {
        buffer.resize(len, 0);
    }
    let body = &mut buffer[..len];
    files.read_into(record.segment, record.offset + RECORD_HEADER as u64, body)?;
    if crc32c::crc32c(body) != record.header.body_crc {
        let what = format!("record {} fails its checksum", record.header.number);
        return Err(corrupt(files, record, what));
    }
    Ok(body)
}

fn corrupt(files: &Segments, record: &RecordRef, what: String) -> Error {
    Error::corrupt(&files.path(record.segment), record.offset, what)
}

/// The frames of one record whose checksum holds.
struct Frames<'a> {
    files: &'a Segments,
    record: &'a RecordRef,
    rest: &'a [u8],
    /// Sequence number of the next frame.
    seq: u64,
}

impl<'a> Frames<'a> {
    /// Whether the record goes on where the one before it ended, if that was read.
    fn check_link(&self, before: Option<Digest>) -> Result<()> {
        let linked = before.is_none_or(|digest| digest == self.record.header.prev);
        let first = frame::read_vouched(self.rest).is_ok_and(|f| f.header.prev == self.record.header.prev);
        if linked && first {
            return Ok(());
        }
        let header = &self.record.header;
        let what = format!("event {}:{} does not link to the event before it", header.branch, header.first_seq);
        Err(corrupt(self.files, self.record, what))
    }

    fn next(&mut self) -> Result<Option<frame::Frame<'a>>> {
        let RecordRef { header, .. } = self.record;
        let bad =
            |what: String| corrupt(self.files, self.record, format!("event {}:{}: {what}", header.branch, self.seq));
        if self.seq > self.record.last_seq() {
            return match self.rest {
                [] => Ok(None),
                left => Err(bad(format!("{} bytes after the last event of the record", left.len()))),
            };
        }
        let frame = frame::read_vouched(self.rest).map_err(|e| bad(e.to_string()))?;
        if frame.header.branch != header.branch || frame.header.seq != self.seq {
            return Err(bad(format!("event {}:{} stands in its place", frame.header.branch, frame.header.seq)));
        }
        self.rest = &self.rest[frame.bytes.len()..];
        self.seq += 1;
        Ok(Some(frame))
    }
}
