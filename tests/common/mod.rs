//! Running the program in tests: it, its answers, its run folders.

// Every test binary uses a part of this.
#![allow(dead_code)]

use serde_json::Value;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// Longest that anything in these tests may take before it counts as hanging.
const HANGS: Duration = Duration::from_secs(300);

/// The program, with no key and no colours from the environment of whoever runs the tests.
pub fn coevolve() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_coevolve"));
    command.env_remove("OPENAI_API_KEY").env_remove("RUST_BACKTRACE").env("NO_COLOR", "1").stdin(Stdio::null());
    command
}

/// What a finished process left.
#[derive(Debug)]
pub struct Done {
    /// Exit code; `None` after a signal.
    pub code: Option<i32>,
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
}

impl Done {
    /// Of a process's output.
    pub fn of(output: std::process::Output) -> Done {
        Done {
            code: output.status.code(),
            stdout: String::from_utf8(output.stdout).expect("stdout is UTF-8"),
            stderr: String::from_utf8(output.stderr).expect("stderr is UTF-8"),
        }
    }

    /// The last line of stdout as JSON; the process must have succeeded.
    pub fn json(&self) -> Value {
        assert_eq!(self.code, Some(0), "{self:?}");
        self.last_line()
    }

    /// The last line of stdout as JSON, whatever the exit code.
    pub fn last_line(&self) -> Value {
        let last = self.stdout.lines().last().unwrap_or_else(|| panic!("no output: {self:?}"));
        serde_json::from_str(last).unwrap_or_else(|e| panic!("{e}: {self:?}"))
    }

    /// Asserts an exit code and a piece of the message on stderr.
    pub fn fails(&self, code: i32, message: &str) {
        assert_eq!(self.code, Some(code), "{self:?}");
        assert!(self.stderr.contains(message), "`{message}` is not in {self:?}");
        assert!(!self.stderr.contains("panicked"), "{self:?}");
    }
}

/// Runs the program to its end.
pub fn run(args: &[&str]) -> Done {
    Done::of(coevolve().args(args).output().expect("the program starts"))
}

/// Kills the process after `delay`, unless it ends before.
pub fn kill_after(child: Child, delay: Duration) -> Option<Done> {
    let begin = Instant::now();
    kill_when(child, || begin.elapsed() >= delay)
}

/// Kills the process as soon as `now` says so, unless it ends before.
pub fn kill_when(mut child: Child, mut now: impl FnMut() -> bool) -> Option<Done> {
    while !now() {
        if child.try_wait().expect("wait").is_some() {
            return Some(Done::of(child.wait_with_output().expect("output")));
        }
        std::thread::sleep(Duration::from_micros(500));
    }
    // It may have ended by itself a moment ago: then it counts as finished.
    child.kill().expect("kill");
    let done = Done::of(child.wait_with_output().expect("output"));
    done.code.is_some().then_some(done)
}

/// A path as an argument.
pub fn text(path: &Path) -> &str {
    path.to_str().expect("UTF-8 path")
}

/// Arguments of a small run of the smoke preset in `dir`, with more settings on top.
pub fn train_args(dir: &Path, settings: &[&str]) -> Vec<String> {
    let mut args: Vec<String> =
        ["train", "--json", "--preset", "desk-smoke", "--set", "eval.tasks=8", "--run", text(dir)]
            .map(String::from)
            .to_vec();
    for setting in settings {
        args.extend(["--set".to_string(), setting.to_string()]);
    }
    args
}

/// Trains to the end; returns the summary.
pub fn train(dir: &Path, settings: &[&str]) -> Value {
    let args = train_args(dir, settings);
    run(&args.iter().map(String::as_str).collect::<Vec<_>>()).json()
}

/// All events of a run, as `log --json` prints them.
pub fn events(dir: &Path) -> Vec<Value> {
    let done = run(&["log", text(dir), "--json"]);
    assert_eq!(done.code, Some(0), "{done:?}");
    done.stdout.lines().map(|l| serde_json::from_str(l).expect("an event a line")).collect()
}

/// The payloads of one kind.
pub fn of_kind(events: &[Value], kind: &str) -> Vec<Value> {
    let payloads = events.iter().map(|e| e["event"].clone());
    payloads.filter(|e| e["event"] == kind).collect()
}

/// The first facts that only one of two runs has.
pub fn differences(straight: &Path, resumed: &Path) -> String {
    let facts = |dir: &Path| -> std::collections::BTreeSet<String> {
        let other = ["run_started", "run_resumed", "checkpoint_saved", "failure_noted"];
        let mut out = std::collections::BTreeSet::new();
        for event in events(dir) {
            if !other.iter().any(|k| event["event"]["event"] == *k) {
                out.insert(event["event"].to_string());
            }
        }
        out
    };
    let (a, b) = (facts(straight), facts(resumed));
    let only = |x: &std::collections::BTreeSet<String>,
                y: &std::collections::BTreeSet<String>,
                name: &str|
     -> Vec<String> { x.difference(y).take(5).map(|e| format!("{name}: {e}")).collect() };
    [only(&a, &b, "uninterrupted"), only(&b, &a, "resumed")].concat().join("\n")
}

/// The two values by which equal runs are known: facts digest and weights.
pub fn identity(summary: &Value) -> (String, String) {
    let get = |key: &str| summary[key].as_str().unwrap_or_else(|| panic!("no {key} in {summary}")).to_string();
    (get("facts_digest"), get("weights_hash"))
}

/// Runs `body` on a thread of its own; fails instead of hanging.
pub fn not_hanging<T: Send + 'static>(body: impl FnOnce() -> T + Send + 'static) -> T {
    let (done, wait) = mpsc::channel();
    let thread = std::thread::spawn(move || {
        let value = body();
        let _ = done.send(());
        value
    });
    if let Err(mpsc::RecvTimeoutError::Timeout) = wait.recv_timeout(HANGS) {
        panic!("still running after {HANGS:?}");
    }
    match thread.join() {
        Ok(value) => value,
        Err(panic) => std::panic::resume_unwind(panic),
    }
}

/// Every file below a folder.
pub fn files(dir: &Path) -> Vec<std::path::PathBuf> {
    let mut out = Vec::new();
    for entry in std::fs::read_dir(dir).expect("folder") {
        let path = entry.expect("entry").path();
        if path.is_dir() { out.extend(files(&path)) } else { out.push(path) }
    }
    out
}
