//! A child process appends, forks, undoes, snapshots and cleans up, and is killed at random moments, again and again in
//! the same folder.
//!
//! `COEVOLVE_CRASH_ROUNDS=1000 cargo test --release --lib kill_minus_nine` kills 1,000 times instead of 50.

use super::*;
use crate::log::snapshot;
use std::collections::BTreeMap;
use std::io::Write;
use std::process::{Command, Stdio};
use std::time::Duration;

const DIR: &str = "COEVOLVE_CRASH_DIR";
/// Kills in one folder.
const ROUNDS: u64 = 50;

/// Content of the event with this seq on a branch.
fn content(branch: BranchId, seq: u64) -> Event {
    match seq.is_multiple_of(97) {
        true => large((seq % 5) as u8 + branch as u8, 70_000 + seq as usize),
        false => event(seq as u32 + branch * 7),
    }
}

fn options() -> Options {
    Options { segment_bytes: 64 << 10, group_wait_us: 50, group_events: 32, ..Options::default() }
}

/// What the child writes down once it is acknowledged: 4 numbers of 8 bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Done {
    Appended { branch: BranchId, seq: u64 },
    Forked { branch: BranchId, at: u64 },
    Undone { to: u64, at: u64 },
    Deleted { branch: BranchId },
}

impl Done {
    fn bytes(self) -> Vec<u8> {
        let numbers = match self {
            Done::Appended { branch, seq } => [0, u64::from(branch), seq],
            Done::Forked { branch, at } => [1, u64::from(branch), at],
            Done::Undone { to, at } => [2, to, at],
            Done::Deleted { branch } => [3, u64::from(branch), 0],
        };
        numbers.iter().flat_map(|n| n.to_le_bytes()).collect()
    }

    fn all(bytes: &[u8]) -> Vec<Done> {
        let number = |b: &[u8]| u64::from_le_bytes(b.try_into().unwrap());
        let one = |b: &[u8]| {
            let (a, b, c) = (number(&b[..8]), number(&b[8..16]), number(&b[16..]));
            match a {
                0 => Done::Appended { branch: b as BranchId, seq: c },
                1 => Done::Forked { branch: b as BranchId, at: c },
                2 => Done::Undone { to: b, at: c },
                _ => Done::Deleted { branch: b as BranchId },
            }
        };
        bytes.chunks_exact(24).map(one).collect()
    }
}

/// The child: not a test by itself.
#[test]
#[ignore = "run by kill_minus_nine"]
fn crash_child() {
    let Some(dir) = std::env::var_os(DIR) else { return };
    let dir = Path::new(&dir);
    let mut file = std::fs::File::options().create(true).append(true).open(dir.join("acknowledged")).unwrap();
    let mut acknowledge = |done: Done| file.write_all(&done.bytes()).unwrap();
    let run = dir.join("run");
    let log = match Log::open(&run, options()) {
        Ok(log) => log,
        Err(Error::Empty { .. }) => Log::create(&run, started(), samples::meta(), options()).unwrap(),
        Err(error) => panic!("{error}"),
    };
    let append = |branch: BranchId, n: u64| -> Vec<(Ticket, Done)> {
        let last = log.reader().last(branch).unwrap();
        let seqs = last + 1..=last + n;
        seqs.map(|seq| {
            let ticket = log.append_to(branch, content(branch, seq), samples::meta()).unwrap();
            (ticket, Done::Appended { branch, seq })
        })
        .collect()
    };
    // Each life begins with something else.
    for burst in log.reader().events().. {
        for (ticket, done) in append(MAIN, 1 + burst % 40) {
            assert_eq!(Done::Appended { branch: MAIN, seq: ticket.wait().unwrap().seq }, done);
            acknowledge(done);
        }
        let last = log.reader().last(MAIN).unwrap();
        let branches = log.reader().branches();
        match burst % 6 {
            0 if branches.len() < 5 => {
                let at = 1 + burst % last;
                let branch = log.create_branch(&format!("b{burst}"), MAIN, at, "{}", samples::meta()).unwrap();
                acknowledge(Done::Forked { branch, at });
            }
            1 => {
                let head = log.head();
                let to = log.read(MAIN, 1).unwrap().map(|e| e.unwrap().seq).nth((head / 2) as usize % 50);
                if let Some(to) = to.filter(|to| *to + 40 < head && burst % 5 == 0) {
                    log.undo(MAIN, to, "", samples::meta()).unwrap();
                    acknowledge(Done::Undone { to, at: last });
                }
            }
            2 => {
                if let Some(branch) = branches.keys().next_back() {
                    for (ticket, done) in append(*branch, 3) {
                        ticket.wait().unwrap();
                        acknowledge(done);
                    }
                }
            }
            3 => {
                let digest = log.reader().digest(MAIN, log.head()).unwrap();
                snapshot::write(&run, MAIN, log.head(), &digest, &Digest([3; 32]), &[7; 9_000]).unwrap();
            }
            4 => drop(log.collect(&Collect { orphans: true, ..Collect::default() }, samples::meta()).unwrap()),
            _ => {
                if let Some(branch) = branches.keys().next().filter(|_| branches.len() > 3) {
                    log.delete_branch(*branch, "", samples::meta()).unwrap();
                    acknowledge(Done::Deleted { branch: *branch });
                }
            }
        }
    }
}

/// Everything that was acknowledged is there, as it was, and nothing is there that was not written.
fn check(run: &Path, done: &[Done], context: &str) -> u64 {
    let reader = match Reader::open(run) {
        Ok(reader) => reader,
        Err(Error::Empty { .. }) if done.is_empty() => return 0,
        Err(error) => panic!("{context}: {error}"),
    };
    let mut lasts: BTreeMap<BranchId, u64> = BTreeMap::new();
    let mut hidden = Vec::new();
    for what in done {
        match *what {
            Done::Appended { branch, seq } => drop(lasts.insert(branch, seq)),
            Done::Forked { branch, at } => drop(lasts.insert(branch, at)),
            Done::Undone { to, at } => hidden.push((to, at)),
            Done::Deleted { branch } => {
                lasts.remove(&branch);
                assert!(!reader.branches().contains_key(&branch), "{context}: {what:?}");
            }
        }
    }
    for (branch, last) in lasts {
        // An undo may have been durable and not acknowledged: the branch as of its last event shows all the same.
        let there = reader.last(branch).unwrap_or_else(|error| panic!("{context}: branch {branch}: {error}"));
        // So may a deletion.
        if !reader.with_branches(|b| b.is_live(branch)) {
            continue;
        }
        assert!(there >= last, "{context}: branch {branch} has {there} events, {last} acknowledged");
        for stamped in reader.read_as_of(branch, 1, there).unwrap() {
            let stamped = stamped.unwrap_or_else(|error| panic!("{context}: branch {branch}: {error}"));
            let wanted = if stamped.seq == 1 { started().into() } else { content(stamped.branch, stamped.seq) };
            assert!(stamped.event == wanted, "{context}: event {branch}:{}", stamped.seq);
        }
    }
    if let Ok(history) = reader.read(MAIN, 1) {
        let seqs: Vec<u64> = history.map(|e| e.unwrap().seq).collect();
        assert!(seqs.is_sorted_by(|a, b| a < b));
        for (to, at) in hidden {
            assert!(!seqs.iter().any(|seq| (to + 1..=at).contains(seq)), "{context}: {to} to {at} is not hidden");
        }
    }
    reader.events()
}

#[test]
fn kill_minus_nine() {
    let rounds = std::env::var("COEVOLVE_CRASH_ROUNDS").map_or(ROUNDS, |n| n.parse().expect("a number"));
    for folder in 0..rounds.div_ceil(ROUNDS) {
        kill_in_one_folder(folder, ROUNDS.min(rounds - folder * ROUNDS));
    }
}

fn kill_in_one_folder(folder: u64, rounds: u64) {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    let mut draw = crate::world::draw(20_261_130, "crash test", &[&folder.to_string()]);
    let mut most = 0;
    for round in 0..rounds {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "log::tests::crash::crash_child", "--ignored", "--test-threads=1"])
            .env(DIR, dir.path())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        std::thread::sleep(Duration::from_millis(5 + draw.below(150) as u64));
        assert!(child.try_wait().unwrap().is_none(), "round {round}: the child ended by itself");
        child.kill().unwrap();
        child.wait().unwrap();
        let acknowledged = std::fs::read(dir.path().join("acknowledged")).unwrap_or_default();
        most = most.max(check(&run, &Done::all(&acknowledged), &format!("round {round}")));
    }
    assert!(most > rounds * 10, "only {most} events in {rounds} rounds: the test does not test");
    let acknowledged = Done::all(&std::fs::read(dir.path().join("acknowledged")).unwrap());
    let count = |is: fn(&Done) -> bool| acknowledged.iter().filter(|done| is(done)).count();
    let forked = count(|d| matches!(d, Done::Forked { .. }));
    let (undone, deleted) = (count(|d| matches!(d, Done::Undone { .. })), count(|d| matches!(d, Done::Deleted { .. })));
    eprintln!("{rounds} kills, {most} events, {forked} forks, {undone} undone, {deleted} deleted");
    assert!(rounds < ROUNDS || (forked > 0 && undone > 0 && deleted > 0), "{forked} {undone} {deleted}");
    drop(Log::open(&run, Options::default()).unwrap());
    check(&run, &acknowledged, "at the end");
    let report = verify(&run).unwrap();
    assert!(report.is_ok(), "{report:?}");
    assert_eq!(report.sled, SledCheck::Compared { equal: report.events, behind: 0 });
}
