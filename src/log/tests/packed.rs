//! Compressed segments: the same log in fewer bytes, and no damage in them goes unseen.

use super::damage::{copy_tree, histories, segments, with_branches};
use super::*;

fn pack_all(dir: &Path) -> usize {
    let log = Log::open(dir, Options { compress: false, ..Options::default() }).unwrap();
    log.pack().unwrap().0 as usize
}

#[test]
fn a_packed_journal_is_the_same_journal() {
    let dir = tempfile::tempdir().unwrap();
    let whole = with_branches(dir.path());
    let before = verify(dir.path()).unwrap();
    let count = segments(dir.path()).len();
    assert_eq!(pack_all(dir.path()), count - 1);
    let packed = segments(dir.path()).iter().filter(|p| p.extension().is_some_and(|e| e == "segz")).count();
    assert_eq!((packed, segments(dir.path()).len()), (count - 1, count));
    assert_eq!(histories(dir.path()), whole);
    let after = verify(dir.path()).unwrap();
    assert!(after.is_ok(), "{after:?}");
    assert_eq!((&after.heads, after.bytes, &after.facts_digest), (&before.heads, before.bytes, &before.facts_digest));
    assert!(after.space.journal < before.space.journal, "{:?}", after.space);
    // Single events, from the middle of blocks.
    let reader = Reader::open(dir.path()).unwrap();
    for stamped in &whole[0] {
        assert_eq!(reader.event(MAIN, stamped.seq).unwrap(), *stamped);
    }
    // It goes on, and is packed further; a kill may leave a half-written file, or both forms.
    let journal = dir.path().join("journal");
    std::fs::write(journal.join("000000000001.segz.tmp"), b"half").unwrap();
    let last = segments(dir.path()).pop().unwrap();
    let options = Options { segment_bytes: 4_000, group_events: 8, compress: false, ..Options::default() };
    let log = Log::open(dir.path(), options).unwrap();
    for n in 0..200 {
        log.append(event(n), samples::meta()).unwrap();
    }
    log.barrier().unwrap();
    drop(log);
    let plain = std::fs::read(&last).unwrap();
    assert!(pack_all(dir.path()) > 1);
    assert!(!last.exists());
    std::fs::write(&last, plain).unwrap();
    assert_eq!(read_all(dir.path(), MAIN).len(), whole[0].len() + 200);
    assert_eq!(pack_all(dir.path()), 1);
    assert_eq!(read_all(dir.path(), MAIN).len(), whole[0].len() + 200);
    assert!(verify(dir.path()).unwrap().is_ok());
}

#[test]
fn the_background_packs_closed_segments() {
    let dir = tempfile::tempdir().unwrap();
    let options = Options { segment_bytes: 4_000, group_events: 8, ..Options::default() };
    let log = Log::create(dir.path(), started(), samples::meta(), options).unwrap();
    for n in 0..300 {
        log.append(event(n), samples::meta()).unwrap();
    }
    log.barrier().unwrap();
    let packed = || segments(dir.path()).iter().filter(|p| p.extension().is_some_and(|e| e == "segz")).count();
    let mut tries = 0;
    while packed() + 1 < segments(dir.path()).len() {
        tries += 1;
        assert!(tries < 3_000, "{packed} packed: {:?}", log.sled_status(), packed = packed());
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    // A reader that was opened before, and one that is opened now.
    assert_eq!(log.read(MAIN, 1).unwrap().map(|e| e.unwrap().seq).collect::<Vec<_>>(), (1..=301).collect::<Vec<_>>());
    assert_eq!(read_all(dir.path(), MAIN).len(), 301);
}

#[test]
fn every_flipped_byte_of_a_packed_segment_is_found_and_repaired() {
    let origin = tempfile::tempdir().unwrap();
    let whole = with_branches(origin.path());
    pack_all(origin.path());
    let path = segments(origin.path())[1].clone();
    let bytes = std::fs::read(&path).unwrap();
    for at in 0..bytes.len() {
        let mut bad = bytes.clone();
        bad[at] ^= 1 << (at % 8);
        std::fs::write(&path, &bad).unwrap();
        let report = verify(origin.path()).unwrap();
        assert!(!report.is_ok(), "byte {at}");
        // A reader refuses, or gives events as they were until a named error.
        if let Ok(reader) = Reader::open(origin.path()) {
            for (got, expected) in reader.read(MAIN, 1).unwrap().zip(&whole[0]) {
                match got {
                    Ok(got) => assert_eq!(got, *expected, "byte {at}"),
                    Err(error) => assert!(matches!(error, Error::Corrupt { .. }), "byte {at}: {error}"),
                }
            }
        }
        if at % 97 == 0 {
            let dir = tempfile::tempdir().unwrap();
            copy_tree(origin.path(), dir.path());
            let done = repair(dir.path()).unwrap();
            assert!(done.journal_rebuilt, "byte {at}: {done:?}");
            assert_eq!(histories(dir.path()), whole, "byte {at}");
            assert!(verify(dir.path()).unwrap().is_ok(), "byte {at}");
        }
    }
    for keep in (0..bytes.len()).step_by(13) {
        std::fs::write(&path, &bytes[..keep]).unwrap();
        assert!(!verify(origin.path()).unwrap().is_ok(), "cut at {keep}");
    }
}
