//! What must not happen whatever is done to the program: a panic, a lost run, a touched foreign folder, a circle of
//! advice.

mod common;

use common::{Done, coevolve, files, run, text, train, train_args};
use std::path::{Path, PathBuf};
use std::process::Stdio;

const SHORT: &[&str] = &["run.steps=2", "evolve.every=1", "batch.tasks=4"];

fn finished(tmp: &Path) -> PathBuf {
    let dir = tmp.join("run");
    train(&dir, SHORT);
    dir
}

#[test]
fn nobody_needs_to_listen_to_progress() {
    let tmp = tempfile::tempdir().expect("folder");
    let full = || Stdio::from(std::fs::File::options().write(true).open("/dev/full").expect("/dev/full"));
    let dir = tmp.path().join("full");
    let done = Done::of(coevolve().args(train_args(&dir, SHORT)).stderr(full()).output().expect("starts"));
    assert_eq!(done.json()["finished"], true);
    // A pipe whose reader is gone.
    let dir = tmp.path().join("closed");
    let mut command = coevolve();
    command.args(train_args(&dir, SHORT)).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("starts");
    drop(child.stderr.take());
    assert_eq!(Done::of(child.wait_with_output().expect("output")).json()["finished"], true);
    // An error that cannot be told is still the right exit code.
    let wrong = coevolve().args(["train", "--preset", "nope"]).stderr(full()).output().expect("starts");
    assert_eq!(wrong.status.code(), Some(2));
}

#[test]
fn settings_out_of_range_are_refused_by_name_before_anything_is_made() {
    let tmp = tempfile::tempdir().expect("folder");
    let dir = tmp.path().join("run");
    for (setting, message) in [
        ("signals.window=0", "1..=65536"),
        ("signals.pattern_length=0", "1..=64"),
        ("signals.theta=200", "0..=100"),
        ("env.workers=99999", "0..=512"),
        ("env.seed_tasks=1000000000", "1..=100000"),
        ("log.group_commit_us=60000000", "0..=1000000"),
        ("batch.group=1", "2..=4096"),
        ("batch.refill=65", "0..=64"),
        ("batch.temperature=0", "batch.temperature"),
        ("batch.top_p=1e-300", "batch.top_p"),
        ("learner.learning_rate=-1", "learner.learning_rate"),
        ("learner.beta1=1", "learner.beta1"),
        ("learner.beta2=2", "learner.beta2"),
        ("learner.epsilon_low=-5", "learner.epsilon_low"),
        ("learner.dual_clip=-3", "learner.dual_clip"),
        ("learner.max_grad_norm=-1", "learner.max_grad_norm"),
        ("learner.correction_min=3", "learner.correction_min"),
        ("learner.precision=fp8", "learner.precision"),
        ("evolve.similarity=2", "evolve.similarity"),
        ("evolve.llm_reasks=17", "0..=16"),
        ("evolve.llm_budget_tokens=2000000000000000", "0..=1125899906842624"),
        ("evolve.llm_price_prompt=-1", "evolve.llm_price_prompt"),
        ("evolve.llm_max_tokens=0", "1..=1048576"),
        ("eval.splits=test-normal,test-normal", "twice"),
    ] {
        run(&train_args(&dir, &[setting]).iter().map(String::as_str).collect::<Vec<_>>()).fails(2, message);
        assert!(!dir.exists(), "{setting}");
    }
    let llm = ["evolve.explorer=llm", "evolve.llm_model=m", "evolve.llm_url=ftp://x"];
    run(&train_args(&dir, &llm).iter().map(String::as_str).collect::<Vec<_>>()).fails(2, "no http:// or https:// URL");
}

#[test]
fn folders_of_something_else_are_not_touched() {
    let tmp = tempfile::tempdir().expect("folder");
    std::fs::write(tmp.path().join("main.c"), "int main(void) { return 0; }").expect("write");
    let dir = text(tmp.path());
    run(&["train", "--preset", "desk-smoke", "--run", dir]).fails(2, "it holds \"main.c\"");
    for args in [vec!["resume", dir], vec!["verify", dir], vec!["verify", "--repair", dir], vec!["replay", dir]] {
        run(&args).fails(2, "");
    }
    run(&["salvage", dir, text(&tmp.path().join("out"))]).fails(2, "holds no event");
    assert_eq!(files(tmp.path()), [tmp.path().join("main.c")]);
}

#[test]
fn what_was_acknowledged_and_is_gone_is_missed() {
    let tmp = tempfile::tempdir().expect("folder");
    let dir = finished(tmp.path());
    // One commit less by a damaged slot of HEAD: reading warns, replay does not pass.
    let head = std::fs::read(dir.join("HEAD")).expect("HEAD");
    let mut bad = head.clone();
    let counter = |slot: usize| u64::from_le_bytes(head[slot * 64 + 8..slot * 64 + 16].try_into().expect("8 bytes"));
    bad[if counter(1) > counter(0) { 64 + 30 } else { 30 }] ^= 1;
    std::fs::write(dir.join("HEAD"), &bad).expect("write");
    run(&["replay", text(&dir)]).fails(1, "coevolve verify --repair");
    let tasks = run(&["tasks", text(&dir)]);
    assert!(tasks.code == Some(0) && tasks.stderr.contains("warning: "), "{tasks:?}");
    assert_eq!(run(&["verify", "--repair", text(&dir)]).code, Some(0));
    assert_eq!(run(&["replay", text(&dir), "--json"]).json()["ok"], true);
    // Both copies gone: everything says so, nothing sends in circles.
    for part in ["journal", "events.sled"] {
        std::fs::remove_dir_all(dir.join(part)).expect("remove");
    }
    let run_dir = text(&dir);
    for args in [
        vec!["tasks", run_dir],
        vec!["replay", run_dir],
        vec!["verify", run_dir],
        vec!["verify", "--repair", run_dir],
        vec!["resume", run_dir],
        vec!["train", "--preset", "desk-smoke", "--run", run_dir],
    ] {
        run(&args).fails(1, "restore them from a backup");
    }
}

#[test]
fn a_run_that_lost_its_end_is_salvaged_and_goes_on() {
    let tmp = tempfile::tempdir().expect("folder");
    let dir = finished(tmp.path());
    let whole = run(&["replay", text(&dir), "--json"]).json();
    std::fs::remove_dir_all(dir.join("events.sled")).expect("remove");
    let segment = dir.join("journal/000000000001.seg");
    let bytes = std::fs::read(&segment).expect("read");
    std::fs::write(&segment, &bytes[..bytes.len() * 2 / 3]).expect("write");
    run(&["verify", "--repair", text(&dir)]).fails(1, "coevolve salvage");
    let saved = tmp.path().join("saved");
    let report = run(&["salvage", text(&dir), text(&saved), "--json"]).json();
    assert!(report["acknowledged"].as_u64() > report["events"].as_u64(), "{report}");
    let resumed = run(&["resume", text(&saved), "--json"]).json();
    // What was lost is computed again, and comes out the same.
    assert_eq!(resumed["facts_digest"], whole["facts_digest"]);
    assert_eq!(run(&["verify", text(&saved), "--json"]).json()["findings"], serde_json::json!([]));
}
