//! Whole turns of the loop on environments that cannot score what is synthesised: unguided exploration makes D_0, the judge
//! scores its rollouts, signals lead back into the environment, and every task has its ancestry. Explorer and judge are a
//! mock endpoint that follows a plan (`fixtures/chat_server.py`); the environments are real servers.

mod common;

use common::{events, of_kind, run};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

/// A Python server; it ends when its stdin does.
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

fn serve(script: &str, argument: Option<&Path>) -> Server {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(script);
    let mut command = Command::new("python3");
    command.arg("-I").arg(script).args(argument).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().expect("python3");
    let mut port = String::new();
    BufReader::new(child.stdout.take().expect("stdout")).read_line(&mut port).expect("port");
    Server { child, url: format!("http://127.0.0.1:{}", port.trim()) }
}

/// What a plan of `tests/fixtures/chat_server.py` says.
struct Plan {
    calls: Vec<Value>,
    query: &'static str,
    proof: &'static str,
}

fn act(text: &str) -> Value {
    json!({"name": "act", "arguments": {"text": text}})
}

fn python(code: &str) -> Value {
    json!({"name": "python", "arguments": {"code": code}})
}

/// Trains three steps with D_0 from unguided exploration; the summary.
fn train(dir: &Path, chat: &str, more: &[String]) -> Value {
    let mut args = vec!["train".to_string(), "--json".into(), "--run".into(), dir.display().to_string()];
    let settings = [
        "policy.model=scripted".to_string(),
        "run.steps=3".into(),
        "env.seed_tasks=1".into(),
        "evolve.initial=explore".into(),
        "evolve.every=2".into(),
        "evolve.max_contexts=2".into(),
        "evolve.rounds=1".into(),
        "evolve.explorer=llm".into(),
        "evolve.llm_model=planned".into(),
        format!("evolve.llm_url={chat}/v1"),
        "env.judge=llm".into(),
        "batch.tasks=1".into(),
        "batch.group=6".into(),
        "eval.every=0".into(),
        "eval.tasks=1".into(),
    ];
    args.extend(settings.into_iter().chain(more.iter().cloned()).flat_map(|s| ["--set".to_string(), s]));
    run(&args.iter().map(String::as_str).collect::<Vec<_>>()).json()
}

/// Asserts what every such run has to show; returns its events.
fn whole_turn(dir: &Path, summary: &Value, query: &str) -> Vec<Value> {
    let dir = dir.to_str().expect("path");
    assert_eq!(summary["finished"], true);
    assert_eq!((summary["tasks"]["explored"].as_u64(), summary["tasks"]["seed"].as_u64()), (Some(1), Some(0)));
    assert_eq!(summary["anomalies"], 0);
    let all = events(Path::new(dir));
    // Its rollouts are scored, by the judge, each by a question of its own.
    let rollouts = of_kind(&all, "rollout_finished");
    let mut scores: Vec<f64> = rollouts.iter().filter_map(|r| r["reward"]["scored"].as_f64()).collect();
    scores.sort_by(f64::total_cmp);
    scores.dedup();
    assert_eq!(rollouts.len(), 18);
    assert_eq!(scores, [0.0, 1.0], "the planned solution and other things were played");
    let judged: Vec<Value> = of_kind(&all, "llm_asked").into_iter().filter(|e| e["role"] == "score").collect();
    assert!(judged.iter().any(|e| e["about"].as_str().expect("about").starts_with("train/")));
    assert!(judged.iter().all(|e| e["body"].as_str().expect("body").contains("happened")));
    // Groups with both are boundary cases, which send the explorer back: its drafts are what D has already.
    assert!(summary["signals"]["boundary"].as_u64().expect("count") >= 6, "{summary}");
    let rejected = of_kind(&all, "draft_rejected");
    assert!(!rejected.is_empty() && rejected.iter().any(|r| r["reason"] == "novel"), "{rejected:?}");
    // The ancestry of the task that joined.
    let admitted = of_kind(&all, "task_admitted");
    assert_eq!(admitted[0]["task"]["turns"][0]["query"], query);
    let task = admitted[0]["task"]["id"].as_str().expect("id");
    let audit = run(&["audit", dir, task, "--json"]).json();
    assert_eq!(audit["origin"], "explored");
    for part in ["exploration", "draft", "validation", "admission", "gradient_steps"] {
        let part = &audit[part];
        assert!(!part.is_null() && part != &json!([]) && part != &json!({}), "{audit}");
    }
    assert_eq!(run(&["verify", dir, "--json"]).json()["findings"], json!([]));
    assert_eq!(run(&["replay", dir, "--json"]).json()["ok"], true);
    all
}

#[test]
fn an_env_service_gives_a_whole_turn_of_the_loop() {
    let temporary = tempfile::tempdir().expect("folder");
    let query = "Bring the sum to 7 with two additions, then finish.";
    let plan = Plan { calls: vec![act("add 3"), act("add 4"), act("done")], query, proof: "sum 7" };
    let chat = start(temporary.path(), &plan);
    let sums = serve("env_service.py", None);
    let settings = [
        "env.name=service".to_string(),
        "env.service=sums".into(),
        format!("env.url={}", sums.url),
        "env.split=train".into(),
        "eval.splits=[\"test\"]".into(),
        "policy.calls=text".into(),
    ];
    let dir = temporary.path().join("run");
    let summary = train(&dir, &chat.url, &settings);
    let all = whole_turn(&dir, &summary, query);
    let started = &of_kind(&all, "run_started")[0];
    assert_eq!(started["environment"], "sums env_service sums, score: sparse, judge: planned");
    // A second run is answered out of the first, without the endpoint.
    drop(chat);
    let again = temporary.path().join("again");
    let replayed = [&settings[..], &[format!("evolve.llm_replay={}", dir.display())]].concat();
    let repeated = train(&again, "http://127.0.0.1:9", &replayed);
    assert_eq!(repeated["facts_digest"], summary["facts_digest"]);
}

#[test]
fn appworld_gives_a_whole_turn_of_the_loop() {
    if !Path::new(env!("CARGO_MANIFEST_DIR")).join(".coevolve/appworld/ready").is_file() {
        eprintln!("skipped: AppWorld is not installed; tools/setup-appworld.sh installs it");
        return;
    }
    let temporary = tempfile::tempdir().expect("folder");
    let query = "Note in Simple Note, under the title Loop, that it closes.";
    let login = "passwords = {p['account_name']: p['password'] for p in apis.supervisor.show_account_passwords()}\n\
                 token = apis.simple_note.login(username='ada.miller@example.com', password=passwords['simple_note'])\
                 ['access_token']";
    let write = "print(apis.simple_note.create_note(title='Loop', content='It closes.', access_token=token))";
    let calls = vec![python(login), python(write), python("apis.supervisor.complete_task()")];
    let chat = start(temporary.path(), &Plan { calls, query, proof: "Note created." });
    let settings = [
        "env.name=appworld".to_string(),
        "env.split=made".into(),
        "env.sessions=2".into(),
        "eval.splits=[\"made\"]".into(),
        "policy.calls=python".into(),
    ];
    let dir = temporary.path().join("run");
    let summary = train(&dir, &chat.url, &settings);
    whole_turn(&dir, &summary, query);
}

fn start(folder: &Path, plan: &Plan) -> Server {
    let path = folder.join("plan.json");
    let text = json!({"calls": plan.calls, "query": plan.query, "proof": plan.proof}).to_string();
    std::fs::write(&path, text).expect("written");
    serve("chat_server.py", Some(&path))
}
