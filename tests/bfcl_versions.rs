//! BFCL V3 and V4 beside each other: the reference through our agent loop, and what the official checker does and
//! does not notice. Skipped, with a printed note, where BFCL is not installed (`tools/setup-bfcl.sh`).
//!
//! By default 25 entries of each category (every eighth); `COEVOLVE_BFCL_FULL=1 cargo test --release --test
//! bfcl_versions` plays all 800 of both versions.

use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};

use coevolve::agent::ReferenceAgent;
use coevolve::config::{Layer, load};
use coevolve::env::bfcl::{Bfcl, BfclOptions, BfclVersion};
use coevolve::env::{EnvError, Environment, Figure, Session};
use coevolve::event::{Reward, TaskSpec, ToolCall};
use coevolve::run::{evaluate_split, limits, play_plan};

const CATEGORIES: [&str; 4] = ["base", "miss_func", "miss_param", "long_context"];
const VERSIONS: [BfclVersion; 2] = [BfclVersion::V3, BfclVersion::V4];
/// Calls in one step; the worker takes at most 64.
const CALLS: usize = 32;

fn open(version: BfclVersion) -> Option<Bfcl> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(".coevolve/bfcl");
    match Bfcl::open(&folder, BfclOptions { version, ..BfclOptions::default() }) {
        Ok(env) => Some(env),
        Err(e @ EnvError::NotInstalled { .. }) => {
            eprintln!("skipped: {e}");
            None
        }
        Err(e) => panic!("{e}"),
    }
}

/// Whether all entries are played.
fn full() -> bool {
    std::env::var_os("COEVOLVE_BFCL_FULL").is_some()
}

/// Entries per category.
fn entries() -> usize {
    if full() { 200 } else { 25 }
}

fn call(name: &str, arguments: &str) -> ToolCall {
    ToolCall { name: name.into(), arguments: arguments.into() }
}

fn figure(figures: &[Figure], name: &str) -> (u64, u64) {
    let found = figures.iter().find(|f| f.name == name).unwrap_or_else(|| panic!("{name} in {figures:?}"));
    (found.count, found.of)
}

#[test]
fn the_reference_passes_every_entry_through_the_agent_loop() {
    for version in VERSIONS {
        let Some(env) = open(version) else { return };
        let env: Arc<dyn Environment> = Arc::new(env);
        let settings =
            load(&[Layer::Set("env.name=bfcl".into()), Layer::Set("run.threads=2".into())]).expect("settings");
        let plan = play_plan(&settings, limits(&settings), Arc::new(AtomicBool::new(false)));
        let mut passed = 0;
        for split in CATEGORIES {
            let tasks = env.tasks(split, 0, entries()).expect("tasks");
            let results =
                evaluate_split(&env, &ReferenceAgent::new(), split, &tasks, 7, &plan, &mut |_| {}).expect("played");
            for (task, reward) in results {
                assert_eq!(reward, Reward::Scored(1.0), "{version:?} {task}");
                passed += 1;
            }
        }
        assert_eq!(passed, 4 * entries());
        // The reference is also what the stricter figures ask for. Half the entries, and four of the others, have a
        // turn that wants no call.
        let figures = env.figures();
        let all = passed as u64;
        for name in ["no_duplicates", "no_junk", "strict"] {
            assert_eq!(figure(&figures, name), (all, all), "{version:?} {name}");
        }
        let (abstained, of) = figure(&figures, "abstained");
        assert_eq!(abstained, of);
        assert!((all / 2..=all / 2 + 4).contains(&of), "{of}");
    }
}

/// One way of breaking an answer.
type Mutation = fn(&[Vec<ToolCall>]) -> Vec<Vec<ToolCall>>;

/// Makes each turn's calls in steps, then ends the turn; whether that passes.
fn play(session: &mut impl Session, task: &TaskSpec, turns: &[Vec<ToolCall>]) -> bool {
    session.reset(task, &task.id, 0).expect("reset");
    for calls in turns {
        for calls in calls.chunks(CALLS) {
            session.step(calls).expect("step");
        }
        if session.end_turn("done").expect("end_turn").done {
            break;
        }
    }
    session.evaluate().expect("evaluate") == Reward::Scored(1.0)
}

/// The answer with something wrong in it, through the protocol: what passes officially, and what passes strictly.
#[test]
fn what_the_checker_lets_pass_and_the_stricter_figures_do_not() {
    fn first_dropped(turns: &[Vec<ToolCall>]) -> Vec<Vec<ToolCall>> {
        let mut turns = turns.to_vec();
        turns.iter_mut().find(|t| !t.is_empty()).expect("calls").remove(0);
        turns
    }
    fn last_dropped(turns: &[Vec<ToolCall>]) -> Vec<Vec<ToolCall>> {
        let mut turns = turns.to_vec();
        turns.iter_mut().rfind(|t| !t.is_empty()).expect("calls").pop();
        turns
    }
    fn junk(turns: &[Vec<ToolCall>]) -> Vec<Vec<ToolCall>> {
        let name = &turns.iter().flatten().next().expect("a call").name;
        turns.iter().map(|t| [t.clone(), vec![call(name, r#"{"no_such":1}"#)]].concat()).collect()
    }
    fn doubled(turns: &[Vec<ToolCall>]) -> Vec<Vec<ToolCall>> {
        turns.iter().map(|t| t.iter().flat_map(|c| [c.clone(), c.clone()]).collect()).collect()
    }
    fn reversed(turns: &[Vec<ToolCall>]) -> Vec<Vec<ToolCall>> {
        turns.iter().map(|t| t.iter().rev().cloned().collect()).collect()
    }
    // In a turn that wants no call: the next one's calls, which are made again in their own turn.
    fn early(turns: &[Vec<ToolCall>]) -> Vec<Vec<ToolCall>> {
        let pick = |t: usize| if turns[t].is_empty() { turns.get(t + 1).unwrap_or(&turns[t]) } else { &turns[t] };
        (0..turns.len()).map(|t| pick(t).clone()).collect()
    }
    let ways: [(&str, Mutation); 6] = [
        ("without the first call", first_dropped),
        ("without the last call", last_dropped),
        ("a junk call in each turn", junk),
        ("each call twice", doubled),
        ("reversed", reversed),
        ("next turn's calls early", early),
    ];
    // Of all entries, as the official checker has it with the package's own executor (`bfcl_worker.py --self-test`).
    // Held-out tools are refused here before their release, where the official runner lets them be called: then they
    // are junk instead of a call too many, and 312 and 311 of 400 pass instead of 274 and 272.
    let expected = |version: BfclVersion| match version {
        BfclVersion::V3 => [0, 0, 800, 288, 359, 312],
        BfclVersion::V4 => [0, 0, 800, 288, 360, 311],
    };
    for version in VERSIONS {
        let mut counts = [0_usize; 6];
        for (w, (way, mutate)) in ways.iter().enumerate() {
            // Opened anew: figures count from there.
            let Some(env) = open(version) else { return };
            let tasks: Vec<TaskSpec> = CATEGORIES
                .iter()
                .filter(|c| w < 5 || c.starts_with("miss"))
                .flat_map(|c| env.tasks(c, 0, entries()).expect("tasks"))
                .collect();
            let passed = Mutex::new(0);
            std::thread::scope(|scope| {
                for half in tasks.chunks(tasks.len().div_ceil(2)) {
                    scope.spawn(|| {
                        let mut session = env.session();
                        let solution = |t: &TaskSpec| t.turns.iter().map(|u| u.solution.clone()).collect::<Vec<_>>();
                        let n = half.iter().filter(|t| play(&mut session, t, &mutate(&solution(t)))).count();
                        *passed.lock().expect("count") += n;
                    });
                }
            });
            counts[w] = passed.into_inner().expect("count");
            let all = tasks.len() as u64;
            let figures = env.figures();
            let (strict, junk, doubles) =
                (figure(&figures, "strict"), figure(&figures, "no_junk"), figure(&figures, "no_duplicates"));
            eprintln!("{version:?} {way:24} {:3} of {all} pass; strict {strict:?} {figures:?}", counts[w]);
            match *way {
                "without the first call" | "without the last call" => assert_eq!(strict, (0, all)),
                "a junk call in each turn" => assert_eq!((strict, junk), ((0, all), (0, all))),
                "each call twice" => assert_eq!((strict, doubles), ((0, all), (0, all))),
                "reversed" => assert!(strict.0 <= counts[w] as u64),
                _ => assert_eq!((strict, figure(&figures, "abstained")), ((0, all), (0, all))),
            }
        }
        if full() {
            assert_eq!(counts, expected(version), "{version:?}");
        } else {
            assert_eq!((counts[0], counts[1], counts[2]), (0, 0, 4 * entries()), "{version:?}");
            assert!(counts[3..].iter().all(|&n| n < 3 * entries()), "{version:?} {counts:?}");
        }
    }
}

/// Official entry miss_func_49 withholds `tail` until turn 3, and its own answer calls it in turn 1: there it works,
/// though it is not shown; elsewhere it is refused as in every other entry.
#[test]
fn held_out_tools_are_refused_but_where_the_answer_itself_calls_them() {
    for version in VERSIONS {
        let Some(env) = open(version) else { return };
        let tasks = env.tasks("miss_func", 0, usize::MAX).expect("tasks");
        let mut refused = 0;
        let mut session = env.session();
        for task in &tasks {
            let opening = session.reset(task, "e", 0).expect("reset");
            let shown: Vec<String> = opening.tools.into_iter().map(|t| t.name).collect();
            let mut released = Vec::new();
            let mut tried = false;
            for (t, turn) in task.turns.iter().enumerate() {
                // What some later turn needs and is not there yet: called now, it does not exist.
                let later = task.turns[t..].iter().flat_map(|u| &u.solution);
                let held: Vec<_> =
                    later.filter(|c| !shown.contains(&c.name) && !released.contains(&c.name)).cloned().collect();
                let early = turn.solution.iter().any(|c| held.iter().any(|h| h.name == c.name));
                assert_eq!(early, task.id.ends_with("_49") && t == 1, "{version:?} {} turn {t}", task.id);
                if let (Some(held), false) = (held.first(), early) {
                    let before = session.state_digest().expect("digest");
                    let reply = session.step(std::slice::from_ref(held)).expect("step");
                    let text = format!("Error during execution: name '{}' is not defined", held.name);
                    assert_eq!(reply.results[0].content, text, "{version:?} {} turn {t}", task.id);
                    assert_eq!(session.state_digest().expect("digest"), before);
                    tried = true;
                }
                for calls in turn.solution.chunks(CALLS) {
                    let reply = session.step(calls).expect("step");
                    assert!(!reply.results.iter().any(|r| r.content.contains("is not defined")), "{}", task.id);
                }
                released.extend(session.end_turn("").expect("end_turn").released.into_iter().map(|t| t.name));
            }
            assert!(!released.is_empty(), "{}", task.id);
            refused += usize::from(tried);
        }
        // Entries 33 and 133 withhold a tool that their answer never calls.
        assert_eq!(refused, 198, "{version:?}");
    }
}

#[test]
fn the_versions_are_told_apart() {
    let (Some(v3), Some(v4)) = (open(BfclVersion::V3), open(BfclVersion::V4)) else { return };
    assert!(v3.version().starts_with("V3 multi-turn, data "), "{}", v3.version());
    assert!(v4.version().starts_with("V4 multi-turn, data "), "{}", v4.version());
    let tools = |env: &Bfcl| {
        let ground = env.playground(None, 1).expect("playground");
        let mut session = env.open().expect("session");
        session.reset(&ground, "e", 0).expect("reset").tools.len()
    };
    assert!(tools(&v3) > 10 && tools(&v4) > 10);
    // Counted in the packages' files: questions that are equal in both.
    let (a, b) = (v3.tasks("base", 0, 200).expect("tasks"), v4.tasks("base", 0, 200).expect("tasks"));
    assert!(a.iter().zip(&b).all(|(a, b)| a.id == b.id && a.family == b.family));
    let words = |t: &TaskSpec| t.turns.iter().map(|u| u.query.clone()).collect::<Vec<_>>();
    assert_eq!(a.iter().zip(&b).filter(|(a, b)| words(a) == words(b)).count(), 129);
    // The narrator works from either release.
    for env in [&v3, &v4] {
        let ground = env.playground(None, 3).expect("playground");
        let narrator = env.narrator().expect("narrator");
        assert!(!narrator.propose(&ground.base, &[], &ground.tools, 3, 4).is_empty());
    }
    let error = load(&[Layer::Set("env.bfcl_version=v2".into())]).expect_err("no such version");
    assert!(error.to_string().contains("v3 | v4"), "{error}");
}
