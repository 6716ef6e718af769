//! The switches of the method do what they say: modes, single signals, validation, the first task set, explorers.

mod common;

use common::{events, of_kind, train};
use serde_json::Value;
use std::collections::BTreeSet;

/// Trains with settings; summary and events.
fn go(settings: &[&str]) -> (Value, Vec<Value>) {
    let tmp = tempfile::tempdir().expect("folder");
    let dir = tmp.path().join("r");
    let summary = train(&dir, settings);
    assert_eq!((summary["finished"].clone(), summary["anomalies"].clone()), (true.into(), 0.into()));
    (summary, events(&dir))
}

fn origins(events: &[Value]) -> BTreeSet<String> {
    of_kind(events, "task_admitted").iter().map(|t| t["origin"].as_str().expect("origin").to_string()).collect()
}

fn kinds(events: &[Value]) -> BTreeSet<String> {
    of_kind(events, "signal_raised").iter().map(|s| s["kind"].as_str().expect("kind").to_string()).collect()
}

fn contexts(events: &[Value]) -> Vec<Value> {
    of_kind(events, "evolution_started")
        .iter()
        .flat_map(|e| e["contexts"].as_array().expect("contexts").clone())
        .collect()
}

fn set(words: &[&str]) -> BTreeSet<String> {
    words.iter().map(|w| w.to_string()).collect()
}

#[test]
fn feedback_explores_where_the_signals_point() {
    let (_, all) = go(&[]);
    assert_eq!(origins(&all), set(&["seed", "synthesised"]));
    assert_eq!(kinds(&all), set(&["boundary", "forgetting", "rare"]), "the preset shows every signal");
    let raised: BTreeSet<(String, String)> = of_kind(&all, "signal_raised")
        .iter()
        .map(|s| (s["key"]["task"].as_str().expect("task").into(), s["kind"].as_str().expect("kind").into()))
        .collect();
    for context in contexts(&all) {
        let at = (context["task"].as_str().expect("a task").into(), context["kind"].as_str().expect("a kind").into());
        assert!(raised.contains(&at), "{context}");
    }
    // The round at the last step is skipped, the others are every `evolve.every` steps.
    let rounds: Vec<u64> =
        of_kind(&all, "evolution_started").iter().map(|e| e["step"].as_u64().expect("step")).collect();
    assert_eq!(rounds, [2, 4]);
    for round in of_kind(&all, "evolution_started") {
        let n = round["contexts"].as_array().expect("contexts").len();
        assert!(n > 0 && n <= 6, "evolve.max_contexts = 6: {n}");
    }
}

#[test]
fn off_never_adds_a_task() {
    let (summary, all) = go(&["evolve.mode=off"]);
    assert!(of_kind(&all, "evolution_started").is_empty() && of_kind(&all, "draft_proposed").is_empty());
    assert_eq!(origins(&all), set(&["seed"]));
    assert_eq!(of_kind(&all, "task_admitted").len(), 24);
    assert_eq!(summary["admitted"], 0);
    // Signals are still raised: they are what the run reports, not only what it acts on.
    assert!(kinds(&all).contains("boundary"));
}

#[test]
fn random_explores_without_a_signal_at_the_same_budget() {
    let (_, guided) = go(&[]);
    let (summary, all) = go(&["evolve.mode=random"]);
    assert_eq!(origins(&all), set(&["explored", "seed"]));
    let mine = contexts(&all);
    assert!(mine.iter().all(|c| c["task"].is_null() && c["kind"].is_null() && c["rollouts"] == serde_json::json!([])));
    assert!(of_kind(&all, "evolution_started").iter().all(|e| e["mode"] == "random"));
    // Up to the first round both runs are the same, so its budget is the same.
    let first =
        |events: &[Value]| of_kind(events, "evolution_started")[0]["contexts"].as_array().expect("contexts").len();
    assert_eq!(first(&all), first(&guided));
    assert!(summary["admitted"].as_u64().expect("admitted") > 0);
}

#[test]
fn every_signal_can_be_switched_off_alone() {
    for (kind, others) in [
        ("forgetting", ["boundary", "rare"]),
        ("boundary", ["forgetting", "rare"]),
        ("rare", ["boundary", "forgetting"]),
    ] {
        let setting = format!("signals.{kind}=false");
        let (summary, all) = go(&[&setting]);
        assert_eq!(kinds(&all), set(&others), "{kind}");
        assert!(contexts(&all).iter().all(|c| c["kind"] != kind));
        assert!(summary["signals"].get(kind).is_none(), "{summary}");
    }
    let (_, all) = go(&["signals.forgetting=false", "signals.boundary=false", "signals.rare=false"]);
    assert!(kinds(&all).is_empty() && contexts(&all).is_empty());
    assert_eq!(origins(&all), set(&["seed"]));
}

#[test]
fn without_validation_every_draft_is_admitted() {
    // With this threshold hardly any draft counts as new.
    let (_, with) = go(&["evolve.similarity=0.2"]);
    assert!(!of_kind(&with, "draft_rejected").is_empty(), "validation rejects nothing here: this proves little");
    let (summary, all) = go(&["evolve.similarity=0.2", "evolve.validate=false"]);
    // Only the very same task cannot join twice.
    let again = of_kind(&all, "draft_rejected");
    assert!(again.iter().all(|r| r["reason"] == "duplicate"), "{again:?}");
    let drafts = summary["drafts"].as_u64().expect("drafts");
    assert_eq!(summary["admitted"].as_u64().expect("admitted") + again.len() as u64, drafts);
    assert_eq!(summary["validated"].as_u64(), Some(drafts));
    assert!(drafts > again.len() as u64);
    for verdict in of_kind(&all, "draft_validated") {
        assert_eq!(verdict["accepted"], true);
        for check in verdict["checks"].as_array().expect("checks") {
            assert!(check["detail"].as_str().expect("detail").contains("off"), "a check that is off says so: {check}");
        }
    }
}

#[test]
fn the_first_task_set_may_be_explored() {
    let (summary, all) = go(&["evolve.initial=explore", "evolve.mode=off", "env.seed_tasks=10"]);
    assert_eq!(origins(&all), set(&["explored"]));
    let admitted = of_kind(&all, "task_admitted");
    assert_eq!(admitted.len(), 10);
    assert_eq!(summary["tasks"]["explored"], 10);
    assert!(admitted.iter().all(|t| t["step"] == 0 && t["draft"].is_string()));
    let rounds = of_kind(&all, "evolution_started");
    assert_eq!((rounds.len(), rounds[0]["round"].clone()), (1, 0.into()));
    // Every draft of the round is accounted for.
    let drafts = of_kind(&all, "draft_proposed").len();
    assert_eq!(drafts, admitted.len() + of_kind(&all, "draft_rejected").len());
}

#[test]
fn the_policy_itself_may_explore() {
    let (_, all) = go(&["evolve.explorer=policy"]);
    let reflections = of_kind(&all, "reflection_written");
    assert!(!reflections.is_empty() && reflections.iter().all(|r| r["author"] == "policy"));
    // The scripted policy knows the old world's values only, so its plans are tried but seldom told as tasks.
    assert!(!of_kind(&all, "exploration_step_taken").is_empty());
    let drafts = of_kind(&all, "draft_proposed");
    assert!(drafts.iter().all(|d| d["author"] == "policy"));
    assert!(of_kind(&all, "failure_noted").is_empty());
    assert_eq!(of_kind(&all, "draft_validated").len(), drafts.len());
}

#[test]
fn at_threshold_0_no_two_tasks_use_the_same_tools_in_the_same_order() {
    // Tasks with other tools are never near-duplicates; at 0 all with the same tools are.
    let tools = |task: &Value| -> Vec<String> {
        let turns = task["task"]["turns"].as_array().expect("turns");
        let calls = turns.iter().flat_map(|t| t["solution"].as_array().expect("solution"));
        calls.map(|c| c["name"].as_str().expect("name").to_string()).collect()
    };
    let repeats = |settings: &[&str]| -> (usize, Value) {
        let (summary, all) = go(settings);
        let mut seen = BTreeSet::new();
        let mut repeated = 0;
        for task in of_kind(&all, "task_admitted") {
            if !seen.insert(tools(&task)) && task["origin"] == "synthesised" {
                repeated += 1;
            }
        }
        (repeated, summary)
    };
    assert!(repeats(&[]).0 > 0, "no two tasks are alike here: this proves little");
    let (repeated, summary) = repeats(&["evolve.similarity=0"]);
    assert_eq!(repeated, 0, "{summary}");
    assert!(summary["rejected"]["novel"].as_u64().is_some_and(|n| n > 0), "{summary}");
}
