//! AppWorld's real server with tasks that the set-up made. Skipped, with a printed note, where it is not installed
//! (`tools/setup-appworld.sh` installs it).

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use coevolve::agent::{Agent, EpisodeJob, InlineHands, Limits, NoopAgent, ReferenceAgent, Sampling};
use coevolve::env::appworld;
use coevolve::env::stdio::{Bounds, StdioEnv};
use coevolve::env::{EnvError, Environment, Role};
use coevolve::event::{EndReason, Reward, RolloutKey, TaskSpec, ToolCall};

fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(".coevolve/appworld")
}

/// One test at a time: one of them counts and kills servers, and each takes 400 MB.
static ALONE: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// AppWorld servers of this process's workers: (server, worker).
fn servers() -> Vec<(u32, u32)> {
    let field = |stat: &str, n: usize| stat.rsplit_once(')')?.1.split_whitespace().nth(n)?.parse::<u32>().ok();
    let parent = |pid: u32| field(&std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?, 1);
    let processes = std::fs::read_dir("/proc").expect("/proc").flatten();
    let pids = processes.filter_map(|e| e.file_name().to_string_lossy().parse::<u32>().ok());
    pids.filter(|pid| {
        let command = std::fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        command.contains("import sys, uvicorn")
    })
    .filter_map(|pid| Some((pid, parent(pid)?)))
    .filter(|(_, worker)| parent(*worker) == Some(std::process::id()))
    .collect()
}

fn kill(pid: u32) {
    let done = std::process::Command::new("kill").args(["-9", &pid.to_string()]).status().expect("kill");
    assert!(done.success());
}

/// The environment, or `None` with a note.
fn open(partial: bool) -> Option<StdioEnv> {
    match appworld::open(&folder(), None, partial, Bounds::default()) {
        Ok(env) => Some(env),
        Err(e @ EnvError::NotInstalled { .. }) => {
            eprintln!("skipped: {e}");
            None
        }
        Err(e) => panic!("{e}"),
    }
}

fn python(code: &str) -> ToolCall {
    ToolCall { name: "python".into(), arguments: serde_json::json!({ "code": code }).to_string() }
}

fn play(env: &Arc<dyn Environment>, agent: &dyn Agent, tasks: &[TaskSpec]) -> Vec<(Reward, EndReason)> {
    let job = |(i, task): (usize, &TaskSpec)| EpisodeJob {
        task: task.clone(),
        key: RolloutKey { step: 0, task: task.id.clone(), draw: 0, k: 0 },
        group: i,
        sampling: Sampling::at(1.0),
        seed: 1,
        label: "test".into(),
    };
    let jobs: Vec<EpisodeJob> = tasks.iter().enumerate().map(job).collect();
    let mut ends = vec![None; jobs.len()];
    let limits = Limits { concurrent: 1, ..Limits::default() };
    let mut done = |i: usize, r: coevolve::agent::EpisodeRecord| ends[i] = Some((r.reward, r.end));
    agent.play(&mut InlineHands::new(Arc::clone(env)), &jobs, &limits, &mut done).expect("plays");
    ends.into_iter().map(|e| e.expect("finished")).collect()
}

#[test]
fn a_missing_installation_or_data_names_the_remedy() {
    let bounds = Bounds::default();
    let error = appworld::open(&folder().join("nowhere"), None, false, bounds).expect_err("not there").to_string();
    assert!(error.contains("tools/setup-appworld.sh"), "{error}");
    if folder().join("ready").is_file() {
        let error = appworld::open(&folder(), Some(&folder().join("bin")), false, bounds).expect_err("no data");
        assert!(error.to_string().contains("appworld download data"), "{error}");
    }
}

#[test]
fn solutions_pass_and_doing_nothing_fails_on_the_real_server() {
    let _alone = alone();
    let Some(env) = open(false) else { return };
    assert!(env.version().contains("0.1.3"), "{}", env.version());
    let env: Arc<dyn Environment> = Arc::new(env);
    let tasks = env.tasks("made", 0, usize::MAX).expect("tasks");
    assert_eq!(tasks.len(), 9);
    let scenarios: std::collections::BTreeSet<_> = tasks.iter().map(|t| t.family.as_str()).collect();
    assert_eq!(scenarios.len(), 3);
    let passed = (Reward::Scored(1.0), EndReason::Done);
    assert!(play(&env, &ReferenceAgent::new(), &tasks).iter().all(|end| *end == passed));
    let nothing = play(&env, &NoopAgent, &tasks);
    assert!(nothing.iter().all(|(reward, _)| *reward == Reward::Scored(0.0)), "{nothing:?}");
}

#[test]
fn code_is_executed_state_is_seen_and_nothing_leaks_between_episodes() {
    let _alone = alone();
    let Some(env) = open(true) else { return };
    let tasks = env.tasks("made", 0, usize::MAX).expect("tasks");
    let task = tasks.iter().find(|t| t.id == "c0e01a1_1").expect("a note to write");
    let (mut one, mut two) = (env.open().expect("session"), env.open().expect("session"));
    let opening = one.reset(task, "one", 0).expect("reset");
    assert_eq!(opening.messages[0].role, Role::System);
    assert!(opening.messages[0].content.contains("Ada Miller") && !opening.messages[0].content.contains("{"));
    assert!(opening.messages[1].content.contains("\"Birthday\""));
    two.reset(task, "two", 0).expect("reset");
    let untouched = one.state_digest().expect("digest");
    assert_eq!(untouched, two.state_digest().expect("digest"));

    // Variables stay from block to block, in this session only.
    assert_eq!(one.step(&[python("x = 6 * 7")]).expect("step").results[0].content, "Execution successful.");
    assert_eq!(one.step(&[python("print(x)")]).expect("step").results[0].content.trim(), "42");
    let other = two.step(&[python("print(x)")]).expect("step");
    assert!(other.results[0].is_error && other.results[0].content.contains("NameError"), "{other:?}");
    // What the package forbids, and what is no code, are results for the agent to read.
    for (code, why) in
        [("import os; print(os.listdir('/'))", "not allowed"), ("print(", "Syntax error"), ("", "No code")]
    {
        let reply = one.step(&[python(code)]).expect("step");
        assert!(reply.results[0].content.contains(why) && !reply.done, "{code}: {reply:?}");
    }
    let unknown = one.step(&[ToolCall { name: "fly".into(), arguments: "{}".into() }]).expect("step");
    assert!(unknown.results[0].is_error);

    // The solution: its first block changes nothing, the second writes the note and completes the task.
    let solution = &task.turns[0].solution;
    one.step(&solution[..1]).expect("step");
    assert_eq!(one.state_digest().expect("digest"), untouched);
    assert!(one.step(&solution[1..]).expect("step").done);
    assert_ne!(one.state_digest().expect("digest"), untouched);
    assert_eq!(one.evaluate().expect("evaluate"), Reward::Scored(1.0));
    // Of its three checks only "no answer was asked for" passes when nothing was done.
    assert_eq!(two.evaluate().expect("evaluate"), Reward::Scored(1.0 / 3.0));
    assert_eq!(two.state_digest().expect("digest"), untouched);

    // The same server, used again: nothing of the first episode is left.
    one.reset(task, "again", 0).expect("reset");
    assert_eq!(one.state_digest().expect("digest"), untouched);
    assert!(one.step(&[python("print(x)")]).expect("step").results[0].is_error);

    // Another instruction has no evaluation of its own.
    let mut own = task.clone();
    own.id = "ours".into();
    own.turns[0].query = "Delete all notes.".into();
    let opening = one.reset(&own, "ours", 0).expect("reset");
    assert_eq!(opening.messages[1].content, "Delete all notes.");
    assert!(matches!(one.evaluate().expect("evaluate"), Reward::Unscored(why) if why.contains("judge")));
    let stranger = TaskSpec { base: "../made".into(), ..own };
    assert!(matches!(one.reset(&stranger, "x", 0), Err(EnvError::Refused { kind, .. }) if kind == "unknown_task"));
}

#[test]
fn endless_code_and_output_are_cut_and_a_server_that_dies_costs_its_episode_only() {
    let _alone = alone();
    let Some(env) = open(false) else { return };
    let tasks = env.tasks("made", 0, 2).expect("tasks");
    let mut session = env.open().expect("session");
    session.reset(&tasks[0], "e", 0).expect("reset");
    for (code, why) in [("while True: pass", "timed out after"), ("x = 'a' * 10**11", "MemoryError")] {
        let reply = session.step(&[python(code)]).expect("step");
        assert!(reply.results[0].is_error && reply.results[0].content.contains(why), "{reply:?}");
    }
    let long = session.step(&[python("print('a' * 50_000_000)")]).expect("step");
    assert!(long.results[0].content.ends_with("more characters]") && long.results[0].content.len() < 201_000);

    let [(server, _)] = servers()[..] else { panic!("one session, one server: {:?}", servers()) };
    kill(server);
    let error = session.step(&[python("print(1)")]).expect_err("its server is gone");
    assert!(error.to_string().contains("got no answer from the AppWorld server"), "{error}");
    // The next episode of the same session has a new one.
    session.reset(&tasks[1], "next", 0).expect("reset");
    assert!(session.step(&tasks[1].turns[0].solution).expect("step").done);
    assert_eq!(session.evaluate().expect("evaluate"), Reward::Scored(1.0));
    // A worker that is killed takes its server along, and its folder goes when the next one starts.
    let [(server, worker)] = servers()[..] else { panic!("one session, one server: {:?}", servers()) };
    kill(worker);
    let gone = || !PathBuf::from(format!("/proc/{server}/exe")).exists();
    (0..100).take_while(|_| !gone()).for_each(|_| std::thread::sleep(std::time::Duration::from_millis(100)));
    assert!(gone(), "the server outlives its worker");
    assert!(session.step(&[python("print(1)")]).is_err());
    drop(session);
    drop(env);
    let _next = open(false);
    let of_the_dead = |name: &str| {
        let owner = name.strip_prefix("coevolve-appworld-").and_then(|rest| rest.split('-').next());
        owner.is_some_and(|pid| !PathBuf::from("/proc").join(pid).exists())
    };
    let temporary = std::fs::read_dir(std::env::temp_dir()).expect("folder").flatten();
    assert_eq!(temporary.filter(|e| of_the_dead(&e.file_name().to_string_lossy())).count(), 0);
}
