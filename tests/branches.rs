//! Standing at an event and going on from there, by the command line.

mod common;

use common::{events, identity, of_kind, run, text, train};
use std::path::Path;

const SETTINGS: &[&str] = &["run.steps=4", "evolve.every=2", "batch.tasks=4", "run.checkpoint_every=1"];

fn checkpoints(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir.join("checkpoints")).expect("checkpoints");
    let mut names: Vec<String> =
        entries.map(|e| e.expect("entry").file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

fn replays(dir: &Path) -> serde_json::Value {
    let report = run(&["replay", text(dir), "--json"]).json();
    assert_eq!(report["ok"], true, "{report}");
    let verified = run(&["verify", text(dir), "--json"]).json();
    assert_eq!(verified["findings"], serde_json::json!([]), "{verified}");
    assert_eq!(verified["facts_digest"], report["facts_digest"]);
    report
}

#[test]
fn what_is_undone_is_trained_again_to_the_same_facts() {
    let tmp = tempfile::tempdir().expect("folder");
    let dir = tmp.path().join("r");
    let wanted = identity(&train(&dir, SETTINGS));
    let before = events(&dir);
    // In the middle of a step, at the end of one, and to the first event.
    let middle = before.iter().position(|e| e["event"]["event"] == "rollout_finished").expect("a rollout") + 5;
    for to in ["step:2".to_string(), middle.to_string(), "1".to_string()] {
        let undone = run(&["undo", text(&dir), "--to", &to, "--reason", "try again", "--json"]).json();
        let at = undone["to"].as_u64().expect("to") as usize;
        assert_eq!(events(&dir).len(), at, "{to}");
        assert_eq!(events(&dir), before[..at], "{to}");
        let summary = run(&["resume", text(&dir), "--json"]).json();
        assert_eq!(identity(&summary), wanted, "{to}");
        assert_eq!(events(&dir)[..at], before[..at], "{to}");
        replays(&dir);
    }
    // An undo that nothing was built on is taken back by another.
    let (whole, last) = (events(&dir), |all: &[serde_json::Value]| all.last().expect("one")["seq"].to_string());
    run(&["undo", text(&dir), "--to", "step:1"]);
    assert!(events(&dir).len() < whole.len());
    run(&["undo", text(&dir), "--to", &last(&whole)]);
    assert_eq!(events(&dir), whole);
    replays(&dir);
    // All of it is still there, under its number.
    let hidden = run(&["show", text(&dir), &before[middle].clone()["seq"].to_string(), "--json"]).json();
    assert_eq!(hidden["event"], before[middle]["event"]);
    run(&["undo", text(&dir), "--to", "99999999"]).fails(2, "names no event");
}

#[test]
fn a_fork_in_its_own_folder_trains_on_and_its_parent_stays_as_it_is() {
    let tmp = tempfile::tempdir().expect("folder");
    let (dir, out) = (tmp.path().join("r"), tmp.path().join("fork"));
    let wanted = identity(&train(&dir, SETTINGS));
    let (before, report) = (events(&dir), replays(&dir));
    let made = run(&["fork", text(&dir), "--at", "step:2", "--run", text(&out), "--json"]).json();
    assert_eq!(made["at"].as_u64().map(|at| at as usize), Some(events(&out).len()));
    run(&["fork", text(&dir), "--at", "step:2", "--run", text(&out)]).fails(2, "already holds a run");
    assert_eq!(identity(&run(&["resume", text(&out), "--json"]).json()), wanted);
    assert_eq!((events(&dir), replays(&dir)), (before, report));
    std::fs::remove_dir_all(&dir).expect("remove");
    replays(&out);
    let task = of_kind(&events(&out), "task_admitted").into_iter().find(|t| t["origin"] == "synthesised").expect("one");
    let audit = run(&["audit", text(&out), task["task"]["id"].as_str().expect("id"), "--json"]).json();
    assert!(audit["signal"].is_object() && audit["validation"].is_object(), "{audit}");
}

#[test]
fn branches_are_listed_read_and_deleted() {
    let tmp = tempfile::tempdir().expect("folder");
    let dir = tmp.path().join("r");
    train(&dir, SETTINGS);
    let whole = events(&dir);
    for (from, name) in [("main", "hot"), ("hot", "hotter")] {
        run(&["fork", text(&dir), "--at", "step:1", "--branch", from, "--name", name, "--json"]).json();
    }
    run(&["fork", text(&dir), "--at", "1", "--name", "hot"]).fails(2, "exists already");
    run(&["fork", text(&dir), "--at", "1"]).fails(2, "--name");
    let rows = |dir: &Path| run(&["branches", text(dir), "--json"]).json()["branches"].clone();
    let names = |rows: &serde_json::Value| -> Vec<String> {
        rows.as_array().expect("rows").iter().map(|r| r["name"].as_str().expect("name").to_string()).collect()
    };
    assert_eq!(names(&rows(&dir)), ["main", "hot", "hotter"]);
    assert_eq!(rows(&dir)[2]["parent"], "hot");
    let of_branch = |name: &str| run(&["log", text(&dir), "--branch", name, "--json"]).stdout.lines().count() as u64;
    assert_eq!(Some(of_branch("hotter")), rows(&dir)[2]["events"].as_u64());
    run(&["branches", text(&dir), "--delete", "hot"]);
    assert_eq!(names(&rows(&dir)), ["main", "hotter"]);
    assert_eq!(Some(of_branch("hotter")), rows(&dir)[1]["events"].as_u64());
    run(&["log", text(&dir), "--branch", "hot"]).fails(2, "hot");
    assert_eq!(events(&dir), whole);
    replays(&dir);
}

#[test]
fn gc_keeps_what_is_needed_and_a_run_resumes_without_the_rest() {
    let tmp = tempfile::tempdir().expect("folder");
    let dir = tmp.path().join("r");
    let wanted = identity(&train(&dir, SETTINGS));
    let report = replays(&dir);
    let all = checkpoints(&dir);
    assert_eq!(all.len(), 4);
    run(&["fork", text(&dir), "--at", "step:2", "--name", "early"]);
    std::fs::create_dir(dir.join("checkpoints/.000009-ab.new")).expect("what a kill leaves");
    let gc = |more: &[&str]| run(&[&["gc", text(&dir), "--keep", "1", "--json"], more].concat()).json();
    let would = gc(&["--dry-run"]);
    assert_eq!(checkpoints(&dir).len(), 5);
    let done = gc(&[]);
    assert_eq!(done["removed"], would["removed"]);
    assert_eq!(done["removed"].as_array().map(Vec::len), Some(3), "{done}");
    // The newest of main, and the one that the fork begins with.
    assert_eq!(checkpoints(&dir), [all[1].clone(), all[3].clone()]);
    assert_eq!(gc(&[])["removed"], serde_json::json!([]));
    assert_eq!(replays(&dir)["facts_digest"], report["facts_digest"]);
    // Without any the weights follow from the log.
    run(&["gc", text(&dir), "--keep", "0"]);
    assert!(checkpoints(&dir).is_empty());
    run(&["undo", text(&dir), "--to", "step:3"]);
    assert_eq!(identity(&run(&["resume", text(&dir), "--json"]).json()), wanted);
}

#[test]
fn a_run_that_keeps_few_checkpoints_comes_to_the_same_end() {
    let tmp = tempfile::tempdir().expect("folder");
    let (all, few) = (tmp.path().join("all"), tmp.path().join("few"));
    let wanted = identity(&train(&all, SETTINGS));
    assert_eq!(identity(&train(&few, &[SETTINGS, &["run.keep_checkpoints=1"]].concat())), wanted);
    assert_eq!((checkpoints(&all).len(), checkpoints(&few).len()), (4, 1));
    assert_eq!(checkpoints(&few)[0], checkpoints(&all)[3]);
    replays(&few);
}
