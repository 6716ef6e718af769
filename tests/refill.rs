//! Dynamic sampling (`batch.refill`) in whole runs: what is drawn anew, what the update sees, and that a run which is
//! stopped in the middle of a further round goes on as if nothing had been.

mod common;

use common::{coevolve, differences, events, identity, kill_when, of_kind, run, text, train, train_args};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Stdio;

const SCRIPTED: &[&str] = &["run.steps=4", "evolve.every=2", "batch.tasks=6", "batch.refill=2"];
const EMBEDDED: &[&str] = &[
    "policy.model=embedded",
    "run.steps=2",
    "evolve.mode=off",
    "batch.tasks=4",
    "batch.refill=2",
    "eval.tasks=2",
    "learner.learning_rate=1e-4",
    // Nothing but the events to go on from.
    "run.checkpoint_every=100",
];

type Group = (String, u64);

fn group(key: &Value) -> Group {
    (key["task"].as_str().expect("task").into(), key["draw"].as_u64().expect("draw"))
}

fn groups(event: &Value) -> Vec<Group> {
    let all = event["groups"].as_array().expect("groups").iter();
    all.map(|g| (g[0].as_str().expect("task").into(), g[1].as_u64().expect("draw"))).collect()
}

/// What the events of a run say of one step, counted from nothing but them.
#[derive(Debug, Default)]
struct Step {
    /// Groups of the plan, then of each further round.
    rounds: Vec<Vec<Group>>,
    /// How many of the groups had at least two different scores when each round was planned.
    mixed_before: Vec<usize>,
    scores: BTreeMap<Group, Vec<f64>>,
    rollouts: usize,
    tokens: BTreeMap<Group, u64>,
    trained: BTreeSet<Group>,
    trained_tokens: u64,
    signals: usize,
    skipped: Vec<String>,
}

impl Step {
    fn mixed(&self) -> BTreeSet<Group> {
        let differ = |s: &&Vec<f64>| s.iter().any(|a| s.iter().any(|b| a - b > 1e-9));
        self.scores.iter().filter(|(_, s)| differ(s)).map(|(g, _)| g.clone()).collect()
    }

    fn planned(&self) -> usize {
        self.rounds.iter().map(Vec::len).sum()
    }
}

fn steps(events: &[Value]) -> BTreeMap<u64, Step> {
    let mut steps: BTreeMap<u64, Step> = BTreeMap::new();
    for e in events.iter().map(|e| &e["event"]) {
        let at = |field: &Value| field.as_u64().expect("step");
        match e["event"].as_str().expect("kind") {
            "batch_planned" => steps.entry(at(&e["step"])).or_default().rounds.push(groups(e)),
            "batch_refilled" => {
                let step = steps.get_mut(&at(&e["step"])).expect("a plan");
                assert_eq!(e["round"], step.rounds.len(), "{e}");
                // Everything before it is sampled.
                assert_eq!(step.scores.len(), step.planned(), "{e}");
                step.mixed_before.push(step.mixed().len());
                step.rounds.push(groups(e));
            }
            "rollout_finished" => {
                let step = steps.get_mut(&at(&e["key"]["step"])).expect("a plan");
                assert!(step.rounds.last().expect("a round").contains(&group(&e["key"])), "{}", e["key"]);
                step.rollouts += 1;
                let of_group = step.scores.entry(group(&e["key"])).or_default();
                of_group.extend(e["reward"]["scored"].as_f64());
                let sampled = e["sampled"].as_array().expect("runs").iter();
                let tokens: u64 = sampled.map(|run| run[1].as_u64().expect("a length")).sum();
                *step.tokens.entry(group(&e["key"])).or_default() += tokens;
            }
            "signal_raised" => steps.get_mut(&at(&e["key"]["step"])).expect("a plan").signals += 1,
            "gradient_step_taken" => {
                let step = steps.get_mut(&at(&e["step"])).expect("a plan");
                step.trained_tokens += e["trained_tokens"].as_u64().expect("tokens");
                step.trained.extend(e["rollouts"].as_array().expect("rollouts").iter().map(|r| group(&r[0])));
            }
            "step_skipped" => {
                let reason = e["reason"].as_str().expect("reason").to_string();
                steps.get_mut(&at(&e["step"])).expect("a plan").skipped.push(reason);
            }
            _ => {}
        }
    }
    steps
}

/// Whether every step is what the setting promises; the steps.
fn checked(dir: &Path, tasks: usize, group_size: usize, rounds: usize) -> BTreeMap<u64, Step> {
    let steps = steps(&events(dir));
    for (number, step) in &steps {
        let context = format!("step {number}: {step:?}");
        assert_eq!(step.rounds[0].len(), tasks, "{context}");
        for (round, before) in step.rounds[1..].iter().zip(&step.mixed_before) {
            assert_eq!(round.len(), tasks - before, "as many as were lacking; {context}");
        }
        let mixed = step.mixed();
        assert!(step.rounds.len() - 1 == rounds || mixed.len() == tasks, "rounds were left; {context}");
        assert!(step.rounds.len() - 1 <= rounds && mixed.len() <= tasks, "{context}");
        let distinct: BTreeSet<&Group> = step.rounds.iter().flatten().collect();
        assert_eq!(distinct.len(), step.planned(), "a group was planned twice; {context}");
        assert_eq!(step.rollouts, step.planned() * group_size, "{context}");
        if step.rounds.len() > 1 {
            assert_eq!(step.trained, mixed, "{context}");
            // What the loss is divided by.
            let tokens: u64 = mixed.iter().map(|g| step.tokens[g]).sum();
            assert_eq!(step.trained_tokens, tokens, "{context}");
        }
        assert_eq!(mixed.is_empty(), !step.skipped.is_empty(), "{context}");
    }
    steps
}

fn is_sound(dir: &Path) {
    let report = run(&["replay", text(dir), "--json"]).json();
    assert_eq!((&report["ok"], &report["anomalies"]), (&true.into(), &0.into()), "{report}");
    let verified = run(&["verify", text(dir), "--json"]).json();
    assert_eq!(verified["findings"], serde_json::json!([]), "{verified}");
    assert_eq!(verified["facts_digest"], report["facts_digest"]);
}

#[test]
fn groups_that_teach_nothing_are_replaced_and_left_out() {
    let tmp = tempfile::tempdir().expect("folder");
    let dir = tmp.path().join("r");
    let args = train_args(&dir, SCRIPTED);
    let done = run(&args.iter().map(String::as_str).collect::<Vec<_>>());
    assert_eq!(done.json()["anomalies"], 0);
    let steps = checked(&dir, 6, 4, 2);
    assert_eq!(steps.len(), 4);
    assert!(steps.values().any(|s| s.rounds.len() == 3), "no step has two further rounds: this proves little");
    let drawn_again = |s: &Step| s.rounds[1..].iter().flatten().any(|g| g.1 > 0);
    let signals: usize = steps.values().map(|s| s.signals).sum();
    assert!(signals > 0 && (steps.values().any(drawn_again) || steps.len() == 4));
    is_sound(&dir);
    // The line of every step says it.
    for (number, step) in &steps {
        let line = done.stderr.lines().find(|l| l.starts_with(&format!("step {number}/4"))).expect("a line a step");
        let left_out = step.planned() - step.mixed().len();
        let wanted = format!("left out {left_out}/{} groups ({} refills)", step.planned(), step.rounds.len() - 1);
        assert_eq!(line.contains(&wanted), step.rounds.len() > 1, "{wanted}: {line}");
    }
    // The log names the rounds.
    let log = run(&["log", text(&dir), "--kind", "batch_refilled"]).stdout;
    assert!(log.contains("round 1") && log.contains("round 2"), "{log}");
}

#[test]
fn without_refill_nothing_is_drawn_anew() {
    let tmp = tempfile::tempdir().expect("folder");
    let settings = ["run.steps=2", "evolve.every=1", "batch.tasks=4"];
    let plain = train(&tmp.path().join("plain"), &settings);
    let zero = train(&tmp.path().join("zero"), &[settings.as_slice(), &["batch.refill=0"]].concat());
    assert_eq!(identity(&plain), identity(&zero));
    let all = events(&tmp.path().join("plain"));
    assert!(of_kind(&all, "batch_refilled").is_empty());
    let recorded = of_kind(&all, "run_started")[0]["settings"].as_str().expect("settings").to_string();
    assert!(recorded.contains("\"refill\":0"), "{recorded}");
    let some = train(&tmp.path().join("some"), &[settings.as_slice(), &["batch.refill=1"]].concat());
    assert_ne!(identity(&plain).0, identity(&some).0);
}

#[test]
fn a_step_in_which_no_group_teaches_anything_is_skipped() {
    let tmp = tempfile::tempdir().expect("folder");
    let dir = tmp.path().join("r");
    let settings = ["run.steps=16", "evolve.mode=off", "batch.tasks=1", "batch.group=2", "batch.refill=1"];
    assert_eq!(train(&dir, &settings)["anomalies"], 0);
    let steps = checked(&dir, 1, 2, 1);
    let skipped: Vec<&Step> = steps.values().filter(|s| !s.skipped.is_empty()).collect();
    assert!(!skipped.is_empty() && skipped.len() < steps.len(), "this proves little");
    for step in skipped {
        assert_eq!((step.rounds.len(), step.skipped.as_slice()), (2, &["no trained tokens".to_string()][..]));
    }
    is_sound(&dir);
}

#[test]
fn a_run_stopped_at_any_event_of_a_further_round_goes_on_to_the_same_facts() {
    let tmp = tempfile::tempdir().expect("folder");
    let dir = tmp.path().join("r");
    let wanted = identity(&train(&dir, &[SCRIPTED, &["run.threads=1"]].concat()));
    let all = events(&dir);
    let kind = |e: &Value| e["event"]["event"].as_str().expect("kind").to_string();
    // The first step with two rounds: from just before its first one to its first update.
    let rounds = all.iter().enumerate().filter(|(_, e)| kind(e) == "batch_refilled");
    let second = rounds.clone().find(|(_, e)| e["event"]["round"] == 2).expect("a second round");
    let step = &second.1["event"]["step"];
    let first = rounds.clone().find(|(_, e)| e["event"]["step"] == *step).expect("a first round").0;
    let end = (first..all.len()).find(|i| kind(&all[*i]) == "policy_published").expect("an end");
    let mut moments = vec![first, first + 1, first + 2, second.0, second.0 + 1, second.0 + 3, end, end + 1];
    moments.extend((second.0..end).find(|i| kind(&all[*i]) == "signal_raised").map(|i| i + 1));
    for events_kept in moments {
        let cut = tmp.path().join(format!("cut-{events_kept}"));
        run(&["fork", text(&dir), "--at", &events_kept.to_string(), "--run", text(&cut)]);
        let summary = run(&["resume", text(&cut), "--json", "--set", "run.threads=2"]).json();
        let context = format!("cut after event {events_kept} ({})", kind(&all[events_kept - 1]));
        if identity(&summary) != wanted {
            panic!("{context}: facts that only one run has:\n{}", differences(&dir, &cut));
        }
        assert_eq!(summary["anomalies"], 0, "{context}");
        is_sound(&cut);
    }
}

#[test]
fn killed_in_a_further_round_and_resumed_equals_uninterrupted() {
    let tmp = tempfile::tempdir().expect("folder");
    let settings = [SCRIPTED, &["run.steps=30", "run.checkpoint_every=7"]].concat();
    let straight = tmp.path().join("straight");
    let wanted = identity(&train(&straight, &settings));
    for kill in [1, 4, 9] {
        let dir = tmp.path().join(format!("killed-{kill}"));
        let mut command = coevolve();
        let args = train_args(&dir, &settings);
        let child = command.args(&args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("starts");
        let seen = || run(&["log", text(&dir), "--kind", "batch_refilled"]).stdout.lines().count();
        let ended = kill_when(child, || dir.join("HEAD").exists() && seen() >= kill);
        assert!(ended.is_none(), "it ended before it could be killed");
        let summary = run(&["resume", text(&dir), "--json"]).json();
        assert_eq!(identity(&summary), wanted, "{}", differences(&straight, &dir));
        assert_eq!(summary["anomalies"], 0);
        is_sound(&dir);
    }
}

/// A real model: any number of threads; and a learner that is rebuilt from the events alone sees the same groups.
#[test]
fn the_embedded_policy_learns_the_same_from_the_groups_that_are_left() {
    let tmp = tempfile::tempdir().expect("folder");
    let go = |name: &str, more: &[&str]| train(&tmp.path().join(name), &[EMBEDDED, more].concat());
    let dir = tmp.path().join("one");
    let one = go("one", &["run.threads=1", "env.workers=0"]);
    let two = go("two", &["run.threads=2", "env.workers=2", "sampling.max_concurrent=5"]);
    assert_eq!(identity(&one), identity(&two), "{}", differences(&dir, &tmp.path().join("two")));
    let steps = checked(&dir, 4, 4, 2);
    assert!(steps.values().any(|s| s.rounds.len() > 1 && !s.trained.is_empty()), "this proves little: {steps:?}");
    is_sound(&dir);
    // In the second step: the first one's update is computed anew and compared.
    let all = events(&dir);
    let first_step = all.iter().position(|e| e["event"]["event"] == "step_finished" && e["event"]["step"] == 1);
    let after = first_step.expect("an end") + 3;
    let cut = tmp.path().join("cut");
    run(&["fork", text(&dir), "--at", &after.to_string(), "--run", text(&cut)]);
    assert_eq!(identity(&run(&["resume", text(&cut), "--json"]).json()), identity(&one));
}
