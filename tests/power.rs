//! The log under power loss and failing disks.
//!
//! A child process writes a log while every call that changes its folder is recorded. *Power loss*: for every prefix
//! of the recording, what a disk with a volatile cache may hold then is laid out and opened (unflushed data lost,
//! kept, reordered, torn at 512 bytes; unflushed names lost or kept). *Faults*: the same child again and again, each
//! time another call fails (once with EIO; from there on with ENOSPC), sled's own calls included. Each time: every
//! acknowledged event is there, nothing else is, nothing is missing between, and the log goes on. So it is when the power
//! goes again while the log recovers, and when an append that was refused is tried again before the power goes.
//!
//! `COEVOLVE_FAULTS=all cargo test --release --test power` fails every call instead of a sample.

mod common;
mod faults;

use coevolve::event::{Event, FailureNoted, Meta, RunStarted, StepSkipped};
use coevolve::log::{BranchId, Error, EventStore, Log, MAIN, Options, Reader, SledCheck, verify};
use coevolve::world::draw;
use faults::{Disk, Fate, Op};
use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

const ROOT: &str = "COEVOLVE_POWER_ROOT";
/// Event of main at which the child forks, and the fork's number.
const FORK_AT: u64 = 30;
const FORK: BranchId = 1;
/// Each fault run of the sample skips this many calls.
const STRIDE: usize = 9;

fn options(sled: bool) -> Options {
    Options {
        segment_bytes: 8 << 10,
        group_wait_us: 50,
        group_events: 16,
        blob_bytes: 12 << 10,
        sled,
        ..Options::default()
    }
}

fn started() -> RunStarted {
    RunStarted {
        run_id: "11111111-2222-4333-8444-555555555555".into(),
        seed: 7,
        settings: "{}".into(),
        code_version: "test".into(),
        policy_digest: "none".into(),
        environment: "none".into(),
    }
}

fn meta() -> Meta {
    Meta::default()
}

/// The event with this seq on this branch: some are payloads of their own.
fn content(branch: BranchId, seq: u64) -> Event {
    if branch == MAIN && seq == 1 {
        return started().into();
    }
    if seq.is_multiple_of(13) {
        let message: String =
            (0..14_000).map(|i| char::from(b'a' + ((i * seq + u64::from(branch)) % 26) as u8)).collect();
        return FailureNoted { stage: format!("{branch}:{seq}"), message }.into();
    }
    StepSkipped { step: seq as u32, update: branch, reason: "x".repeat((seq * 37 % 600) as usize) }.into()
}

/// The child: not a test by itself. Ends with 3 when the log refused to go on.
#[test]
#[ignore = "run by the tests below"]
fn child() {
    let Some(root) = std::env::var_os(ROOT) else { return };
    if let Err(error) = work(Path::new(&root)) {
        eprintln!("{error}");
        std::process::exit(3);
    }
}

fn work(root: &Path) -> Result<(), Error> {
    let mut ack = std::fs::File::options().create(true).append(true).open(root.join("ack")).expect("ack");
    let mut acknowledge = |branch: BranchId, seq: u64| {
        ack.write_all(&[u64::from(branch).to_le_bytes(), seq.to_le_bytes()].concat()).expect("ack");
    };
    let run = root.join("run");
    let mut log = Log::create(&run, started(), meta(), options(true))?;
    acknowledge(MAIN, 1);
    for life in 0..3u64 {
        if life > 0 {
            drop(log);
            log = Log::open(&run, options(true))?;
        }
        for burst in 0..6 {
            let mut heads = vec![(MAIN, log.head())];
            if let Ok(head) = log.reader().head(FORK) {
                heads.push((FORK, head));
            }
            // Branches in turns: a record holds one branch's events, so that several records wait for a flush.
            let mut tickets = Vec::new();
            for more in 1..=1 + (burst * 5 + life) % 7 {
                for (branch, head) in &heads {
                    let seq = head + more;
                    tickets.push((*branch, seq, log.append_to(*branch, content(*branch, seq), meta())?));
                }
            }
            for (branch, seq, ticket) in tickets {
                assert_eq!(ticket.wait()?.seq, seq);
                acknowledge(branch, seq);
            }
            if log.head() >= FORK_AT && log.reader().head(FORK).is_err() {
                assert_eq!(log.create_branch("fork", MAIN, FORK_AT, "{}", meta())?, FORK);
                acknowledge(FORK, FORK_AT);
            }
        }
    }
    Ok(())
}

fn run_child(library: &Path, root: &Path, trace: Option<&Path>, fault: Option<&str>) -> Option<i32> {
    run(library, "child", root, trace, fault)
}

/// Runs one of the children; its exit code.
fn run(library: &Path, child: &str, root: &Path, trace: Option<&Path>, fault: Option<&str>) -> Option<i32> {
    std::fs::create_dir_all(root).expect("folder");
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    command.args(["--exact", child, "--ignored", "--test-threads=1"]).env(ROOT, root);
    command.env("LD_PRELOAD", library).env("COEVOLVE_TRACE_ROOT", root);
    if let Some(trace) = trace {
        command.env("COEVOLVE_TRACE", trace);
    }
    if let Some(fault) = fault {
        command.env("COEVOLVE_FAULT", fault);
    }
    let running = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("starts");
    let done = common::kill_after(running, Duration::from_secs(60)).unwrap_or_else(|| panic!("{fault:?}: hangs"));
    assert!(matches!(done.code, Some(0 | 3)), "{fault:?}: {done:?}");
    done.code
}

/// The last acknowledged event of each branch, from the bytes of the `ack` file.
fn acknowledged(bytes: &[u8]) -> BTreeMap<BranchId, u64> {
    let number = |b: &[u8]| u64::from_le_bytes(b.try_into().expect("8 bytes"));
    bytes.chunks_exact(16).map(|pair| (number(&pair[..8]) as BranchId, number(&pair[8..]))).collect()
}

/// Everything a run folder must give after a crash; what is missing.
fn check(run: &Path, acknowledged: &BTreeMap<BranchId, u64>, sled: bool) -> Result<(), String> {
    let text = |e: Error| e.to_string();
    let log = match Log::open(run, options(sled)) {
        Err(Error::Empty { .. }) if acknowledged.is_empty() => {
            drop(Log::create(run, started(), meta(), options(sled)).map_err(text)?);
            Log::open(run, options(sled)).map_err(text)?
        }
        opened => opened.map_err(text)?,
    };
    let branches: BTreeSet<BranchId> = [MAIN].into_iter().chain(acknowledged.keys().copied()).collect();
    let heads = |reader: &Reader| -> Result<BTreeMap<BranchId, u64>, String> {
        let mut heads = BTreeMap::new();
        for branch in &branches {
            let mut last = 0;
            for event in reader.read(*branch, 1).map_err(text)? {
                let event = event.map_err(text)?;
                let owner = if *branch == FORK && event.seq <= FORK_AT { MAIN } else { *branch };
                if event.seq != last + 1 || event.event != content(owner, event.seq) {
                    return Err(format!("branch {branch}: {} follows {last}, or has another content", event.seq));
                }
                last = event.seq;
            }
            heads.insert(*branch, last);
        }
        Ok(heads)
    };
    let before = heads(log.reader())?;
    if let Some((branch, seq)) = acknowledged.iter().find(|(branch, seq)| before[branch] < **seq) {
        return Err(format!("{seq} events of branch {branch} were acknowledged, {} are there", before[branch]));
    }
    // It goes on from there.
    let next = before[&MAIN] + 1;
    let stamped = log.append(content(MAIN, next), meta()).and_then(|t| t.wait()).map_err(text)?;
    drop(log);
    let after = heads(&Reader::open(run).map_err(text)?)?[&MAIN];
    if (stamped.seq, after) != (next, next) {
        return Err(format!("event {next} became {} and then {after}", stamped.seq));
    }
    if sled {
        let report = verify(run).map_err(text)?;
        if !report.is_ok() || !matches!(report.sled, SledCheck::Compared { behind: 0, .. }) {
            return Err(format!("{report:?}"));
        }
    }
    Ok(())
}

/// A folder for many small files that nobody needs to survive.
fn scratch() -> tempfile::TempDir {
    let memory = Path::new("/dev/shm");
    if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() }.expect("folder")
}

/// Calls of a child that nothing happened to, and the folder it left.
fn recorded(tmp: &Path) -> (Vec<Op>, PathBuf) {
    let (root, recording) = (tmp.join("child"), tmp.join("trace"));
    assert_eq!(run_child(faults::library(), &root, Some(&recording), None), Some(0));
    (faults::trace(&recording).into_iter().filter(|(_, failed)| !failed).map(|(op, _)| op).collect(), root)
}

/// Flushes that a broken program would not make.
type Deaf = fn(&Op) -> bool;

/// Opens what a power loss leaves after each prefix of `ops`, each state once. `deaf` flushes are ignored.
/// Returns the number of states, of those opened with the sled copy, and what went wrong.
fn lose_power_everywhere(tmp: &Path, ops: &[Op], deaf: Deaf) -> (usize, usize, Vec<String>) {
    lose_power_from(tmp, ops, 0, deaf)
}

/// The same from the call with number `first` on.
fn lose_power_from(tmp: &Path, ops: &[Op], first: usize, deaf: Deaf) -> (usize, usize, Vec<String>) {
    let mut disk = Disk::default();
    let (mut acks, mut seen, mut states, mut with_sled, mut wrong) = (Vec::new(), BTreeSet::new(), 0, 0, Vec::new());
    for (at, op) in ops.iter().enumerate() {
        match op {
            Op::Write(path, _, data) if path == "ack" => acks.extend_from_slice(data),
            op if deaf(op) => {}
            op => disk.apply(op),
        }
        if at < first {
            continue;
        }
        let mut d = draw(20_261_130, "power loss", &[&at.to_string()]);
        let mut below = |n: usize| d.below(n);
        for variant in 0..6 {
            let fate = match variant {
                0 => Fate::Lost,
                1 => Fate::NamesOnly,
                2 => Fate::Kept,
                _ => Fate::Drawn(&mut below),
            };
            let found = disk.lose_power(fate);
            if !seen.insert((found.digest(), acks.len())) {
                continue;
            }
            states += 1;
            let sled = states % 12 == 0;
            with_sled += usize::from(sled);
            let target = tmp.join("state");
            found.write(&target);
            if let Err(what) = check(&target.join("run"), &acknowledged(&acks), sled) {
                wrong.push(format!("call {at} {op:.60?}, variant {variant}: {what}"));
            }
            std::fs::remove_dir_all(&target).expect("remove");
        }
    }
    (states, with_sled, wrong)
}

#[test]
fn a_power_loss_at_any_moment_loses_nothing_acknowledged() {
    let tmp = scratch();
    let (ops, root) = recorded(tmp.path());
    let wanted = acknowledged(&std::fs::read(root.join("ack")).expect("ack"));
    assert!(wanted[&MAIN] > 60 && wanted[&FORK] > FORK_AT + 20, "{wanted:?}");

    // The recording is complete: applied in full it is the folder that the child left.
    let mut whole = Disk::default();
    ops.iter().for_each(|op| whole.apply(op));
    let left = whole.lose_power(Fate::Kept);
    let files = common::files(&root);
    for part in ["/journal/", "/blobs/", "/events.sled/", "/HEAD"] {
        assert!(files.iter().any(|f| f.to_string_lossy().contains(part)), "nothing in {part}: {files:?}");
    }
    for file in files {
        let name = file.strip_prefix(&root).expect("below").to_str().expect("UTF-8");
        let recorded = left.files.get(name).unwrap_or_else(|| panic!("{name} was not recorded"));
        assert!(*recorded == std::fs::read(&file).expect("read"), "{name}: the recording has another content");
    }

    // Flushes that made several records durable.
    let (mut written, mut shared) = (0, 0);
    for op in &ops {
        match op {
            Op::Write(path, ..) if path.contains("/journal/") => written += 1,
            Op::Flush(path) if path.contains("/journal/") => {
                shared += usize::from(written > 1);
                written = 0;
            }
            _ => {}
        }
    }
    assert!(shared > 5, "{shared} flushes were shared: the test does not test");

    let (states, with_sled, wrong) = lose_power_everywhere(tmp.path(), &ops, |_| false);
    eprintln!(
        "{} calls, {shared} shared flushes, {states} different states, {with_sled} with the sled copy",
        ops.len()
    );
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(states > 300 && with_sled > 20, "{states} states: the test does not test");
}

/// The test above sees what it is there to see: without one kind of flush, acknowledged events are lost.
#[test]
fn a_missing_flush_would_be_seen() {
    let tmp = scratch();
    let (ops, _) = recorded(tmp.path());
    let planted: [(&str, Deaf); 3] = [
        ("segments", |op| matches!(op, Op::Flush(p) if p.contains("/journal/"))),
        ("the journal's folder", |op| matches!(op, Op::FlushFolder(p) if p.ends_with("/journal"))),
        ("payloads", |op| matches!(op, Op::Flush(p) if p.contains("/blobs/"))),
    ];
    for (what, deaf) in planted {
        let (_, _, wrong) = lose_power_everywhere(tmp.path(), &ops, deaf);
        assert!(!wrong.is_empty(), "nothing is lost when {what} are never flushed: this test is blind");
    }
}

#[test]
fn whatever_call_fails_nothing_acknowledged_is_lost_and_the_log_goes_on() {
    let tmp = scratch();
    let library = faults::library();
    let (root, recording) = (tmp.path().join("whole"), tmp.path().join("trace"));
    assert_eq!(run_child(library, &root, Some(&recording), None), Some(0));
    let calls =
        faults::trace(&recording).iter().filter(|(op, _)| !matches!(op, Op::Write(p, ..) if p == "ack")).count();
    let all = std::env::var("COEVOLVE_FAULTS").is_ok_and(|v| v == "all");
    let (mut runs, mut refused) = (0, 0);
    for (kind, suffix) in [("EIO once", "5"), ("ENOSPC from here on", "28:on")] {
        let mut at = 1;
        while at <= calls {
            let root: PathBuf = tmp.path().join("run");
            let fault = format!("{at}:{suffix}");
            let code = run_child(library, &root, None, Some(&fault));
            runs += 1;
            refused += usize::from(code == Some(3));
            let acks = std::fs::read(root.join("ack")).unwrap_or_default();
            if let Err(what) = check(&root.join("run"), &acknowledged(&acks), runs % 4 == 0) {
                panic!("call {at} fails, {kind}: {what}");
            }
            std::fs::remove_dir_all(&root).expect("remove");
            at += if all { 1 } else { STRIDE };
        }
    }
    eprintln!("{calls} calls, {runs} runs with a failing one, {refused} of them ended with an error");
    assert!(refused > runs / 10, "{refused} of {runs}: the faults hit nothing");
}

/// The child of the test below: opens what a power loss left and goes on a little. Not a test by itself.
#[test]
#[ignore = "run by the tests below"]
fn child_that_recovers() {
    let Some(root) = std::env::var_os(ROOT) else { return };
    let root = Path::new(&root);
    let mut ack = std::fs::File::options().create(true).append(true).open(root.join("ack")).expect("ack");
    let log = Log::open(&root.join("run"), options(false)).expect("opens");
    for seq in log.head() + 1..=log.head() + 2 {
        log.append(content(MAIN, seq), meta()).and_then(|t| t.wait()).expect("goes on");
        ack.write_all(&[u64::from(MAIN).to_le_bytes(), seq.to_le_bytes()].concat()).expect("ack");
    }
}

#[test]
fn a_power_loss_while_another_one_is_recovered_from_loses_nothing_acknowledged() {
    let tmp = scratch();
    let (ops, _) = recorded(tmp.path());
    let (mut disk, mut acks, mut recovered, mut second) = (Disk::default(), Vec::new(), 0, 0);
    let every = ops.len() / 24;
    for (at, op) in ops.iter().enumerate() {
        match op {
            Op::Write(path, _, data) if path == "ack" => acks.extend_from_slice(data),
            op => disk.apply(op),
        }
        if at % every != every - 1 || acks.is_empty() {
            continue;
        }
        let mut d = draw(20_261_130, "first power loss", &[&at.to_string()]);
        let mut below = |n: usize| d.below(n);
        let found = disk.lose_power(if at % 2 == 0 { Fate::Lost } else { Fate::Drawn(&mut below) });
        let root = tmp.path().join("recovering");
        found.write(&root);
        std::fs::create_dir_all(&root).expect("folder");
        let recording = tmp.path().join("trace");
        assert_eq!(run(faults::library(), "child_that_recovers", &root, Some(&recording), None), Some(0), "call {at}");
        std::fs::remove_dir_all(&root).expect("remove");
        // What the first one left is what the second one begins with, all of it durable.
        let mut more = found.written();
        more.push(Op::Write("ack".into(), 0, acks.clone()));
        let begins = more.len();
        more.extend(faults::trace(&recording).into_iter().filter(|(_, failed)| !failed).map(|(op, _)| op));
        assert!(more.len() > begins + 4, "nothing was recorded");
        let (states, _, wrong) = lose_power_from(tmp.path(), &more, begins, |_| false);
        assert!(wrong.is_empty(), "after call {at}: {}", wrong.join("\n"));
        recovered += 1;
        second += states;
    }
    eprintln!("{recovered} recoveries, {second} states after a second power loss");
    assert!(recovered >= 20 && second > 200, "{recovered} recoveries, {second} states: the test does not test");
}

/// The child of the test below: tries an append again that was refused. Not a test by itself.
#[test]
#[ignore = "run by the tests below"]
fn child_that_tries_again() {
    let Some(root) = std::env::var_os(ROOT) else { return };
    let root = Path::new(&root);
    let mut ack = std::fs::File::options().create(true).append(true).open(root.join("ack")).expect("ack");
    let mut acknowledge = |seq: u64| {
        ack.write_all(&[u64::from(MAIN).to_le_bytes(), seq.to_le_bytes()].concat()).expect("ack");
    };
    let Ok(log) = Log::create(&root.join("run"), started(), meta(), options(false)) else { std::process::exit(3) };
    acknowledge(1);
    for seq in 2..=28 {
        let append = || log.append(content(MAIN, seq), meta());
        if append().or_else(|_| append()).and_then(|t| t.wait()).is_err() {
            std::process::exit(3);
        }
        acknowledge(seq);
    }
}

#[test]
fn a_payload_whose_append_failed_and_was_tried_again_survives_a_power_loss() {
    let tmp = scratch();
    let child = "child_that_tries_again";
    let (whole, recording) = (tmp.path().join("whole"), tmp.path().join("trace"));
    assert_eq!(run(faults::library(), child, &whole, Some(&recording), None), Some(0));
    let calls = faults::trace(&recording);
    let of_payloads = |op: &Op| match op {
        Op::Flush(path) | Op::FlushFolder(path) | Op::Rename(path, _) | Op::Create(path) => path.contains("/blobs"),
        _ => false,
    };
    // The test's own notes are not counted.
    let counted = calls.iter().filter(|(op, _)| !matches!(op, Op::Write(p, ..) if p == "ack"));
    let hit: Vec<usize> = counted.enumerate().filter(|(_, (op, _))| of_payloads(op)).map(|(at, _)| at + 1).collect();
    assert!(hit.len() > 8, "{hit:?}");
    let mut survived = 0;
    for at in hit {
        let root = tmp.path().join("run");
        let code = run(faults::library(), child, &root, Some(&recording), Some(&format!("{at}:5")));
        survived += usize::from(code == Some(0));
        let ops: Vec<Op> =
            faults::trace(&recording).into_iter().filter(|(_, failed)| !failed).map(|(op, _)| op).collect();
        let (_, _, wrong) = lose_power_everywhere(tmp.path(), &ops, |_| false);
        assert!(wrong.is_empty(), "call {at} failed: {}", wrong.join("\n"));
        std::fs::remove_dir_all(&root).expect("remove");
    }
    assert!(survived > 4, "{survived} children went on after a failed call: the test does not test");
}
