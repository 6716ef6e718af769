//! The llm explorer end to end against a loopback server that speaks the OpenAI chat protocol.
//!
//! The server plays a competent explorer deterministically: an answer depends on the request and on what the run's log
//! holds since before the round (which world is explored), never on requests before it, so that a run that was killed
//! may ask again. Its honest drafts are written by desk's narrator; next to each it puts a dishonest one that its judge
//! must turn down.

mod common;

use coevolve::agent::ReferenceAgent;
use coevolve::env::desk::Desk;
use coevolve::event::{ContextSpec, Event, ExplorationStepTaken, ReflectionWritten, TaskSpec, ToolCall};
use coevolve::evolve::procedural::Procedural;
use coevolve::evolve::{Bounds, Context, Explorer, playground};
use coevolve::log::{MAIN, Reader};
use coevolve::world::draw;
use common::{Done, coevolve, events, files, of_kind, run, text};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

const KEY: &str = "sk-test-9f2c7b1e-do-not-log-me";
const KEY_ENV: &str = "COEVOLVE_TEST_KEY";
const MODEL: &str = "loopback-explorer-1";

/// Length of an answer that has to become a file of its own in the run, bytes.
const MANY_WORDS: usize = 100_000;

/// How the server misbehaves.
#[derive(Clone, Copy, PartialEq)]
enum Mood {
    /// Every kind of fault now and then.
    Moody,
    /// Never.
    Calm,
    /// Refuses every key.
    Unauthorised,
}

/// What the server knows and has seen.
struct Brain {
    run: PathBuf,
    mood: Mood,
    asked: u64,
    authorisations: BTreeSet<String>,
    /// Requests by role: reflect, explore, abstract, judge.
    roles: BTreeMap<&'static str, u64>,
    faults: BTreeMap<&'static str, u64>,
    reflections: BTreeMap<String, ReflectionWritten>,
    /// What an honest query asks for.
    written: BTreeMap<String, Vec<ToolCall>>,
}

/// A request as the server sees it.
struct Request {
    authorisation: Option<String>,
    body: Value,
}

fn read(stream: &mut TcpStream) -> Option<Request> {
    let mut bytes = Vec::new();
    let mut buffer = [0u8; 8192];
    loop {
        let n = stream.read(&mut buffer).ok()?;
        if n == 0 {
            return None;
        }
        bytes.extend_from_slice(&buffer[..n]);
        let Some(end) = bytes.windows(4).position(|w| w == b"\r\n\r\n") else { continue };
        let head = String::from_utf8_lossy(&bytes[..end]).to_string();
        let header = |name: &str| {
            head.lines()
                .filter_map(|l| l.split_once(':'))
                .find(|(k, _)| k.eq_ignore_ascii_case(name))
                .map(|(_, v)| v.trim())
        };
        let length: usize = header("content-length")?.parse().ok()?;
        if bytes.len() >= end + 4 + length {
            assert!(head.starts_with("POST /v1/chat/completions "), "{head}");
            let body = serde_json::from_slice(&bytes[end + 4..]).expect("a JSON body");
            return Some(Request { authorisation: header("authorization").map(String::from), body });
        }
    }
}

fn http(status: &str, extra: &str, body: &str) -> String {
    format!(
        "HTTP/1.1 {status}\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: {}\r\n{extra}\r\n{body}",
        body.len()
    )
}

fn completion(content: &str) -> String {
    finished(content, "stop")
}

fn finished(content: &str, reason: &str) -> String {
    let body = json!({"choices": [{"message": {"role": "assistant", "content": content}, "finish_reason": reason}], "usage": {"prompt_tokens": 100, "completion_tokens": 10}});
    http("200 OK", "", &body.to_string())
}

/// Starts the server; returns its base URL.
fn serve(brain: Arc<Mutex<Brain>>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
    let url = format!("http://{}/v1", listener.local_addr().expect("address"));
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let (mut stream, brain) = (stream.expect("connection"), brain.clone());
            // A slow answer must not hold up the next request.
            std::thread::spawn(move || {
                let Some(request) = read(&mut stream) else { return };
                let (answer, wait) = respond(&brain, &request);
                std::thread::sleep(wait);
                // The client may have given up by now.
                let _ = stream.write_all(answer.as_bytes());
            });
        }
    });
    url
}

fn respond(brain: &Mutex<Brain>, request: &Request) -> (String, Duration) {
    let mut brain = brain.lock().expect("the server has not failed before");
    brain.asked += 1;
    brain.authorisations.insert(request.authorisation.clone().unwrap_or_default());
    assert_eq!(request.body["model"], MODEL);
    let now = Duration::ZERO;
    let fault = match (brain.mood, brain.asked % 23) {
        (Mood::Unauthorised, _) => "unauthorised",
        (Mood::Moody, 3) => "busy",
        (Mood::Moody, 5) => "wordy",
        (Mood::Moody, 7) => "garbage",
        (Mood::Moody, 9) => "limited",
        (Mood::Moody, 11) => "cut",
        (Mood::Moody, 13) => "types",
        (Mood::Moody, 15) if !brain.faults.contains_key("slow") => "slow",
        (Mood::Moody, 17) => "length",
        (Mood::Moody, 19) => "chatty",
        _ => "",
    };
    if !fault.is_empty() {
        *brain.faults.entry(fault).or_default() += 1;
    }
    match fault {
        "unauthorised" => return (http("401 Unauthorized", "", "{\"error\": \"bad key\"}"), now),
        "busy" => return (http("503 Service Unavailable", "retry-after: 0\r\n", "busy"), now),
        "limited" => {
            let extra = "retry-after: Sun, 06 Nov 1994 08:49:37 GMT\r\n";
            return (http("429 Too Many Requests", extra, "{\"error\": \"slow down\"}"), now);
        }
        "types" => return (completion("{\"belongs\": \"yes\", \"tool\": 3, \"summary\": [], \"query\": null}"), now),
        "length" => return (finished("{\"stop\": true, \"belongs\": true", "length"), now),
        "garbage" => return (http("200 OK", "", "<html>gateway</html>"), now),
        "cut" => return ("HTTP/1.1 200 OK\r\ncontent-length: 500\r\n\r\n{\"choices\": [{".to_string(), now),
        "slow" => return (completion("{}"), Duration::from_secs(8)),
        "chatty" => return (completion("I am sorry, I cannot help with that."), now),
        _ => {}
    }
    let system = request.body["messages"][0]["content"].as_str().expect("system").to_string();
    let user = request.body["messages"][1]["content"].as_str().expect("user");
    let user: Value = serde_json::from_str(user).expect("the user message is JSON");
    let (role, answer) = if system.starts_with("You study attempts") {
        ("reflect", brain.reflect(&user))
    } else if system.starts_with("You explore") {
        ("explore", brain.explore(&user))
    } else if system.starts_with("From exploration steps") {
        ("abstract", brain.draft(&user, &request.body["seed"]))
    } else if system.starts_with("You try out") {
        ("solve", solve_next(&user))
    } else {
        assert!(system.starts_with("You check tasks"), "{system}");
        ("judge", brain.judge(&user))
    };
    *brain.roles.entry(role).or_default() += 1;
    // Models like to wrap their JSON, some of them in a great many words.
    let words = if fault == "wordy" { "Let me think. ".repeat(MANY_WORDS / 14) } else { String::new() };
    (completion(&format!("{words}Here you are:\n```json\n{answer}\n```")), now)
}

impl Brain {
    fn new(run: &Path, mood: Mood) -> Arc<Mutex<Brain>> {
        Arc::new(Mutex::new(Brain {
            run: run.to_path_buf(),
            mood,
            asked: 0,
            authorisations: BTreeSet::new(),
            roles: BTreeMap::new(),
            faults: BTreeMap::new(),
            reflections: BTreeMap::new(),
            written: BTreeMap::new(),
        }))
    }

    /// The context of the running run that `is_it` knows by (seed of the run, context id), as its log tells it.
    fn context(&self, is_it: impl Fn(u64, &str) -> bool, steps: u32, min_solution: u32) -> Context {
        let reader = Reader::open(&self.run).expect("the run's log");
        let (mut seed, mut spec, mut tasks) = (0, None::<ContextSpec>, BTreeMap::<String, TaskSpec>::new());
        for stamped in reader.read(MAIN, 1).expect("read") {
            match stamped.expect("event").event {
                Event::RunStarted(e) => seed = e.seed,
                Event::TaskAdmitted(e) => {
                    tasks.insert(e.task.id.clone(), e.task);
                }
                Event::EvolutionStarted(e) => spec = e.contexts.into_iter().find(|c| is_it(seed, &c.id)).or(spec),
                _ => {}
            }
        }
        let spec = spec.expect("the context has started");
        let task = spec.task.as_ref().map(|t| tasks[t].clone());
        Context { spec, task, rollout: None, seed, bounds: Bounds { rounds: 1, steps, max_drafts: 8, min_solution } }
    }

    fn reflect(&self, user: &Value) -> Value {
        assert!(user["signal"].is_string() && user["guidance"].is_string(), "{user}");
        let actions = user["attempt"]["actions"].as_array().expect("the attempt");
        let calls = actions.iter().flat_map(|a| a["calls"].as_array().expect("calls"));
        let tools: Vec<&str> = calls.filter_map(|c| c["name"].as_str()).collect();
        json!({
            "summary": "The attempt went wrong.", "failure_cause": "It stopped early.", "instability_pattern": "",
            "focus_pattern": tools, "exploration_objectives": ["try again"], "do_not_repeat": [],
        })
    }

    fn explore(&mut self, user: &Value) -> Value {
        let reflection: ReflectionWritten = serde_json::from_value(user["reflection"].clone()).expect("reflection");
        let done = user["steps"].as_array().expect("steps").len();
        let steps = done as u32 + user["steps_left"].as_u64().expect("steps left") as u32;
        let context = self.context(|_, id| id == reflection.context, steps, 3);
        let round = user["round"].as_u64().expect("round") as u32;
        let ground = playground(&Desk::default(), &context, round).expect("playground");
        let so_far: Vec<ExplorationStepTaken> =
            (0..done).map(|i| step(&reflection.context, round, i, &json!({}))).collect();
        self.reflections.insert(reflection.context.clone(), reflection.clone());
        match hands().next_action(&context, &reflection, &ground, &[], round, &so_far).expect("an action") {
            None => json!({"stop": true}),
            Some(intent) => {
                let arguments: Value = serde_json::from_str(&intent.call.arguments).expect("arguments");
                json!({"reasoning": intent.reasoning, "tool": intent.call.name, "arguments": arguments})
            }
        }
    }

    /// The request does not say which context the steps are from; its seed does.
    fn draft(&mut self, user: &Value, seed: &Value) -> Value {
        let asked = user["steps"].as_array().expect("steps");
        let round = asked[0]["round"].as_u64().expect("round") as u32;
        let min = user["minimum_calls"].as_u64().expect("minimum") as u32;
        let seed_of = |run: u64, id: &str| draw(run, "llm abstract", &[id, &round.to_string()]).bits() >> 33;
        let context = self.context(|run, id| *seed == json!(seed_of(run, id)), 6, min);
        let reflection = self.reflections[&context.spec.id].clone();
        let ground = playground(&Desk::default(), &context, round).expect("playground");
        let id = &context.spec.id;
        let steps: Vec<ExplorationStepTaken> = asked.iter().enumerate().map(|(i, s)| step(id, 0, i, s)).collect();
        let drafts = hands().abstract_drafts(&context, &reflection, &[ground], &steps).expect("drafts");
        let mut out = Vec::new();
        for draft in drafts {
            let turns = draft.task.turns;
            let answers: Vec<String> = turns.iter().filter_map(|t| t.answer.clone()).collect();
            if turns.iter().any(|t| t.missing.is_some()) || answers.len() > 1 {
                continue;
            }
            let query = turns.iter().map(|t| t.query.as_str()).collect::<Vec<_>>().join(" Then ");
            let solution: Vec<ToolCall> = turns.into_iter().flat_map(|t| t.solution).collect();
            let calls: Vec<Value> = solution
                .iter()
                .map(|c| json!({"name": c.name, "arguments": serde_json::from_str::<Value>(&c.arguments).expect("arguments")}))
                .collect();
            self.written.insert(query.clone(), solution);
            let from: Vec<Value> = draft.from_steps.iter().map(|(r, s)| json!([r, s])).collect();
            let task = |query: &str| json!({"intent": draft.intent, "query": query, "solution": calls, "answer": answers.first(), "completion": draft.completion, "from_steps": from});
            out.push(task(&query));
            out.push(task(&format!("Please water the plants of office {}.", out.len())));
        }
        Value::Array(out)
    }

    fn judge(&self, user: &Value) -> Value {
        let turn = &user["turns"][0];
        assert_eq!(user["turns"].as_array().expect("turns").len(), 1);
        let calls: Vec<Value> =
            turn["executed"].as_array().expect("executed").iter().map(|e| e["call"].clone()).collect();
        let wanted = self.written.get(turn["query"].as_str().expect("query"));
        let belongs =
            wanted.is_some_and(|w| calls == serde_json::to_value(w).expect("calls").as_array().expect("list").clone());
        json!({"belongs": belongs, "reason": if belongs { "the calls do what is asked" } else { "nobody asked for this" }})
    }
}

/// Whether the server's agent that tries drafts out does what is asked; else it only says that it did.
fn is_diligent(query: &str) -> bool {
    !query.len().is_multiple_of(4)
}

fn solve_next(user: &Value) -> Value {
    let (solution, executed) = (user["solution"].as_array().expect("solution"), user["executed"].as_array());
    let query = user["query"].as_str().expect("query");
    match solution.get(executed.expect("executed").len()).filter(|_| is_diligent(query)) {
        Some(call) => {
            let arguments: Value =
                serde_json::from_str(call["arguments"].as_str().expect("arguments")).expect("arguments");
            json!({"reasoning": "", "tool": call["name"], "arguments": arguments})
        }
        None => json!({"done": true, "say": user["answer"].as_str().unwrap_or("Done.")}),
    }
}

fn hands() -> Procedural {
    Procedural::new(Arc::new(Desk::default())).expect("desk has a narrator")
}

fn step(context: &str, round: u32, i: usize, asked: &Value) -> ExplorationStepTaken {
    let call: ToolCall = serde_json::from_value(asked["call"].clone())
        .unwrap_or_else(|_| ToolCall { name: String::new(), arguments: "{}".into() });
    ExplorationStepTaken {
        context: context.into(),
        round,
        step: i as u32,
        base: String::new(),
        reasoning: String::new(),
        call,
        observation: asked["observation"].as_str().unwrap_or_default().into(),
        is_error: false,
    }
}

fn start(dir: &Path, url: &str, more: &[&str]) -> Command {
    let url = format!("evolve.llm_url={url}");
    let model = format!("evolve.llm_model={MODEL}");
    let key = format!("evolve.llm_key_env={KEY_ENV}");
    let mut settings = vec!["evolve.explorer=llm", &url, &model, &key, "evolve.llm_timeout_ms=5000"];
    settings.extend(more);
    let mut command = coevolve();
    command.args(common::train_args(dir, &settings)).env(KEY_ENV, KEY);
    command
}

fn train(dir: &Path, url: &str, more: &[&str]) -> Done {
    Done::of(start(dir, url, more).output().expect("starts"))
}

fn text_of(event: &Value, key: &str) -> String {
    event[key].as_str().expect("a text").to_owned()
}

/// No file of the run and nothing printed holds the key.
fn assert_secret(dir: &Path, done: &Done) {
    let all = files(dir);
    assert!(all.len() > 3, "{all:?}");
    for file in all {
        let bytes = std::fs::read(&file).expect("read");
        assert!(!bytes.windows(KEY.len()).any(|w| w == KEY.as_bytes()), "the key is in {}", file.display());
    }
    assert!(!done.stdout.contains(KEY) && !done.stderr.contains(KEY));
}

#[test]
fn a_competent_explorer_behind_a_bad_connection_grows_the_task_set() {
    let tmp = tempfile::tempdir().expect("folder");
    let dir = tmp.path().join("r");
    let brain = Brain::new(&dir, Mood::Moody);
    let url = serve(brain.clone());
    let prices = ["evolve.llm_price_prompt=3", "evolve.llm_price_completion=15"];
    let done = train(&dir, &url, &prices);
    let summary = done.json();
    assert_secret(&dir, &done);
    let brain = brain.lock().expect("brain");
    assert_eq!(brain.authorisations, BTreeSet::from([format!("Bearer {KEY}")]));
    for fault in ["busy", "wordy", "garbage", "limited", "cut", "types", "slow", "length", "chatty"] {
        assert!(brain.faults.contains_key(fault), "{fault} was not tried: {:?}", brain.faults);
    }
    for role in ["reflect", "explore", "abstract", "judge", "solve"] {
        assert!(brain.roles.contains_key(role), "{role} was not asked: {:?}", brain.roles);
    }

    let all = events(&dir);
    // Faults that asking again mends cost nothing.
    let notes = of_kind(&all, "failure_noted");
    assert!(notes.is_empty(), "{notes:?}");
    assert!(summary["admitted"].as_u64().expect("admitted") > 0, "{summary}");
    assert!(summary["rejected"]["belongs"].as_u64().is_some_and(|n| n > 0), "{summary}");
    for reflection in of_kind(&all, "reflection_written") {
        assert_eq!(reflection["author"], MODEL);
    }
    for task in of_kind(&all, "task_admitted") {
        if task["origin"] != "synthesised" {
            continue;
        }
        let query = task["task"]["turns"][0]["query"].as_str().expect("query");
        assert!(brain.written.contains_key(query), "a dishonest draft was admitted: {query}");
        let audit = run(&["audit", text(&dir), task["task"]["id"].as_str().expect("id"), "--json"]).json();
        for part in ["signal", "reflection", "draft", "validation", "admission"] {
            assert!(audit[part].is_object(), "{part}: {audit}");
        }
        assert!(!audit["exploration"].as_array().expect("steps").is_empty());
        assert_eq!(audit["draft"]["author"], MODEL);
        assert_eq!(audit["validation"]["judge"], format!("{MODEL} as judge"));
    }
    // What passed all other checks was tried out, and stays out where that came to nothing.
    let mut tried = [0, 0];
    for verdict in of_kind(&all, "draft_validated") {
        let checks = verdict["checks"].as_array().expect("checks");
        let Some(check) = checks.iter().find(|c| c["name"] == "carried_out") else {
            assert_eq!(verdict["accepted"], false, "{verdict}");
            continue;
        };
        let mut drafts = of_kind(&all, "draft_proposed").into_iter();
        let draft = drafts.find(|d| d["draft"] == verdict["draft"]).expect("the draft");
        let diligent = is_diligent(draft["task"]["turns"][0]["query"].as_str().expect("query"));
        assert_eq!((&check["passed"], &verdict["accepted"]), (&json!(diligent), &json!(diligent)), "{verdict}");
        tried[usize::from(diligent)] += 1;
    }
    assert!(tried[0] > 0 && tried[1] > 0, "{tried:?}");
    // Every draft has a verdict, also one whose judge gave no answer.
    let ids = |kind| of_kind(&all, kind).iter().map(|e| text_of(e, "draft")).collect::<BTreeSet<_>>();
    let judged: BTreeSet<String> = ids("draft_validated").union(&ids("draft_rejected")).cloned().collect();
    assert_eq!(ids("draft_proposed"), judged);
    // What the endpoint said it used is recorded, outside the facts.
    let used: u64 = all.iter().map(|e| e["llm_completion_tokens"].as_u64().expect("tokens")).sum();
    let useless: u64 = ["types", "length", "chatty"].iter().map(|fault| brain.faults[fault]).sum();
    assert_eq!(used, 10 * (brain.roles.values().sum::<u64>() + useless));
    assert_eq!(run(&["replay", text(&dir), "--json"]).json()["ok"], true);

    // Every question and its answer is recorded, and what it took. Of the server's faults only those of the transport are
    // not answers; nobody counted what those cost but for the cut one.
    let asked = of_kind(&all, "llm_asked");
    let attempts: u64 = asked.iter().map(|e| e["attempts"].as_u64().expect("attempts")).sum();
    assert_eq!(attempts, brain.asked);
    let again: u64 = ["types", "chatty"].iter().map(|fault| brain.faults[fault]).sum();
    assert_eq!(asked.len() as u64, brain.roles.values().sum::<u64>() + again);
    assert!(asked.iter().all(|e| e["answer"].is_string() && e["failure"] == ""), "{asked:?}");
    let estimated = |e: &&Value| e["estimated_tokens"].as_u64().expect("tokens") > 0;
    let lost: u64 = ["garbage", "cut", "slow"].iter().map(|fault| brain.faults[fault]).sum();
    assert_eq!(asked.iter().filter(estimated).count() as u64, lost);
    let sum = |key: &str| asked.iter().map(|e| e[key].as_u64().expect("a number")).sum::<u64>();
    let llm = &summary["llm"];
    assert_eq!((llm["asked"].as_u64(), llm["answered"].as_u64()), (Some(asked.len() as u64), Some(asked.len() as u64)));
    // 100 and 10 tokens an answer, at 3 and 15 a million.
    assert_eq!((sum("prompt_tokens"), sum("completion_tokens")), (10 * used, used));
    assert_eq!(llm["cost_micros"].as_u64(), Some(3 * 10 * used + 15 * used));
    assert_eq!(sum("cost_micros"), 45 * used);
    let wordy = asked.iter().filter(|e| text_of(e, "answer").len() > MANY_WORDS - 14).count() as u64;
    assert_eq!(wordy, brain.faults["wordy"]);
    let blobs = files(&dir.join("blobs"));
    assert!(blobs.iter().any(|f| std::fs::metadata(f).expect("file").len() > MANY_WORDS as u64), "{blobs:?}");

    // The recorded run stands for the network: a run of the same settings comes to the same facts and weights.
    let again = tmp.path().join("again");
    let gone = dead();
    let replayed = train(&again, &gone, &[&format!("evolve.llm_replay={}", text(&dir))]);
    assert_eq!(common::identity(&replayed.json()), common::identity(&summary), "{}", common::differences(&dir, &again));
    assert_secret(&again, &replayed);
    let told = of_kind(&events(&again), "llm_asked");
    assert_eq!(told.len(), asked.len());
    for (told, asked) in told.iter().zip(&asked) {
        assert_eq!((&told["request"], &told["answer"]), (&asked["request"], &asked["answer"]));
        assert_eq!((told["attempts"].as_u64(), told["cost_micros"].as_u64()), (Some(0), Some(0)));
    }
    // Another run asks other things: that is said, by the name of the setting, and costs its rounds and not the run.
    let other = tmp.path().join("other");
    let replayed = train(&other, &gone, &[&format!("evolve.llm_replay={}", text(&dir)), "run.seed=8", "run.steps=3"]);
    assert_survived(&other, &replayed, "holds no answer to request");
    let nowhere =
        train(&tmp.path().join("x"), &gone, &[&format!("evolve.llm_replay={}", text(&tmp.path().join("no")))]);
    assert!(nowhere.code != Some(0) && nowhere.stderr.contains("no"), "{nowhere:?}");
    assert!(!tmp.path().join("x").exists());
}

/// The address of a server that is gone.
fn dead() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
    format!("http://{}/v1", listener.local_addr().expect("address"))
}

/// What a request may cost, by the rule of `evolve.llm_budget_tokens`: a third of its bytes and the longest answer.
fn reserve(asked: &Value) -> u64 {
    (text_of(asked, "body").len() as u64).div_ceil(3) + 1024
}

#[test]
fn no_more_is_spent_than_the_budget_not_even_across_a_kill() {
    let tmp = tempfile::tempdir().expect("folder");
    // Without a bound the run asks this much; with this one the middle request does not fit.
    let free = tmp.path().join("free");
    train(&free, &serve(Brain::new(&free, Mood::Calm)), &[]).json();
    let all = of_kind(&events(&free), "llm_asked");
    let middle = all.len() / 2;
    let bound = 110 * middle as u64 + reserve(&all[middle]) - 1;
    let budget = format!("evolve.llm_budget_tokens={bound}");
    let dir = tmp.path().join("r");
    let brain = Brain::new(&dir, Mood::Calm);
    let done = train(&dir, &serve(brain.clone()), &[&budget]);
    let summary = done.json();
    let check = |dir: &Path, summary: &Value| {
        let all = events(dir);
        let asked = of_kind(&all, "llm_asked");
        let mut spent = 0;
        for one in &asked {
            assert!(spent + reserve(one) <= bound, "{spent} were spent before {one}");
            spent += 110;
        }
        assert_eq!(summary["finished"], true);
        assert_eq!(summary["llm"]["prompt_tokens"].as_u64().map(|n| n * 11 / 10), Some(spent));
        asked.len() as u64
    };
    let asked = check(&dir, &summary);
    assert_eq!(brain.lock().expect("brain").asked, asked);
    assert!(asked > 10, "{asked} of {}", all.len());
    // Each round after the budget is used up says so once, and asks nothing more.
    let all = events(&dir);
    let notes = of_kind(&all, "failure_noted");
    let rounds = of_kind(&all, "evolution_started").len();
    assert!(!notes.is_empty() && notes.len() <= rounds, "{} notes in {rounds} rounds", notes.len());
    for note in &notes {
        assert!(text_of(note, "message").contains("evolve.llm_budget_tokens"), "{note}");
    }
    let mut said = false;
    for event in &all {
        match event["event"]["event"].as_str().expect("a kind") {
            "evolution_started" => said = false,
            "failure_noted" => assert!(!std::mem::replace(&mut said, true), "said twice in a round"),
            "llm_asked" => assert!(!said, "asked on after the budget was used up"),
            _ => {}
        }
    }

    // Killed halfway, a run knows from its log what is spent, asks nothing again, and comes to the same.
    let dir = tmp.path().join("killed");
    let brain = Brain::new(&dir, Mood::Calm);
    let child = start(&dir, &serve(brain.clone()), &[&budget]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let half = || brain.lock().expect("brain").asked >= asked / 2;
    assert!(common::kill_when(child.expect("starts"), half).is_none(), "it ended before it was killed");
    let mut command = coevolve();
    command.args(["resume", "--json", text(&dir)]).env(KEY_ENV, KEY);
    let resumed = Done::of(command.output().expect("starts")).json();
    assert_eq!(check(&dir, &resumed), asked);
    assert_eq!(
        common::identity(&resumed),
        common::identity(&summary),
        "{}",
        common::differences(&tmp.path().join("r"), &dir)
    );
    let again = brain.lock().expect("brain").asked - asked;
    assert!(again <= 1, "{again} requests were sent twice; only the one under way when it was killed may be");
}

#[test]
fn a_calm_server_gives_the_same_run_twice() {
    let tmp = tempfile::tempdir().expect("folder");
    let go = |name: &str| {
        let dir = tmp.path().join(name);
        let url = serve(Brain::new(&dir, Mood::Calm));
        common::identity(&train(&dir, &url, &["run.steps=3"]).json())
    };
    assert_eq!(go("a"), go("b"));
}

/// What a killed run asked and was told is in its log: it goes on from there, to the facts of an uninterrupted run.
///
/// Commits are slow here, so that each kill takes much with it that followed from answers.
#[test]
fn killed_while_it_explores_a_run_goes_on_from_its_log() {
    let settings = ["run.steps=3", "log.group_commit_us=20000"];
    let tmp = tempfile::tempdir().expect("folder");
    let straight = tmp.path().join("straight");
    let brain = Brain::new(&straight, Mood::Calm);
    let wanted = common::identity(&train(&straight, &serve(brain.clone()), &settings).json());
    let explored = of_kind(&events(&straight), "exploration_step_taken").len();
    assert!(explored >= 20, "{explored} exploration steps");
    let requests = brain.lock().expect("brain").asked;

    let dir = tmp.path().join("killed");
    let brain = Brain::new(&dir, Mood::Calm);
    let asked = || brain.lock().expect("brain").asked;
    let url = serve(brain.clone());
    let mut command = start(&dir, &url, &settings);
    let (mut amid, mut kills, mut before) = (0, 0, Vec::new());
    for share in [5, 4, 3, 2, 5, 4, 3] {
        let until = asked() + requests / share;
        let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("starts");
        if common::kill_when(child, || asked() >= until).is_some() {
            break;
        }
        kills += 1;
        command = coevolve();
        command.args(["resume", "--json", text(&dir)]).env(KEY_ENV, KEY);
        let all = events(&dir);
        let rounds = |kind| of_kind(&all, kind).len();
        amid += usize::from(rounds("evolution_started") > rounds("evolution_finished"));
        assert!(all.starts_with(&before), "events that were there are gone");
        before = all;
    }
    let summary = Done::of(command.output().expect("starts")).json();
    assert_eq!(common::identity(&summary), wanted, "{}", common::differences(&straight, &dir));
    assert!(events(&dir).starts_with(&before), "events that were there are gone");
    assert_eq!((summary["finished"].as_bool(), summary["anomalies"].as_u64()), (Some(true), Some(0)));
    assert_eq!(run(&["replay", text(&dir), "--json"]).json()["ok"], true);
    assert!(amid > 0, "no kill fell into an evolution round");
    // An answer is durable before it is used: a kill costs the request that is under way and no other.
    assert!((requests..=requests + kills).contains(&asked()), "{} requests, {requests} without kills", asked());
}

/// The run is what it would be without evolution, and says why.
fn assert_survived(dir: &Path, done: &Done, reason: &str) {
    let summary = done.json();
    let all = events(dir);
    assert_eq!((summary["drafts"].as_u64(), summary["admitted"].as_u64()), (Some(0), Some(0)), "{summary}");
    assert_eq!(summary["finished"], true);
    assert!(of_kind(&all, "reflection_written").is_empty() && of_kind(&all, "draft_proposed").is_empty());
    let contexts: usize =
        of_kind(&all, "evolution_started").iter().map(|e| e["contexts"].as_array().expect("contexts").len()).sum();
    assert!(contexts > 0);
    let notes = of_kind(&all, "failure_noted");
    assert_eq!(notes.len(), contexts, "every context that was given up is noted");
    for note in notes {
        assert!(note["message"].as_str().expect("message").contains(reason), "{note}");
    }
    assert_secret(dir, done);
}

#[test]
fn a_dead_endpoint_costs_the_evolution_and_not_the_run() {
    let tmp = tempfile::tempdir().expect("folder");
    let dir = tmp.path().join("r");
    let done = train(&dir, &dead(), &["evolve.llm_retries=0", "run.steps=3"]);
    assert_survived(&dir, &done, "cannot connect");
}

#[test]
fn a_refused_key_names_the_variable_and_is_not_tried_again() {
    let tmp = tempfile::tempdir().expect("folder");
    let dir = tmp.path().join("r");
    let brain = Brain::new(&dir, Mood::Unauthorised);
    let done = train(&dir, &serve(brain.clone()), &["run.steps=3", "log.group_commit_us=300000"]);
    assert_survived(&dir, &done, KEY_ENV);
    let contexts = of_kind(&events(&dir), "failure_noted").len() as u64;
    assert_eq!(brain.lock().expect("brain").asked, contexts);
}

/// The honest drafts of the server are solvable: the check of the check.
#[test]
fn what_was_admitted_can_be_solved_by_its_own_solution() {
    let tmp = tempfile::tempdir().expect("folder");
    let dir = tmp.path().join("r");
    let url = serve(Brain::new(&dir, Mood::Calm));
    train(&dir, &url, &["run.steps=3", "log.group_commit_us=300000"]).json();
    let mut solved = 0;
    for task in of_kind(&events(&dir), "task_admitted") {
        if task["origin"] == "synthesised" {
            let task: TaskSpec = serde_json::from_value(task["task"].clone()).expect("task");
            assert_eq!(solve(&task), coevolve::event::Reward::Scored(1.0), "{task:?}");
            solved += 1;
        }
    }
    assert!(solved > 0);
}

fn solve(task: &TaskSpec) -> coevolve::event::Reward {
    use coevolve::agent::{Agent, EpisodeJob, InlineHands, Limits, Sampling};
    let key = coevolve::event::RolloutKey { step: 0, task: task.id.clone(), draw: 0, k: 0 };
    let job = EpisodeJob { task: task.clone(), key, group: 0, sampling: Sampling::at(0.0), seed: 0, label: "t".into() };
    let mut rewards = Vec::new();
    let mut hands = InlineHands::new(Arc::new(Desk::default()));
    ReferenceAgent::new()
        .play(&mut hands, &[job], &Limits::default(), &mut |_, r| rewards.push(r.reward))
        .expect("plays");
    rewards.remove(0)
}
