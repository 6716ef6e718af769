//! A run that is killed at any moment and resumed is the run that was never killed.
//!
//! `COEVOLVE_KILL_ROUNDS` (kills, default 50), `COEVOLVE_KILL_SETTINGS` (arguments of `train`) and
//! `COEVOLVE_KILL_SEED` turn the same test into a longer one:
//! `COEVOLVE_KILL_SETTINGS="--preset desk --set run.steps=12 --set evolve.every=3" cargo test --release --test resume`.

mod common;

use coevolve::config::{Layer, load};
use coevolve::log::{Log, MAIN, Options, Reader};
use coevolve::project::State;
use coevolve::run::state_at;
use coevolve::world::draw;
use common::{Done, coevolve, differences, events, identity, kill_after, of_kind, run, text, train};
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

/// Kills of one run before it is left to finish.
const KILLS_OF_A_RUN: u64 = 8;

fn setting(name: &str, default: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| default.to_string())
}

fn start(args: &[String]) -> Child {
    let mut command = coevolve();
    command.args(args).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.spawn().expect("the program starts")
}

/// A fifth of the kills falls into the first moments, where folders and files come into being.
fn moment(seed: u64, attempt: u64, whole: Duration) -> Duration {
    let mut d = draw(seed, "kill", &[&attempt.to_string()]);
    let share = if d.chance(0.2) { 0.05 * d.unit() } else { d.unit() };
    whole.mul_f64(share)
}

#[test]
fn killed_at_random_moments_and_resumed_equals_uninterrupted() {
    let kills: u64 = setting("COEVOLVE_KILL_ROUNDS", "50").parse().expect("COEVOLVE_KILL_ROUNDS is a number");
    let seed: u64 = setting("COEVOLVE_KILL_SEED", "1").parse().expect("COEVOLVE_KILL_SEED is a number");
    let preset = "--preset desk-smoke --set run.steps=12 --set evolve.every=3 --set eval.tasks=8";
    let settings = setting("COEVOLVE_KILL_SETTINGS", preset);
    let tmp = tempfile::tempdir().expect("folder");
    let train = |dir: &Path| -> Vec<String> {
        let mut args = vec!["train".to_string(), "--json".into(), "--run".into(), text(dir).into()];
        args.extend(settings.split_whitespace().map(String::from));
        args
    };

    let mut whole = Duration::MAX;
    for name in ["first", "second", "third"] {
        let begin = Instant::now();
        let done = start(&train(&tmp.path().join(name))).wait_with_output().expect("output");
        assert!(done.status.success(), "{done:?}");
        whole = whole.min(begin.elapsed());
    }
    let straight = Done::of(start(&train(&tmp.path().join("straight"))).wait_with_output().expect("output")).json();
    let wanted = identity(&straight);
    assert_eq!(straight["finished"], true);
    assert_eq!(straight["anomalies"], 0);
    let admitted = of_kind(&events(&tmp.path().join("straight")), "task_admitted");
    assert!(admitted.iter().any(|t| t["origin"] == "synthesised"), "nothing evolves in this run: it proves little");

    let (mut killed, mut attempts, mut runs) = (0, 0, 0);
    while killed < kills {
        let dir = tmp.path().join(format!("run-{runs}"));
        let mut args = train(&dir);
        let mut of_this_run = 0;
        let summary = loop {
            let child = start(&args);
            let spare = of_this_run < KILLS_OF_A_RUN && killed < kills;
            attempts += 1;
            let ended = match spare {
                true => kill_after(child, moment(seed, attempts, whole)),
                false => Some(Done::of(child.wait_with_output().expect("output"))),
            };
            if let Some(done) = ended {
                break done;
            }
            killed += 1;
            of_this_run += 1;
            // A kill before the settings were written leaves nothing to resume.
            if dir.join("settings.json").exists() {
                args = vec!["resume".into(), "--json".into(), text(&dir).into()];
            }
        };
        let summary = summary.json();
        let context = format!("run {runs}, killed {of_this_run} times, kill {killed} in all, seed {seed}");
        if identity(&summary) != wanted {
            let differences = differences(&tmp.path().join("straight"), &dir);
            panic!("{context}: {summary}\nfacts that only one run has:\n{differences}");
        }
        assert_eq!(summary["anomalies"], 0, "{context}");
        for key in ["steps", "held_out_before", "held_out_after", "signals", "drafts", "admitted", "rejected"] {
            assert_eq!(summary[key], straight[key], "{context}: {key}");
        }
        assert_eq!(run(&["replay", text(&dir), "--json"]).json()["ok"], true, "{context}");
        assert_eq!(run(&["verify", text(&dir), "--json"]).json()["findings"], serde_json::json!([]), "{context}");
        std::fs::remove_dir_all(&dir).expect("remove");
        runs += 1;
    }
    eprintln!("{killed} kills in {runs} runs, {attempts} processes; uninterrupted {whole:.1?}");
}

const SHORT: &[&str] = &["run.steps=2", "evolve.every=1", "batch.tasks=4"];

#[test]
fn a_kill_before_the_first_event_starts_afresh() {
    let tmp = tempfile::tempdir().expect("folder");
    let straight = train(&tmp.path().join("straight"), SHORT);
    let mut layers = vec![Layer::Preset("desk-smoke".into()), Layer::Set("eval.tasks=8".into())];
    layers.extend(SHORT.iter().map(|s| Layer::Set(s.to_string())));
    let settings = serde_json::to_string(&load(&layers).expect("settings")).expect("json");
    type Leave = fn(&Path);
    let leavings: &[(&str, Leave)] = &[
        ("settings only", |_| {}),
        ("a lock", |d| std::fs::write(d.join("LOCK"), "process 1 on nowhere\n").expect("lock")),
        ("an empty journal", |d| std::fs::create_dir(d.join("journal")).expect("journal")),
        ("a torn settings file beside", |d| std::fs::write(d.join("settings.json.new"), "{\"run\":").expect("new")),
    ];
    for (name, leave) in leavings {
        let dir = tmp.path().join(name);
        std::fs::create_dir(&dir).expect("folder");
        std::fs::write(dir.join("settings.json"), &settings).expect("settings");
        leave(&dir);
        let summary = run(&["resume", text(&dir), "--json"]).json();
        assert_eq!(identity(&summary), identity(&straight), "{name}");
    }
    // `train` may also take such a folder over.
    let dir = tmp.path().join("taken");
    std::fs::create_dir_all(dir.join("journal")).expect("folder");
    std::fs::write(dir.join("settings.json"), settings.replace("\"steps\":2", "\"steps\":3")).expect("settings");
    assert_eq!(identity(&train(&dir, SHORT)), identity(&straight));
    // What a kill right after would be taken up with are the new settings.
    let left = std::fs::read_to_string(dir.join("settings.json")).expect("settings");
    let left: serde_json::Value = serde_json::from_str(&left).expect("json");
    assert_eq!(left["run"]["steps"], 2);
}

#[test]
fn a_finished_run_prints_its_summary_again_and_stays_as_it_is() {
    let tmp = tempfile::tempdir().expect("folder");
    let dir = tmp.path().join("r");
    let first = train(&dir, SHORT);
    let before = events(&dir);
    let again = run(&["resume", text(&dir), "--json"]).json();
    for (key, value) in first.as_object().expect("summary") {
        if !["seconds", "sampling", "latencies"].contains(&key.as_str()) {
            assert_eq!(&again[key], value, "{key}");
        }
    }
    assert_eq!(events(&dir), before);
    let page = run(&["resume", text(&dir)]);
    assert_eq!(page.code, Some(0), "{page:?}");
    assert!(page.stdout.contains(first["facts_digest"].as_str().expect("digest")), "{page:?}");
    run(&["train", "--preset", "desk-smoke", "--run", text(&dir)]).fails(2, "already holds a run");
}

/// Starts a run and kills it once its log shows `count` events of `kind`.
fn kill_once_it_has(dir: &Path, settings: &[&str], kind: &str, count: usize) {
    let mut child = start(&common::train_args(dir, settings));
    let seen = || run(&["log", text(dir), "--kind", kind]).stdout.lines().count();
    while !dir.join("HEAD").exists() || seen() < count {
        assert!(child.try_wait().expect("wait").is_none(), "it ended before it could be killed");
    }
    child.kill().expect("kill");
    child.wait().expect("wait");
}

#[test]
fn a_checkpoint_is_a_cache() {
    let tmp = tempfile::tempdir().expect("folder");
    let settings = ["run.steps=40", "run.checkpoint_every=1", "evolve.every=4", "batch.tasks=4"];
    let straight = train(&tmp.path().join("straight"), &settings);
    type Spoil = fn(&Path);
    let spoilings: &[(&str, Spoil)] = &[
        ("gone", |c| std::fs::remove_dir_all(c).expect("remove")),
        ("empty", |c| std::fs::write(c.join("version"), "").expect("write")),
        ("of another version", |c| std::fs::write(c.join("version"), "1000").expect("write")),
    ];
    for (name, spoil) in spoilings {
        let dir = tmp.path().join(name);
        kill_once_it_has(&dir, &settings, "checkpoint_saved", 3);
        let mut all: Vec<_> = std::fs::read_dir(dir.join("checkpoints"))
            .expect("checkpoints")
            .map(|e| e.expect("entry").path())
            .collect();
        all.sort();
        assert!(all.len() >= 3);
        // Once only the last, once all of them.
        spoil(&all[all.len() - 1]);
        if *name == "gone" {
            all[..all.len() - 1].iter().for_each(|c| spoil(c));
        }
        let summary = run(&["resume", text(&dir), "--json"]).json();
        assert_eq!(identity(&summary), identity(&straight), "{name}");
        assert_eq!(summary["anomalies"], 0, "{name}");
    }
}

#[test]
fn a_snapshot_is_a_cache() {
    let tmp = tempfile::tempdir().expect("folder");
    let dir = tmp.path().join("r");
    let settings = ["run.steps=4", "evolve.every=1", "batch.tasks=4", "run.checkpoint_every=1"];
    let summary = train(&dir, &settings);
    let snapshots = common::files(&dir.join("snapshots"));
    assert_eq!(snapshots.len(), 2, "{snapshots:?}");
    // By way of a snapshot or not, the state after every event is the same, in every field.
    let reader = Reader::open(&dir).expect("readable");
    let mut folded = State::new();
    for stamped in reader.read(MAIN, 1).expect("events") {
        let stamped = stamped.expect("event");
        folded.apply(stamped.seq, &stamped.event, &stamped.meta);
        if stamped.seq % 7 == 0 || stamped.seq + 3 > reader.head(MAIN).expect("head") {
            let state = state_at(&reader, MAIN, stamped.seq).expect("state");
            assert!(state == folded, "after event {}", stamped.seq);
        }
    }
    // Killed behind the last snapshot, with and without it, and with a damaged one.
    let resumed = |name: &str, spoil: &dyn Fn(&Path)| {
        let dir = tmp.path().join(name);
        kill_once_it_has(&dir, &settings, "checkpoint_saved", 2);
        spoil(&dir.join("snapshots"));
        let done = run(&["resume", text(&dir), "--json"]).json();
        assert_eq!(identity(&done), identity(&summary), "{name}");
        assert_eq!(run(&["replay", text(&dir), "--json"]).json()["ok"], true, "{name}");
    };
    resumed("whole", &|snapshots| assert!(snapshots.is_dir()));
    resumed("gone", &|snapshots| std::fs::remove_dir_all(snapshots).expect("remove"));
    resumed("damaged", &|snapshots| {
        // A kill may also have left a file in the making.
        for file in common::files(snapshots).iter().filter(|f| f.extension().is_some_and(|e| e == "snap")) {
            let mut bytes = std::fs::read(file).expect("read");
            let middle = bytes.len() / 2;
            bytes[middle] ^= 1;
            std::fs::write(file, bytes).expect("write");
        }
    });
}

#[test]
fn a_run_is_resumed_with_other_execution_settings_but_not_with_other_facts() {
    let tmp = tempfile::tempdir().expect("folder");
    let dir = tmp.path().join("r");
    let straight = train(&tmp.path().join("straight"), SHORT);
    let settings: Vec<&str> = SHORT.iter().copied().chain(["run.threads=2"]).collect();
    kill_once_it_has(&dir, &settings, "run_started", 1);
    run(&["resume", text(&dir), "--set", "run.steps=3"]).fails(2, "run.steps");
    let resumed = run(&["resume", text(&dir), "--json", "--set", "run.threads=1", "--set", "env.workers=3"]).json();
    assert_eq!(identity(&resumed), identity(&straight));
}

#[test]
fn the_second_writer_of_a_folder_is_refused_and_readers_are_not() {
    let tmp = tempfile::tempdir().expect("folder");
    let dir = tmp.path().join("r");
    train(&dir, SHORT);
    let held = Log::open(&dir, Options::default()).expect("open");
    let holder = format!("process {}", std::process::id());
    for args in [vec!["resume", text(&dir)], vec!["verify", text(&dir), "--repair"]] {
        let done = run(&args);
        done.fails(1, "is being written by");
        assert!(done.stderr.contains(&holder), "{done:?}");
    }
    for command in ["log", "tasks", "replay"] {
        assert_eq!(run(&[command, text(&dir)]).code, Some(0), "{command}");
    }
    drop(held);
    assert_eq!(run(&["resume", text(&dir)]).code, Some(0));
}

#[test]
fn folders_without_a_run_say_so() {
    let tmp = tempfile::tempdir().expect("folder");
    run(&["resume", text(&tmp.path().join("nowhere"))]).fails(2, "is no folder");
    run(&["resume", text(tmp.path())]).fails(2, "coevolve train --run");
    std::fs::write(tmp.path().join("settings.json"), "{\"run\": {\"stepz\": 1}}").expect("write");
    run(&["resume", text(tmp.path())]).fails(2, "stepz");
}
