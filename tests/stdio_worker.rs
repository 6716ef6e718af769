//! The stdio client against a worker that misbehaves on command: every fault is an error of the right
//! kind, hurts nobody else, and leaves no process behind.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use coevolve::env::stdio::{Bounds, Launch, Pool, StdioEnv, WorkerSession};
use coevolve::env::{EnvError, Environment, Session};
use coevolve::event::json::canonical_json;
use coevolve::event::{Reward, TaskSpec, ToolCall};
use proptest::prelude::*;

fn launch() -> Launch {
    let script = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/fake_worker.py");
    Launch {
        env: "fake".into(),
        program: "python3".into(),
        args: vec!["-I".into(), script.into()],
        vars: vec![],
        reply_bytes: 1 << 20,
    }
}

/// Hangs are noticed after 1.5 s; nothing else comes near it once the interpreter is up.
fn pool() -> Arc<Pool> {
    let bounds = Bounds { start_ms: 60_000, step_ms: 1_500, reset_ms: 60_000, evaluate_ms: 60_000, max_workers: 4 };
    Pool::new(launch(), bounds)
}

fn task(family: &str) -> TaskSpec {
    TaskSpec {
        id: "t".into(),
        env: "fake".into(),
        split: "train".into(),
        family: family.into(),
        base: "t".into(),
        tools: vec![],
        turns: vec![],
    }
}

fn ping() -> ToolCall {
    ToolCall { name: "ping".into(), arguments: r#"{"a":1}"#.into() }
}

/// Starts an episode; returns the worker's process id.
fn reset(session: &mut WorkerSession) -> u32 {
    session.reset(&task(""), "e", 0).expect("reset").messages[0].content.parse().expect("pid")
}

/// Whether any live (not zombie) process of the group is left.
fn group_is_gone(pgid: u32) -> bool {
    let deadline = Instant::now() + Duration::from_secs(20);
    while Instant::now() < deadline {
        let alive = std::fs::read_dir("/proc").expect("/proc").flatten().any(|entry| {
            let Ok(stat) = std::fs::read_to_string(entry.path().join("stat")) else { return false };
            // pid (comm) state ppid pgrp ..: comm may hold anything, so split after its last parenthesis.
            let Some((_, rest)) = stat.rsplit_once(')') else { return false };
            let fields: Vec<&str> = rest.split_whitespace().collect();
            fields.first() != Some(&"Z") && fields.get(2) == Some(&pgid.to_string().as_str())
        });
        if !alive {
            return true;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    false
}

#[test]
fn every_fault_is_an_error_and_hurts_nobody_else() {
    let pool = pool();
    let mut sibling = pool.session();
    let sibling_pid = reset(&mut sibling);
    sibling.step(&[ping(), ping(), ping()]).expect("sibling");

    type Check = fn(&EnvError) -> bool;
    let deadline: Check = |e| matches!(e, EnvError::Deadline { after_ms: 1_500, op, .. } if op == "end_turn");
    let protocol: Check = |e| matches!(e, EnvError::Protocol { .. });
    let died: Check = |e| matches!(e, EnvError::Died { .. });
    let faults: [(&str, Check); 16] = [
        ("hang", deadline),
        ("hang ignoring TERM", deadline),
        ("hang with a child", deadline),
        ("answer late", deadline),
        ("die", |e| {
            matches!(e, EnvError::Died { detail, .. } if detail.contains("exit status: 7")
                && detail.contains("the disk is on fire"))
        }),
        ("die by signal", |e| matches!(e, EnvError::Died { detail, .. } if detail.contains("signal: 9"))),
        ("close stdout", died),
        ("half a line", died),
        ("garbage", |e| matches!(e, EnvError::Protocol { detail, .. } if detail.contains("oh no"))),
        ("not an object", protocol),
        ("deep JSON", |e| matches!(e, EnvError::Protocol { detail, .. } if detail.contains("recursion"))),
        ("wrong rid", protocol),
        ("no rid", protocol),
        ("missing field", protocol),
        ("50 MB", |e| matches!(e, EnvError::Protocol { detail, .. } if detail.contains("1048576 bytes"))),
        ("flood stderr", |_| false),
    ];
    let mut session = pool.session();
    for (how, check) in faults {
        let pid = reset(&mut session);
        assert_ne!(pid, sibling_pid);
        session.step(&[ping()]).expect("before the fault");
        let outcome = session.end_turn(how);
        if how == "flood stderr" {
            outcome.expect("noise on stderr is no fault");
            continue;
        }
        let error = outcome.expect_err(how);
        assert!(check(&error), "{how}: {error}");
        assert!(group_is_gone(pid), "{how} left a process behind");
        // The broken episode stays broken: no score can come out of it.
        assert!(matches!(session.evaluate(), Err(EnvError::Died { .. })), "{how}");
        // The next episode gets a fresh worker and works.
        assert_ne!(reset(&mut session), sibling_pid, "{how}");
        session.step(&[ping(), ping()]).expect(how);
        assert_eq!(session.evaluate().expect(how), Reward::Scored(0.2), "{how}");
    }
    // The sibling's episode went on undisturbed.
    sibling.step(&[ping()]).expect("sibling");
    assert_eq!(sibling.evaluate().expect("sibling"), Reward::Scored(0.4));

    drop(sibling);
    drop(session);
    assert_eq!(pool.alive(), 2);
    drop(pool);
    assert!(group_is_gone(sibling_pid), "dropping the pool kills idle workers");
}

#[test]
fn a_refusal_leaves_the_worker_alone_and_a_double_answer_is_noticed() {
    let pool = pool();
    let mut session = pool.session();
    let pid = reset(&mut session);
    // Two answers with one rid: the first is taken, the second must not pass for the next one's.
    session.end_turn("refuse").expect_err("refused");
    let error = session.evaluate().expect_err("the second answer");
    assert!(matches!(&error, EnvError::Protocol { detail, .. } if detail.contains("rid")), "{error}");
    assert!(group_is_gone(pid));

    let pid = reset(&mut session);
    let error = pool.ask("no_such_operation", serde_json::Map::new()).expect_err("unknown operation");
    assert!(matches!(&error, EnvError::Refused { .. }), "{error}");
    assert_eq!(pool.alive(), 2, "a refusal does not cost the worker");
    assert_eq!(reset(&mut session), pid);

    session.end_turn("answer twice").expect("first answer");
    assert!(matches!(session.step(&[ping()]), Err(EnvError::Protocol { .. })));

    // When the next operation is a reset, the episode that starts is not the one to pay.
    let pid = reset(&mut session);
    session.end_turn("answer twice").expect("first answer");
    assert_ne!(reset(&mut session), pid);
}

#[test]
fn thousands_of_calls_in_one_message_are_answered_or_refused_whole() {
    let pool = Pool::new(Launch { reply_bytes: 4 << 20, ..launch() }, pool().bounds());
    let mut session = pool.session();
    let pid = reset(&mut session);
    // One step, one reply line: 15,000 answers of 100 bytes fit into its bound, of 500 they do not.
    let reply = session.step(&vec![ping(); 15_000]).expect("step");
    assert_eq!(reply.results.len(), 15_000);
    let wide = ToolCall { name: "ping".into(), arguments: format!(r#"{{"a":"{}"}}"#, "z".repeat(400)) };
    assert!(matches!(session.step(&vec![wide; 15_000]), Err(EnvError::Protocol { .. })));
    assert!(group_is_gone(pid));
    reset(&mut session);
    // Arguments nested deeper than our own reader goes travel as their text.
    let deep = ToolCall { name: "ping".into(), arguments: format!("{}{}", "[".repeat(50_000), "]".repeat(50_000)) };
    let reply = session.step(&[deep.clone(), ping()]).expect("step");
    assert!(reply.results[0].content.contains(&deep.arguments));
    assert_eq!(session.evaluate().expect("evaluate"), Reward::Scored(0.2));
}

/// Set in the process that plays the trainer.
const TRAINER: &str = "COEVOLVE_TEST_TRAINER";

/// Not a test by itself: a trainer with an idle worker, one in an episode, and one that hangs and notices nothing.
/// It prints their ids and waits to be killed.
#[test]
fn trainer_that_is_killed() {
    if std::env::var_os(TRAINER).is_none() {
        return;
    }
    let pool = pool();
    // The threads that start the workers end; their workers must not end with them.
    let begin = || {
        let pool = Arc::clone(&pool);
        let start = std::thread::spawn(move || {
            let mut session = pool.session();
            let pid = reset(&mut session);
            (session, pid)
        });
        start.join().expect("started")
    };
    let (idle, (mut playing, second), (mut hanging, third)) = (begin(), begin(), begin());
    std::thread::sleep(Duration::from_millis(300));
    drop(idle.0);
    playing.step(&[ping()]).expect("still alive");
    hanging.reset(&task(""), "hang", 0).expect("reset");
    std::thread::spawn(move || hanging.state_digest());
    std::thread::sleep(Duration::from_millis(300));
    println!("workers {} {second} {third}", idle.1);
    std::thread::sleep(Duration::from_secs(120));
}

#[test]
fn a_killed_trainer_leaves_no_worker_behind() {
    use std::io::BufRead;
    let mut trainer = std::process::Command::new(std::env::current_exe().expect("this test"))
        .args(["--exact", "trainer_that_is_killed", "--nocapture"])
        .env(TRAINER, "1")
        .stdout(std::process::Stdio::piped())
        .spawn()
        .expect("trainer");
    let lines = std::io::BufReader::new(trainer.stdout.take().expect("stdout")).lines();
    let words = lines.map_while(Result::ok).find_map(|l| l.split_once("workers ").map(|(_, ids)| ids.to_owned()));
    let ids: Vec<u32> = words.expect("ids").split(' ').map(|id| id.parse().expect("id")).collect();
    assert_eq!(ids.len(), 3);
    for id in &ids {
        assert!(std::path::Path::new(&format!("/proc/{id}")).exists(), "all three are alive");
    }
    trainer.kill().expect("SIGKILL");
    trainer.wait().expect("reaped");
    for id in ids {
        assert!(group_is_gone(id), "{id} outlived its trainer");
    }
}

#[test]
fn a_worker_that_stops_reading_cannot_block_us() {
    let pool = pool();
    let mut session = pool.session();
    let pid = reset(&mut session);
    session.end_turn("stop reading").expect("it answers once more");
    // Far more than a pipe holds (64 KiB): the write itself blocks.
    let big = ToolCall { name: "ping".into(), arguments: format!(r#"{{"a":"{}"}}"#, "z".repeat(4 << 20)) };
    assert!(matches!(session.step(&[big]), Err(EnvError::Deadline { .. })));
    assert!(group_is_gone(pid));
}

#[test]
fn processes_are_reused_bounded_and_replaced() {
    let pool = pool();
    let mut first = pool.session();
    let pid = reset(&mut first);
    first.step(&[ping()]).expect("step");
    drop(first);
    let mut second = pool.session();
    assert_eq!(reset(&mut second), pid, "a healthy worker is used again");
    assert_eq!(second.evaluate().expect("evaluate"), Reward::Scored(0.0), "without the last episode's state");
    drop(second);

    let mut sessions: Vec<_> = (0..4).map(|_| pool.session()).collect();
    let mut pids: Vec<u32> = sessions.iter_mut().map(reset).collect();
    pids.dedup();
    assert_eq!(pids.len(), 4, "one process each");
    let error = pool.session().reset(&task(""), "e", 0).expect_err("a fifth");
    assert!(matches!(&error, EnvError::Refused { kind, .. } if kind == "too_many_workers"), "{error}");
    drop(sessions.pop());
    reset(&mut pool.session());

    // An idle worker that was killed from outside costs no episode.
    drop(sessions);
    for pid in &pids {
        std::process::Command::new("kill").args(["-9", &pid.to_string()]).status().expect("kill");
        assert!(group_is_gone(*pid));
    }
    assert!(!pids.contains(&reset(&mut pool.session())));
    assert_eq!(pool.alive(), 1);
}

#[test]
fn what_cannot_start_says_so() {
    let nothing = Launch { program: "/no/such/program".into(), ..launch() };
    let pool = Pool::new(nothing, Bounds::default());
    let error = pool.describe().expect_err("no program");
    assert!(
        matches!(&error, EnvError::Died { op, detail, .. }
        if op == "start" && detail.contains("/no/such/program")),
        "{error}"
    );
    assert_eq!(pool.alive(), 0);
}

#[test]
fn any_worker_is_an_environment() {
    let env = StdioEnv::open(launch(), Bounds::default()).expect("open");
    assert_eq!((env.name(), env.version().as_str(), env.splits()), ("fake", "1", vec!["train".to_owned()]));
    let tasks = env.tasks("train", 0, 10).expect("tasks");
    assert_eq!(tasks[0].turns[0].solution[0].arguments, r#"{"a":[1,"x"],"b":2.0}"#);
    assert_eq!((tasks[0].id.as_str(), tasks[0].base.as_str()), ("t0", "t0"));
    assert!(matches!(env.tasks("test", 0, 10), Err(EnvError::Unknown { .. })));
    let ground = env.playground(None, 3).expect("playground");
    assert_eq!((ground.split.as_str(), ground.base.as_str(), ground.turns.len()), ("playground", "t0", 0));

    let mut session = env.open().expect("session");
    session.reset(&ground, "e1", 0).expect("reset");
    let odd = ToolCall { name: "ping".into(), arguments: "not json".into() };
    let reply = session.step(&[ping(), odd]).expect("step");
    assert_eq!(reply.results[0].content, r#"{"arguments": {"a": 1}, "name": "ping"}"#);
    assert!(reply.results[1].content.contains(r#""arguments": "not json""#));
    assert_eq!(session.state_digest().expect("digest"), None);
}

fn json() -> impl Strategy<Value = serde_json::Value> {
    let leaf = prop_oneof![
        Just(serde_json::Value::Null),
        any::<bool>().prop_map(Into::into),
        any::<i64>().prop_map(Into::into),
        any::<f64>().prop_filter("finite", |x| x.is_finite()).prop_map(Into::into),
        ".{0,12}".prop_map(Into::into),
    ];
    leaf.prop_recursive(3, 24, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Into::into),
            prop::collection::vec((".{0,4}", inner), 0..4)
                .prop_map(|items| serde_json::Value::Object(items.into_iter().collect())),
        ]
    })
}

proptest! {
    #[test]
    fn canonical_json_keeps_the_value_and_is_a_fixed_point(value in json()) {
        let text = canonical_json(&value);
        let back: serde_json::Value = serde_json::from_str(&text).expect("still JSON");
        prop_assert_eq!(&back, &value);
        prop_assert_eq!(canonical_json(&back), text);
    }
}
