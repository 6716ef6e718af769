//! Undo, deletion, forks into folders of their own, and what gc removes.

use super::*;
use crate::log::{blob, snapshot};

fn seqs(reader: &Reader, branch: BranchId) -> Vec<u64> {
    reader.read(branch, 1).unwrap().map(|e| e.unwrap().seq).collect()
}

/// Main 1..=10, undone to 5, then 11 and 12; fork `kept` at 8 before, `back` at 7 after the undo.
fn undone(dir: &Path) -> (Log, BranchId, BranchId) {
    let log = Log::create(dir, started(), samples::meta(), without_sled()).unwrap();
    for n in 0..9 {
        log.append(event(n), samples::meta()).unwrap();
    }
    log.barrier().unwrap();
    let kept = log.create_branch("kept", MAIN, 8, "{}", samples::meta()).unwrap();
    log.undo(MAIN, 5, "the reward was wrong", samples::meta()).unwrap();
    assert_eq!((log.head(), log.reader().last(MAIN).unwrap()), (5, 10));
    let back = log.create_branch("back", MAIN, 7, "{}", samples::meta()).unwrap();
    for n in 20..22 {
        log.append(event(n), samples::meta()).unwrap();
    }
    log.append_to(kept, event(30), samples::meta()).unwrap();
    log.append_to(back, event(31), samples::meta()).unwrap().wait().unwrap();
    (log, kept, back)
}

#[test]
fn an_undo_hides_and_removes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let (log, kept, back) = undone(dir.path());
    let check = |reader: &Reader| {
        assert_eq!(seqs(reader, MAIN), [1, 2, 3, 4, 5, 11, 12]);
        assert_eq!(seqs(reader, kept), (1..=9).collect::<Vec<_>>());
        assert_eq!(seqs(reader, back), (1..=8).collect::<Vec<_>>());
        // What is hidden is still there, and so is the view of that time.
        assert_eq!(reader.event(MAIN, 9).unwrap().event, event(7));
        assert_eq!(reader.read_as_of(MAIN, 1, 9).unwrap().count(), 9);
        assert_eq!(reader.read_as_of(MAIN, 4, 11).unwrap().map(|e| e.unwrap().seq).collect::<Vec<_>>(), [4, 5, 11]);
        assert!(matches!(reader.read_as_of(MAIN, 1, 13), Err(Error::NoEvent { seq: 13, head: 12, .. })));
    };
    check(log.reader());
    for (branch, to) in [(MAIN, 0), (MAIN, 13)] {
        let refused = log.undo(branch, to, "", samples::meta());
        assert!(matches!(refused, Err(Error::NoEvent { .. })), "{to}: {refused:?}");
    }
    assert!(matches!(log.undo(LEDGER, 1, "", samples::meta()), Err(Error::NoBranch { .. })));
    assert!(matches!(log.undo(9, 1, "", samples::meta()), Err(Error::NoBranch { .. })));
    drop(log);
    check(&Reader::open(dir.path()).unwrap());
    assert!(verify(dir.path()).unwrap().is_ok());
    // Undone and at once opened again: it goes on behind what was hidden.
    let log = Log::open(dir.path(), Options::default()).unwrap();
    log.undo(MAIN, 11, "", samples::meta()).unwrap();
    drop(log);
    let log = Log::open(dir.path(), Options::default()).unwrap();
    assert_eq!(log.append(event(40), samples::meta()).unwrap().wait().unwrap().seq, 13);
    assert_eq!(seqs(log.reader(), MAIN), [1, 2, 3, 4, 5, 11, 13]);
    // To a hidden event: what was undone is back, and the rest hidden.
    log.undo(MAIN, 9, "it was right", samples::meta()).unwrap();
    assert_eq!(seqs(log.reader(), MAIN), (1..=9).collect::<Vec<_>>());
    assert_eq!(log.append(event(41), samples::meta()).unwrap().wait().unwrap().seq, 14);
    assert_eq!(seqs(log.reader(), MAIN), (1..=9).chain([14]).collect::<Vec<_>>());
    log.undo(MAIN, 13, "", samples::meta()).unwrap();
    assert_eq!(seqs(log.reader(), MAIN), [1, 2, 3, 4, 5, 11, 13]);
    // To the very last event, which an undo without an append behind it hid.
    log.undo(MAIN, 14, "", samples::meta()).unwrap();
    assert_eq!(seqs(log.reader(), MAIN), (1..=9).chain([14]).collect::<Vec<_>>());
    drop(log);
    let log = Log::open(dir.path(), Options::default()).unwrap();
    log.undo(MAIN, 13, "", samples::meta()).unwrap();
    drop(log);
    // All of it also from sled, after a rebuild from it, in an exported stream, and in what salvage saves.
    let whole: Vec<Vec<Stamped>> = [MAIN, kept, back].map(|b| read_all(dir.path(), b)).to_vec();
    let mut stream = Vec::new();
    export(dir.path(), &mut stream, &mut |_, _| {}).unwrap();
    let (imported, saved) = (dir.path().join("imported"), dir.path().join("saved"));
    import(&mut stream.as_slice(), &imported, &mut |_| {}).unwrap();
    assert!(!salvage(dir.path(), &saved).unwrap().lost());
    std::fs::remove_dir_all(dir.path().join("journal")).unwrap();
    assert!(Reader::open(dir.path()).unwrap().is_from_sled());
    for folder in [dir.path(), &imported, &saved] {
        assert_eq!([MAIN, kept, back].map(|b| read_all(folder, b)).to_vec(), whole, "{}", folder.display());
    }
    drop(Log::open(dir.path(), Options::default()).unwrap());
    assert_eq!([MAIN, kept, back].map(|b| read_all(dir.path(), b)).to_vec(), whole);
}

#[test]
fn snapshots_of_what_was_undone_are_passed_over() {
    let dir = tempfile::tempdir().unwrap();
    let log = Log::create(dir.path(), started(), samples::meta(), without_sled()).unwrap();
    for n in 0..9 {
        log.append(event(n), samples::meta()).unwrap();
    }
    log.barrier().unwrap();
    let fold = Digest([1; 32]);
    for seq in [4, 8] {
        let digest = log.reader().digest(MAIN, seq).unwrap();
        snapshot::write(dir.path(), MAIN, seq, &digest, &fold, b"state").unwrap();
    }
    let newest = |upto| snapshot::newest(log.reader(), MAIN, &fold, upto).map(|s| s.seq);
    assert_eq!(newest(10), Some(8));
    log.undo(MAIN, 6, "", samples::meta()).unwrap();
    log.append(event(50), samples::meta()).unwrap().wait().unwrap();
    assert_eq!(newest(11), Some(4));
    // As of an event that was undone it counts.
    assert_eq!(newest(9), Some(8));
}

#[test]
fn a_deleted_branch_hurts_no_other() {
    let dir = tempfile::tempdir().unwrap();
    let (log, kept, back) = undone(dir.path());
    let child = log.create_branch("child", kept, 9, "{}", samples::meta()).unwrap();
    log.append_to(child, event(60), samples::meta()).unwrap().wait().unwrap();
    let before = seqs(log.reader(), child);
    log.delete_branch(kept, "a dead end", samples::meta()).unwrap();
    assert!(matches!(log.delete_branch(kept, "", samples::meta()), Err(Error::NoBranch { .. })));
    assert!(matches!(log.delete_branch(MAIN, "", samples::meta()), Err(Error::BranchName { .. })));
    assert!(matches!(log.append_to(kept, event(0), samples::meta()), Err(Error::NoBranch { .. })));
    assert!(matches!(log.create_branch("x", kept, 3, "{}", samples::meta()), Err(Error::NoBranch { .. })));
    let again = log.create_branch("kept", back, 8, "{}", samples::meta()).unwrap();
    assert_eq!(again, child + 1);
    drop(log);
    let reader = Reader::open(dir.path()).unwrap();
    assert!(matches!(reader.read(kept, 1), Err(Error::NoBranch { .. })));
    assert_eq!(reader.branch("kept").unwrap(), again);
    assert_eq!((seqs(&reader, child), seqs(&reader, MAIN)), (before, vec![1, 2, 3, 4, 5, 11, 12]));
    assert!(verify(dir.path()).unwrap().is_ok());
}

#[test]
fn a_linked_folder_is_independent() {
    let dir = tempfile::tempdir().unwrap();
    let (a, b) = (dir.path().join("a"), dir.path().join("b"));
    let options = Options { segment_bytes: 3_000, group_events: 4, blob_bytes: 500, ..Options::default() };
    let log = Log::create(&a, started(), samples::meta(), options.clone()).unwrap();
    for n in 0..100 {
        log.append(if n % 10 == 0 { large(n as u8, 900) } else { event(n) }, samples::meta()).unwrap();
    }
    log.barrier().unwrap();
    // While it is being written to.
    assert_eq!(link(&a, &b).unwrap(), 101);
    assert!(matches!(link(&a, &b), Err(Error::Exists { .. })));
    let whole = read_all(&a, MAIN);
    assert_eq!(read_all(&b, MAIN), whole);
    use std::os::unix::fs::MetadataExt;
    let links = |path: std::path::PathBuf| std::fs::metadata(path).map_or(0, |m| m.nlink());
    let payloads = blob::list(&b).unwrap();
    assert_eq!(payloads.len(), 10);
    assert!(payloads.into_iter().all(|(path, ..)| links(path) == 2));
    let other = Log::open(&b, options.clone()).unwrap();
    assert_eq!(other.append(event(500), samples::meta()).unwrap().wait().unwrap().seq, 102);
    assert_eq!(log.append(event(600), samples::meta()).unwrap().wait().unwrap().seq, 102);
    drop(log);
    drop(other);
    assert_eq!((&read_all(&a, MAIN)[..101], &read_all(&b, MAIN)[..101]), (&whole[..], &whole[..]));
    assert_ne!(read_all(&a, MAIN)[101], read_all(&b, MAIN)[101]);
    // Repairing and removing one leaves the other alone.
    let segment =
        b.join("journal").join(std::fs::read_dir(b.join("journal")).unwrap().next().unwrap().unwrap().file_name());
    let bytes = std::fs::read(&segment).unwrap();
    std::fs::remove_file(&segment).unwrap();
    std::fs::write(&segment, &bytes[..bytes.len() / 2]).unwrap();
    repair(&b).unwrap();
    assert!(verify(&a).unwrap().is_ok() && verify(&b).unwrap().is_ok());
    std::fs::remove_dir_all(&a).unwrap();
    assert_eq!(read_all(&b, MAIN)[..101], whole);
    assert!(verify(&b).unwrap().is_ok());
}

#[test]
fn gc_removes_what_nothing_needs_and_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let options = Options { blob_bytes: 500, ..without_sled() };
    let log = Log::create(dir.path(), started(), samples::meta(), options).unwrap();
    log.append(large(1, 900), samples::meta()).unwrap();
    let gone = log.create_branch("gone", MAIN, 1, "{}", samples::meta()).unwrap();
    log.append_to(gone, large(2, 900), samples::meta()).unwrap();
    log.append(large(3, 900), samples::meta()).unwrap();
    log.undo(MAIN, 2, "", samples::meta()).unwrap();
    log.delete_branch(gone, "", samples::meta()).unwrap();
    // Not needed: a payload without an event, halves of files, the snapshot of a deleted branch, a named folder.
    let orphan = blob::write(dir.path(), &[9; 3_000], 1).unwrap();
    let (payload, snapshots) = (blob::path(dir.path(), &orphan), dir.path().join("snapshots"));
    std::fs::write(payload.with_extension("tmp.1"), b"half").unwrap();
    std::fs::create_dir(&snapshots).unwrap();
    std::fs::write(snapshots.join("0-2.snap"), b"main's").unwrap();
    std::fs::write(snapshots.join("1-2.snap"), b"gone's").unwrap();
    std::fs::write(snapshots.join("0-3.tmp"), b"half").unwrap();
    std::fs::create_dir_all(dir.path().join("checkpoints/1")).unwrap();
    std::fs::write(dir.path().join("checkpoints/1/weights"), [0; 100]).unwrap();
    std::fs::create_dir(dir.path().join("quarantine")).unwrap();
    let also = ["checkpoints/1", "checkpoints/2", "../outside", "/etc", ""].map(|p| (p.to_string(), "old".to_string()));
    let what = Collect { orphans: true, also: also.to_vec(), dry_run: true, ..Collect::default() };
    let events = log.reader().events();
    let would = log.collect(&what, samples::meta()).unwrap();
    assert_eq!(log.reader().events(), events);
    assert!(payload.exists());
    let what = Collect { dry_run: false, ..what };
    let removed = log.collect(&what, samples::meta()).unwrap();
    assert_eq!(removed, would);
    let mut names: Vec<&str> = removed.iter().map(|r| r.path.rsplit('/').next().unwrap()).collect();
    names.sort_unstable();
    let half = format!("{orphan}.tmp.1");
    let mut wanted = vec!["0-3.tmp", "1", "1-2.snap", &half];
    let hex = orphan.to_string();
    wanted.push(&hex);
    wanted.sort_unstable();
    assert_eq!(names, wanted);
    assert_eq!(removed.iter().find(|r| r.path == "checkpoints/1").unwrap().bytes, 100);
    assert!(!payload.exists() && !dir.path().join("checkpoints/1").exists());
    assert!(snapshots.join("0-2.snap").exists() && dir.path().join("quarantine").exists());
    // Payloads of undone events and deleted branches are part of the log.
    assert_eq!(blob::list(dir.path()).unwrap().len(), 3);
    assert_eq!(log.collect(&what, samples::meta()).unwrap(), []);
    drop(log);
    std::fs::remove_dir_all(&snapshots).unwrap();
    assert!(verify(dir.path()).unwrap().is_ok());
}

/// A fork whose first record has checksums that hold, but another event before it than the one it was forked at.
#[test]
fn a_fork_that_does_not_link_is_found() {
    use crate::event::frame;
    use crate::log::record::RECORD_HEADER;
    let dir = tempfile::tempdir().unwrap();
    let (log, kept, _) = undone(dir.path());
    drop(log);
    assert_eq!(verify(dir.path()).unwrap().findings, []);
    let record = *Reader::open(dir.path()).unwrap().records().iter().find(|r| r.header.branch == kept).unwrap();
    let path = segment(dir.path(), record.segment);
    let mut bytes = std::fs::read(&path).unwrap();
    let (mut header, at) = (record.header, record.offset as usize);
    header.prev = Digest([9; 32]);
    let body = &mut bytes[at + RECORD_HEADER..][..header.body_len as usize];
    body[32..64].fill(9);
    assert_eq!(header.count, 1);
    let crc = crc32c::crc32c_append(crc32c::crc32c(&body[..68]), &body[frame::HEADER_LEN..]);
    body[68..72].copy_from_slice(&crc.to_le_bytes());
    header.body_crc = crc32c::crc32c(body);
    bytes[at..at + RECORD_HEADER].copy_from_slice(&header.encode());
    std::fs::write(&path, bytes).unwrap();
    let report = verify(dir.path()).unwrap();
    let [found] = report.findings.as_slice() else { panic!("{:?}", report.findings) };
    assert_eq!((found.event, found.offset), (Some((kept, 9)), Some(record.offset)));
    assert!(found.what.contains("does not link to the event it was forked at"), "{}", found.what);
    // Reading across the fork finds it as well, and so does whoever is sent the run.
    let read: std::result::Result<Vec<Stamped>, _> = Reader::open(dir.path()).unwrap().read(kept, 1).unwrap().collect();
    assert!(read.unwrap_err().to_string().contains("does not link"));
    let mut stream = Vec::new();
    export(dir.path(), &mut stream, &mut |_, _| {}).unwrap();
    let copy = dir.path().join("copy");
    assert!(matches!(import(&mut stream.as_slice(), &copy, &mut |_| {}), Err(Error::Stream { .. })));
    assert!(!copy.exists());
}

#[test]
fn facts_about_branches_that_are_longer_than_a_payload_can_be_read_again() {
    let dir = tempfile::tempdir().unwrap();
    let log = Log::create(dir.path(), started(), samples::meta(), without_sled()).unwrap();
    log.append(event(1), samples::meta()).unwrap().wait().unwrap();
    let long = "settings ".repeat(10_000);
    let fork = log.create_branch("long", MAIN, 2, &long, samples::meta()).unwrap();
    log.append_to(fork, event(3), samples::meta()).unwrap().wait().unwrap();
    log.undo(fork, 2, &long, samples::meta()).unwrap();
    let removed = vec![crate::event::RemovedFile { path: long.clone(), bytes: 1, reason: "old".into() }];
    log.append_to(LEDGER, crate::event::GarbageCollected { removed }.into(), samples::meta()).unwrap().wait().unwrap();
    drop(log);
    let log = Log::open(dir.path(), without_sled()).unwrap();
    assert_eq!(log.reader().branches()[&fork].settings, long);
    assert_eq!((log.reader().head(fork).unwrap(), log.reader().last(fork).unwrap()), (2, 3));
    drop(log);
    assert!(verify(dir.path()).unwrap().is_ok());
}
