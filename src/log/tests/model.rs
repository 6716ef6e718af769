//! The log on disk against the in-memory twin, under any sequence of operations.

use super::*;
use proptest::prelude::*;

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
    Barrier,
    Reopen,
    /// The last bytes of HEAD's progress are lost: recovery has to find whole records above the watermark.
    Crash,
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let op = prop_oneof![
        6 => (0..4usize, any::<u16>()).prop_map(|(branch, n)| Op::Append { branch, n: n.into() }),
        1 => (0..4usize, 1..30u64).prop_map(|(parent, at)| Op::Fork { parent, at }),
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
        let options = Options { segment_bytes: 1_500, group_events: 3, group_wait_us: 0, ..without_sled() };
        let mut log = Log::create(dir.path(), started(), samples::meta(), options.clone()).unwrap();
        let memory = MemoryLog::new();
        memory.append(started().into(), samples::meta()).unwrap();
        let mut branches = vec![MAIN];
        for op in ops {
            match op {
                Op::Append { branch, n } => {
                    let branch = branches[branch % branches.len()];
                    log.append_to(branch, event(n), samples::meta()).unwrap();
                    memory.on_branch(branch).unwrap().append(event(n), samples::meta()).unwrap();
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
        for &branch in &branches {
            let disk: Vec<Stamped> = log.read(branch, 1).unwrap().map(|e| e.unwrap()).collect();
            let twin: Vec<Stamped> = memory.read(branch, 1).unwrap().map(|e| e.unwrap()).collect();
            prop_assert_eq!(disk, twin);
        }
        drop(log);
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
