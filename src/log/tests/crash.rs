//! A child process appends and is killed at random moments, again and again in the same folder.
//!
//! `COEVOLVE_CRASH_ROUNDS=1000 cargo test --release --lib kill_minus_nine` kills 1,000 times instead of 50.

use super::*;
use std::io::Write;
use std::process::{Command, Stdio};
use std::time::Duration;

const DIR: &str = "COEVOLVE_CRASH_DIR";
/// Kills in one folder.
const ROUNDS: u64 = 50;

/// Content of the event with this seq on main.
fn content(seq: u64) -> Event {
    if seq.is_multiple_of(97) { large((seq % 5) as u8, 70_000 + seq as usize) } else { event(seq as u32) }
}

fn options() -> Options {
    Options { segment_bytes: 64 << 10, group_wait_us: 50, group_events: 32, ..Options::default() }
}

/// The child: not a test by itself.
#[test]
#[ignore = "run by kill_minus_nine"]
fn crash_child() {
    let Some(dir) = std::env::var_os(DIR) else { return };
    let dir = Path::new(&dir);
    let mut acknowledged = std::fs::File::options().create(true).append(true).open(dir.join("acknowledged")).unwrap();
    let run = dir.join("run");
    let log = match Log::open(&run, options()) {
        Ok(log) => log,
        Err(Error::Empty { .. }) => Log::create(&run, started(), samples::meta(), options()).unwrap(),
        Err(error) => panic!("{error}"),
    };
    let mut seq = log.head();
    for burst in 0.. {
        let tickets: Vec<Ticket> = (0..1 + burst % 40)
            .map(|_| {
                seq += 1;
                log.append(content(seq), samples::meta()).unwrap()
            })
            .collect();
        for ticket in tickets {
            let stamped = ticket.wait().unwrap();
            acknowledged.write_all(&stamped.seq.to_le_bytes()).unwrap();
        }
    }
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
        let last = acknowledged.chunks_exact(8).next_back().map_or(0, |b| u64::from_le_bytes(b.try_into().unwrap()));
        let events = match Reader::open(&run) {
            Ok(reader) => reader.read(MAIN, 1).unwrap().map(|e| e.unwrap()).collect::<Vec<_>>(),
            Err(Error::Empty { .. }) => Vec::new(),
            Err(error) => panic!("round {round}: {error}"),
        };
        assert!(events.len() as u64 >= last, "round {round}: {} events, {last} acknowledged", events.len());
        for (i, e) in events.iter().enumerate() {
            assert_eq!(e.seq, i as u64 + 1, "round {round}");
            assert!(
                e.event == if i == 0 { started().into() } else { content(e.seq) },
                "round {round}: event {}",
                e.seq
            );
        }
        most = most.max(events.len());
    }
    assert!(most as u64 > rounds * 10, "only {most} events in {rounds} rounds: the test does not test");
    let log = Log::open(&run, Options::default()).unwrap();
    let head = log.head();
    assert!(head >= most as u64);
    drop(log);
    let report = verify(&run).unwrap();
    assert!(report.is_ok(), "{report:?}");
    assert_eq!(report.sled, SledCheck::Compared { equal: head, behind: 0 });
}
