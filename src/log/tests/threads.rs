//! Many threads at one log: appending, reading, waiting, letting go.

use super::*;
use std::sync::atomic::{AtomicBool, Ordering};

#[test]
fn the_log_s_own_reader_can_be_refreshed_while_it_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let log = Log::create(dir.path(), started(), samples::meta(), without_sled()).unwrap();
    let done = AtomicBool::new(false);
    std::thread::scope(|s| {
        for _ in 0..2 {
            s.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    log.reader().refresh().unwrap();
                    log.reader().complete().unwrap();
                }
            });
        }
        let appended = (0..2_000).try_for_each(|n| log.append(event(n), samples::meta())?.wait().map(drop));
        done.store(true, Ordering::Relaxed);
        appended.unwrap();
    });
    drop(log);
    assert_eq!(read_all(dir.path(), MAIN).len(), 2_001);
}

#[test]
fn a_fact_of_the_ledger_that_does_not_fit_is_refused_before_it_is_written() {
    use crate::event::{BranchCreated, BranchDeleted, BranchUndone};
    let dir = tempfile::tempdir().unwrap();
    let log = Log::create(dir.path(), started(), samples::meta(), without_sled()).unwrap();
    let misfits: [Event; 3] = [
        BranchDeleted { branch: 9, reason: String::new() }.into(),
        BranchUndone { branch: 9, to: 1, at: 1, reason: String::new() }.into(),
        BranchCreated { name: "x".into(), branch: 3, parent: 9, at: 1, settings: String::new() }.into(),
    ];
    for misfit in misfits {
        assert!(matches!(log.append_to(LEDGER, misfit, samples::meta()), Err(Error::BranchFact)));
    }
    log.append(event(1), samples::meta()).unwrap().wait().unwrap();
    drop(log);
    drop(Log::open(dir.path(), without_sled()).unwrap());
    assert_eq!(read_all(dir.path(), MAIN).len(), 2);
}

/// The n-th event of a thread: small ones, some near the longest group, some that are payloads of their own.
fn of_thread(thread: u32, n: u32) -> Event {
    let bytes = match n % 29 {
        7 => 3_000,
        11 => 9_000,
        _ => n as usize % 40,
    };
    FailureNoted { stage: format!("{thread} {n}"), message: "y".repeat(bytes) }.into()
}

/// Appends from several threads to three branches, while a slow subscriber follows; nothing is missing or out of order.
fn append_from_all_sides(options: Options, events: u32) {
    const THREADS: u32 = 6;
    let dir = tempfile::tempdir().unwrap();
    let log = Log::create(dir.path(), started(), samples::meta(), options.clone()).unwrap();
    let fork = |name: &str| log.create_branch(name, MAIN, 1, "{}", samples::meta()).unwrap();
    let branches = [MAIN, fork("a"), fork("b")];
    let before = log.reader().events();
    let mut slow = log.published();
    std::thread::scope(|s| {
        for thread in 0..THREADS {
            let (log, branch) = (&log, branches[thread as usize % branches.len()]);
            s.spawn(move || {
                let (mut held, mut last) = (Vec::new(), 1);
                for n in 0..events {
                    held.push((n, log.append_to(branch, of_thread(thread, n), samples::meta()).unwrap()));
                    match (n + thread) % 13 {
                        3 => assert!(log.barrier().unwrap() >= 1),
                        // Nobody waits for these.
                        5 => held.clear(),
                        9 => {
                            for (n, ticket) in held.drain(..) {
                                let stamped = ticket.wait().unwrap();
                                assert_eq!((stamped.branch, &stamped.event), (branch, &of_thread(thread, n)));
                                assert!(stamped.seq > last, "{} after {last}", stamped.seq);
                                last = stamped.seq;
                                assert_eq!(log.reader().event(branch, last).unwrap().event, stamped.event);
                            }
                        }
                        _ => {}
                    }
                }
            });
        }
        let mut lasts = std::collections::BTreeMap::new();
        for got in 0..u64::from(THREADS * events) {
            let stamped = slow.recv().unwrap();
            let last = lasts.insert(stamped.branch, stamped.seq).unwrap_or(1);
            assert_eq!(stamped.seq, last + 1, "branch {}", stamped.branch);
            if got.is_multiple_of(64) {
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
        }
    });
    assert_eq!(log.reader().events() - before, u64::from(THREADS * events));
    drop(log);
    let mut next = [0; THREADS as usize];
    for branch in branches {
        for stamped in read_all(dir.path(), branch).into_iter().filter(|e| e.branch == branch && e.seq > 1) {
            let Event::FailureNoted(noted) = &stamped.event else { panic!("{stamped:?}") };
            let thread: u32 = noted.stage.split(' ').next().unwrap().parse().unwrap();
            let n = &mut next[thread as usize];
            assert_eq!(stamped.event, of_thread(thread, *n), "each thread's events in its order");
            *n += 1;
        }
    }
    assert_eq!(next, [events; THREADS as usize]);
    assert!(verify(dir.path()).unwrap().is_ok());
}

#[test]
fn threads_that_share_a_log_lose_and_disturb_nothing() {
    for group_events in [1, 2, 256] {
        for queue_events in [1, 3, 1024] {
            for (group_bytes, group_wait_us) in [(1, 0), (4_000, 200), (1 << 20, 5_000)] {
                let (blob_bytes, ring_events) = (8 << 10, 16);
                let options = Options {
                    group_events,
                    queue_events,
                    group_bytes,
                    group_wait_us,
                    blob_bytes,
                    ring_events,
                    segment_bytes: 20_000,
                    ..without_sled()
                };
                append_from_all_sides(options, 60);
            }
        }
    }
}
