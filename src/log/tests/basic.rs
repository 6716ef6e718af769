//! Appending, reading, branches, publication, blobs, the lock.

use super::*;
use std::time::Duration;

#[test]
fn appended_events_are_read_back_after_reopening() {
    let dir = tempfile::tempdir().unwrap();
    written(dir.path(), 100, without_sled());
    let log = Log::open(dir.path(), without_sled()).unwrap();
    assert!(log.notes().is_empty(), "{:?}", log.notes());
    assert_eq!(log.head(), 101);
    assert_eq!(log.append(event(100), samples::meta()).unwrap().wait().unwrap().seq, 102);
    let events = read_all(dir.path(), MAIN);
    assert_eq!(events.len(), 102);
    for (i, e) in events.iter().enumerate() {
        assert_eq!((e.seq, e.branch), (i as u64 + 1, MAIN));
        assert_eq!(e.event, if i == 0 { started().into() } else { event(i as u32 - 1) });
        assert_eq!(e.meta, samples::meta());
    }
    assert_eq!(log.reader().event(MAIN, 50).unwrap(), events[49]);
    let from: Vec<u64> = log.read(MAIN, 100).unwrap().map(|e| e.unwrap().seq).collect();
    assert_eq!(from, [100, 101, 102]);
    assert!(matches!(log.reader().event(MAIN, 103), Err(Error::NoEvent { seq: 103, head: 102, .. })));
    assert!(matches!(log.read(7, 1).err(), Some(Error::NoBranch { .. })));
}

#[test]
fn the_chain_is_the_hash_of_the_frames_of_a_record_which_hold_the_digest_before_it() {
    use crate::event::{codec, frame};
    let dir = tempfile::tempdir().unwrap();
    let options = Options { group_events: 3, group_wait_us: 1_000_000, ..without_sled() };
    written(dir.path(), 7, options);
    let reader = Reader::open(dir.path()).unwrap();
    let sled = tempfile::tempdir().unwrap();
    drop(Log::open(dir.path(), Options::default()).unwrap());
    std::fs::rename(dir.path().join("events.sled"), sled.path().join("events.sled")).unwrap();
    let from_sled = Reader::open(sled.path()).unwrap();
    let (mut prev, mut digest) = (Digest::ZERO, Digest::ZERO);
    let mut body = Vec::new();
    // The first event is alone, as its creator waits for it.
    for (i, e) in read_all(dir.path(), MAIN).into_iter().enumerate() {
        if i % 3 == 1 {
            prev = digest;
            body.clear();
        }
        let encoded = codec::encode(&e.event, &e.meta).unwrap();
        let header = frame::Header {
            kind: encoded.kind as u16,
            version: 1,
            flags: 0,
            branch: 0,
            seq: e.seq,
            prev,
            meta_version: 1,
        };
        frame::write(&mut body, &header, &encoded.facts, &encoded.meta).unwrap();
        digest = Digest(*blake3::hash(&body).as_bytes());
        assert_eq!(reader.digest(MAIN, e.seq).unwrap(), digest, "event {}", e.seq);
        assert_eq!(from_sled.digest(MAIN, e.seq).unwrap(), digest, "event {}", e.seq);
    }
    assert_eq!(reader.records().len(), 4);
}

#[test]
fn segments_roll_and_are_read_as_one() {
    let dir = tempfile::tempdir().unwrap();
    let options = Options { segment_bytes: 2_000, group_events: 4, ..without_sled() };
    written(dir.path(), 200, options.clone());
    let segments = std::fs::read_dir(dir.path().join("journal")).unwrap().count();
    assert!(segments > 5, "{segments}");
    assert_eq!(read_all(dir.path(), MAIN).len(), 201);
    let log = Log::open(dir.path(), options).unwrap();
    log.append(event(200), samples::meta()).unwrap().wait().unwrap();
    drop(log);
    assert_eq!(read_all(dir.path(), MAIN).last().unwrap().event, event(200));
    assert!(verify(dir.path()).unwrap().is_ok());
}

#[test]
fn branches_share_their_past_and_go_their_own_way() {
    let dir = tempfile::tempdir().unwrap();
    let log = Log::create(dir.path(), started(), samples::meta(), without_sled()).unwrap();
    for n in 0..10 {
        log.append(event(n), samples::meta()).unwrap();
    }
    log.barrier().unwrap();
    let a = log.create_branch("a", MAIN, 5, "{}", samples::meta()).unwrap();
    // Creating a branch adds nothing to its parent.
    assert_eq!(log.head(), 11);
    log.append_to(a, event(100), samples::meta()).unwrap();
    log.append(event(10), samples::meta()).unwrap();
    log.append_to(a, event(101), samples::meta()).unwrap().wait().unwrap();
    let b = log.create_branch("b", a, 6, r#"{"x":1}"#, samples::meta()).unwrap();
    log.append_to(b, event(200), samples::meta()).unwrap().wait().unwrap();
    // A fork of a fork below its parent's fork point.
    let c = log.create_branch("c", b, 3, "{}", samples::meta()).unwrap();
    log.append_to(c, event(300), samples::meta()).unwrap().wait().unwrap();
    assert_eq!((a, b, c), (1, 2, 3));
    for (name, why) in [("a", "exists"), ("main", "reserved"), ("", "reserved"), ("12", "number")] {
        let error = log.create_branch(name, MAIN, 1, "{}", samples::meta()).unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
    }
    assert!(matches!(log.create_branch("d", MAIN, 13, "{}", samples::meta()), Err(Error::NoEvent { head: 12, .. })));
    assert!(matches!(log.create_branch("d", 9, 1, "{}", samples::meta()), Err(Error::NoBranch { .. })));
    assert!(matches!(log.append_to(9, event(1), samples::meta()), Err(Error::NoBranch { .. })));
    drop(log);
    // (owner, n of the event) of each history; n = seq - 2 on main, RunStarted left out.
    let history = |branch| -> Vec<(BranchId, Event)> {
        let events = read_all(dir.path(), branch);
        for (i, e) in events.iter().enumerate() {
            assert_eq!(e.seq, i as u64 + 1);
        }
        events.into_iter().skip(1).map(|e| (e.branch, e.event)).collect()
    };
    let main = |n: u32| (MAIN, event(n));
    assert_eq!(history(MAIN), (0..11).map(main).collect::<Vec<_>>());
    let on_a: Vec<_> = (0..4).map(main).chain([(a, event(100)), (a, event(101))]).collect();
    assert_eq!(history(a), on_a);
    let on_b: Vec<_> = (0..4).map(main).chain([(a, event(100)), (b, event(200))]).collect();
    assert_eq!(history(b), on_b);
    assert_eq!(history(c), (0..2).map(main).chain([(c, event(300))]).collect::<Vec<_>>());
    let reader = Reader::open(dir.path()).unwrap();
    assert_eq!((reader.head(a).unwrap(), reader.head(b).unwrap(), reader.head(c).unwrap()), (7, 7, 4));
    assert_eq!((reader.branch("main").unwrap(), reader.branch("b").unwrap(), reader.branch("3").unwrap()), (0, 2, 3));
    assert!(matches!(reader.branch("z"), Err(Error::NoBranch { .. })));
    assert_eq!(reader.branches()[&b].settings, r#"{"x":1}"#);
    // Opened on a branch, `append` goes there.
    let log = Log::open(dir.path(), Options { branch: b, ..without_sled() }).unwrap();
    assert_eq!(log.append(event(201), samples::meta()).unwrap().wait().unwrap().seq, 8);
    assert_eq!(log.head(), 8);
    drop(log);
    assert!(verify(dir.path()).unwrap().is_ok());
}

#[test]
fn a_slow_subscriber_gets_everything_in_order_from_disk() {
    let dir = tempfile::tempdir().unwrap();
    let options = Options { ring_events: 3, group_events: 5, ..without_sled() };
    let log = Log::create(dir.path(), started(), samples::meta(), options).unwrap();
    let mut from_start = log.published_from(0);
    let mut subscription = log.published();
    assert!(subscription.try_recv().unwrap().is_none());
    for n in 0..50 {
        log.append(event(n), samples::meta()).unwrap();
    }
    log.barrier().unwrap();
    let seqs: Vec<u64> = subscription.drain().unwrap().iter().map(|e| e.seq).collect();
    assert_eq!(seqs, (2..=51).collect::<Vec<_>>());
    log.append(event(50), samples::meta()).unwrap();
    assert_eq!(subscription.recv().unwrap().event, event(50));
    assert!(subscription.recv_timeout(Duration::from_millis(1)).unwrap().is_none());
    let all: Vec<u64> = from_start.drain().unwrap().iter().map(|e| e.seq).collect();
    assert_eq!(all, (1..=52).collect::<Vec<_>>());
    drop(log);
    assert!(matches!(subscription.recv(), Err(Error::Closed)));
}

#[test]
fn many_threads_append_without_loss_or_doubles() {
    let dir = tempfile::tempdir().unwrap();
    let options = Options { queue_events: 4, group_events: 16, ..without_sled() };
    let log = Log::create(dir.path(), started(), samples::meta(), options).unwrap();
    std::thread::scope(|s| {
        for t in 0..4u32 {
            let log = &log;
            s.spawn(move || {
                for i in 0..100 {
                    log.append(event(t * 1000 + i), samples::meta()).unwrap();
                }
            });
        }
    });
    assert_eq!(log.barrier().unwrap(), 401);
    let mut steps: Vec<u32> = log
        .read(MAIN, 2)
        .unwrap()
        .map(|e| match e.unwrap().event {
            Event::StepSkipped(e) => e.step,
            other => panic!("{other:?}"),
        })
        .collect();
    // Each thread's events keep their order.
    for t in 0..4 {
        let own: Vec<u32> = steps.iter().copied().filter(|s| s / 1000 == t).collect();
        assert!(own.is_sorted());
    }
    steps.sort_unstable();
    assert_eq!(steps, (0..4).flat_map(|t| (0..100).map(move |i| t * 1000 + i)).collect::<Vec<_>>());
}

#[test]
fn large_payloads_live_in_blobs_and_their_loss_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let log = Log::create(dir.path(), started(), samples::meta(), without_sled()).unwrap();
    let big = large(1, 200_000);
    log.append(big.clone(), samples::meta()).unwrap();
    log.append(big.clone(), samples::meta()).unwrap();
    log.append(large(2, 60_000), samples::meta()).unwrap();
    log.barrier().unwrap();
    drop(log);
    let events = read_all(dir.path(), MAIN);
    assert_eq!((&events[1].event, &events[2].event, &events[3].event), (&big, &big, &large(2, 60_000)));
    let segment_len = std::fs::metadata(segment(dir.path(), 1)).unwrap().len();
    assert!(segment_len < 70_000, "{segment_len}");
    let report = verify(dir.path()).unwrap();
    assert!(report.is_ok());
    assert_eq!(report.blobs, 1);
    let folder = std::fs::read_dir(dir.path().join("blobs")).unwrap().next().unwrap().unwrap().path();
    let blob = std::fs::read_dir(folder).unwrap().next().unwrap().unwrap().path();
    let mut bytes = std::fs::read(&blob).unwrap();
    bytes[1234] ^= 1;
    std::fs::write(&blob, bytes).unwrap();
    let report = verify(dir.path()).unwrap();
    assert_eq!(report.first_bad_event(), Some((MAIN, 2)));
    assert_eq!(report.findings[0].path, blob);
    std::fs::remove_file(&blob).unwrap();
    assert_eq!(verify(dir.path()).unwrap().findings.len(), 2);
    let error = Reader::open(dir.path()).unwrap().event(MAIN, 3).unwrap_err();
    assert!(matches!(error, Error::Blob { branch: MAIN, seq: 3, .. }), "{error}");
    // The others are still readable.
    assert_eq!(Reader::open(dir.path()).unwrap().event(MAIN, 4).unwrap().event, large(2, 60_000));
}

#[test]
fn one_writer_at_a_time_and_readers_any_time() {
    let dir = tempfile::tempdir().unwrap();
    let log = Log::create(dir.path(), started(), samples::meta(), without_sled()).unwrap();
    let error = Log::open(dir.path(), without_sled()).unwrap_err();
    assert!(error.to_string().contains(&format!("process {}", std::process::id())), "{error}");
    assert!(matches!(repair(dir.path()), Err(Error::Locked { .. })));
    assert_eq!(read_all(dir.path(), MAIN).len(), 1);
    drop(log);
    let again = Log::create(dir.path(), started(), samples::meta(), without_sled());
    assert!(matches!(again, Err(Error::Exists { .. })));
    Log::open(dir.path(), without_sled()).unwrap();
}

#[test]
fn folders_without_a_first_event_are_empty_and_started_afresh() {
    let dir = tempfile::tempdir().unwrap();
    assert!(matches!(Log::open(dir.path(), without_sled()), Err(Error::Empty { .. })));
    assert!(matches!(Reader::open(dir.path()), Err(Error::Empty { .. })));
    assert!(matches!(Log::open(&dir.path().join("no"), without_sled()), Err(Error::Empty { .. })));
    written(dir.path(), 0, Options::default());
    let first = std::fs::read(segment(dir.path(), 1)).unwrap();
    // A kill before the first event was durable leaves any prefix of the segment, with or without HEAD.
    for keep in [0, 10, 64, 100, first.len() - 1] {
        std::fs::write(segment(dir.path(), 1), &first[..keep]).unwrap();
        let _ = std::fs::remove_file(dir.path().join("HEAD"));
        let _ = std::fs::remove_dir_all(dir.path().join("events.sled"));
        assert!(matches!(Reader::open(dir.path()), Err(Error::Empty { .. })), "{keep}");
        assert!(matches!(Log::open(dir.path(), without_sled()), Err(Error::Empty { .. })), "{keep}");
        let log = Log::create(dir.path(), started(), samples::meta(), without_sled()).unwrap();
        assert_eq!(log.head(), 1);
    }
    assert_eq!(read_all(dir.path(), MAIN).len(), 1);
}

#[test]
fn a_reader_follows_a_run_that_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let log = Log::create(dir.path(), started(), samples::meta(), Options { segment_bytes: 3_000, ..without_sled() });
    let log = log.unwrap();
    std::thread::scope(|s| {
        let path = dir.path();
        let follower = s.spawn(move || {
            let reader = Reader::open(path).unwrap();
            let mut seen = Vec::new();
            while seen.len() < 501 {
                reader.wait_beyond(seen.len() as u64, Duration::from_secs(20)).unwrap();
                let next = seen.len() as u64 + 1;
                seen.extend(reader.read(MAIN, next).unwrap().map(|e| e.unwrap()));
            }
            seen
        });
        for n in 0..500 {
            log.append(event(n), samples::meta()).unwrap();
            if n % 50 == 0 {
                log.barrier().unwrap();
            }
        }
        log.barrier().unwrap();
        let seen = follower.join().unwrap();
        assert!(seen.iter().enumerate().all(|(i, e)| e.seq == i as u64 + 1));
        assert_eq!(seen.last().unwrap().event, event(499));
    });
}

#[test]
fn reading_works_in_a_read_only_folder() {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir().unwrap();
    written(dir.path(), 5, without_sled());
    let mode = |mode| {
        for path in [dir.path().join("journal"), dir.path().to_path_buf()] {
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
        }
    };
    mode(0o555);
    let before: Vec<_> = std::fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    let events = read_all(dir.path(), MAIN);
    let after: Vec<_> = std::fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    mode(0o755);
    assert_eq!(events.len(), 6);
    assert_eq!(before, after);
}

#[test]
fn after_a_failed_flush_nothing_more_is_acknowledged() {
    for fail_at in 1..6u64 {
        let dir = tempfile::tempdir().unwrap();
        let options = Options { faults: Faults::plan(Some(fail_at), None), group_events: 1, ..without_sled() };
        let log = Log::create(dir.path(), started(), samples::meta(), options);
        if fail_at == 1 {
            assert!(matches!(log, Err(Error::Failed { .. })));
            continue;
        }
        let log = log.unwrap();
        let mut subscription = log.published();
        let mut acknowledged = 1;
        for n in 0..8 {
            match log.append(event(n), samples::meta()).unwrap().wait() {
                Ok(stamped) => {
                    assert_eq!(stamped.seq, acknowledged + 1);
                    acknowledged += 1;
                }
                Err(error) => assert!(matches!(error, Error::Failed { .. }), "{error}"),
            }
        }
        assert_eq!(acknowledged, fail_at - 1);
        assert!(matches!(log.barrier(), Err(Error::Failed { .. })));
        assert_eq!(log.head(), acknowledged);
        for _ in 1..acknowledged {
            subscription.recv().unwrap();
        }
        assert!(matches!(subscription.recv(), Err(Error::Failed { .. })));
        drop(log);
        // The record whose flush failed is whole in the file: it may come back, but flushed and in its place.
        let log = Log::open(dir.path(), without_sled()).unwrap();
        assert_eq!(log.head(), acknowledged + 1);
        assert!(log.notes().iter().any(|n| n.contains("1 whole records")), "{:?}", log.notes());
        log.append(event(99), samples::meta()).unwrap().wait().unwrap();
        drop(log);
        assert!(verify(dir.path()).unwrap().is_ok());
        assert_eq!(read_all(dir.path(), MAIN).len() as u64, acknowledged + 2);
    }
}

#[test]
fn a_torn_write_is_moved_aside_and_the_log_goes_on() {
    for keep in [0, 1, 50, 104, 150] {
        let dir = tempfile::tempdir().unwrap();
        let options = Options { faults: Faults::plan(None, Some((4, keep))), group_events: 1, ..without_sled() };
        let log = Log::create(dir.path(), started(), samples::meta(), options).unwrap();
        let answers: Vec<bool> =
            (0..4).map(|n| log.append(event(n), samples::meta()).unwrap().wait().is_ok()).collect();
        assert_eq!(answers, [true, true, false, false]);
        drop(log);
        let log = Log::open(dir.path(), without_sled()).unwrap();
        assert_eq!(log.head(), 3);
        assert_eq!(log.notes().iter().any(|n| n.contains("quarantine")), keep > 0, "{:?}", log.notes());
        assert_eq!(log.append(event(7), samples::meta()).unwrap().wait().unwrap().seq, 4);
        drop(log);
        assert_eq!(read_all(dir.path(), MAIN).last().unwrap().event, event(7));
    }
}

#[test]
fn equal_facts_in_another_order_have_an_equal_facts_digest() {
    let (one, two) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let steps = |order: &[usize]| -> Vec<Event> {
        let skipped = |step, update| -> Event { StepSkipped { step, update, reason: String::new() }.into() };
        let finished = |step| -> Event {
            crate::event::StepFinished { step, mean_reward: 0.5, projection_digest: "00".into() }.into()
        };
        let mut out = Vec::new();
        for step in 1..4 {
            out.extend(order.iter().map(|update| skipped(step, *update as u32)));
            out.push(finished(step));
        }
        out
    };
    for (dir, run_id, order) in [(&one, "first", [0, 1, 2, 3]), (&two, "second", [2, 0, 3, 1])] {
        let run = RunStarted { run_id: run_id.into(), ..started() };
        let log = Log::create(dir.path(), run, samples::meta(), without_sled()).unwrap();
        for e in steps(&order) {
            log.append(e, Meta::default()).unwrap();
            log.append(FailureNoted { stage: run_id.into(), message: String::new() }.into(), Meta::default()).unwrap();
        }
        log.barrier().unwrap();
    }
    let digest = |dir: &tempfile::TempDir| Reader::open(dir.path()).unwrap().facts_digest(MAIN).unwrap();
    assert_eq!(digest(&one), digest(&two));
    assert_eq!(verify(one.path()).unwrap().facts_digest, digest(&one).to_string());
    assert_ne!(digest(&one), Digest::ZERO);
}
