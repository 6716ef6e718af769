//! Torn tails, flipped bits, lost copies.

use super::*;
use std::path::PathBuf;

pub(super) fn copy_tree(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy_tree(&entry.path(), &target);
        } else {
            std::fs::copy(entry.path(), target).unwrap();
        }
    }
}

/// A closed run of five records with the offsets of their ends, and HEAD as it was before the last one.
fn five_records(dir: &Path) -> (Vec<u64>, Vec<u8>) {
    let log = Log::create(dir, started(), samples::meta(), Options { group_events: 1, ..without_sled() }).unwrap();
    let len = || std::fs::metadata(segment(dir, 1)).unwrap().len();
    let mut ends = vec![len()];
    let mut head = Vec::new();
    for n in 10..14 {
        head = std::fs::read(dir.join("HEAD")).unwrap();
        log.append(event(n), samples::meta()).unwrap().wait().unwrap();
        ends.push(len());
    }
    (ends, head)
}

#[test]
fn a_tail_torn_at_any_byte_keeps_what_was_acknowledged() {
    let origin = tempfile::tempdir().unwrap();
    let (ends, head) = five_records(origin.path());
    let bytes = std::fs::read(segment(origin.path(), 1)).unwrap();
    let whole = read_all(origin.path(), MAIN);
    for keep in ends[3]..=ends[4] {
        let dir = tempfile::tempdir().unwrap();
        copy_tree(origin.path(), dir.path());
        std::fs::write(segment(dir.path(), 1), &bytes[..keep as usize]).unwrap();
        std::fs::write(dir.path().join("HEAD"), &head).unwrap();
        // A reader sees what HEAD vouches for.
        assert_eq!(read_all(dir.path(), MAIN), whole[..4]);
        let log = Log::open(dir.path(), without_sled()).unwrap();
        let left = if keep == ends[4] { 5 } else { 4 };
        assert_eq!(log.head(), left, "cut at {keep}");
        let torn = keep > ends[3] && keep < ends[4];
        assert_eq!(log.notes().iter().any(|n| n.contains("quarantine")), torn, "{:?}", log.notes());
        if torn {
            let file = std::fs::read_dir(dir.path().join("quarantine")).unwrap().next().unwrap().unwrap().path();
            assert_eq!(std::fs::read(file).unwrap(), &bytes[ends[3] as usize..keep as usize]);
        }
        assert_eq!(log.append(event(50), samples::meta()).unwrap().wait().unwrap().seq, left + 1);
        drop(log);
        let events = read_all(dir.path(), MAIN);
        assert_eq!(events[..left as usize], whole[..left as usize]);
        assert_eq!(events.len() as u64, left + 1);
        assert!(verify(dir.path()).unwrap().is_ok());
    }
}

#[test]
fn every_flipped_bit_of_a_segment_is_found_and_never_misread() {
    let dir = tempfile::tempdir().unwrap();
    let (ends, _) = five_records(dir.path());
    let path = segment(dir.path(), 1);
    let bytes = std::fs::read(&path).unwrap();
    let whole = read_all(dir.path(), MAIN);
    for at in 0..bytes.len() {
        let mut bad = bytes.clone();
        bad[at] ^= 1 << (at % 8);
        std::fs::write(&path, &bad).unwrap();
        let report = verify(dir.path()).unwrap();
        assert!(!report.is_ok(), "byte {at}");
        assert!(report.findings.iter().all(|f| f.path == path), "byte {at}: {report:?}");
        // The record that holds the byte names the first bad event: one event per record here.
        if at >= 64 {
            let record = ends.iter().position(|end| (at as u64) < *end).unwrap() as u64;
            assert_eq!(report.first_bad_event(), Some((MAIN, record + 1)), "byte {at}: {report:?}");
        }
        // A reader gives a prefix and then a named error, or refuses at once.
        match Reader::open(dir.path()) {
            Err(error) => assert!(matches!(error, Error::Corrupt { .. }), "byte {at}: {error}"),
            Ok(reader) => {
                let got: Vec<_> = reader.read(MAIN, 1).unwrap().collect();
                let good = got.iter().take_while(|e| e.is_ok()).count();
                assert_eq!(got.len(), good + 1, "byte {at}");
                for (e, expected) in got.iter().zip(&whole) {
                    assert!(e.as_ref().map_or(true, |e| e == expected), "byte {at}");
                }
                assert!(matches!(got[good], Err(Error::Corrupt { .. })), "byte {at}");
            }
        }
    }
    // Truncation below the watermark.
    for keep in (0..bytes.len()).step_by(7) {
        std::fs::write(&path, &bytes[..keep]).unwrap();
        let report = verify(dir.path()).unwrap();
        let whole_records = ends.iter().filter(|end| **end <= keep as u64).count() as u64;
        assert_eq!(report.first_bad_event(), Some((MAIN, whole_records + 1)), "cut at {keep}: {report:?}");
    }
}

#[test]
fn a_damaged_head_is_found_and_rewritten() {
    let dir = tempfile::tempdir().unwrap();
    five_records(dir.path());
    let whole = read_all(dir.path(), MAIN);
    let path = dir.path().join("HEAD");
    let bytes = std::fs::read(&path).unwrap();
    for at in (0..bytes.len()).step_by(3) {
        let mut bad = bytes.clone();
        bad[at] ^= 0x10;
        std::fs::write(&path, &bad).unwrap();
        let report = verify(dir.path()).unwrap();
        assert_eq!(report.findings.iter().map(|f| &f.path).collect::<Vec<_>>(), [&path], "byte {at}: {report:?}");
        // Also where the damaged slot is the newer one: what it alone acknowledged is not given up.
        let hurt = tempfile::tempdir().unwrap();
        copy_tree(dir.path(), hurt.path());
        repair(hurt.path()).unwrap();
        assert_eq!(read_all(hurt.path(), MAIN), whole, "byte {at}");
        assert!(verify(hurt.path()).unwrap().is_ok(), "byte {at}");
    }
    std::fs::remove_file(&path).unwrap();
    assert!(!verify(dir.path()).unwrap().is_ok());
    assert_eq!(read_all(dir.path(), MAIN), whole);
    drop(Log::open(dir.path(), without_sled()).unwrap());
    assert_eq!(read_all(dir.path(), MAIN), whole);
    assert!(verify(dir.path()).unwrap().is_ok());
}

/// A run with two branches, blobs and several segments, with its sled copy; and the histories.
pub(super) fn with_branches(dir: &Path) -> Vec<Vec<Stamped>> {
    // Not compressed: which bytes are what depends on when the background gets to it.
    let options = Options { segment_bytes: 4_000, group_events: 3, compress: false, ..Options::default() };
    let log = Log::create(dir, started(), samples::meta(), options).unwrap();
    for n in 0..40 {
        log.append(event(n), samples::meta()).unwrap();
    }
    log.append(large(1, 100_000), samples::meta()).unwrap();
    log.append(large(2, 30_000), samples::meta()).unwrap();
    log.barrier().unwrap();
    let a = log.create_branch("a", MAIN, 20, "{}", samples::meta()).unwrap();
    for n in 0..20 {
        log.append(event(n + 100), samples::meta()).unwrap();
        log.append_to(a, event(n + 200), samples::meta()).unwrap();
    }
    log.barrier().unwrap();
    let b = log.create_branch("b", a, 25, "{}", samples::meta()).unwrap();
    log.append_to(b, event(300), samples::meta()).unwrap().wait().unwrap();
    drop(log);
    let all = histories(dir);
    assert_eq!(all.iter().map(Vec::len).collect::<Vec<_>>(), [63, 40, 26]);
    all
}

pub(super) fn histories(dir: &Path) -> Vec<Vec<Stamped>> {
    (0..3).map(|branch| read_all(dir, branch)).collect()
}

pub(super) fn segments(dir: &Path) -> Vec<PathBuf> {
    let mut all: Vec<PathBuf> = std::fs::read_dir(dir.join("journal")).unwrap().map(|e| e.unwrap().path()).collect();
    all.sort();
    all
}

#[test]
fn all_segments_gone_sled_answers_and_restores_them() {
    let dir = tempfile::tempdir().unwrap();
    let whole = with_branches(dir.path());
    let report = verify(dir.path()).unwrap();
    assert!(report.is_ok(), "{report:?}");
    assert!(matches!(report.sled, SledCheck::Compared { equal: 86, behind: 0 }), "{:?}", report.sled);
    for folder_too in [false, true] {
        if folder_too {
            std::fs::remove_dir_all(dir.path().join("journal")).unwrap();
            std::fs::remove_file(dir.path().join("HEAD")).unwrap();
        } else {
            segments(dir.path()).iter().for_each(|s| std::fs::remove_file(s).unwrap());
        }
        let reader = Reader::open(dir.path()).unwrap();
        assert!(reader.is_from_sled());
        assert_eq!(reader.event(2, 26).unwrap(), whole[2][25]);
        drop(reader);
        assert_eq!(histories(dir.path()), whole);
        let refused = Log::create(dir.path(), started(), samples::meta(), Options::default());
        assert!(matches!(refused, Err(Error::Exists { .. })));
        let log = Log::open(dir.path(), Options::default()).unwrap();
        assert!(log.notes().iter().any(|n| n.contains("86 events came back")), "{:?}", log.notes());
        drop(log);
        assert!(!Reader::open(dir.path()).unwrap().is_from_sled());
        assert_eq!(histories(dir.path()), whole);
        assert!(verify(dir.path()).unwrap().is_ok());
    }
}

#[test]
fn sled_gone_it_is_rebuilt_and_answers_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let whole = with_branches(dir.path());
    std::fs::remove_dir_all(dir.path().join("events.sled")).unwrap();
    assert!(matches!(verify(dir.path()).unwrap().sled, SledCheck::Absent));
    drop(Log::open(dir.path(), Options::default()).unwrap());
    std::fs::remove_dir_all(dir.path().join("journal")).unwrap();
    assert!(Reader::open(dir.path()).unwrap().is_from_sled());
    assert_eq!(histories(dir.path()), whole);
}

#[test]
fn a_damaged_sled_copy_is_rebuilt() {
    let dir = tempfile::tempdir().unwrap();
    let whole = with_branches(dir.path());
    let db = dir.path().join("events.sled/db");
    let bytes = std::fs::read(&db).unwrap();
    for (i, part) in [0.05, 0.2, 0.4, 0.6].into_iter().enumerate() {
        let mut bad = bytes.clone();
        let at = (bytes.len() as f64 * part) as usize;
        let end = (at + 5_000).min(bad.len());
        bad[at..end].iter_mut().for_each(|b| *b ^= 0x55);
        std::fs::write(&db, bad).unwrap();
        // Whatever sled makes of it, the events are the journal's, and afterwards the copies agree.
        assert_eq!(histories(dir.path()), whole);
        repair(dir.path()).unwrap();
        let report = verify(dir.path()).unwrap();
        assert!(report.is_ok(), "place {i}: {report:?}");
        assert!(matches!(report.sled, SledCheck::Compared { equal: 86, behind: 0 }), "{:?}", report.sled);
    }
}

#[test]
fn the_filler_replaces_a_copy_of_another_run() {
    let (dir, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    written(dir.path(), 5, Options::default());
    let foreign = RunStarted { run_id: "another".into(), ..started() };
    drop(Log::create(other.path(), foreign, samples::meta(), Options::default()).unwrap());
    std::fs::remove_dir_all(dir.path().join("events.sled")).unwrap();
    copy_tree(&other.path().join("events.sled"), &dir.path().join("events.sled"));
    let report = verify(dir.path()).unwrap();
    assert!(report.findings[0].what.contains("another run"), "{report:?}");
    drop(Log::open(dir.path(), Options::default()).unwrap());
    let report = verify(dir.path()).unwrap();
    assert!(report.is_ok() && report.sled == SledCheck::Compared { equal: 6, behind: 0 }, "{report:?}");
}

#[test]
fn damaged_segments_are_repaired_from_sled() {
    let origin = tempfile::tempdir().unwrap();
    let whole = with_branches(origin.path());
    let count = segments(origin.path()).len();
    assert!(count > 3);
    type Harm = Box<dyn Fn(&Path)>;
    let flip = |which: usize, part: f64| -> Harm {
        Box::new(move |dir: &Path| {
            let path = &segments(dir)[which];
            let mut bytes = std::fs::read(path).unwrap();
            let at = (bytes.len() as f64 * part) as usize;
            bytes[at] ^= 4;
            std::fs::write(path, bytes).unwrap();
        })
    };
    let remove =
        |which: usize| -> Harm { Box::new(move |dir: &Path| std::fs::remove_file(&segments(dir)[which]).unwrap()) };
    let cut: Harm = Box::new(move |dir: &Path| {
        let path = &segments(dir)[count - 1];
        let bytes = std::fs::read(path).unwrap();
        std::fs::write(path, &bytes[..bytes.len() / 2]).unwrap();
    });
    let two: Harm = Box::new(|dir: &Path| {
        let path = &segments(dir)[1];
        let mut bytes = std::fs::read(path).unwrap();
        let len = bytes.len();
        bytes[100..len - 100].iter_mut().for_each(|b| *b ^= 0xff);
        std::fs::write(path, bytes).unwrap();
    });
    let harms = [
        flip(0, 0.0),
        flip(0, 0.03),
        flip(0, 0.5),
        flip(count - 1, 0.7),
        flip(count - 2, 0.9),
        remove(0),
        remove(1),
        remove(count - 1),
        cut,
        two,
    ];
    for (i, harm) in harms.iter().enumerate() {
        let dir = tempfile::tempdir().unwrap();
        copy_tree(origin.path(), dir.path());
        harm(dir.path());
        let report = verify(dir.path()).unwrap();
        assert!(!report.is_ok(), "harm {i}");
        let done = repair(dir.path()).unwrap();
        assert!(done.journal_rebuilt, "harm {i}: {done:?}");
        assert_eq!(done.restored_events > 0, i > 0, "harm {i}: {done:?}");
        assert_eq!(histories(dir.path()), whole, "harm {i}");
        let report = verify(dir.path()).unwrap();
        assert!(report.is_ok(), "harm {i}: {report:?}");
        let log = Log::open(dir.path(), Options::default()).unwrap();
        assert_eq!(log.append(event(77), samples::meta()).unwrap().wait().unwrap().seq, 64, "harm {i}");
    }
}

#[test]
fn what_neither_copy_holds_is_not_made_up() {
    let dir = tempfile::tempdir().unwrap();
    let (ends, _) = five_records(dir.path());
    let path = segment(dir.path(), 1);
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[ends[1] as usize + 120] ^= 1;
    std::fs::write(&path, &bytes).unwrap();
    let error = repair(dir.path()).unwrap_err();
    assert!(error.to_string().contains("event 0:3 is in neither copy"), "{error}");
    assert_eq!(std::fs::read(&path).unwrap(), bytes);
}

#[test]
fn an_interrupted_change_of_places_is_finished() {
    let origin = tempfile::tempdir().unwrap();
    let whole = with_branches(origin.path());
    // As left by a crash after `journal/` moved away: the new journal stands in `repair/`, flushed.
    for whole_mark in [true, false] {
        let dir = tempfile::tempdir().unwrap();
        copy_tree(origin.path(), dir.path());
        std::fs::remove_file(dir.path().join("HEAD")).unwrap();
        std::fs::create_dir_all(dir.path().join("repair")).unwrap();
        std::fs::rename(dir.path().join("journal"), dir.path().join("repair/journal")).unwrap();
        if whole_mark {
            std::fs::write(dir.path().join("repair/WHOLE"), "").unwrap();
        }
        let log = Log::open(dir.path(), Options::default()).unwrap();
        let finished = log.notes().iter().any(|n| n.contains("interrupted"));
        assert_eq!(finished, whole_mark, "{:?}", log.notes());
        drop(log);
        assert_eq!(histories(dir.path()), whole);
        assert!(!dir.path().join("repair").exists());
    }
}

#[test]
fn files_of_other_names_in_the_journal_s_folder_are_no_segments() {
    let dir = tempfile::tempdir().unwrap();
    written(dir.path(), 3, without_sled());
    let journal = dir.path().join("journal");
    for name in ["7.seg", "+00000000007.seg", "18446744073709551615.seg", "000000000007.seg.new", "notes.seg"] {
        std::fs::write(journal.join(name), b"something else").unwrap();
        assert!(verify(dir.path()).unwrap().is_ok(), "{name}");
        assert_eq!(read_all(dir.path(), MAIN).len(), 4, "{name}");
        assert_eq!(Log::open(dir.path(), without_sled()).unwrap().head(), 4, "{name}");
        assert!(journal.join(name).exists(), "{name}");
        std::fs::remove_file(journal.join(name)).unwrap();
    }
}
