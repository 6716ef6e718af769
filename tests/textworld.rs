//! Real text games through our client. Skipped, with a printed note, where TextWorld is not installed
//! (`tools/setup-textworld.sh` installs it). The smallest games, few of them: making one takes about 2 seconds.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use coevolve::agent::{Agent, NoopAgent, ReferenceAgent};
use coevolve::config::{Layer, load};
use coevolve::env::stdio::{Bounds, Launch, REPLY_BYTES, StdioEnv};
use coevolve::env::textworld::{TextWorld, TextWorldOptions};
use coevolve::env::{EnvError, Environment, Session, ToolResult};
use coevolve::event::{Missing, Reward, TaskSpec, ToolCall, TurnSpec};
use coevolve::run::{evaluate_split, limits, play_plan};

fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(".coevolve/textworld")
}

/// The environment, or `None` with a note.
fn open(options: TextWorldOptions) -> Option<TextWorld> {
    match TextWorld::open(&folder(), options) {
        Ok(env) => Some(env),
        Err(e @ EnvError::NotInstalled { .. }) => {
            eprintln!("skipped: {e}");
            None
        }
        Err(e) => panic!("{e}"),
    }
}

fn act(text: &str) -> ToolCall {
    ToolCall { name: "act".into(), arguments: serde_json::json!({ "text": text }).to_string() }
}

fn say(session: &mut dyn Session, text: &str) -> ToolResult {
    session.step(&[act(text)]).expect("step").results.remove(0)
}

#[test]
fn a_missing_installation_names_the_remedy() {
    let error = TextWorld::open(&folder().join("nowhere"), TextWorldOptions::default()).expect_err("not there");
    assert!(error.to_string().contains("tools/setup-textworld.sh"), "{error}");
}

#[test]
fn walkthroughs_win_through_the_agent_loop_and_doing_nothing_does_not() {
    let Some(env) = open(TextWorldOptions::default()) else { return };
    let env: Arc<dyn Environment> = Arc::new(env);
    assert_eq!(env.splits(), ["train", "dev", "test"]);
    let settings =
        load(&[Layer::Set("env.name=textworld".into()), Layer::Set("run.threads=2".into())]).expect("settings");
    let plan = play_plan(&settings, limits(&settings), Arc::new(AtomicBool::new(false)));
    // Every size of game is among the first three seeds.
    for (split, count, first) in [("train", 3, "tw-0"), ("dev", 1, "tw-10000"), ("test", 1, "tw-20000")] {
        let tasks = env.tasks(split, 0, count).expect("tasks");
        assert_eq!((tasks.len(), tasks[0].id.as_str()), (count, first));
        let won = |agent: &dyn Agent| {
            let results = evaluate_split(&env, agent, split, &tasks, 7, &plan, &mut |_| {}).expect("played");
            results.iter().filter(|(_, reward)| *reward == Reward::Scored(1.0)).count()
        };
        assert_eq!(won(&ReferenceAgent::new()), count, "{split}");
        assert_eq!(won(&NoopAgent), 0, "{split}");
    }
    assert!(matches!(env.tasks("valid", 0, 1), Err(EnvError::Unknown { .. })));
}

/// Another process with another cache makes the same bytes.
#[test]
fn a_seed_is_a_game() {
    let Some(env) = open(TextWorldOptions::default()) else { return };
    let ours = env.tasks("train", 0, 1).expect("tasks");
    let cache = tempfile::tempdir().expect("folder");
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tools/workers/textworld_worker.py");
    let launch = Launch {
        env: "textworld".into(),
        program: folder().join("bin/python"),
        args: vec!["-I".into(), script.into(), "--cache".into(), cache.path().into()],
        vars: vec![],
        reply_bytes: REPLY_BYTES,
    };
    let other = StdioEnv::open(launch, Bounds::default()).expect("open");
    let made = |cache: &Path| cache.join("recipe-1");
    assert_eq!(std::fs::read_dir(made(cache.path())).expect("cache").count(), 0, "made when it is wanted");
    // A reset makes the game too.
    let mut session = other.open().expect("session");
    let opening = session.reset(&ours[0], "e", 0).expect("reset");
    assert!(opening.messages[0].content.starts_with(&ours[0].turns[0].query), "{opening:?}");
    let story = |cache: &Path| std::fs::read(made(cache).join("tw-0.z8")).expect("story");
    assert_eq!(story(cache.path()), story(&folder().join("games")));
    let names = std::fs::read_dir(made(cache.path())).expect("cache").count();
    assert_eq!(names, 2, "the game, its description, and nothing left of the making");
}

#[test]
fn commands_are_commands_and_state_is_the_games_own() {
    let Some(env) = open(TextWorldOptions::default()) else { return };
    let task = &env.tasks("train", 0, 1).expect("tasks")[0];
    // Game 0: take the larva from the toolbox, drop it on the floor.
    let solution: Vec<&str> = vec!["take fly larva from toolbox", "drop fly larva"];
    assert_eq!(task.turns[0].solution, solution.iter().map(|c| act(c)).collect::<Vec<_>>());
    let (mut session, mut other) = (env.open().expect("session"), env.open().expect("session"));
    let opening = session.reset(task, "e", 0).expect("reset");
    other.reset(task, "e", 0).expect("reset");
    assert_eq!(opening.tools.iter().map(|t| t.name.as_str()).collect::<Vec<_>>(), ["act"]);
    assert!(opening.messages[0].content.contains("-= Cellar =-"), "{opening:?}");
    let begin = session.state_digest().expect("digest");
    assert!(begin.is_some());

    assert_eq!(say(session.as_mut(), "inventory").content, "You are carrying nothing.");
    assert!(!say(session.as_mut(), "sing to the larva").is_error, "the game answers what it does not understand");
    let bad = |name: &str, arguments: &str| ToolCall { name: name.into(), arguments: arguments.into() };
    let wrong = [
        bad("look", "{}"),
        bad("act", "{}"),
        bad("act", "not json"),
        bad("act", r#"{"text":3}"#),
        bad("act", r#"{"text":"look","more":1}"#),
        bad("act", r#"{"text":""}"#),
        bad("act", r#"{"text":"look\ndrop fly larva"}"#),
        bad("act", &format!(r#"{{"text":{}1{}}}"#, "[".repeat(100_000), "]".repeat(100_000))),
        act(&"look ".repeat(100)),
        act("restart"),
        act("UNDO"),
        act("save"),
        act("again"),
        act("tw-trace-actions"),
        act("restrict commands"),
        act("take fly larva. drop fly larva"),
        act("take fly larva and toolbox"),
    ];
    let reply = session.step(&wrong).expect("errors are results");
    for (call, result) in wrong.iter().zip(&reply.results) {
        assert!(result.is_error, "{:.80} -> {result:?}", call.arguments);
    }
    assert_eq!(session.state_digest().expect("digest"), begin, "nothing has changed");

    assert_eq!(say(session.as_mut(), solution[0]).content, "You take the fly larva from the toolbox.");
    assert_ne!(session.state_digest().expect("digest"), begin);
    assert_eq!(other.state_digest().expect("digest"), begin, "the other episode of the game is its own");
    assert_eq!(session.evaluate().expect("evaluate"), Reward::Scored(0.0));
    let reply = session.step(&[act(solution[1]), act("look")]).expect("step");
    assert!(reply.done && reply.results[0].content.contains("*** The End ***"), "{reply:?}");
    assert!(reply.results[1].is_error, "after the end");
    assert_eq!(session.evaluate().expect("evaluate"), Reward::Scored(1.0));
    assert!(matches!(session.step(&[act("look")]), Err(EnvError::Refused { kind, .. }) if kind == "episode_over"));
    // The next episode starts anew.
    session.reset(task, "f", 0).expect("reset");
    assert_eq!(session.state_digest().expect("digest"), begin);
    assert!(session.end_turn("I give up").expect("end").done);
    assert_eq!(session.evaluate().expect("evaluate"), Reward::Scored(0.0));
}

#[test]
fn only_admissible_commands_on_request() {
    let Some(env) = open(TextWorldOptions { admissible: true, ..TextWorldOptions::default() }) else { return };
    let task = &env.tasks("train", 0, 1).expect("tasks")[0];
    let mut session = env.open().expect("session");
    session.reset(task, "e", 0).expect("reset");
    let begin = session.state_digest().expect("digest");
    // Understood by the game, but worded in another way than the list.
    let refused = say(session.as_mut(), "get larva");
    assert!(refused.is_error);
    let list = "Not possible now. Possible: close toolbox; examine fly larva; examine toolbox; inventory; look; take fly larva from toolbox";
    assert_eq!(refused.content, list);
    assert_eq!(session.state_digest().expect("digest"), begin);
    for call in &task.turns[0].solution {
        assert!(!session.step(std::slice::from_ref(call)).expect("step").results[0].is_error);
    }
    assert_eq!(session.evaluate().expect("evaluate"), Reward::Scored(1.0));
    let figures = env.figures();
    assert_eq!((figures[0].name.as_str(), figures[0].count, figures[0].of), ("no_refused", 0, 1));
}

#[test]
fn own_tasks_are_judged_by_the_facts_their_solution_reaches() {
    let Some(env) = open(TextWorldOptions::default()) else { return };
    let ground = env.playground(Some(&env.tasks("train", 0, 1).expect("tasks")[0]), 1).expect("playground");
    let mut session = env.open().expect("session");
    let opening = session.reset(&ground, "p", 0).expect("reset");
    assert_eq!(opening.turns, 0);
    say(session.as_mut(), "close toolbox");
    assert!(matches!(session.evaluate().expect("evaluate"), Reward::Unscored(_)));

    let turn = |query: &str, commands: &[&str], missing: Option<Missing>, answer: Option<&str>| TurnSpec {
        query: query.into(),
        solution: commands.iter().map(|c| act(c)).collect(),
        answer: answer.map(Into::into),
        missing,
    };
    let field = Missing { field: "thing".into(), reply: "The larva.".into() };
    let task = TaskSpec {
        id: "own".into(),
        split: "train".into(),
        turns: vec![
            turn("Pick it up.", &["take fly larva from toolbox"], Some(field), None),
            turn("Shut the box.", &["close toolbox"], None, Some("closed")),
        ],
        ..ground
    };
    let mut run = |first: &str, second: &str, words: &str| {
        let opening = session.reset(&task, "own", 0).expect("reset");
        assert_eq!(opening.messages.last().expect("a query").content, "Pick it up.");
        assert_eq!(session.end_turn("What?").expect("ask").messages[0].content, "The larva.");
        say(session.as_mut(), first);
        assert_eq!(session.end_turn("Done.").expect("end").messages[0].content, "Shut the box.");
        say(session.as_mut(), second);
        assert!(session.end_turn(words).expect("end").done);
        session.evaluate().expect("evaluate")
    };
    let take = "take fly larva from toolbox";
    assert_eq!(run(take, "close toolbox", "It is CLOSED now."), Reward::Scored(1.0));
    for other in ["get larva", "pick larva up", "carry the larva", "remove fly larva from toolbox"] {
        assert_eq!(run(other, "shut toolbox", "closed"), Reward::Scored(1.0), "{other}: other words, same facts");
    }
    assert_eq!(run(take, "close toolbox", "Done."), Reward::Scored(0.0), "the answer is not said");
    assert_eq!(run(take, "look", "closed"), Reward::Scored(0.0));
    assert_eq!(run("look", "close toolbox", "closed"), Reward::Scored(0.0));
}

#[test]
fn games_of_the_users_are_played_from_a_folder() {
    let Some(made) = open(TextWorldOptions::default()) else { return };
    let task = made.tasks("train", 0, 1).expect("tasks").remove(0);
    let games = folder().join("games/recipe-1");
    let given = tempfile::tempdir().expect("folder");
    for (split, file, from) in
        [("known", "larva.z8", "tw-0.z8"), ("known", "larva.json", "tw-0.json"), ("bare", "larva.z8", "tw-0.z8")]
    {
        std::fs::create_dir_all(given.path().join(split)).expect("split");
        std::fs::copy(games.join(from), given.path().join(split).join(file)).expect("copied");
    }
    let options = TextWorldOptions { games: Some(given.path().into()), ..TextWorldOptions::default() };
    let env = open(options.clone()).expect("installed");
    assert_eq!(env.splits(), ["bare", "known"]);
    let tasks = |split: &str| env.tasks(split, 0, 10).expect("tasks");
    assert_eq!((tasks("known").len(), tasks("known")[0].id.as_str()), (1, "known/larva.z8"));
    let mut session = env.open().expect("session");
    for (split, reward) in [("known", Some(1.0)), ("bare", None)] {
        session.reset(&tasks(split)[0], "e", 0).expect("reset");
        for call in &task.turns[0].solution {
            session.step(std::slice::from_ref(call)).expect("step");
        }
        // Without a description nobody knows that the game is won: no score, rather than a made-up one.
        match (session.evaluate().expect("evaluate"), reward) {
            (Reward::Scored(x), Some(y)) if x == y => {}
            (Reward::Unscored(why), None) => assert!(why.contains(".json"), "{why}"),
            (got, _) => panic!("{split}: {got:?}"),
        }
    }
    let strict = open(TextWorldOptions { admissible: true, ..options }).expect("installed");
    let mut session = strict.open().expect("session");
    let error = session.reset(&tasks("bare")[0], "e", 0).expect_err("no list of commands");
    assert!(matches!(&error, EnvError::Refused { kind, .. } if kind == "no_commands"), "{error}");

    let nothing = TextWorldOptions { games: Some(given.path().join("no")), ..TextWorldOptions::default() };
    let error = TextWorld::open(&folder(), nothing).expect_err("no such folder");
    assert!(error.to_string().contains("is no folder"), "{error}");
}
