//! Steps a second of BFCL through the whole pipeline, and where an episode's time goes.
//!
//! `cargo bench --bench bfcl` (after `tools/setup-bfcl.sh`); `-- 50` plays fewer entries of each category.
//!
//! The reference plays every entry of V3 and of V4: reset, steps, turns, evaluation, each in a worker process
//! behind JSON lines. Starting the workers is done before the clock runs.
//!
//! Result (2 cores that other programs used too, load 3.5 to 6; all 800 entries of each version, all pass; two runs):
//!
//! | | steps/s | episodes/s | reset p50 | step p50 | end_turn p50 | evaluate p50 | the pipe alone p50 |
//! |---|---|---|---|---|---|---|---|
//! | V3 | 939, 1,076 | 161, 185 | 887, 1,023 us | 232, 174 us | 161, 104 us | 1,032, 974 us | 61, 118 us |
//! | V4 | 1,322, 568 | 231, 99 | 839, 2,213 us | 162, 316 us | 103, 198 us | 1,096, 1,338 us | 118, 121 us |
//!
//! An episode is 5.8 steps. Of its time 38 to 46 % are steps, 22 to 26 % ends of turns, 15 to 23 % resets and 13 to
//! 16 % evaluations (V3 and V4, second run). The pipe's 99th percentile is up to 8 ms, a time slice of the scheduler:
//! much of the spread is waiting for a core.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use coevolve::agent::sample::Sampling;
use coevolve::agent::{EpisodeJob, Limits, ReferenceAgent};
use coevolve::env::bfcl::{Bfcl, BfclOptions, BfclVersion};
use coevolve::env::{EnvError, Environment, Opening, Session, StepReply, TurnReply};
use coevolve::event::{Reward, RolloutKey, TaskSpec, ToolCall};
use coevolve::pipeline::{Latencies, Plan, play};

/// Sampler threads, each with a worker process at work.
const THREADS: usize = 2;

/// How long operations took: histograms, and the whole in microseconds.
#[derive(Default)]
struct Seen {
    latencies: Latencies,
    total_us: BTreeMap<&'static str, u64>,
}

/// An environment that notes how long every operation takes.
struct Timed {
    inner: Bfcl,
    seen: Arc<Mutex<Seen>>,
}

struct TimedSession {
    inner: Box<dyn Session>,
    seen: Arc<Mutex<Seen>>,
}

impl Environment for Timed {
    fn name(&self) -> &str {
        self.inner.name()
    }
    fn version(&self) -> String {
        self.inner.version()
    }
    fn splits(&self) -> Vec<String> {
        self.inner.splits()
    }
    fn tasks(&self, split: &str, seed: u64, limit: usize) -> Result<Vec<TaskSpec>, EnvError> {
        self.inner.tasks(split, seed, limit)
    }
    fn open(&self) -> Result<Box<dyn Session>, EnvError> {
        Ok(Box::new(TimedSession { inner: self.inner.open()?, seen: Arc::clone(&self.seen) }))
    }
    fn playground(&self, near: Option<&TaskSpec>, seed: u64) -> Result<TaskSpec, EnvError> {
        self.inner.playground(near, seed)
    }
    fn max_sessions(&self) -> Option<usize> {
        self.inner.max_sessions()
    }
}

impl TimedSession {
    fn time<T>(&mut self, stage: &'static str, operation: impl FnOnce(&mut dyn Session) -> T) -> T {
        let begun = Instant::now();
        let answer = operation(self.inner.as_mut());
        let micros = begun.elapsed().as_micros() as u64;
        let mut seen = self.seen.lock().expect("not poisoned");
        seen.latencies.record(stage, micros);
        *seen.total_us.entry(stage).or_default() += micros;
        answer
    }
}

impl Session for TimedSession {
    fn reset(&mut self, task: &TaskSpec, episode: &str, seed: u64) -> Result<Opening, EnvError> {
        self.time("reset", |s| s.reset(task, episode, seed))
    }
    fn step(&mut self, calls: &[ToolCall]) -> Result<StepReply, EnvError> {
        self.time("step", |s| s.step(calls))
    }
    fn end_turn(&mut self, say: &str) -> Result<TurnReply, EnvError> {
        self.time("end_turn", |s| s.end_turn(say))
    }
    fn evaluate(&mut self) -> Result<Reward, EnvError> {
        self.time("evaluate", |s| s.evaluate())
    }
    fn state_digest(&mut self) -> Result<Option<[u8; 32]>, EnvError> {
        self.inner.state_digest()
    }
}

/// What one play did.
#[derive(Default)]
struct Done {
    episodes: usize,
    passed: usize,
    steps: u64,
    calls: usize,
    latencies: Latencies,
}

fn run(env: &Arc<dyn Environment>, jobs: &[EpisodeJob]) -> Done {
    let limits = Limits { concurrent: 1, ..Limits::default() };
    let plan = Plan { threads: THREADS, env_workers: 0, limits, stop: Arc::new(AtomicBool::new(false)) };
    let groups = jobs.chunks(1).map(<[EpisodeJob]>::to_vec).collect();
    let mut done = Done::default();
    let mut latencies = Latencies::default();
    play(env, &ReferenceAgent::new(), groups, &plan, &mut latencies, &mut |record| {
        done.episodes += 1;
        done.passed += usize::from(record.reward == Reward::Scored(1.0));
        done.steps += u64::from(record.env_steps);
        done.calls += record.actions.iter().map(|a| a.calls.len()).sum::<usize>();
        Ok(())
    })
    .expect("played");
    Done { latencies, ..done }
}

fn main() {
    let entries: usize = std::env::args().skip(1).find_map(|a| a.parse().ok()).unwrap_or(200);
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(".coevolve/bfcl");
    for version in [BfclVersion::V3, BfclVersion::V4] {
        let inner = match Bfcl::open(&folder, BfclOptions { version, ..BfclOptions::default() }) {
            Ok(env) => env,
            Err(error) => return println!("{error}"),
        };
        let pool = Arc::clone(inner.pool());
        let seen = Arc::<Mutex<Seen>>::default();
        let env: Arc<dyn Environment> = Arc::new(Timed { inner, seen: Arc::clone(&seen) });
        let mut jobs = Vec::new();
        for split in ["base", "miss_func", "miss_param", "long_context"] {
            jobs.extend(env.tasks(split, 0, entries).expect("tasks").into_iter().map(|task| EpisodeJob {
                key: RolloutKey { step: 0, task: task.id.clone(), draw: 0, k: 0 },
                group: 0,
                sampling: Sampling::at(0.0),
                seed: 7,
                label: split.into(),
                task,
            }));
        }
        // A worker reads each category's files at its first entry of it.
        let short: Vec<EpisodeJob> = jobs.iter().step_by(entries.div_ceil(8)).cloned().collect();
        for _ in 0..3 {
            run(&env, &short);
        }
        // A request that is refused at once: what the pipe itself costs.
        let mut all = Latencies::default();
        for _ in 0..1_000 {
            let begun = Instant::now();
            pool.ask("nothing", serde_json::Map::new()).expect_err("no such operation");
            all.record("pipe alone", begun.elapsed().as_micros() as u64);
        }
        *seen.lock().expect("not poisoned") = Seen::default();
        let begun = Instant::now();
        let done = run(&env, &jobs);
        let seconds = begun.elapsed().as_secs_f64();
        println!(
            "{version:?}: {} of {} episodes pass; {} steps, {} calls in {seconds:.2} s: {:.0} steps/s, {:.0} episodes/s",
            done.passed,
            done.episodes,
            done.steps,
            done.calls,
            done.steps as f64 / seconds,
            done.episodes as f64 / seconds,
        );
        let seen = seen.lock().expect("not poisoned");
        let total = seen.total_us.values().sum::<u64>().max(1) as f64;
        let shares = seen.total_us.iter().map(|(stage, us)| format!("{stage} {:.0} %", *us as f64 * 100.0 / total));
        println!("  of the environment's time: {}", shares.collect::<Vec<_>>().join(", "));
        all.merge(&seen.latencies);
        all.merge(&done.latencies);
        println!("  {:20} {:>7} {:>7} {:>7} {:>7} {:>7}  us", "", "count", "p50", "p90", "p99", "max");
        for row in all.rows() {
            println!(
                "  {:20} {:7} {:7} {:7} {:7} {:7}",
                row.stage, row.count, row.p50_us, row.p90_us, row.p99_us, row.max_us
            );
        }
    }
}
