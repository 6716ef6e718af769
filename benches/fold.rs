//! The fold of all projections from a cold open, and what it costs.
//!
//! `cargo bench --bench fold` (1 M events; `COEVOLVE_BENCH_EVENTS=10000000` for more) writes a log with the real writer
//! below `target/` and folds it in processes of their own, each on one thread: open, read, check, fold. The log is in the
//! page cache: what is measured is the program, not the disk. With `COEVOLVE_BENCH_DIR` (a folder with a log) and
//! `COEVOLVE_BENCH_PART` (`fold`, `facts`, `snapshot`, `space`) one part runs on a log that is there.
//!
//! Measured on two cores of a Xeon with nothing else running; 472 bytes per event, 10 M events (4.7 GB, 90,930 steps):
//!
//! | | |
//! |---|---|
//! | open and fold all projections | 9.3 s, 1.07 M events/s on one core (1 M events: 1.14 M/s) |
//! | allocations per event, second half of the log | 0.0058 (1 M events: 0.0090) |
//! | peak memory of that | 80 MiB (1 M events: 16 MiB) |
//! | with the facts digest (the BLAKE3 of every fact; a resume without a snapshot) | 13.6 s, 0.74 M events/s |
//! | open by a snapshot, 5,000 events behind it | 1.8 s from a cold cache |
//! | open for writing | 0.47 s |
//! | fork at event 5 M, durable | 0.8 to 4.3 ms |
//! | journal and sled copy, plain | 1.00 + 1.69 = 2.69 times the events, filled in 66.8 s |
//! | compressed | 0.09 + 0.18 = 0.27 times, 23.0 s |
//! | open and fold from compressed segments | 0.91 M events/s, open 0.10 s |
//!
//! About a tenth of the fold is the BLAKE3 of the records, which links each to the one before.
//!
//! Allocations are those of lists that double, and evolution rounds. The rollouts here are made up of few words: real ones
//! compress less (see `verify`, which tells the space of a run).

#[path = "../tests/common/training.rs"]
mod training;

use coevolve::event::Meta;
use coevolve::event::digest::FactsDigest;
use coevolve::log::{Error, EventStore, Log, MAIN, Options, Reader, snapshot};
use coevolve::project::{State, fold_version};
use coevolve::run::state_at;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

#[global_allocator]
static ALLOCATOR: training::Counting = training::Counting;

const TASKS: u64 = 2000;
/// Events behind the snapshot that an opening by way of it has to fold.
const TAIL: u64 = 5000;

/// Peak resident memory of this process, MiB.
fn peak_mib() -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:")).unwrap_or_default();
    line.trim().trim_end_matches(" kB").trim().parse::<f64>().unwrap_or(f64::NAN) / 1024.0
}

/// Processor time of this process so far, seconds: what one core would have taken if nobody else had used it.
fn cpu() -> f64 {
    // The clock ticks a hundred times a second; user and system time are fields 14 and 15.
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let after_name = stat.rsplit_once(") ").map_or("", |(_, rest)| rest);
    after_name.split(' ').skip(11).take(2).filter_map(|n| n.parse::<f64>().ok()).sum::<f64>() / 100.0
}

fn open(dir: &Path) -> (Reader, u64, f64) {
    let begin = Instant::now();
    let reader = Reader::open(dir).expect("a reader");
    let events = reader.head(MAIN).expect("main");
    (reader, events, begin.elapsed().as_secs_f64())
}

fn print(what: &str, events: u64, seconds: f64, cpu: f64) {
    let rate = |seconds: f64| events as f64 / seconds / 1e6;
    println!(
        "{what:24} {seconds:8.3} s, {:.2} M events/s; {cpu:.2} s of processor, {:.2} M/s",
        rate(seconds),
        rate(cpu)
    );
}

fn fold(dir: &Path) {
    let (reader, events, opened) = open(dir);
    let (begin, mut state, mut half) = (Instant::now(), State::new(), 0);
    let sweep = reader.sweep(MAIN, 1, u64::MAX, |swept| {
        state.apply_view(swept.seq, &swept.view, &swept.meta);
        if swept.seq == events / 2 {
            half = training::allocations();
        }
        Ok::<_, Error>(())
    });
    sweep.expect("swept");
    let (folded, cpu) = (begin.elapsed().as_secs_f64(), cpu());
    let allocations = training::allocations() - half;
    assert_eq!((state.last_seq, state.anomaly_count), (Some(events), 0));
    let (steps, rounds) = (state.metrics.steps.len(), state.metrics.rounds.len());
    println!("{events} events, {steps} steps, {rounds} evolution rounds, |D| = {}", state.tasks.len());
    println!("open                     {:8.1} ms", opened * 1e3);
    print("open and fold", events, opened + folded, cpu);
    let later = events - events / 2;
    println!("allocations, second half {allocations:8}, {:.4} per event", allocations as f64 / later as f64);
    println!("peak memory              {:8.1} MiB", peak_mib());
}

fn facts(dir: &Path) {
    let (reader, events, opened) = open(dir);
    let (begin, mut state, mut facts) = (Instant::now(), State::new(), FactsDigest::new());
    let sweep = reader.sweep(MAIN, 1, u64::MAX, |swept| {
        state.apply_view(swept.seq, &swept.view, &swept.meta);
        facts.add_view(&swept.view).map_err(Error::from)
    });
    sweep.expect("swept");
    let seconds = opened + begin.elapsed().as_secs_f64();
    print("with the facts digest", events, seconds, cpu());
}

/// What the loop keeps in a snapshot.
#[derive(serde::Serialize)]
struct Kept<'a> {
    facts_chain: [u8; 32],
    facts: u64,
    state: &'a State,
}

fn by_snapshot(dir: &Path) {
    let (reader, events, _) = open(dir);
    let at = events.saturating_sub(TAIL);
    let state = state_at(&reader, MAIN, at).expect("a state");
    let body = serde_json::to_vec(&Kept { facts_chain: [0; 32], facts: 0, state: &state }).expect("JSON");
    let digest = reader.digest(MAIN, at).expect("a digest");
    snapshot::write(dir, MAIN, at, &digest, &fold_version(), &body).expect("a snapshot");
    let begin = Instant::now();
    let (reader, events, _) = open(dir);
    let opened = state_at(&reader, MAIN, events).expect("a state");
    assert_eq!(opened.last_seq, Some(events));
    let (ms, mib) = (begin.elapsed().as_secs_f64() * 1e3, body.len() as f64 / (1 << 20) as f64);
    println!("open by a snapshot       {ms:8.1} ms, {TAIL} events behind it, {mib:.1} MiB");
}

/// A fork in the middle, what the sled copy takes, and the space of both, plain and compressed.
fn space(dir: &Path) {
    let seconds = |begin: Instant| begin.elapsed().as_secs_f64();
    let report = |what: &str, filled: f64| {
        let size = |name: &str| {
            let files = std::fs::read_dir(dir.join(name)).expect("a folder").map(|f| f.expect("a file").path());
            files.filter_map(|f| f.metadata().ok()).filter(|m| m.is_file()).map(|m| m.len()).sum::<u64>() as f64
        };
        let frames = Reader::open(dir).expect("a reader").frame_bytes() as f64;
        let (journal, sled) = (size("journal") / frames, size("events.sled") / frames);
        println!("{what:10} journal {journal:.2}x, sled {sled:.2}x, together {:.2}x; {filled:.1} s", journal + sled);
    };
    for (what, compress) in [("plain", false), ("compressed", true)] {
        let _ = std::fs::remove_dir_all(dir.join("events.sled"));
        let begin = Instant::now();
        let log = Log::open(dir, Options { compress, ..Options::default() }).expect("a log");
        println!("open for writing         {:8.1} ms", seconds(begin) * 1e3);
        let middle = log.head() / 2;
        let forked = Instant::now();
        log.create_branch(&format!("{what} fork"), MAIN, middle, "{}", Meta::default()).expect("a fork");
        println!("fork at event {middle:<10} {:8.1} ms", seconds(forked) * 1e3);
        // Closing waits for the sled copy; what is left to compress is compressed then.
        if compress {
            log.pack().expect("packed");
        }
        drop(log);
        report(what, seconds(begin));
    }
}

fn main() {
    if let (Some(dir), Ok(part)) = (std::env::var_os("COEVOLVE_BENCH_DIR"), std::env::var("COEVOLVE_BENCH_PART")) {
        let dir = Path::new(&dir);
        match part.as_str() {
            "fold" => fold(dir),
            "facts" => facts(dir),
            "space" => space(dir),
            _ => by_snapshot(dir),
        }
        return;
    }
    let asked = std::env::var("COEVOLVE_BENCH_EVENTS").ok().and_then(|n| n.parse().ok());
    let root = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    std::fs::create_dir_all(&root).expect("a folder");
    let dir = tempfile::tempdir_in(root).expect("a folder");
    let begin = Instant::now();
    let (events, _) = training::write(dir.path(), asked.unwrap_or(1_000_000), TASKS);
    let segments = std::fs::read_dir(dir.path().join("journal")).expect("segments");
    let bytes: u64 = segments.map(|s| s.expect("a segment").metadata().expect("its length").len()).sum();
    let seconds = begin.elapsed().as_secs_f64();
    println!("written in {seconds:.1} s: {bytes} bytes, {} per event", bytes / events);
    for part in ["fold", "facts", "snapshot", "space", "fold"] {
        // A process of its own: peak memory and allocations are those of the fold.
        let itself = std::env::current_exe().expect("itself");
        let status =
            Command::new(itself).env("COEVOLVE_BENCH_DIR", dir.path()).env("COEVOLVE_BENCH_PART", part).status();
        assert!(status.expect("started").success(), "{part}");
    }
}
