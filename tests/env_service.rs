//! The env_service client against a server that was written from the protocol's description, over real HTTP, with faults.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use coevolve::agent::{Agent, EpisodeJob, InlineHands, Limits, ReferenceAgent, Sampling};
use coevolve::env::service::{ServiceEnv, ServiceOptions};
use coevolve::env::{ACT, EnvError, Environment, Role};
use coevolve::event::{EndReason, Reward, RolloutKey, TaskSpec, ToolCall, TurnSpec};
use coevolve::http::{Bounds, Http};
use serde_json::{Value, json};

/// The server; it ends when its stdin does.
struct Server {
    child: Child,
    url: String,
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Server {
    fn start() -> Server {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/env_service.py");
        let mut child = Command::new("python3")
            .args(["-I", script])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("python3");
        let mut port = String::new();
        BufReader::new(child.stdout.take().expect("stdout")).read_line(&mut port).expect("port");
        Server { child, url: format!("http://127.0.0.1:{}", port.trim()) }
    }

    fn options(&self) -> ServiceOptions {
        ServiceOptions {
            url: format!("{}/", self.url),
            env_type: "sums".into(),
            splits: vec!["train".into(), "test".into()],
            step_limit: 5,
            partial: false,
            deadline_ms: 2000,
            sessions: None,
        }
    }

    fn open(&self) -> ServiceEnv {
        ServiceEnv::open(self.options()).expect("healthy")
    }

    /// (operation, instance, task, messages, params) of every request.
    fn log(&self) -> Vec<Value> {
        let bounds = Bounds { deadline_ms: 5000, body_bytes: 1 << 20 };
        let answer = Http::new(true).unwrap().get(&format!("{}/log", self.url), bounds).unwrap();
        serde_json::from_slice(&answer.body).unwrap()
    }
}

fn task(id: &str) -> TaskSpec {
    TaskSpec {
        id: id.into(),
        env: "sums".into(),
        split: "train".into(),
        family: "sums".into(),
        base: id.into(),
        tools: vec![ACT.into()],
        turns: vec![TurnSpec { query: String::new(), solution: vec![], answer: None, missing: None }],
    }
}

fn act(text: &str) -> ToolCall {
    ToolCall { name: ACT.into(), arguments: json!({ "text": text }).to_string() }
}

#[test]
fn an_episode_is_what_the_protocol_says() {
    let server = Server::start();
    let env = server.open();
    let ids = |split: &str| env.tasks(split, 0, 4).map(|t| t.into_iter().map(|t| t.id).collect::<Vec<_>>());
    assert_eq!(ids("train").unwrap(), ["0", "1", "2", "3"]);
    assert_eq!(ids("test").unwrap(), ["5", "6"], "numbers are ids, too");
    assert!(matches!(ids("none"), Err(EnvError::Unknown { .. })));
    assert!(matches!(ids("odd"), Err(EnvError::Protocol { .. })));

    let mut session = env.open().unwrap();
    let opening = session.reset(&task("1"), "e", 0).unwrap();
    let said: Vec<_> = opening.messages.iter().map(|m| (m.role, m.content.as_str())).collect();
    let rules = "Say `add N` until the sum is the goal, then `done`.";
    assert_eq!(said, [(Role::System, rules), (Role::User, "The goal is 8.")]);
    assert_eq!((opening.step_limit, opening.tools.len(), opening.tools[0].name.as_str()), (5, 1, ACT));
    assert!(opening.tools[0].description.contains(rules), "an explorer reads the rules in the tool");
    // Two calls of one message are two messages to the server; what it cannot do is the agent's to read.
    let reply = session.step(&[act("add 3"), act("add 5"), ToolCall { name: "fly".into(), arguments: "{}".into() }]);
    let reply = reply.unwrap();
    let read: Vec<_> = reply.results.iter().map(|r| (r.content.as_str(), r.is_error)).collect();
    assert_eq!(read, [("sum 3", false), ("sum 8", false), ("there is no tool `fly`; use `act`", true)]);
    assert!(!reply.done);
    assert_eq!(session.evaluate().unwrap(), Reward::Scored(1.0));
    // Words without a call reach the server; its answer is the user's.
    let turn = session.end_turn("well").unwrap();
    assert_eq!((turn.messages[0].role, turn.messages[0].content.as_str(), turn.done), (Role::User, "sum 8", false));
    let reply = session.step(&[act("done"), act("add 1")]).unwrap();
    assert!(reply.done && reply.results[1].is_error, "nothing is sent behind the end");
    assert!(session.end_turn("more").unwrap().done);
    assert_eq!(session.state_digest().unwrap(), None);
    drop(session);

    let log = server.log();
    let episode: Vec<_> = log.iter().filter(|r| r[0] != "/get_env_profile").collect();
    let ops: Vec<_> = episode.iter().map(|r| r[0].as_str().unwrap()).collect();
    assert_eq!(ops, ["/create", "/step", "/step", "/evaluate", "/step", "/step", "/release"]);
    let instance = &episode[0][1];
    assert!(instance.is_string() && episode.iter().all(|r| r[1] == *instance));
    assert_eq!((&episode[0][2], &episode[0][4]), (&json!("1"), &json!({})));
    assert_eq!(episode[1][3], json!({"role": "assistant", "content": "add 3"}), "an object, not a list");
    assert_eq!(episode[3][4], json!({"sparse": true}));
}

#[test]
fn python_goes_as_a_fenced_block_and_partial_credit_asks_for_the_dense_score() {
    let server = Server::start();
    let env = ServiceEnv::open(ServiceOptions { partial: true, ..server.options() }).unwrap();
    let mut session = env.open().unwrap();
    session.reset(&task("1"), "e", 0).unwrap();
    session.step(&[ToolCall { name: "python".into(), arguments: r#"{"code":"x = 1"}"#.into() }]).unwrap();
    assert_eq!(server.log().last().unwrap()[3]["content"], "```python\nx = 1\n```");
    session.step(&[act("add 2")]).unwrap();
    assert_eq!(session.evaluate().unwrap(), Reward::Scored(0.25));
    assert!(env.version().contains("dense"));
}

#[test]
fn every_fault_ends_its_episode_unscored_and_touches_no_other() {
    let server = Server::start();
    let env = server.open();
    let mut sibling = env.open().unwrap();
    sibling.reset(&task("0"), "sibling", 0).unwrap();
    sibling.step(&[act("add 3")]).unwrap();
    for (id, said, why) in [
        ("late", "add 1", "no whole answer within 2000 ms"),
        ("garbage", "add 1", "no JSON object"),
        ("cut", "add 1", "broke off"),
        ("huge", "add 1", "longer than"),
        ("crash", "add 1", "status 500: KeyError: 'shelf'"),
        ("wordless", "add 1", "no text `content`"),
        ("0", "add much", "status 400: ValueError"),
    ] {
        let mut faulty = task(id);
        faulty.turns[0].solution = vec![act(said)];
        let key = RolloutKey { step: 0, task: id.into(), draw: 0, k: 0 };
        let job =
            EpisodeJob { task: faulty, key, group: 0, sampling: Sampling::at(1.0), seed: 1, label: "fault".into() };
        let mut records = Vec::new();
        let mut hands = InlineHands::new(std::sync::Arc::new(server.open()));
        ReferenceAgent::new()
            .play(&mut hands, &[job], &Limits::default(), &mut |_, r| records.push(r))
            .expect("plays on");
        let Reward::Unscored(reason) = &records[0].reward else { panic!("{id}: {:?}", records[0].reward) };
        assert!(reason.contains(why), "{id}: {reason}");
        assert_eq!(records[0].end, EndReason::EnvironmentFailure, "{id}");
    }
    sibling.step(&[act("add 4")]).unwrap();
    assert_eq!(sibling.evaluate().unwrap(), Reward::Scored(1.0));
    // A step is never sent twice: it may have been carried out.
    let steps = |log: &[Value], text: &str| log.iter().filter(|r| r[0] == "/step" && r[3]["content"] == text).count();
    assert_eq!(steps(&server.log(), "add 1"), 6);
}

#[test]
fn a_score_is_a_number_from_nought_to_one_or_none() {
    let server = Server::start();
    let env = server.open();
    let mut session = env.open().unwrap();
    for (id, expected) in [("null", None), ("text", None), ("negative", None), ("beyond", None), ("true", Some(1.0))] {
        session.reset(&task(id), id, 0).unwrap();
        match (session.evaluate().unwrap(), expected) {
            (Reward::Scored(got), Some(want)) => assert_eq!(got, want, "{id}"),
            (Reward::Unscored(why), None) => assert!(why.contains("no score in [0, 1]"), "{id}: {why}"),
            (got, _) => panic!("{id}: {got:?}"),
        }
    }
    // The server's evaluation is of its own words; for ours nobody has asked it anything.
    let mut own = task("2");
    own.turns[0].query = "The goal is 100.".into();
    let opening = session.reset(&own, "own", 0).unwrap();
    assert_eq!(opening.messages[1].content, "The goal is 100.");
    assert!(matches!(session.evaluate().unwrap(), Reward::Unscored(why) if why.contains("judge")));
    let create = server.log().into_iter().rfind(|r| r[0] == "/create").unwrap();
    assert_eq!(create[4], json!({"is_open_query": true}));
}

#[test]
fn quirks_are_taken_and_lost_connections_tried_again_where_that_is_safe() {
    let server = Server::start();
    let env = server.open();
    let mut session = env.open().unwrap();
    // A state that is one message, and no `is_terminated`.
    session.reset(&task("quirks"), "e", 0).unwrap();
    let reply = session.step(&[act("add 2")]).unwrap();
    assert_eq!((reply.results[0].content.as_str(), reply.done), ("sum 2", false));
    session.reset(&task("dropped-create"), "e", 0).unwrap();
    let created: Vec<_> = server.log().into_iter().filter(|r| r[0] == "/create" && r[2] == "dropped-create").collect();
    assert_eq!(created.len(), 2);
    assert_ne!(created[0][1], created[1][1], "the first attempt may live on at the server");
    assert!(session.step(&[act("add 1")]).is_ok());
}

#[test]
fn a_server_that_is_not_there_is_named() {
    let server = Server::start();
    let options = server.options();
    drop(server);
    let error = ServiceEnv::open(options.clone()).unwrap_err().to_string();
    assert!(error.contains(options.url.trim_end_matches('/')) && error.contains("env.url"), "{error}");
    assert!(env_with_dead_server().contains("got no answer"));
}

/// The server dies in the middle of an episode.
fn env_with_dead_server() -> String {
    let server = Server::start();
    let env = server.open();
    let mut session = env.open().unwrap();
    session.reset(&task("0"), "e", 0).unwrap();
    drop(server);
    session.step(&[act("add 1")]).unwrap_err().to_string()
}
