//! The command line from outside: help, exit codes, machine-readable answers, pipes.

mod common;

use common::{Done, coevolve, events, of_kind, run, text, train};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::OnceLock;

/// One finished run for all tests that only read.
fn finished() -> &'static Path {
    static RUN: OnceLock<(tempfile::TempDir, PathBuf)> = OnceLock::new();
    let (_, dir) = RUN.get_or_init(|| {
        let tmp = tempfile::tempdir().expect("folder");
        let dir = tmp.path().join("finished");
        train(&dir, &[]);
        (tmp, dir)
    });
    dir
}

fn fixture(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

/// Names of the subcommands, as `--help` lists them.
fn commands() -> Vec<String> {
    let help = run(&["--help"]).stdout;
    let list = help.split("Commands:\n").nth(1).expect("a list of commands").split("\n\n").next().expect("list");
    list.lines()
        .filter_map(|l| l.strip_prefix("  "))
        .filter(|l| !l.starts_with(' '))
        .filter_map(|l| l.split_whitespace().next())
        .map(String::from)
        .collect()
}

/// `COEVOLVE_WRITE_FIXTURES=1 cargo test --release --test cli` writes the file anew.
#[test]
fn the_whole_reference_is_as_recorded() {
    let mut text = String::new();
    let mut add = |args: &[&str]| {
        let done = Done::of(coevolve().args(args).env("COLUMNS", "110").output().expect("starts"));
        assert_eq!(done.code, Some(0), "{args:?}: {done:?}");
        assert!(done.stderr.is_empty(), "{args:?}: {done:?}");
        text += &format!("$ coevolve {}\n{}\n", args.join(" "), done.stdout.trim_end());
    };
    add(&["--help"]);
    let commands = commands();
    for command in ["train", "resume", "eval", "replay", "log", "show", "tasks", "audit", "verify", "check"] {
        assert!(commands.iter().any(|c| c == command), "{command} is missing in {commands:?}");
    }
    for command in &commands {
        if command != "help" {
            add(&[command, "--help"]);
        }
    }
    let path = fixture("cli.txt");
    if std::env::var_os("COEVOLVE_WRITE_FIXTURES").is_some() {
        std::fs::write(&path, &text).expect("write");
    }
    let recorded = std::fs::read_to_string(&path).expect("tests/fixtures/cli.txt");
    assert!(
        recorded == text,
        "the command line has changed; if that is meant, run with COEVOLVE_WRITE_FIXTURES=1 and look at the difference\n{text}"
    );
}

#[test]
fn wrong_usage_and_configuration_are_2() {
    let dir = text(finished());
    let nowhere = "/nonexistent/run";
    let tmp = tempfile::tempdir().expect("folder");
    let new = tmp.path().join("new");
    let new = text(&new);
    let cases: &[(&[&str], &str)] = &[
        (&["frobnicate"], "frobnicate"),
        (&["train", "--frobnicate"], "--frobnicate"),
        (&["train", "--run", new, "--preset", "nope"], "desk-smoke"),
        (&["train", "--run", new, "--set", "run.step=3"], "did you mean `run.steps`"),
        (&["train", "--run", new, "--set", "run.steps=many"], "run.steps"),
        (&["train", "--run", new, "--set", "run.steps=0"], "1..=10000000"),
        (&["train", "--run", new, "--set", "evolve.mode=on"], "feedback | random | off"),
        (&["train", "--run", new, "--set", "run.steps"], "key=value"),
        (&["train", "--run", new, "--config", "/nonexistent/c.toml"], "/nonexistent/c.toml"),
        (&["train", "--run", new, "--set", "evolve.explorer=llm"], "evolve.llm_model"),
        (&["train", "--run", new, "--set", "policy.model=/nonexistent/model"], "/nonexistent/model"),
        (&["train", "--run", new, "--preset", "desk-smoke", "--set", "env.split=nope"], "nope"),
        (&["train", "--run", new, "--preset", "desk-smoke", "--set", "eval.splits=nope"], "nope"),
        (&["resume", nowhere], nowhere),
        (&["log", nowhere], nowhere),
        (&["tasks", nowhere], nowhere),
        (&["audit", nowhere, "x"], nowhere),
        (&["replay", nowhere], nowhere),
        (&["verify", nowhere], nowhere),
        (&["show", nowhere, "1"], nowhere),
        (&["eval", nowhere, "--split", "test-normal"], nowhere),
        (&["log", text(tmp.path())], "holds no event"),
        (&["log", dir, "--kind", "nope"], "task_admitted"),
        (&["log", dir, "--from", "99999999"], "99999999"),
        (&["log", dir, "--branch", "nope"], "nope"),
        (&["tasks", dir, "--at", "step:99"], "step 99"),
        (&["tasks", dir, "--origin", "nope"], "synthesised"),
        (&["audit", dir, "syn-nope"], "syn-nope"),
        (&["show", dir, "syn-nope"], "syn-nope"),
        (&["show", dir, "0"], "`0`"),
        (&["eval", "--env", "desk", "--split", "nope", "--policy", "none"], "test-normal"),
        (&["eval", "--env", "nope", "--split", "x", "--policy", "none"], "desk | bfcl"),
        (&["eval", dir, "--env", "desk", "--split", "test-normal"], "--env"),
        (&["check", "loss", "/nonexistent/case.json"], "/nonexistent/case.json"),
    ];
    for (args, message) in cases {
        let done = run(args);
        assert_eq!(done.code, Some(2), "{args:?}: {done:?}");
        assert!(done.stderr.contains(message), "{args:?}: `{message}` is not in {done:?}");
        assert!(!done.stderr.contains("panicked"), "{args:?}: {done:?}");
    }
    assert!(!Path::new(new).join("journal").exists(), "a refused run leaves no journal");
}

/// Copies a folder.
fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).expect("folder");
    for entry in std::fs::read_dir(from).expect("folder") {
        let entry = entry.expect("entry");
        let target = to.join(entry.file_name());
        if entry.path().is_dir() {
            copy(&entry.path(), &target);
        } else {
            std::fs::copy(entry.path(), target).expect("copy");
        }
    }
}

#[test]
fn a_damaged_run_is_1_and_verify_repairs_what_has_a_second_copy() {
    let tmp = tempfile::tempdir().expect("folder");
    let dir = tmp.path().join("damaged");
    copy(finished(), &dir);
    let segments: Vec<PathBuf> = common::files(&dir.join("journal"));
    let segment = segments.iter().max_by_key(|p| p.metadata().expect("size").len()).expect("a segment");
    let mut bytes = std::fs::read(segment).expect("read");
    let at = bytes.len() / 2;
    bytes[at] ^= 0x40;
    std::fs::write(segment, &bytes).expect("write");
    let name = segment.file_name().expect("name").to_str().expect("UTF-8");

    let found = run(&["verify", text(&dir), "--json"]);
    assert_eq!(found.code, Some(1), "{found:?}");
    let findings = found.last_line()["findings"].clone();
    assert!(findings[0]["path"].as_str().expect("path").ends_with(name), "{findings}");
    assert!(findings[0]["offset"].is_u64(), "{findings}");
    run(&["replay", text(&dir)]).fails(1, "coevolve verify --repair");
    // A snapshot vouches for what it folded: reading goes on.
    assert_eq!(run(&["tasks", text(&dir)]).stdout, run(&["tasks", text(finished())]).stdout);
    std::fs::remove_dir_all(dir.join("snapshots")).expect("remove");
    for args in [vec!["tasks", text(&dir)], vec!["resume", text(&dir)]] {
        run(&args).fails(1, "coevolve verify --repair");
    }

    let repaired = run(&["verify", text(&dir), "--repair"]);
    assert_eq!(repaired.code, Some(0), "{repaired:?}");
    let replayed = run(&["replay", text(&dir), "--json"]).json();
    assert_eq!(replayed["facts_digest"], run(&["replay", text(finished()), "--json"]).json()["facts_digest"]);
}

/// Every field that the documentation promises, with a value.
fn has(value: &Value, fields: &[&str]) {
    for field in fields {
        let found = field.split('.').try_fold(value, |v, key| v.get(key));
        assert!(found.is_some_and(|v| !v.is_null()), "{field} is missing in {value}");
    }
}

const SUMMARY: &[&str] = &[
    "run",
    "steps",
    "seed",
    "held_out_before",
    "held_out_after",
    "challenge_before",
    "challenge_after",
    "signals",
    "drafts",
    "admitted",
    "rejected",
    "seconds.total",
    "seconds.sampling",
    "seconds.environment",
    "seconds.learning",
    "seconds.evolution",
    "seconds.log",
    "events",
    "facts_digest",
    "weights_hash",
];

#[test]
fn the_summary_has_every_field_and_agrees_with_the_events() {
    let tmp = tempfile::tempdir().expect("folder");
    let dir = tmp.path().join("r");
    let summary = train(&dir, &[]);
    has(&summary, SUMMARY);
    has(&run(&["resume", text(&dir), "--json"]).json(), SUMMARY);

    let all = events(&dir);
    let count = |kind: &str| of_kind(&all, kind).len() as u64;
    assert_eq!(summary["events"], json!(all.len()));
    assert_eq!(summary["drafts"], json!(count("draft_proposed")));
    assert_eq!(summary["steps"], json!(6));
    let admitted = of_kind(&all, "task_admitted");
    let synthesised = admitted.iter().filter(|t| t["origin"] == "synthesised").count() as u64;
    assert_eq!(summary["admitted"], json!(synthesised));
    assert!(synthesised > 0);
    let signals = of_kind(&all, "signal_raised");
    for kind in ["forgetting", "boundary", "rare"] {
        let n = signals.iter().filter(|s| s["kind"] == kind).count();
        assert_eq!(summary["signals"].get(kind).cloned().unwrap_or(json!(0)), json!(n), "{kind}");
    }
    let rejected: u64 = summary["rejected"].as_object().expect("reasons").values().filter_map(Value::as_u64).sum();
    assert_eq!(rejected, count("draft_rejected"));
    assert_eq!(synthesised + rejected, count("draft_proposed"));
    // Held-out success from the events, by hand.
    let evaluations = of_kind(&all, "evaluation_finished");
    let success = |split: &str, last: bool| {
        let mut of_split = evaluations.iter().filter(|e| e["split"] == split);
        let one = if last { of_split.next_back() } else { of_split.next() }.expect("an evaluation");
        let results = one["results"].as_array().expect("results");
        let solved = results.iter().filter(|r| r[1]["scored"].as_f64().expect("score") >= 0.5).count();
        solved as f64 / results.len() as f64
    };
    assert_eq!(summary["held_out_before"], json!(success("test-normal", false)));
    assert_eq!(summary["held_out_after"], json!(success("test-normal", true)));
    assert_eq!(summary["challenge_after"], json!(success("test-challenge", true)));
    let published = of_kind(&all, "policy_published");
    assert_eq!(summary["weights_hash"], published.last().expect("a version")["weights_hash"]);
    assert_eq!(of_kind(&all, "run_finished")[0]["weights_hash"], summary["weights_hash"]);
}

#[test]
fn tasks_lists_the_training_set_at_any_event() {
    let dir = text(finished());
    let listed = run(&["tasks", dir, "--json"]).json();
    let tasks = listed["tasks"].as_array().expect("tasks");
    let admitted = of_kind(&events(finished()), "task_admitted");
    let mut ids: Vec<&str> = admitted.iter().map(|t| t["task"]["id"].as_str().expect("id")).collect();
    ids.sort_unstable();
    assert_eq!(tasks.iter().map(|t| t["id"].as_str().expect("id")).collect::<Vec<_>>(), ids);
    for task in tasks {
        has(task, &["id", "origin", "admitted_at", "weight", "attempts", "forgotten"]);
        assert!(task.get("success_rate").is_some());
        assert_eq!(task["success_rate"].is_null(), task["attempts"] == 0, "{task}");
    }
    // Before training there were only the seeds.
    let early = run(&["tasks", dir, "--json", "--at", "step:0"]).json();
    assert_eq!(early["tasks"].as_array().expect("tasks").len(), 24);
    assert!(early["tasks"].as_array().expect("tasks").iter().all(|t| t["origin"] == "seed" && t["attempts"] == 0));
    let ids = run(&["tasks", dir, "--ids", "--origin", "synthesised"]);
    assert_eq!(ids.stdout.lines().count(), tasks.iter().filter(|t| t["origin"] == "synthesised").count());
}

#[test]
fn every_synthesised_task_has_its_whole_ancestry() {
    let dir = text(finished());
    let all = events(finished());
    let at = |seq: &Value| all[seq.as_u64().expect("seq") as usize - 1]["event"].clone();
    let ids = run(&["tasks", dir, "--ids", "--origin", "synthesised"]);
    assert!(ids.stdout.lines().count() > 0);
    for id in ids.stdout.lines() {
        let audit = run(&["audit", dir, id, "--json"]).json();
        let fields = [
            "task",
            "signal",
            "rollouts",
            "reflection",
            "exploration",
            "draft",
            "validation",
            "admission",
            "gradient_steps",
        ];
        has(&audit, &fields);
        assert_eq!(audit["task"]["id"], id);
        assert!(!audit["rollouts"].as_array().expect("rollouts").is_empty());
        assert!(!audit["exploration"].as_array().expect("exploration").is_empty());
        // The chain is linked, not only complete: each part is the event it says it is.
        assert_eq!(at(&audit["admission"]["seq"])["task"]["id"], id);
        assert_eq!(at(&audit["admission"]["seq"])["draft"], audit["draft"]["draft"]);
        assert_eq!(at(&audit["draft"]["seq"])["context"], audit["reflection"]["context"]);
        assert_eq!(at(&audit["validation"]["seq"])["draft"], audit["draft"]["draft"]);
        assert_eq!(audit["validation"]["accepted"], true);
        assert_eq!(audit["validation"]["checks"].as_array().expect("checks").len(), 5);
        assert_eq!(at(&audit["signal"]["seq"])["key"], audit["rollouts"][0]["key"]);
        assert_eq!(at(&audit["signal"]["seq"])["kind"], audit["signal"]["kind"]);
        let weak = audit["signal"]["task"].as_str().expect("task");
        for rollout in audit["rollouts"].as_array().expect("rollouts") {
            assert_eq!(rollout["key"]["task"], weak);
        }
        let order = ["signal", "reflection", "draft", "validation", "admission"];
        let seqs: Vec<u64> = order.iter().map(|f| audit[f]["seq"].as_u64().expect("seq")).collect();
        assert!(seqs.is_sorted(), "{id}: {seqs:?}");
        for step in audit["gradient_steps"].as_array().expect("steps") {
            let event = at(&step["seq"]);
            let trained = event["rollouts"].as_array().expect("rollouts").iter().filter(|r| r[0]["task"] == id).count();
            assert!(trained > 0 && step["rollouts"] == json!(trained), "{step}");
        }
        let page = run(&["audit", dir, id]);
        assert_eq!(page.code, Some(0), "{page:?}");
        assert!(page.stdout.contains(weak) && page.stdout.contains(id), "{page:?}");
    }
    let trained = ids.stdout.lines().filter(|id| {
        let audit = run(&["audit", dir, id, "--json"]).json();
        !audit["gradient_steps"].as_array().expect("steps").is_empty()
    });
    assert!(trained.count() > 0, "no synthesised task was ever trained on");
    let seed = run(&["tasks", dir, "--ids", "--origin", "seed"]).stdout.lines().next().expect("a seed").to_string();
    assert!(run(&["audit", dir, &seed, "--json"]).json()["signal"].is_null());
}

#[test]
fn replay_verify_and_eval_answer_with_their_fields() {
    let dir = text(finished());
    let replay = run(&["replay", dir, "--json"]).json();
    has(&replay, &["events", "digests_compared", "facts_digest", "projection_digest", "ok", "mismatches"]);
    assert_eq!((replay["ok"].clone(), replay["digests_compared"].clone()), (json!(true), json!(7)));
    let verify = run(&["verify", dir, "--json"]).json();
    has(&verify, &["events", "records", "segments", "findings", "facts_digest", "sled"]);
    assert_eq!(verify["facts_digest"], replay["facts_digest"]);
    assert_eq!(verify["events"], replay["events"]);
    // A prefix has another digest, and is consistent with what was recorded up to there.
    let early = run(&["replay", dir, "--json", "--to", "step:2"]).json();
    assert_eq!((early["ok"].clone(), early["digests_compared"].clone()), (json!(true), json!(3)));
    assert_ne!(early["facts_digest"], replay["facts_digest"]);

    let eval = run(&["eval", dir, "--split", "test-normal", "--tasks", "8", "--json"]).json();
    has(&eval, &["passed", "total", "score", "scored", "split", "families", "families_passed"]);
    assert_eq!(eval["total"], 8);
    // The same policy on the same tasks at temperature 0 as the run's own last evaluation.
    let resumed = run(&["resume", dir, "--json"]).json();
    assert_eq!(eval["passed"].as_f64().expect("passed") / 8.0, resumed["held_out_after"].as_f64().expect("share"));

    for (policy, score) in [("reference", 1.0), ("none", 0.0), ("echo", 0.0), ("random", 0.0)] {
        let args =
            ["eval", "--env", "desk", "--split", "test-challenge", "--policy", policy, "--tasks", "40", "--json"];
        let eval = run(&args).json();
        assert_eq!(eval["score"], json!(score), "{policy}");
        assert_eq!(eval["total"], 40);
    }
}

#[test]
fn log_and_show_filter_and_find() {
    let dir = text(finished());
    let all = events(finished());
    let some = run(&["log", dir, "--json", "--kind", "task_admitted", "--kind", "run_finished"]);
    let wanted = of_kind(&all, "task_admitted").len() + 1;
    assert_eq!(some.stdout.lines().count(), wanted);
    let range = run(&["log", dir, "--from", "3", "--to", "7"]);
    assert_eq!(range.stdout.lines().count(), 5);
    for (i, event) in all.iter().enumerate() {
        assert_eq!(event["seq"], json!(i + 1));
    }
    assert_eq!(run(&["show", dir, "3", "--json"]).json()["event"], all[2]["event"]);
    let rollout = of_kind(&all, "rollout_finished").remove(0);
    let key = &rollout["key"];
    let id = format!("{}/{}/{}/{}", key["step"], key["task"].as_str().expect("task"), key["draw"], key["k"]);
    assert_eq!(run(&["show", dir, &id, "--json"]).json()["event"], rollout);
    assert!(run(&["show", dir, &id]).stdout.contains("sampled"));
    let draft = of_kind(&all, "draft_proposed").remove(0);
    assert_eq!(run(&["show", dir, draft["draft"].as_str().expect("id"), "--json"]).json()["event"], draft);
}

#[test]
fn a_closed_pipe_is_no_failure() {
    let dir = text(finished());
    for args in [vec!["log", dir], vec!["log", dir, "--json"], vec!["settings"], vec!["completions", "bash"]] {
        let mut child = coevolve().args(&args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("starts");
        let mut out = child.stdout.take().expect("stdout");
        let mut first = [0u8; 1];
        out.read_exact(&mut first).expect("a byte");
        drop(out);
        let done = Done::of(child.wait_with_output().expect("ends"));
        assert_eq!((done.code, done.stderr.as_str()), (Some(0), ""), "{args:?}");
    }
}

#[test]
fn follow_reads_a_running_run_to_its_end() {
    let tmp = tempfile::tempdir().expect("folder");
    let dir = tmp.path().join("r");
    let mut training = coevolve()
        .args(common::train_args(&dir, &[]))
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("starts");
    while run(&["log", text(&dir)]).code != Some(0) {
        assert!(training.try_wait().expect("wait").is_none(), "it ended before it could be followed");
    }
    let mut follower =
        coevolve().args(["log", text(&dir), "--follow", "--json"]).stdout(Stdio::piped()).spawn().expect("starts");
    let lines = BufReader::new(follower.stdout.take().expect("stdout")).lines();
    let seen: Vec<Value> = lines.map(|l| serde_json::from_str(&l.expect("a line")).expect("an event")).collect();
    assert!(follower.wait().expect("ends").success());
    let summary = Done::of(training.wait_with_output().expect("ends")).json();
    assert_eq!(summary["events"], json!(seen.len()));
    assert_eq!(seen, events(&dir));
    assert_eq!(seen.last().expect("events")["event"]["event"], "run_finished");
}

#[test]
fn settings_print_as_a_file_that_is_read_back() {
    let tmp = tempfile::tempdir().expect("folder");
    let file = tmp.path().join("settings.toml");
    std::fs::write(&file, run(&["settings", "--preset", "desk-smoke"]).stdout).expect("write");
    let short = ["--set", "run.steps=1", "--set", "eval.tasks=4", "--json", "--run"];
    let by_file = tmp.path().join("a");
    let mut args = vec!["train", "--config", text(&file)];
    args.extend(short);
    args.push(text(&by_file));
    let a = run(&args).json();
    let by_name = tmp.path().join("b");
    let mut args = vec!["train", "--preset", "desk-smoke"];
    args.extend(short);
    args.push(text(&by_name));
    assert_eq!(common::identity(&a), common::identity(&run(&args).json()));
    let presets = run(&["settings", "--presets"]).stdout;
    assert!(presets.lines().any(|l| l == "desk-smoke") && presets.lines().any(|l| l == "bfcl-smollm2"), "{presets}");
}

/// `check WHAT -` on a document.
fn check(what: &str, document: &str) -> Done {
    let mut child = coevolve()
        .args(["check", what, "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("starts");
    child.stdin.take().expect("stdin").write_all(document.as_bytes()).expect("write");
    Done::of(child.wait_with_output().expect("ends"))
}

#[test]
fn check_loss_gives_the_golden_numbers() {
    // Two sequences of 2 and 8 tokens, A = +1 and -1, ratio 1, no KL: by hand -1*2/10 + 1*8/10 = 0.6 (dapo),
    // mean of the two sequence means = 0 (grpo), (8 - 2) / (2 * 10) = 0.3 (dr_grpo with 10 positions).
    let document = |loss: &str| {
        let rollout = |n: usize, advantage: f64| json!({"group": 0, "advantage": advantage, "logp": vec![-1.0; n], "logp_old": vec![-1.0; n], "mask": vec![1; n]});
        json!({"options": {"loss": loss, "beta": 0.0, "max_completion_length": 10}, "rollouts": [rollout(2, 1.0), rollout(8, -1.0)]})
    };
    for (loss, wanted) in [("dapo", 0.6), ("grpo", 0.0), ("dr_grpo", 0.3)] {
        let answer = check("loss", &document(loss).to_string()).json();
        assert!((answer["loss"].as_f64().expect("loss") - wanted).abs() < 1e-9, "{loss}: {answer}");
        has(&answer, &["advantages", "policy_loss", "kl", "dloss_dlogp", "clip_fraction", "trained_tokens"]);
        assert_eq!(answer["trained_tokens"], 10);
    }
    // An array gives one answer a case, in order.
    let both = check("loss", &json!([document("dapo"), document("grpo")]).to_string());
    assert_eq!((both.code, both.stdout.lines().count()), (Some(0), 2));
    let bad = json!([document("dapo"), {"rollouts": [{"reward": 1.0, "logp": [-1.0], "mask": [1, 1]}]}]);
    check("loss", &bad.to_string()).fails(2, "case 1");
    check("loss", r#"{"options": {"loss": "nope"}, "rollouts": []}"#).fails(2, "nope");
    check("loss", "{\n \"rollouts\": [,]}").fails(2, "line 2");
}

#[test]
fn check_signals_raises_what_the_definitions_say() {
    // Step 1: solved once (window empty: nothing). Step 2: failed with 1.0 in the window: forgetting.
    // Two members on both sides of 0.5: both are boundary.
    let rollout =
        |step: u32, k: u32, score: f64| json!({"step": step, "task": "t", "k": k, "score": score, "calls": ["cd"]});
    let rollouts = json!([rollout(2, 1, 1.0), rollout(1, 0, 1.0), rollout(2, 0, 0.0), rollout(1, 1, 1.0)]);
    let answer =
        check("signals", &json!({"config": {"window": 16, "n_min": 200}, "rollouts": rollouts}).to_string()).json();
    let raised: Vec<(u64, String)> = answer["signals"]
        .as_array()
        .expect("signals")
        .iter()
        .map(|s| (s["index"].as_u64().expect("index"), s["kind"].as_str().expect("kind").to_string()))
        .collect();
    let mut sorted = raised.clone();
    sorted.sort();
    assert_eq!(sorted, [(0, "boundary".into()), (2, "boundary".into()), (2, "forgetting".to_string())]);
    assert_eq!(answer["forgetting"]["t"]["learnt_at"], 1);
    check("signals", r#"{"rollouts": [{"step": 1, "task": "t", "k": 0, "score": 2.0}]}"#).fails(2, "case 0");
    check("signals", r#"{"rollouts": 3}"#).fails(2, "rollouts");
}

#[test]
fn check_tool_calls_and_template_read_cases() {
    let text = "I look.\n<tool_call>\n{\"name\": \"cd\", \"arguments\": {\"folder\": \"x\"}}\n</tool_call>";
    let tools = json!([{"type": "function", "function": {"name": "cd", "description": "d", "parameters": {"type": "object", "properties": {"folder": {"type": "string"}}, "required": ["folder"]}}}]);
    let case = json!({"format": "hermes", "text": text, "tools": tools});
    let answer = check("tool-calls", &case.to_string()).json();
    assert_eq!(answer["calls"], json!([{"name": "cd", "arguments": {"folder": "x"}}]));
    assert_eq!(answer["errors"], json!([]));
    assert!(answer["text"].as_str().expect("text").contains("I look."));
    check("tool-calls", r#"{"format": "nope", "text": "x"}"#).fails(2, "case 0");
    check("tool-calls", r#"[{"format": "hermes", "text": "x"}, {"format": "hermes"}]"#).fails(2, "case 1");

    let template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}";
    let case =
        json!({"template": template, "messages": [{"role": "user", "content": "hi"}], "add_generation_prompt": true});
    let answer = check("template", &case.to_string()).json();
    assert_eq!(answer["text"], "<user>hi<assistant>");
    check("template", &json!({"template": "{% for %}", "messages": []}).to_string()).fails(2, "case 0");
    check("template", &json!({"messages": []}).to_string()).fails(2, "template");
}
