//! The official benchmark through our client. Skipped, with a printed note, where it is not installed
//! (`tools/setup-bfcl.sh` installs it).

use std::path::PathBuf;

use coevolve::env::bfcl::{Bfcl, BfclOptions};
use coevolve::env::stdio::WorkerSession;
use coevolve::env::{EnvError, Environment, Executed, Session};
use coevolve::event::{Reward, TaskSpec, ToolCall, TurnSpec};

fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(".coevolve/bfcl")
}

/// The environment, or `None` with a note.
fn open(options: BfclOptions) -> Option<Bfcl> {
    match Bfcl::open(&folder(), options) {
        Ok(env) => Some(env),
        Err(e @ EnvError::NotInstalled { .. }) => {
            eprintln!("skipped: {e}");
            None
        }
        Err(e) => panic!("{e}"),
    }
}

/// Plays each turn's calls one step, then ends the turn.
fn play(session: &mut dyn Session, task: &TaskSpec, turns: &[Vec<ToolCall>]) -> Reward {
    session.reset(task, &task.id, 0).expect("reset");
    for calls in turns {
        if !calls.is_empty() {
            session.step(calls).expect("step");
        }
        if session.end_turn("done").expect("end_turn").done {
            break;
        }
    }
    session.evaluate().expect("evaluate")
}

fn solution(task: &TaskSpec) -> Vec<Vec<ToolCall>> {
    task.turns.iter().map(|t| t.solution.clone()).collect()
}

fn call(name: &str, arguments: &str) -> ToolCall {
    ToolCall { name: name.into(), arguments: arguments.into() }
}

#[test]
fn a_missing_installation_names_the_remedy() {
    let error = Bfcl::open(&folder().join("nowhere"), BfclOptions::default()).expect_err("not there");
    assert!(error.to_string().contains("tools/setup-bfcl.sh"), "{error}");
}

#[test]
fn ground_truth_passes_everywhere_and_doing_nothing_or_echoing_nowhere() {
    let Some(env) = open(BfclOptions::default()) else { return };
    let mut session = env.open().expect("session");
    for split in ["base", "miss_func", "miss_param", "long_context"] {
        let tasks = env.tasks(split, 0, usize::MAX).expect("tasks");
        assert_eq!(tasks.len(), 200);
        let passed = |turns: &dyn Fn(&TaskSpec) -> Vec<Vec<ToolCall>>, session: &mut dyn Session| {
            tasks.iter().filter(|t| play(session, t, &turns(t)) == Reward::Scored(1.0)).count()
        };
        assert_eq!(passed(&solution, session.as_mut()), 200, "{split}");
        let nothing = |t: &TaskSpec| vec![vec![]; t.turns.len()];
        assert_eq!(passed(&nothing, session.as_mut()), 0, "{split}");
        // Echo: the user's words as a call.
        let echo = |t: &TaskSpec| t.turns.iter().map(|u| vec![call(&u.query, "{}")]).collect();
        assert_eq!(passed(&echo, session.as_mut()), 0, "{split}");
    }
}

#[test]
fn partial_credit_is_the_share_of_turns_before_the_first_failure() {
    let Some(env) = open(BfclOptions { partial: true, ..BfclOptions::default() }) else { return };
    let tasks = env.tasks("base", 0, usize::MAX).expect("tasks");
    let mut session = env.open().expect("session");
    // Entry 0 has four turns with 3, 2, 1 and 4 calls.
    let task = &tasks[0];
    assert_eq!(task.turns.iter().map(|t| t.solution.len()).collect::<Vec<_>>(), [3, 2, 1, 4]);
    for played in 0..=4_usize {
        let mut turns = solution(task);
        turns[played..].iter_mut().for_each(Vec::clear);
        assert_eq!(play(session.as_mut(), task, &turns), Reward::Scored(played as f64 / 4.0));
    }
    // A failure in the second turn loses the rest, right or not: its state check runs over what is missing.
    let mut turns = solution(task);
    turns[1].clear();
    assert_eq!(play(session.as_mut(), task, &turns), Reward::Scored(0.25));
    // Stopped in the middle: the turns reached count, and the episode has not passed.
    session.reset(task, "stopped", 0).expect("reset");
    session.step(&task.turns[0].solution).expect("step");
    assert_eq!(session.evaluate().expect("evaluate"), Reward::Scored(0.25));
    // Doing nothing earns nothing, also where turns ask for nothing.
    for split in ["base", "miss_func", "miss_param"] {
        for task in env.tasks(split, 0, usize::MAX).expect("tasks") {
            let nothing = vec![vec![]; task.turns.len()];
            assert_eq!(play(session.as_mut(), &task, &nothing), Reward::Scored(0.0), "{}", task.id);
        }
    }
}

#[test]
fn state_never_leaks_between_episodes() {
    let Some(env) = open(BfclOptions::default()) else { return };
    let tasks = env.tasks("base", 0, 40).expect("tasks");
    // Alone, in a fresh worker each: digests after every turn.
    let trace = |session: &mut dyn Session, task: &TaskSpec| {
        session.reset(task, &task.id, 0).expect("reset");
        let mut seen = vec![(session.state_digest().expect("digest"), vec![])];
        for turn in &task.turns {
            let results = session.step(&turn.solution).map(|r| r.results).unwrap_or_default();
            seen.push((session.state_digest().expect("digest"), results));
            session.end_turn("").expect("end_turn");
        }
        seen
    };
    let alone: Vec<_> = tasks
        .iter()
        .take(8)
        .map(|task| {
            let Some(fresh) = open(BfclOptions::default()) else { panic!("was there a moment ago") };
            trace(fresh.open().expect("session").as_mut(), task)
        })
        .collect();
    // One after another in one worker, twice, in both orders.
    let mut session = env.open().expect("session");
    for task in tasks.iter().chain(tasks.iter().rev()) {
        let seen = trace(session.as_mut(), task);
        if let Some(i) = tasks.iter().take(8).position(|t| t.id == task.id) {
            assert_eq!(seen, alone[i], "{}", task.id);
        }
    }
    // Beside 16 others on the same task, which make a mess in lockstep; one of them is killed in every episode.
    let mut others: Vec<_> = (0..16).map(|_| env.session()).collect();
    for (i, (task, alone)) in tasks.iter().zip(&alone).enumerate() {
        session.reset(task, "same", 0).expect("reset");
        for other in &mut others {
            other.reset(task, "same", 0).expect("reset");
        }
        for (t, (turn, seen)) in task.turns.iter().zip(&alone[1..]).enumerate() {
            for (o, other) in others.iter_mut().enumerate() {
                if o == i {
                    if t == 0 {
                        other.step(&turn.solution).expect("step");
                        crash(other);
                    }
                    continue;
                }
                other.step(&turn.solution).expect("step");
                other.step(&turn.solution).expect("step");
                other.end_turn("").expect("end_turn");
            }
            let results = session.step(&turn.solution).map(|r| r.results).expect("step");
            assert_eq!((session.state_digest().expect("digest"), results), *seen, "{}", task.id);
            session.end_turn("").expect("end_turn");
        }
        assert_eq!(session.evaluate().expect("evaluate"), Reward::Scored(1.0));
        // The session that lost its worker: its next episode is like the one alone.
        assert!(matches!(others[i].evaluate(), Err(EnvError::Died { .. })));
        assert_eq!(trace(&mut others[i], task), *alone, "{}", task.id);
    }
}

/// Kills a session's worker in the middle of its episode.
fn crash(session: &mut WorkerSession) {
    let id = session.worker_id().expect("a worker").to_string();
    assert!(std::process::Command::new("kill").args(["-9", &id]).status().expect("kill").success());
    assert!(matches!(session.state_digest(), Err(EnvError::Died { .. })));
    assert_eq!(session.worker_id(), None);
}

#[test]
fn calls_are_calls_and_never_code() {
    let Some(env) = open(BfclOptions::default()) else { return };
    let task = &env.tasks("base", 0, 1).expect("tasks")[0];
    let mut session = env.open().expect("session");
    let opening = session.reset(task, "e", 0).expect("reset");
    assert_eq!(opening.messages[0].content, task.turns[0].query);
    let before = session.state_digest().expect("digest");
    let bad = [
        call("print", r#"{"x":1}"#),
        call("__init__", "{}"),
        call("_load_scenario", r#"{"scenario":{}}"#),
        call("__import__('os').system", r#"{"command":"true"}"#),
        call("add", r#"{"a":1,"b":2}"#), // a tool of another API
        call("ls", r#"{"b":true}"#),
        call("ls", "[1]"),
        call("ls", "not json"),
        call("cd", r#"{"folder":"nowhere"}"#),
        call("cat", r#"{"file_name":"\u0000\ud7ff"}"#),
    ];
    let reply = session.step(&bad).expect("errors are results");
    for (call, result) in bad.iter().zip(&reply.results) {
        assert!(result.is_error, "{call:?} -> {result:?}");
    }
    assert!(reply.results[5].content.contains("unexpected keyword argument 'b'"), "{:?}", reply.results[5]);
    assert_eq!(session.state_digest().expect("digest"), before, "failed calls change nothing");
    // Nesting far beyond what a JSON reader follows is a bad argument; 15,000 calls at once are no step.
    let deep = format!(r#"{{"folder":{}{}}}"#, "[".repeat(100_000), "]".repeat(100_000));
    let reply = session.step(&[call("cd", &deep)]).expect("an error result");
    assert!(reply.results[0].is_error, "{:.200}", reply.results[0].content);
    let many = vec![call("ls", "{}"); 15_000];
    assert!(matches!(session.step(&many), Err(EnvError::Refused { kind, .. }) if kind == "too_many_calls"));
    assert_eq!(session.state_digest().expect("digest"), before);
    let fine = session.step(&[call("ls", "{}")]).expect("step");
    assert_eq!(fine.results[0].content, r#"{"current_directory_content": ["document", "archive"]}"#);
    assert!(!fine.results[0].is_error);

    // Absurd precision and powers are refused at once.
    let tasks = env.tasks("base", 0, usize::MAX).expect("tasks");
    let maths = tasks.iter().find(|t| t.family.contains("MathAPI")).expect("one with maths");
    session.reset(maths, "e", 0).expect("reset");
    let reply = session
        .step(&[
            call("logarithm", r#"{"value":10.0,"base":3.0,"precision":1000000000}"#),
            call("power", r#"{"base":9,"exponent":999999999}"#),
            call("logarithm", r#"{"value":8.0,"base":2.0,"precision":10}"#),
        ])
        .expect("step");
    assert!(reply.results[0].is_error && reply.results[1].is_error);
    // ln 8 / ln 2 at ten digits: the refused precision has left nothing behind.
    assert!(reply.results[2].content.starts_with("{'result': mpf('3.00000000"), "{:?}", reply.results[2]);
    assert!(reply.results[2].content.len() <= "{'result': mpf('3.000000000000')}".len());
}

#[test]
fn tools_held_out_are_refused_until_they_are_released() {
    let Some(env) = open(BfclOptions::default()) else { return };
    // Entry 0 withholds `sort` until turn 3, whose official words are fixed.
    let task = &env.tasks("miss_func", 0, 1).expect("tasks")[0];
    let mut session = env.open().expect("session");
    let opening = session.reset(task, "e", 0).expect("reset");
    assert!(opening.tools.iter().all(|t| t.name != "sort"));
    let sort = call("sort", r#"{"file_name":"final_report.pdf"}"#);
    for turn in 0..3 {
        session.step(&task.turns[turn].solution).expect("step");
        let early = session.step(std::slice::from_ref(&sort)).expect("step");
        assert_eq!(early.results[0].content, "Error during execution: name 'sort' is not defined");
        let reply = session.end_turn("").expect("end_turn");
        let released: Vec<_> = reply.released.iter().map(|t| t.name.as_str()).collect();
        assert_eq!(released, if turn == 2 { vec!["sort"] } else { vec![] });
    }
    let late = session.step(&[sort]).expect("step");
    assert!(!late.results[0].is_error, "{late:?}");
}

#[test]
fn the_twenty_first_step_of_a_turn_is_the_last() {
    let Some(env) = open(BfclOptions::default()) else { return };
    let task = &env.tasks("base", 0, 1).expect("tasks")[0];
    let mut session = env.open().expect("session");
    session.reset(task, "e", 0).expect("reset");
    for step in 1..=21 {
        assert_eq!(session.step(&[call("ls", "{}")]).expect("step").done, step == 21);
    }
    assert!(matches!(session.step(&[call("ls", "{}")]), Err(EnvError::Refused { .. })));
    assert_eq!(session.evaluate().expect("evaluate"), Reward::Scored(0.0));
}

/// A folder copied into itself breaks the official comparison. Against the official answer it is a failure; as
/// somebody's own solution it cannot be scored. Neither crashes.
#[test]
fn a_cyclic_file_system_is_survived() {
    let Some(env) = open(BfclOptions::default()) else { return };
    let task = &env.tasks("base", 0, 1).expect("tasks")[0];
    let mut session = env.open().expect("session");
    session.reset(task, "e", 0).expect("reset");
    let before = session.state_digest().expect("digest");
    let twice = call("cp", r#"{"source":"archive","destination":"archive"}"#);
    let reply = session.step(&[twice.clone(), call("find", "{}"), twice.clone()]).expect("step");
    assert!(!reply.results[0].is_error, "{reply:?}");
    assert_ne!(session.state_digest().expect("digest"), before);
    assert_eq!(session.evaluate().expect("evaluate"), Reward::Scored(0.0));

    let turns = vec![TurnSpec { query: "q".into(), solution: vec![twice], answer: None, missing: None }];
    let own = TaskSpec { id: "own".into(), turns, ..task.clone() };
    assert!(matches!(play(session.as_mut(), &own, &solution(&own)), Reward::Unscored(_)));
    assert_eq!(play(session.as_mut(), task, &solution(task)), Reward::Scored(1.0), "the next episode is fine");
}

#[test]
fn synthesised_tasks_are_judged_by_their_own_solution() {
    let Some(env) = open(BfclOptions::default()) else { return };
    let solution = vec![
        call("cd", r#"{"folder":"document"}"#),
        call("mkdir", r#"{"dir_name":"drafts"}"#),
        call("mv", r#"{"source":"final_report.pdf","destination":"drafts"}"#),
    ];
    let turn =
        |query: &str, solution: Vec<ToolCall>| TurnSpec { query: query.into(), solution, answer: None, missing: None };
    let task = TaskSpec {
        id: "own".into(),
        env: "bfcl".into(),
        split: "train".into(),
        family: String::new(),
        base: "multi_turn_base_0".into(),
        tools: ["cd", "mkdir", "mv", "ls"].map(Into::into).to_vec(),
        turns: vec![turn("File the report.", solution.clone()), turn("List.", vec![call("ls", "{}")])],
    };
    let mut session = env.session();
    let opening = session.reset(&task, "e", 0).expect("reset");
    assert_eq!(opening.messages[0].content, "File the report.");
    assert_eq!(opening.turns, 2);
    assert_eq!(opening.tools.iter().map(|t| t.name.as_str()).collect::<Vec<_>>(), ["cd", "ls", "mkdir", "mv"]);
    assert!(session.step(&[call("pwd", "{}")]).expect("step").results[0].is_error, "not among its tools");

    let right = [solution.clone(), vec![call("ls", "{}")]];
    let mut other_order = solution.clone();
    other_order.rotate_left(1); // mkdir before cd: another place
    assert_eq!(play(&mut session, &task, &right), Reward::Scored(1.0));
    assert_eq!(play(&mut session, &task, &[vec![], vec![]]), Reward::Scored(0.0));
    assert_eq!(play(&mut session, &task, &[other_order, vec![call("ls", "{}")]]), Reward::Scored(0.0));
    assert_eq!(play(&mut session, &task, &[solution[..2].to_vec(), vec![call("ls", "{}")]]), Reward::Scored(0.0));
    assert_eq!(play(&mut session, &task, &[solution.clone(), vec![]]), Reward::Scored(0.0), "the result is missing");
    // Against another reference on request.
    assert_eq!(play(&mut session, &task, &[solution[..2].to_vec(), vec![call("ls", "{}")]]), Reward::Scored(0.0));
    let detail = session.evaluate_detailed(Some(&[solution[..2].to_vec(), vec![]])).expect("detail");
    assert_eq!(detail["passed"], true);
    assert_eq!(detail["figures"]["abstained"], false, "the second turn of that reference wants no call");

    // Asking for what is missing gets the answer once; a required answer has to be said.
    let mut asking = task.clone();
    asking.turns[0].missing = Some(coevolve::event::Missing { field: "dir_name".into(), reply: "drafts".into() });
    asking.turns[1].answer = Some("drafts".into());
    for (last, score) in [("It holds DRAFTS now.", 1.0), ("Done.", 0.0)] {
        session.reset(&asking, "e", 0).expect("reset");
        let reply = session.end_turn("Which name?").expect("ask");
        assert_eq!((reply.messages[0].content.as_str(), reply.done), ("drafts", false));
        session.step(&solution).expect("step");
        assert_eq!(session.end_turn("ok").expect("end").messages[0].content, "List.");
        session.step(&[call("ls", "{}")]).expect("step");
        assert!(session.end_turn(last).expect("end").done);
        assert_eq!(session.evaluate().expect("evaluate"), Reward::Scored(score), "{last}");
    }
    let unknown = TaskSpec { base: "multi_turn_base_200".into(), ..task };
    assert!(matches!(session.reset(&unknown, "e", 0), Err(EnvError::Refused { kind, .. }) if kind == "unknown_task"));
}

#[test]
fn splits_share_numbers_and_playgrounds_come_from_train() {
    let Some(env) = open(BfclOptions::default()) else { return };
    let numbers = |split: &str| -> Vec<usize> {
        let tasks = env.tasks(split, 0, usize::MAX).expect("tasks");
        tasks.iter().map(|t| t.id.rsplit('_').next().expect("id").parse().expect("number")).collect()
    };
    let (train, test) = (numbers("base-train"), numbers("base-test"));
    assert_eq!((train.len(), test.len()), (160, 40));
    let mut both = [train.clone(), test.clone()].concat();
    both.sort_unstable();
    assert_eq!(both, (0..200).collect::<Vec<_>>());
    assert_eq!(numbers("miss_param-train"), train);
    assert_eq!(numbers("long_context-test"), test);
    assert!(matches!(env.tasks("base-dev", 0, 1), Err(EnvError::Unknown { .. })));

    let near = env.tasks("base-test", 0, usize::MAX).expect("tasks");
    for (seed, near) in near.iter().enumerate() {
        let ground = env.playground(Some(near), seed as u64).expect("playground");
        assert_eq!(ground.family, near.family);
        let n: usize = ground.base.rsplit('_').next().expect("id").parse().expect("number");
        assert!(train.contains(&n));
        let mut session = env.open().expect("session");
        let opening = session.reset(&ground, "p", 0).expect("reset");
        assert!(opening.messages.is_empty() && opening.turns == 0);
        assert_eq!(opening.tools.len(), ground.tools.len());
        assert!(matches!(session.evaluate().expect("evaluate"), Reward::Unscored(_)));
    }
    assert_eq!(env.playground(None, 5).expect("playground"), env.playground(None, 5).expect("playground"));
}

#[test]
fn every_tool_has_a_json_schema() {
    let Some(env) = open(BfclOptions::default()) else { return };
    let mut session = env.open().expect("session");
    let mut names = std::collections::BTreeSet::new();
    for task in env.tasks("base", 0, usize::MAX).expect("tasks") {
        for tool in session.reset(&task, "e", 0).expect("reset").tools {
            assert_eq!(tool.parameters["type"], "object");
            assert!(tool.description.len() < 500 && !tool.description.contains("Tool description"), "{tool:?}");
            let properties = tool.parameters["properties"].as_object().expect("properties");
            for (name, schema) in properties {
                let kind = schema["type"].as_str().expect("type");
                let known = ["string", "number", "integer", "boolean", "array", "object"].contains(&kind);
                assert!(known, "{}.{name}: {kind}", tool.name);
                assert!(schema.get("default") != Some(&"None".into()), "{}.{name}", tool.name);
            }
            for name in tool.parameters["required"].as_array().expect("required") {
                assert!(properties.contains_key(name.as_str().expect("name")), "{tool:?}");
            }
            names.insert(tool.name);
        }
    }
    assert_eq!(names.len(), 129);
}

/// The procedural explorer's whole way: plans that run, words that are understood, tasks that are scored.
#[test]
fn proposals_run_are_narrated_understood_and_scored() {
    let Some(env) = open(BfclOptions::default()) else { return };
    // The same installation with workers of its own.
    let Some(other) = open(BfclOptions::default()) else { return };
    let narrator = env.narrator().expect("narrator");
    let mut session = env.open().expect("session");
    let (mut drafts, mut referring, mut families) = (0, 0, std::collections::BTreeSet::new());
    for seed in 0..40 {
        let ground = env.playground(None, seed).expect("playground");
        let pattern: Vec<String> = if seed % 2 == 0 { vec![] } else { ground.tools[3..6].to_vec() };
        let plans = narrator.propose(&ground.base, &pattern, &ground.tools, seed, 4);
        let again = other.narrator().expect("narrator").propose(&ground.base, &pattern, &ground.tools, seed, 4);
        assert_eq!(plans, again, "same seed, same plans");
        assert!(!plans.is_empty(), "{} {pattern:?}", ground.base);
        for (i, plan) in plans.into_iter().enumerate() {
            assert!((1..=4).contains(&plan.len()));
            session.reset(&ground, "run", 0).expect("reset");
            let mut executed = Vec::new();
            for call in &plan {
                let result = session.step(std::slice::from_ref(call)).expect("step").results.remove(0);
                assert!(!result.is_error, "{call:?}: {result:?}");
                executed.push(Executed { call: call.clone(), result: result.content, is_error: false });
            }
            let told = narrator.narrate(&ground.base, &executed, seed).expect("narrated");
            if std::env::var_os("SHOW").is_some() {
                eprintln!("[{} {i}] {}", ground.base, told.query);
            }
            referring += usize::from(told.query.contains(" of step "));
            let understood = narrator.understand(&ground.base, &told.query, None);
            assert_eq!(understood, Some((plan.clone(), None)), "{}", told.query);
            families.insert(told.family);

            let turns = vec![TurnSpec {
                query: told.query,
                solution: told.solution,
                answer: told.answer,
                missing: told.missing,
            }];
            let task = TaskSpec { id: format!("d{seed}.{i}"), split: "train".into(), turns, ..ground.clone() };
            assert_eq!(play(session.as_mut(), &task, &[plan]), Reward::Scored(1.0));
            assert_eq!(play(session.as_mut(), &task, &[vec![]]), Reward::Scored(0.0));
            drafts += 1;
        }
    }
    eprintln!("{drafts} drafts of 160, {} families, {referring} refer to a result", families.len());
    assert!(drafts >= 120, "{drafts}");
    assert!(families.len() >= 100, "{}", families.len());
    assert!(referring >= 5, "{referring}");

    // Nothing is made from test entries.
    let test = &env.tasks("base-test", 0, 1).expect("tasks")[0];
    assert!(narrator.propose(&test.base, &[], &[], 1, 4).is_empty());
}
