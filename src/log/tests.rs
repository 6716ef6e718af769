//! Tests of the log as a whole.

use super::*;
use crate::event::samples;
use crate::event::{RunStarted, StepSkipped};
use std::path::Path;

fn started() -> RunStarted {
    match samples::all().remove(0) {
        Event::RunStarted(e) => e,
        _ => unreachable!("the first sample is RunStarted"),
    }
}

fn event(n: u32) -> Event {
    StepSkipped { step: n, update: n * 2, reason: "x".repeat(n as usize % 50) }.into()
}

fn options() -> Options {
    Options { sled: false, ..Options::default() }
}

fn all(dir: &Path, branch: BranchId) -> Vec<Stamped> {
    Reader::open(dir).unwrap().read(branch, 1).unwrap().map(|e| e.unwrap()).collect()
}

#[test]
fn appended_events_are_read_back_after_reopening() {
    let dir = tempfile::tempdir().unwrap();
    let log = Log::create(dir.path(), started(), samples::meta(), options()).unwrap();
    assert_eq!(log.head(), 1);
    for n in 0..100 {
        log.append(event(n), samples::meta()).unwrap();
    }
    assert_eq!(log.barrier().unwrap(), 101);
    drop(log);
    let log = Log::open(dir.path(), options()).unwrap();
    assert!(log.notes().is_empty(), "{:?}", log.notes());
    assert_eq!(log.append(event(100), samples::meta()).unwrap().wait().unwrap().seq, 102);
    let events = all(dir.path(), MAIN);
    assert_eq!(events.len(), 102);
    for (i, e) in events.iter().enumerate() {
        assert_eq!((e.seq, e.branch), (i as u64 + 1, MAIN));
        assert_eq!(e.event, if i == 0 { started().into() } else { event(i as u32 - 1) });
        assert_eq!(e.meta, samples::meta());
    }
}
