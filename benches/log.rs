//! The log: durable appends and replay.
//!
//! `cargo bench --bench log`. The raw file is the yardstick: the same number of bytes and one `fdatasync` per group.

use coevolve::event::{FailureNoted, Meta, RunStarted};
use coevolve::log::{EventStore, Log, MAIN, Options, Reader};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use std::hint::black_box;
use std::io::Write;

const GROUP: u64 = 64;
const EVENT_BYTES: usize = 1024;
const REPLAY_EVENTS: u64 = 20_000;

fn started() -> RunStarted {
    RunStarted {
        run_id: "00112233445566778899aabbccddeeff".into(),
        seed: 1,
        settings: "{}".into(),
        code_version: "bench".into(),
        policy_digest: String::new(),
        environment: "none".into(),
    }
}

fn event() -> FailureNoted {
    // Frame header and archive overhead make the frame about 1 KiB.
    FailureNoted { stage: "bench".into(), message: "x".repeat(EVENT_BYTES - 72 - 60) }
}

fn append(c: &mut Criterion) {
    let mut group = c.benchmark_group("append durable, 64 events of 1 KiB");
    group.throughput(Throughput::Bytes(GROUP * EVENT_BYTES as u64));
    for (name, sled) in [("journal", false), ("journal and sled behind", true)] {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let options = Options { group_events: GROUP as usize, sled, ..Options::default() };
        let log = Log::create(dir.path(), started(), Meta::default(), options).expect("a log");
        group.bench_function(name, |b| {
            b.iter(|| {
                for _ in 0..GROUP {
                    log.append(event().into(), Meta::default()).expect("append");
                }
                log.barrier().expect("durable")
            });
        });
    }
    let dir = tempfile::tempdir().expect("a temporary folder");
    let mut file = std::fs::File::create(dir.path().join("raw")).expect("a file");
    let bytes = vec![b'x'; GROUP as usize * EVENT_BYTES];
    group.bench_function("raw file", |b| {
        b.iter(|| {
            file.write_all(&bytes).expect("write");
            file.sync_data().expect("flush");
        });
    });
    group.finish();
}

fn replay(c: &mut Criterion) {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let options = Options { sled: false, ..Options::default() };
    let log = Log::create(dir.path(), started(), Meta::default(), options).expect("a log");
    for _ in 1..REPLAY_EVENTS {
        log.append(event().into(), Meta::default()).expect("append");
    }
    log.barrier().expect("durable");
    let mut group = c.benchmark_group("replay, 20,000 events of 1 KiB");
    group.throughput(Throughput::Elements(REPLAY_EVENTS));
    group.sample_size(20);
    group.bench_function("open and read all, checksums and chain verified", |b| {
        b.iter(|| {
            let reader = Reader::open(dir.path()).expect("a reader");
            let events = reader.read(MAIN, 1).expect("main").map(|e| e.expect("an event")).fold(0u64, |n, e| n + e.seq);
            assert_eq!(black_box(events), REPLAY_EVENTS * (REPLAY_EVENTS + 1) / 2);
        });
    });
    group.finish();
}

criterion_group!(benches, append, replay);
criterion_main!(benches);
