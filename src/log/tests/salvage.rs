//! Salvage: prefixes, whole branches, nothing invented.

use super::damage::copy_tree;
use super::*;
use crate::log::{Salvage, salvage};
use std::collections::BTreeMap;

/// main 1..=12; a forked at 5, b from a at 6, c from main at 12; one record an event; event 9 is a payload file.
pub(super) fn family(dir: &Path, options: Options) {
    let options = Options { group_events: 1, blob_bytes: 4096, ..options };
    let log = Log::create(dir, started(), samples::meta(), options).unwrap();
    let add = |branch, event: Event| log.append_to(branch, event, samples::meta()).unwrap().wait().map(drop).unwrap();
    (0..7).for_each(|n| add(MAIN, event(n)));
    add(MAIN, large(1, 5000));
    let a = log.create_branch("a", MAIN, 5, "{}", samples::meta()).unwrap();
    (100..103).for_each(|n| add(a, event(n)));
    add(MAIN, event(8));
    let b = log.create_branch("b", a, 6, "{}", samples::meta()).unwrap();
    (200..203).for_each(|n| add(b, event(n)));
    (9..11).for_each(|n| add(MAIN, event(n)));
    let c = log.create_branch("c", MAIN, 12, "{}", samples::meta()).unwrap();
    (300..303).for_each(|n| add(c, event(n)));
}

/// Histories by branch name, digests left out: a branch whose ledger was renumbered keeps its own chain.
pub(super) fn histories(dir: &Path) -> BTreeMap<String, Vec<Stamped>> {
    let reader = Reader::open(dir).unwrap();
    let mut names = vec![("main".to_string(), MAIN)];
    names.extend(reader.branches().into_iter().map(|(id, branch)| (branch.name, id)));
    names.into_iter().map(|(name, id)| (name, read_all(dir, id))).collect()
}

/// Salvages and checks what must hold whatever was damaged.
fn checked(dir: &Path, whole: &BTreeMap<String, Vec<Stamped>>, what: &str) -> Option<Salvage> {
    let out = tempfile::tempdir().unwrap();
    let out = out.path().join("saved");
    let report = match salvage(dir, &out) {
        Ok(report) => report,
        Err(Error::Unrepairable { .. }) => {
            assert!(!out.exists(), "{what}: a failed salvage leaves nothing");
            return None;
        }
        Err(error) => panic!("{what}: {error}"),
    };
    let saved = histories(&out);
    for (name, events) in &saved {
        assert!(whole[name].starts_with(events), "{what}: {name} is no prefix of what was written");
    }
    for branch in &report.branches {
        let kept = saved.get(&branch.name).map_or(0, Vec::len);
        assert_eq!(kept as u64, branch.kept, "{what}: {branch:?}");
        // A branch whose creation is lost has no name; one that lost its end may not show it.
        let of = whole.get(&branch.name).map_or(usize::MAX, Vec::len);
        assert!(branch.why.is_empty() || kept < of, "{what}: {branch:?}");
        assert!(kept == of || !branch.why.is_empty() || report.acknowledged > report.events, "{what}: {branch:?}");
    }
    assert_eq!(report.lost(), saved != *whole, "{what}: {report:?}");
    assert!(verify(&out).unwrap().is_ok(), "{what}");
    // It is a run like any other.
    let log = Log::open(&out, Options::default()).unwrap();
    let next = log.head() + 1;
    assert_eq!(log.append(event(77), samples::meta()).unwrap().wait().unwrap().seq, next, "{what}");
    Some(report)
}

#[test]
fn an_intact_run_is_copied_whole_and_either_copy_suffices() {
    let dir = tempfile::tempdir().unwrap();
    family(dir.path(), Options::default());
    let whole = histories(dir.path());
    assert_eq!(whole.values().map(Vec::len).collect::<Vec<_>>(), [8, 9, 15, 12]);
    let report = checked(dir.path(), &whole, "intact").unwrap();
    assert_eq!((report.lost(), report.from_sled, report.blobs), (false, 0, 1));
    std::fs::remove_dir_all(dir.path().join("journal")).unwrap();
    let report = checked(dir.path(), &whole, "sled alone").unwrap();
    assert_eq!((report.lost(), report.from_sled, report.events), (false, 21, 24));
    // Nothing is overwritten.
    let full = tempfile::tempdir().unwrap();
    std::fs::write(full.path().join("x"), "x").unwrap();
    assert!(matches!(salvage(dir.path(), full.path()), Err(Error::Foreign { .. })));
    assert!(matches!(salvage(&dir.path().join("nowhere"), full.path()), Err(Error::Empty { .. })));
}

#[test]
fn whatever_byte_is_lost_prefixes_and_later_branches_are_saved() {
    let dir = tempfile::tempdir().unwrap();
    family(dir.path(), without_sled());
    let whole = histories(dir.path());
    let path = segment(dir.path(), 1);
    let bytes = std::fs::read(&path).unwrap();
    let (mut saved, mut branches_beyond) = (0, 0);
    for at in (64..bytes.len()).step_by(37) {
        let mut bad = bytes.clone();
        bad[at] ^= 1 << (at % 8);
        std::fs::write(&path, &bad).unwrap();
        let Some(report) = checked(dir.path(), &whole, &format!("byte {at}")) else { continue };
        assert!(report.lost(), "byte {at}");
        saved += 1;
        let cut = |b: &crate::log::SalvagedBranch| !b.why.is_empty();
        branches_beyond += usize::from(cut(&report.branches[0]) && report.branches.iter().any(|b| !cut(b)));
    }
    assert!(
        saved > 30 && branches_beyond > 3,
        "{saved} saved, {branches_beyond} with whole branches beside a cut main"
    );
    // Cut short.
    for keep in (64..bytes.len()).step_by(397) {
        std::fs::write(&path, &bytes[..keep]).unwrap();
        let report = checked(dir.path(), &whole, &format!("cut at {keep}"));
        assert!(report.is_none_or(|r| r.lost()), "cut at {keep}");
    }
}

#[test]
fn a_lost_payload_ends_its_branch_before_it_even_inside_a_record() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    let log = Log::create(&run, started(), samples::meta(), Options { blob_bytes: 4096, ..without_sled() }).unwrap();
    for n in 0..20 {
        log.append(if n == 13 { large(2, 6000) } else { event(n) }, samples::meta()).unwrap();
    }
    log.barrier().unwrap();
    drop(log);
    let whole = histories(&run);
    let damaged = dir.path().join("damaged");
    copy_tree(&run, &damaged);
    std::fs::remove_dir_all(damaged.join("blobs")).unwrap();
    let report = checked(&damaged, &whole, "payload").unwrap();
    let main = &report.branches[0];
    assert_eq!((main.kept, main.of), (14, 21));
    assert!(main.why.contains("event 15"), "{main:?}");
}
