//! Tests of the log as a whole.

mod basic;
mod branches;
mod crash;
mod damage;
mod flushes;
mod model;
mod newer;
mod packed;
mod salvage;
mod snapshot;
mod stream;
mod sweep;
mod threads;

use super::*;
use crate::event::digest::Digest;
use crate::event::samples;
use crate::event::{FailureNoted, RunStarted, StepSkipped};
use std::path::Path;

pub(super) fn started() -> RunStarted {
    match samples::all().remove(0) {
        Event::RunStarted(e) => e,
        _ => unreachable!("the first sample is RunStarted"),
    }
}

/// The n-th event of a test: its content follows from n.
pub(super) fn event(n: u32) -> Event {
    StepSkipped { step: n, update: n * 2, reason: "x".repeat(n as usize % 50) }.into()
}

/// Facts of `bytes` bytes and more.
pub(super) fn large(n: u8, bytes: usize) -> Event {
    let message = (0..bytes).map(|i| char::from(b'a' + ((i as u8).wrapping_mul(7) ^ n) % 26)).collect();
    FailureNoted { stage: format!("large {n}"), message }.into()
}

pub(super) fn without_sled() -> Options {
    Options { sled: false, ..Options::default() }
}

/// A folder with `RunStarted` and events 0..n, closed.
pub(super) fn written(dir: &Path, n: u32, options: Options) {
    let log = Log::create(dir, started(), samples::meta(), options).unwrap();
    for i in 0..n {
        log.append(event(i), samples::meta()).unwrap();
    }
    log.barrier().unwrap();
}

pub(super) fn read_all(dir: &Path, branch: BranchId) -> Vec<Stamped> {
    let reader = Reader::open(dir).unwrap();
    let read: Vec<Stamped> = reader.read(branch, 1).unwrap().map(|e| e.unwrap()).collect();
    let mut swept = Vec::new();
    let sweep = reader.sweep(branch, 1, u64::MAX, |s| {
        swept.push((s.seq, s.view.native(), s.meta));
        Ok::<_, Error>(())
    });
    sweep.unwrap();
    assert!(swept.iter().eq(read.iter().map(|s| (s.seq, s.event.clone(), s.meta.clone())).collect::<Vec<_>>().iter()));
    read
}

/// The only segment of a small run.
pub(super) fn segment(dir: &Path, number: u64) -> std::path::PathBuf {
    dir.join(format!("journal/{number:012}.seg"))
}
