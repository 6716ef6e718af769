//! Same seed, same facts and weights: whatever the threads, workers, batches of the engine and of the log.

mod common;

use common::{events, identity, of_kind, train};
use std::collections::BTreeSet;

const RUN: &[&str] = &["run.steps=4", "evolve.every=1"];

#[test]
fn execution_settings_change_no_fact() {
    let tmp = tempfile::tempdir().expect("folder");
    let go = |name: &str, more: &[&str]| {
        let settings: Vec<&str> = RUN.iter().chain(more).copied().collect();
        train(&tmp.path().join(name), &settings)
    };
    let plain = go("plain", &["run.threads=1", "env.workers=0"]);
    let wanted = identity(&plain);
    let variants: &[&[&str]] = &[
        &["run.threads=1", "env.workers=0"],
        &["run.threads=2", "env.workers=1"],
        &["run.threads=3", "env.workers=3"],
        &["run.threads=3", "env.workers=0", "sampling.max_concurrent=1"],
        &["run.threads=2", "env.workers=3", "sampling.max_concurrent=3"],
        &["run.threads=1", "env.workers=1", "sampling.max_concurrent=1000"],
        &["log.group_commit_events=1", "log.segment_mib=1", "run.checkpoint_every=1"],
        &["log.group_commit_us=50000", "run.checkpoint_every=100"],
    ];
    for (i, variant) in variants.iter().enumerate() {
        let summary = go(&i.to_string(), variant);
        assert_eq!(identity(&summary), wanted, "{variant:?}");
        assert_eq!(summary["anomalies"], 0, "{variant:?}");
    }

    // The digest is over what it should be over: the runs differ in order and time, not in facts.
    let facts = |name: &str| -> BTreeSet<String> {
        let all = events(&tmp.path().join(name));
        let kinds = ["rollout_finished", "signal_raised", "gradient_step_taken", "draft_validated", "task_admitted"];
        kinds.iter().flat_map(|k| of_kind(&all, k)).map(|e| e.to_string()).collect()
    };
    let (one, three) = (facts("plain"), facts("2"));
    assert!(one.len() > 4 * 8 * 4, "{}", one.len());
    assert_eq!(one, three);
}

#[test]
fn another_seed_is_another_run() {
    let tmp = tempfile::tempdir().expect("folder");
    let mut seen = BTreeSet::new();
    for seed in ["run.seed=7", "run.seed=8", "run.seed=9"] {
        let settings: Vec<&str> = RUN.iter().copied().chain([seed]).collect();
        let summary = train(&tmp.path().join(seed), &settings);
        assert!(seen.insert(identity(&summary).0), "{seed}");
        assert_eq!(summary["seed"].to_string(), seed.trim_start_matches("run.seed="));
    }
}

/// The same with a real model, its decoder and its learner.
#[test]
fn the_embedded_policy_learns_the_same_with_any_number_of_threads() {
    let tmp = tempfile::tempdir().expect("folder");
    let go = |name: &str, more: &[&str]| {
        let small = ["policy.model=embedded", "run.steps=2", "evolve.every=1", "batch.tasks=6", "eval.tasks=4"];
        let settings: Vec<&str> = small.iter().chain(more).copied().collect();
        train(&tmp.path().join(name), &settings)
    };
    let plain = go("one", &["run.threads=1", "env.workers=0"]);
    let other = go("two", &["run.threads=2", "env.workers=2", "sampling.max_concurrent=5"]);
    assert_eq!(identity(&other), identity(&plain));
    let steps = of_kind(&events(&tmp.path().join("one")), "gradient_step_taken");
    assert!(!steps.is_empty(), "nothing was learnt: this proves little");
    let another = go("seed", &["run.threads=1", "run.seed=8"]);
    assert_ne!(identity(&another).0, identity(&plain).0);
}
