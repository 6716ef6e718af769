//! Flipped bits in every file of a run: found and named, or without any effect.

mod common;

use coevolve::log::{Log, MAIN, Options, Reader, Stamped};
use coevolve::run::{repair, verify};
use coevolve::world::draw;
use common::{files, text, train};
use std::path::Path;

/// Flips a file gets beside its first and last bytes.
const FLIPS: usize = 24;

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).expect("folder");
    for file in files(from) {
        let target = to.join(file.strip_prefix(from).expect("below"));
        std::fs::create_dir_all(target.parent().expect("a parent")).expect("folder");
        std::fs::copy(&file, target).expect("copy");
    }
}

fn history(dir: &Path) -> Vec<Stamped> {
    let reader = Reader::open(dir).expect("opens");
    reader.read(MAIN, 1).expect("reads").map(|e| e.expect("an event")).collect()
}

#[test]
fn a_flipped_bit_in_any_file_is_found_or_does_nothing() {
    let tmp = tempfile::tempdir().expect("folder");
    let dir = tmp.path().join("r");
    // Small segments, so that some are compressed; checkpoints, snapshots; large payloads are added below.
    let settings = ["run.steps=3", "batch.tasks=4", "run.checkpoint_every=1", "eval.tasks=4", "evolve.every=2"];
    train(&dir, &settings);
    let options = Options { segment_bytes: 64 << 10, blob_bytes: 1 << 10, ..Options::default() };
    let log = Log::open(&dir, options).expect("opens");
    use coevolve::event::{FailureNoted, Meta};
    use coevolve::log::EventStore;
    for n in 0..40 {
        let message = (0..6_000u32).map(|i| char::from(b'a' + ((i * n) % 23) as u8)).collect();
        log.append(FailureNoted { stage: "test".into(), message }.into(), Meta::default()).expect("appends");
        log.append(FailureNoted { stage: "test".into(), message: "x".repeat(900) }.into(), Meta::default())
            .expect("appends");
        log.barrier().expect("durable");
    }
    log.pack().expect("packs");
    drop(log);
    let whole = history(&dir);
    assert!(verify(&dir).expect("verifies").is_ok());
    let names: Vec<_> = files(&dir).into_iter().map(|f| f.strip_prefix(&dir).expect("below").to_path_buf()).collect();
    let of = |part: &str| names.iter().filter(|n| text(n).contains(part)).count();
    for part in [".segz", ".seg", "HEAD", "blobs/", "snapshots/", "checkpoints/", "events.sled/db"] {
        assert!(of(part) > 0, "{part}: {names:?}");
    }
    // Read by nobody once the log has an event; the text of the lock is for people.
    let no_matter = ["settings.json", "LOCK"];
    let (mut flips, mut found) = (0, 0);
    let work = tmp.path().join("work");
    copy(&dir, &work);
    for name in names.iter().filter(|n| !no_matter.contains(&text(n))) {
        let bytes = std::fs::read(dir.join(name)).expect("read");
        let mut places: Vec<usize> = (0..8).chain(bytes.len().saturating_sub(4)..bytes.len()).collect();
        let mut random = draw(1, "flip", &[text(name)]);
        places.extend((0..FLIPS).map(|_| random.below(bytes.len().max(1))));
        places.retain(|at| *at < bytes.len());
        places.sort_unstable();
        places.dedup();
        let hurt = work.join(name);
        for at in places {
            let context = format!("{} byte {at}", name.display());
            if name.starts_with("events.sled") {
                // sled writes when it is opened: it starts from the same files each time.
                std::fs::remove_dir_all(work.join("events.sled")).expect("remove");
                copy(&dir.join("events.sled"), &work.join("events.sled"));
            }
            let mut bad = bytes.clone();
            bad[at] ^= 1 << (at % 8);
            std::fs::write(&hurt, &bad).expect("write");
            let report = verify(&work).expect("verifies");
            flips += 1;
            if report.is_ok() {
                // Bytes of sled's files that hold nothing, or that it makes anew.
                assert!(name.starts_with("events.sled"), "{context} was not found");
                assert_eq!(history(&work), whole, "{context}");
            } else {
                found += 1;
                let named = |path: &Path| path.starts_with(&hurt) || hurt.starts_with(path);
                assert!(report.findings.iter().any(|f| named(&f.path)), "{context}: {:?}", report.findings);
            }
            std::fs::write(&hurt, &bytes).expect("write");
        }
    }
    eprintln!("{flips} flips in {} files, {found} found, {} without effect", names.len(), flips - found);
    // One of each kind is mended, or named when there is one copy only.
    for part in [".segz", "000002.seg", "HEAD", "snapshots/", "checkpoints/"] {
        let Some(name) = names.iter().find(|n| text(n).contains(part)) else { continue };
        let hurt = tmp.path().join("hurt");
        copy(&dir, &hurt);
        let mut bytes = std::fs::read(hurt.join(name)).expect("read");
        let at = bytes.len() / 2;
        bytes[at] ^= 1;
        std::fs::write(hurt.join(name), bytes).expect("write");
        assert!(!verify(&hurt).expect("verifies").is_ok(), "{part}");
        repair(&hurt).expect("repairs");
        assert!(verify(&hurt).expect("verifies").is_ok(), "{part}");
        assert_eq!(history(&hurt), whole, "{part}");
        std::fs::remove_dir_all(&hurt).expect("remove");
    }
}
