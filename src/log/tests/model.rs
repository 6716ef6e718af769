//! The log on disk against the in-memory twin, under any sequence of operations.

use super::*;
use crate::log::{blob, snapshot};
use proptest::prelude::*;

const FOLD: Digest = Digest([7; 32]);

/// An event whose payload is longer than what stays in the journal here.
fn long(n: u32) -> Event {
    FailureNoted { stage: "test".into(), message: format!("{n} ").repeat(1_000) }.into()
}

fn n_events(log: &Log) -> u64 {
    log.reader().events()
}

#[derive(Debug, Clone)]
enum Op {
    Append {
        branch: usize,
        n: u32,
    },
    Fork {
        parent: usize,
        at: u64,
    },
    /// Back to an event of the branch as it stands, or to none (refused).
    Undo {
        branch: usize,
        to: u64,
    },
    Delete {
        branch: usize,
    },
    /// A cache of the branch as of its head: found again as long as the branch still sees that event.
    Snapshot {
        branch: usize,
    },
    /// Files that nothing needs are removed, and others that look like it are left.
    Collect,
    /// The closed segments are packed.
    Pack,
    Barrier,
    Reopen,
    /// The last bytes of HEAD's progress are lost: recovery has to find whole records above the watermark.
    Crash,
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let op = prop_oneof![
        8 => (0..6usize, any::<u16>()).prop_map(|(branch, n)| Op::Append { branch, n: n.into() }),
        2 => (0..6usize, 1..40u64).prop_map(|(parent, at)| Op::Fork { parent, at }),
        2 => (0..6usize, 0..40u64).prop_map(|(branch, to)| Op::Undo { branch, to }),
        1 => (0..6usize).prop_map(|branch| Op::Delete { branch }),
        1 => (0..6usize).prop_map(|branch| Op::Snapshot { branch }),
        1 => Just(Op::Collect),
        1 => Just(Op::Pack),
        1 => Just(Op::Barrier),
        1 => Just(Op::Reopen),
        1 => Just(Op::Crash),
    ];
    prop::collection::vec(op, 1..40)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn disk_and_memory_tell_the_same_story(ops in ops()) {
        let dir = tempfile::tempdir().unwrap();
        let options =
            Options { segment_bytes: 1_500, group_events: 3, group_wait_us: 0, blob_bytes: 1_000, ..without_sled() };
        let mut log = Log::create(dir.path(), started(), samples::meta(), options.clone()).unwrap();
        let memory = MemoryLog::new();
        memory.append(started().into(), samples::meta()).unwrap();
        let mut branches = vec![MAIN];
        for op in ops {
            match op {
                Op::Append { branch, n } => {
                    let branch = branches[branch % branches.len()];
                    // Every seventh event's payload goes to a file.
                    let event = if n % 7 == 0 { long(n) } else { event(n) };
                    let done = log.append_to(branch, event.clone(), samples::meta());
                    let twin = memory.on_branch(branch);
                    prop_assert_eq!(done.is_ok(), twin.is_ok());
                    twin.and_then(|twin| twin.append(event, samples::meta())).ok();
                }
                Op::Fork { parent, at } => {
                    log.barrier().unwrap();
                    let parent = branches[parent % branches.len()];
                    let name = format!("b{}", branches.len());
                    let made = log.create_branch(&name, parent, at, "{}", samples::meta());
                    let expected = memory.create_branch(parent, at);
                    prop_assert_eq!(made.as_ref().ok(), expected.as_ref().ok());
                    branches.extend(made);
                }
                Op::Undo { branch, to } => {
                    log.barrier().unwrap();
                    let branch = branches[branch % branches.len()];
                    let done = log.undo(branch, to, "", samples::meta());
                    prop_assert_eq!(done.is_ok(), memory.undo(branch, to).is_ok());
                }
                Op::Delete { branch } => {
                    let branch = branches[branch % branches.len()];
                    let done = log.delete_branch(branch, "", samples::meta());
                    prop_assert_eq!(done.is_ok(), memory.delete_branch(branch).is_ok());
                }
                Op::Snapshot { branch } => {
                    log.barrier().unwrap();
                    let branch = branches[branch % branches.len()];
                    let Ok(seq) = log.reader().head(branch) else { continue };
                    let digest = log.reader().digest(branch, seq).unwrap();
                    let body = format!("{branch} {seq} {digest}");
                    snapshot::write(dir.path(), branch, seq, &digest, &FOLD, body.as_bytes()).unwrap();
                }
                Op::Collect => {
                    let orphan = blob::write(dir.path(), &[n_events(&log) as u8; 2000], 1).unwrap();
                    let removed = log.collect(&Collect { orphans: true, ..Collect::default() }, samples::meta()).unwrap();
                    prop_assert!(removed.iter().any(|r| r.path.ends_with(&orphan.to_string())));
                }
                Op::Pack => {
                    log.barrier().unwrap();
                    log.pack().unwrap();
                }
                Op::Barrier => {
                    prop_assert_eq!(log.barrier().unwrap(), memory.head());
                }
                Op::Reopen => {
                    drop(log);
                    log = Log::open(dir.path(), options.clone()).unwrap();
                }
                Op::Crash => {
                    let head = std::fs::read(dir.path().join("HEAD")).unwrap();
                    log.append(event(1), samples::meta()).unwrap().wait().unwrap();
                    memory.append(event(1), samples::meta()).unwrap();
                    drop(log);
                    std::fs::write(dir.path().join("HEAD"), head).unwrap();
                    log = Log::open(dir.path(), options.clone()).unwrap();
                }
            }
        }
        log.barrier().unwrap();
        let copy = dir.path().join("copy");
        link(dir.path(), &copy).unwrap();
        let linked = Reader::open(&copy).unwrap();
        for &branch in &branches {
            let Ok(twin) = memory.read(branch, 1) else {
                prop_assert!(log.read(branch, 1).is_err());
                continue;
            };
            let twin: Vec<Stamped> = twin.map(|e| e.unwrap()).collect();
            let disk: Vec<Stamped> = log.read(branch, 1).unwrap().map(|e| e.unwrap()).collect();
            prop_assert_eq!(&disk, &twin);
            let other: Vec<Stamped> = linked.read(branch, 1).unwrap().map(|e| e.unwrap()).collect();
            prop_assert_eq!(&other, &disk);
            // A snapshot is found only where the branch sees the event it was taken at.
            if let Some(found) = snapshot::newest(log.reader(), branch, &FOLD, log.reader().head(branch).unwrap()) {
                prop_assert!(disk.iter().any(|e| e.seq == found.seq), "an event of the history");
                let digest = log.reader().digest(branch, found.seq).unwrap();
                prop_assert!(String::from_utf8(found.body).unwrap().ends_with(&digest.to_string()));
            }
        }
        drop(log);
        std::fs::remove_dir_all(&copy).unwrap();
        prop_assert!(verify(dir.path()).unwrap().is_ok());
    }
}

#[test]
fn the_twin_fails_as_planned() {
    let memory = MemoryLog::with_faults(Faults::plan(Some(3), None));
    let mut subscription = memory.published();
    let answers: Vec<bool> = (0..5).map(|n| memory.append(event(n), samples::meta()).unwrap().wait().is_ok()).collect();
    assert_eq!(answers, [true, true, false, false, false]);
    assert_eq!(memory.head(), 2);
    assert!(matches!(memory.barrier(), Err(Error::Failed { .. })));
    assert_eq!(subscription.drain().unwrap().len(), 2);
    assert!(matches!(subscription.try_recv(), Err(Error::Failed { .. })));
    let torn = MemoryLog::with_faults(Faults::plan(None, Some((1, 0))));
    assert!(torn.append(event(0), samples::meta()).unwrap().wait().is_err());
}

#[test]
fn the_twin_serves_a_slow_subscriber() {
    let memory = MemoryLog::new();
    let mut subscription = memory.published();
    for n in 0..500 {
        memory.append(event(n), samples::meta()).unwrap();
    }
    let seqs: Vec<u64> = subscription.drain().unwrap().iter().map(|e| e.seq).collect();
    assert_eq!(seqs, (1..=500).collect::<Vec<_>>());
}
