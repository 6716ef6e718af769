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
    let mut seq = index.last_seq(MAIN).unwrap();
    let mut prev = Reader::open(dir).unwrap().digest(MAIN, seq).unwrap();
    for n in events {
        seq += 1;
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
        written(dir.path(), 3, without_sled());
        let before = std::fs::read(head::path(dir.path())).unwrap();
        flush_together(dir.path(), 3..6);
        // As a power loss may leave it: the pages of the second record did not arrive, and nothing was acknowledged.
        std::fs::write(head::path(dir.path()), before).unwrap();
        let all = records(dir.path());
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
        written(dir.path(), 3, without_sled());
        let before = std::fs::read(head::path(dir.path())).unwrap();
        flush_together(dir.path(), 3..5);
        flush_together(dir.path(), 5..6);
        // HEAD lags behind, as after a power loss.
        std::fs::write(head::path(dir.path()), before).unwrap();
        let all = records(dir.path());
        damage(dir.path(), &all[all.len() - 3], at);
        match Log::open(dir.path(), without_sled()) {
            Err(Error::Corrupt { what, .. }) => assert!(what.contains("after its flush"), "{what}"),
            other => panic!("{other:?}"),
        }
        assert!(!dir.path().join("quarantine").exists());
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
        match Log::open(dir.path(), without_sled()) {
            Err(Error::Corrupt { what, .. }) => assert!(what.contains("segment 2 was made after its flush"), "{what}"),
            other => panic!("{other:?}"),
        }
    }
}
