//! Records that share a flush, and what a crash in the middle of one leaves.

use super::*;
use crate::event::codec::{self, Encoded, META_VERSION};
use crate::event::frame;
use crate::log::head;
use crate::log::index::{Index, RecordRef};
use crate::log::journal::Journal;
use crate::log::record::{self, RecordHeader};
use crate::log::segments::Segments;

/// Records of one event that follow what is there, and share a flush.
fn flush_together(dir: &Path, events: std::ops::Range<u32>) {
    let (mut journal, index, _) = Journal::open(dir, 1 << 20, Default::default()).unwrap();
    let last = index.last_seq(MAIN).unwrap();
    let mut prev = Reader::open(dir).unwrap().digest(MAIN, last).unwrap();
    for (seq, n) in (last + 1..).zip(events) {
        let Encoded { kind, version, facts, meta } = codec::encode(&event(n), &samples::meta()).unwrap();
        let header =
            frame::Header { kind: kind as u16, version, flags: 0, branch: MAIN, seq, prev, meta_version: META_VERSION };
        let mut bytes = vec![0; record::RECORD_HEADER];
        frame::write(&mut bytes, &header, &facts, &meta).unwrap();
        let body = &bytes[record::RECORD_HEADER..];
        let header = RecordHeader {
            journal: [0; 16],
            epoch: 0,
            number: 0,
            branch: MAIN,
            count: 1,
            first_seq: seq,
            body_len: 0,
            body_crc: crc32c::crc32c(body),
            prev,
            place: 0,
        };
        prev = Digest::of(body);
        journal.append_unflushed(header, &mut bytes).unwrap();
    }
    journal.flush().unwrap();
}

fn records(dir: &Path) -> Vec<RecordRef> {
    let mut index = Index::default();
    assert_eq!(index.scan(&Segments::new(dir), None).unwrap(), None);
    index.records().to_vec()
}

/// Changes a byte of a record's header or body.
fn damage(dir: &Path, record: &RecordRef, at: usize) {
    let path = segment(dir, record.segment);
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[record.offset as usize + at] ^= 1;
    std::fs::write(path, bytes).unwrap();
}

/// A run of four events, then these flushes of one record an event, with the HEAD from before them, as a power loss may
/// leave it; its records.
fn flushed_behind_head(dir: &Path, flushes: &[std::ops::Range<u32>]) -> Vec<RecordRef> {
    written(dir, 3, without_sled());
    let before = std::fs::read(head::path(dir)).unwrap();
    flushes.iter().for_each(|flush| flush_together(dir, flush.clone()));
    std::fs::write(head::path(dir), before).unwrap();
    records(dir)
}

/// Opening refuses to take damage for a torn flush, and moves nothing away.
fn refused(dir: &Path, why: &str) {
    match Log::open(dir, without_sled()) {
        Err(Error::Corrupt { what, .. }) => assert!(what.contains(why), "{what}"),
        other => panic!("{other:?}"),
    }
    assert!(!dir.join("quarantine").exists());
}

const IN_BODY: usize = record::RECORD_HEADER + 20;
const IN_HEADER: usize = 20;

#[test]
fn groups_that_wait_share_a_flush_and_say_so() {
    let dir = tempfile::tempdir().unwrap();
    let options = Options { group_events: 1, ..without_sled() };
    let log = Log::create(dir.path(), started(), samples::meta(), options).unwrap();
    // The committer cannot finish what it took first while the index is held.
    let tickets: Vec<Ticket> =
        log.reader().with_index(|_| (0..10).map(|n| log.append(event(n), samples::meta()).unwrap()).collect()).unwrap();
    for (n, ticket) in tickets.iter().enumerate() {
        assert_eq!(ticket.wait().unwrap().seq, n as u64 + 2);
    }
    drop(log);
    let places: Vec<u32> = records(dir.path()).iter().map(|r| r.header.place).collect();
    assert_eq!(places.len(), 11);
    assert!(places.windows(2).all(|p| p[1] == 0 || p[1] == p[0] + 1), "{places:?}");
    assert!(places[1..].iter().filter(|p| **p == 0).count() <= 2, "{places:?}");
    assert_eq!(read_all(dir.path(), MAIN).len(), 11);
}

#[test]
fn a_record_torn_in_the_middle_of_a_flush_is_moved_away_with_what_shares_it() {
    for at in [IN_BODY, IN_HEADER] {
        let dir = tempfile::tempdir().unwrap();
        // The pages of the second record did not arrive, and nothing was acknowledged.
        let all = flushed_behind_head(dir.path(), std::slice::from_ref(&(3..6)));
        assert_eq!(all.iter().rev().take(3).map(|r| r.header.place).collect::<Vec<_>>(), [2, 1, 0]);
        damage(dir.path(), &all[all.len() - 2], at);
        let log = Log::open(dir.path(), without_sled()).unwrap();
        assert_eq!(log.head(), 5, "the events before, and the first of the flush");
        assert!(log.notes().iter().any(|n| n.contains("quarantine")), "{:?}", log.notes());
        log.append(event(9), samples::meta()).unwrap().wait().unwrap();
        drop(log);
        assert_eq!(read_all(dir.path(), MAIN).len(), 6);
    }
}

#[test]
fn a_damaged_record_that_was_flushed_before_another_was_begun_is_not_taken_for_torn() {
    for at in [IN_BODY, IN_HEADER] {
        let dir = tempfile::tempdir().unwrap();
        let all = flushed_behind_head(dir.path(), &[3..5, 5..6]);
        damage(dir.path(), &all[all.len() - 3], at);
        refused(dir.path(), "after its flush");
    }
}

#[test]
fn a_damaged_record_before_a_later_segment_is_not_taken_for_torn() {
    for at in [IN_BODY, IN_HEADER] {
        let dir = tempfile::tempdir().unwrap();
        written(dir.path(), 3, without_sled());
        let before = std::fs::read(head::path(dir.path())).unwrap();
        flush_together(dir.path(), 3..4);
        let (mut journal, ..) = Journal::open(dir.path(), 1, Default::default()).unwrap();
        journal.make_room().unwrap();
        drop(journal);
        assert!(segment(dir.path(), 2).exists());
        std::fs::write(head::path(dir.path()), before).unwrap();
        damage(dir.path(), records(dir.path()).last().unwrap(), at);
        refused(dir.path(), "segment 2 was made after its flush");
    }
}

#[test]
fn a_record_of_a_later_flush_shows_what_was_flushed_before_it_even_if_the_first_of_its_flush_is_damaged() {
    for at in [IN_BODY, IN_HEADER] {
        let dir = tempfile::tempdir().unwrap();
        // Of each flush the first record is damaged: only records that share a flush are left whole.
        let all = flushed_behind_head(dir.path(), &[3..5, 5..8]);
        damage(dir.path(), &all[all.len() - 5], at);
        damage(dir.path(), &all[all.len() - 3], at);
        refused(dir.path(), "after its flush");
    }
}

#[test]
fn an_older_watermark_of_a_segment_before_lets_a_follower_read_no_further() {
    let dir = tempfile::tempdir().unwrap();
    // Each record in a segment of its own.
    written(dir.path(), 3, Options { segment_bytes: 1, ..without_sled() });
    let segments = Segments::new(dir.path());
    let mut index = Index::default();
    assert_eq!(index.scan(&segments, None).unwrap(), None);
    let (events, last) = (index.events(), index.records().last().copied().unwrap());
    let first = index.records()[0];
    let before =
        head::Watermark { segment: 1, offset: first.offset + first.header.record_len(), next_record: 2, events: 1 };
    assert!(last.segment > 1, "{last:?}");
    // Something is being written, and is not there yet.
    let path = segment(dir.path(), last.segment);
    let mut bytes = std::fs::read(&path).unwrap();
    bytes.extend_from_slice(&[7; 300]);
    std::fs::write(&path, bytes).unwrap();
    assert_eq!(index.scan(&segments, Some(&before)).unwrap(), None);
    assert_eq!(index.events(), events);
}

/// A run with sled whose HEAD, and sled copy if asked for, are those of an earlier moment, and what it held. Each event
/// has a flush of its own.
fn lagging(dir: &Path, sled_too: bool) -> Vec<Stamped> {
    written(dir, 3, Options::default());
    let (sled, kept) = (dir.join("events.sled"), dir.join("kept"));
    if sled_too {
        std::fs::rename(&sled, &kept).unwrap();
    }
    let before = std::fs::read(head::path(dir)).unwrap();
    let log = Log::open(dir, Options { sled: !sled_too, ..Options::default() }).unwrap();
    for n in 3..8 {
        log.append(event(n), samples::meta()).unwrap().wait().unwrap();
    }
    drop(log);
    let all = read_all(dir, MAIN);
    std::fs::write(head::path(dir), before).unwrap();
    if sled_too {
        std::fs::rename(&kept, &sled).unwrap();
    }
    all
}

#[test]
fn damage_above_a_watermark_that_lags_is_seen_and_mended() {
    for at in [IN_BODY, IN_HEADER] {
        let dir = tempfile::tempdir().unwrap();
        let all = lagging(dir.path(), false);
        let records = records(dir.path());
        damage(dir.path(), &records[records.len() - 3], at);
        assert!(matches!(Log::open(dir.path(), without_sled()), Err(Error::Corrupt { .. })));
        let report = verify(dir.path()).unwrap();
        assert_eq!(report.first_bad_event(), Some((MAIN, all.len() as u64 - 2)), "{report:?}");
        assert_eq!(repair(dir.path()).unwrap().restored_events, 1);
        assert!(verify(dir.path()).unwrap().is_ok());
        drop(Log::open(dir.path(), without_sled()).unwrap());
        assert_eq!(read_all(dir.path(), MAIN), all);
    }
}

#[test]
fn mending_damage_below_a_watermark_that_lags_keeps_what_stands_above_it() {
    let dir = tempfile::tempdir().unwrap();
    let all = lagging(dir.path(), true);
    damage(dir.path(), &records(dir.path())[0], IN_BODY);
    let out = dir.path().join("salvaged");
    let saved = salvage(dir.path(), &out).unwrap();
    assert_eq!((saved.events, read_all(&out, MAIN).len()), (all.len() as u64, all.len()));
    assert!(repair(dir.path()).unwrap().journal_rebuilt);
    assert_eq!(read_all(dir.path(), MAIN), all);
}
