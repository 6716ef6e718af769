//! A long log, by what it takes: memory of the fold, bytes on disk, what a fork writes. No times (see `benches/fold.rs`).
//!
//! 1 M events; `COEVOLVE_SCALE_EVENTS=10000000 cargo test --release --workspace --test scale -- --nocapture` for more.

#[path = "common/training.rs"]
#[allow(dead_code, reason = "the allocator that counts is another test's")]
mod training;

use coevolve::event::Meta;
use coevolve::log::{EventStore, Log, MAIN, Options, Reader, verify};
use coevolve::run::state_at;
use std::path::Path;
use std::process::Command;

const DIR: &str = "COEVOLVE_SCALE_DIR";
/// Peak memory of a process that folds a log of any length, MiB.
const MEMORY_MIB: u64 = 300;
/// Journal and sled copy together, in bytes of the events.
const PLAIN: f64 = 2.9;
const COMPRESSED: f64 = 1.8;

fn peak_mib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("status");
    let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:")).expect("the peak");
    line.trim().trim_end_matches("kB").trim().parse::<u64>().expect("a number") / 1024
}

/// The child: folds the log and says what memory that took. Not a test by itself.
#[test]
#[ignore = "run by the test below"]
fn fold_child() {
    let Some(dir) = std::env::var_os(DIR) else { return };
    let reader = Reader::open(Path::new(&dir)).expect("a reader");
    let head = reader.head(MAIN).expect("main");
    let state = state_at(&reader, MAIN, head).expect("folded");
    assert_eq!((state.last_seq, state.anomaly_count), (Some(head), 0));
    println!("peak {} MiB", peak_mib());
}

fn fold(dir: &Path) -> u64 {
    let mut child = Command::new(std::env::current_exe().expect("this program"));
    child.args(["--exact", "fold_child", "--ignored", "--nocapture"]).env(DIR, dir);
    let done = child.output().expect("starts");
    let text = String::from_utf8_lossy(&done.stdout).into_owned();
    assert!(done.status.success(), "{text}");
    let peak = text.lines().find_map(|l| l.strip_prefix("peak ")?.strip_suffix(" MiB")?.parse().ok());
    peak.unwrap_or_else(|| panic!("no peak in {text}"))
}

#[test]
fn a_long_log_takes_the_memory_and_the_space_that_it_should() {
    let asked = std::env::var("COEVOLVE_SCALE_EVENTS").map_or(1_000_000, |n| n.parse().expect("a number"));
    let root = Path::new(env!("CARGO_TARGET_TMPDIR"));
    std::fs::create_dir_all(root).expect("a folder");
    let tmp = tempfile::tempdir_in(root).expect("a folder");
    let dir = tmp.path();
    let (events, _) = training::write(dir, asked, 2_000);
    let peak = fold(dir);
    println!("{events} events; the fold takes {peak} MiB");
    assert!(peak <= MEMORY_MIB, "{peak} MiB");

    for (what, compress, most) in [("plain", false, PLAIN), ("compressed", true, COMPRESSED)] {
        let _ = std::fs::remove_dir_all(dir.join("events.sled"));
        let log = Log::open(dir, Options { compress, ..Options::default() }).expect("a log");
        // A fork anywhere is one small event.
        let journal = |log: &Log| log.reader().frame_bytes();
        let before = journal(&log);
        log.create_branch(what, MAIN, events / 2, "{}", Meta::default()).expect("a fork");
        assert!(journal(&log) - before < 1_000);
        assert_eq!(log.head(), events);
        if compress {
            log.pack().expect("packs");
        }
        // Closing waits for the sled copy.
        drop(log);
        let report = verify(dir).expect("verifies");
        println!("{what}: {:?}", report.space);
        assert!(report.is_ok(), "{:?}", report.findings);
        assert!(report.space.factor <= most, "{what}: {:?}", report.space);
    }
    // The same fold from compressed segments, in the same memory.
    let peak = fold(dir);
    println!("from compressed segments it takes {peak} MiB");
    assert!(peak <= MEMORY_MIB, "{peak} MiB");
}
