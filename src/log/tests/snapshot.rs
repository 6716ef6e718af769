//! Snapshots: used when they fit, passed over when they do not.

use super::*;
use crate::log::snapshot::{self, Snapshot};

const FOLD: Digest = Digest([7; 32]);

fn snap(reader: &Reader, branch: BranchId, seq: u64, body: &[u8]) {
    snapshot::write(reader.dir(), branch, seq, &reader.digest(branch, seq).unwrap(), &FOLD, body).unwrap();
}

#[test]
fn the_newest_that_fits_the_history_counts_and_two_are_kept() {
    let dir = tempfile::tempdir().unwrap();
    written(dir.path(), 20, without_sled());
    let reader = Reader::open(dir.path()).unwrap();
    let newest = |upto| snapshot::newest(&reader, MAIN, &FOLD, upto).map(|s| s.seq);
    assert_eq!(newest(21), None);
    for seq in [5, 10, 15] {
        snap(&reader, MAIN, seq, format!("as of {seq}").as_bytes());
        // A kill in the middle of the next one.
        std::fs::write(dir.path().join("snapshots/0-99.tmp"), b"CV").unwrap();
    }
    snap(&reader, MAIN, 15, b"as of 15");
    let names = std::fs::read_dir(dir.path().join("snapshots")).unwrap().map(|e| e.unwrap().file_name());
    assert_eq!(names.collect::<std::collections::BTreeSet<_>>(), ["0-10.snap", "0-15.snap"].map(Into::into).into());
    let found = snapshot::newest(&reader, MAIN, &FOLD, 21);
    assert_eq!(found, Some(Snapshot { seq: 15, body: b"as of 15".to_vec() }));
    assert_eq!((newest(15), newest(14), newest(9)), (Some(15), Some(10), None));
    assert_eq!(snapshot::newest(&reader, MAIN, &Digest([8; 32]), 21), None, "another fold");
    // A fork shares those of its history, and has its own.
    let log = Log::open(dir.path(), without_sled()).unwrap();
    let fork = log.create_branch("f", MAIN, 12, "{}", samples::meta()).unwrap();
    (0..8).for_each(|n| drop(log.append_to(fork, event(100 + n), samples::meta()).unwrap().wait().unwrap()));
    drop(log);
    let reader = Reader::open(dir.path()).unwrap();
    let of_fork = |upto| snapshot::newest(&reader, fork, &FOLD, upto).map(|s| s.seq);
    assert_eq!(of_fork(20), Some(10), "main's event 15 is none of the fork's");
    snap(&reader, fork, 18, b"f");
    assert_eq!((of_fork(20), of_fork(17)), (Some(18), Some(10)));
    assert_eq!(snapshot::newest(&reader, MAIN, &FOLD, 21).map(|s| s.seq), Some(15));
}

#[test]
fn every_changed_byte_is_found_and_passed_over() {
    let dir = tempfile::tempdir().unwrap();
    written(dir.path(), 20, without_sled());
    let reader = Reader::open(dir.path()).unwrap();
    snap(&reader, MAIN, 5, b"old");
    snap(&reader, MAIN, 10, b"the newer one");
    let path = dir.path().join("snapshots/0-10.snap");
    let bytes = std::fs::read(&path).unwrap();
    assert!(verify(dir.path()).unwrap().is_ok());
    let passed_over = |bad: &[u8], what: &str| {
        std::fs::write(&path, bad).unwrap();
        assert_eq!(snapshot::newest(&reader, MAIN, &FOLD, 21).map(|s| s.seq), Some(5), "{what}");
        let findings = verify(dir.path()).unwrap().findings;
        assert_eq!(findings.iter().map(|f| &f.path).collect::<Vec<_>>(), [&path], "{what}");
    };
    for at in 0..bytes.len() {
        let mut bad = bytes.clone();
        bad[at] ^= 1 << (at % 8);
        passed_over(&bad, &format!("byte {at}"));
    }
    for keep in 0..bytes.len() {
        passed_over(&bytes[..keep], &format!("cut at {keep}"));
    }
    // A repair throws away what it cannot mend and what the next run makes anew.
    repair(dir.path()).unwrap();
    assert!(!path.exists() && verify(dir.path()).unwrap().is_ok());
}
