//! Stages over bounded lock-free queues.
//!
//! ```text
//!            chunks of groups            operations               records
//!  planner ───────────────► samplers ◄──────────────► environment  ───────► scorer and writer
//!  (caller)   bounded        (threads)    bounded       workers     bounded   (the caller's sink,
//!                                                                              which appends to the log)
//! ```
//!
//! Back-pressure: every queue is bounded, a full one blocks its producer. The queue of operations holds as
//! many as there can be episodes in flight, so a sampler never waits for an environment to hand in an
//! operation. A panic or error in any stage poisons the pipeline: all stages stop, the first cause is
//! returned, and what the sink has taken is in the log. No result depends on timing or thread counts
//! ([`crate::agent::Agent::play`]); only the order in which records reach the sink does.

mod latency;
mod pool;

pub use latency::{Latencies, LatencyRow};
pub use pool::{EnvPool, PooledHands};

use crate::agent::{Agent, AgentError, EpisodeJob, EpisodeRecord, InlineHands, Limits, PlayStats};
use crate::env::Environment;
use crate::world::Stopwatch;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

/// Records that may wait for the sink.
const RECORD_QUEUE: usize = 64;

/// How to run the stages.
#[derive(Debug, Clone)]
pub struct Plan {
    /// Sampler threads, at least 1.
    pub threads: usize,
    /// Environment worker threads; 0 = environments run in the sampler's thread.
    pub env_workers: usize,
    /// Bounds of an episode.
    pub limits: Limits,
    /// Set from outside to stop early.
    pub stop: Arc<AtomicBool>,
}

/// Why a play stopped.
#[derive(Debug, thiserror::Error)]
pub enum PipelineError {
    /// A stage panicked. The log holds everything that was acknowledged.
    #[error("the {stage} stage panicked: {message}; the log is intact, `coevolve resume` goes on from it")]
    Panic {
        /// Stage name.
        stage: &'static str,
        /// The panic's message.
        message: String,
    },
    /// An agent failed.
    #[error(transparent)]
    Agent(#[from] AgentError),
    /// The sink refused a record.
    #[error("{0}")]
    Sink(String),
}

/// First cause of a stop, shared by the stages.
#[derive(Default)]
struct Poison(Mutex<Option<PipelineError>>);

impl Poison {
    fn set(&self, error: PipelineError, stop: &AtomicBool) {
        stop.store(true, Ordering::SeqCst);
        let mut slot = self.0.lock().unwrap_or_else(|e| e.into_inner());
        // What other stages report once the first has failed: they were stopped, or their workers are gone.
        let follows = |e: &PipelineError| {
            matches!(e, PipelineError::Agent(AgentError::Stopped) | PipelineError::Agent(AgentError::Hands(_)))
        };
        if slot.as_ref().is_none_or(|first| follows(first) && !follows(&error)) {
            *slot = Some(error);
        }
    }

    fn take(&self) -> Option<PipelineError> {
        self.0.lock().unwrap_or_else(|e| e.into_inner()).take()
    }
}

/// Runs a stage; a panic poisons the pipeline.
fn stage<T>(
    name: &'static str,
    poison: &Poison,
    stop: &AtomicBool,
    body: impl FnOnce() -> Result<T, PipelineError>,
) -> Option<T> {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(value)) => Some(value),
        Ok(Err(error)) => {
            poison.set(error, stop);
            None
        }
        Err(payload) => {
            let message = payload
                .downcast_ref::<&str>()
                .map(|s| s.to_string())
                .or_else(|| payload.downcast_ref::<String>().cloned())
                .unwrap_or_else(|| "no message".into());
            poison.set(PipelineError::Panic { stage: name, message }, stop);
            None
        }
    }
}

/// Plays all groups and hands each record to `sink` on the calling thread.
///
/// # Errors
/// The first failure of any stage. Records handed over before it are valid.
pub fn play(
    env: &Arc<dyn Environment>,
    agent: &dyn Agent,
    groups: Vec<Vec<EpisodeJob>>,
    plan: &Plan,
    latencies: &mut Latencies,
    sink: &mut dyn FnMut(EpisodeRecord) -> Result<(), String>,
) -> Result<PlayStats, PipelineError> {
    let most = env.max_sessions().unwrap_or(usize::MAX).max(1);
    let threads = plan.threads.clamp(1, groups.len().max(1)).min(most);
    let mut plan = plan.clone();
    plan.limits.concurrent = plan.limits.concurrent.clamp(1, (most / threads).max(1));
    let plan = &plan;
    let chunks = split(groups, threads, plan.limits.concurrent);
    // A private flag: poison must not stop the caller's later plays.
    let stop = Arc::new(AtomicBool::new(false));
    let poison = Poison::default();
    let pool = EnvPool::start(env.clone(), plan.env_workers, threads * plan.limits.concurrent.max(1), stop.clone());
    let (chunk_in, chunk_out) = crossbeam::channel::bounded::<Vec<EpisodeJob>>(threads);
    let (record_in, record_out) = crossbeam::channel::bounded::<(EpisodeRecord, Stopwatch)>(RECORD_QUEUE);
    let totals = Mutex::new((PlayStats::default(), Latencies::default()));

    std::thread::scope(|scope| {
        for _ in 0..threads {
            let (chunk_out, record_in) = (chunk_out.clone(), record_in.clone());
            let (poison, stop, pool, totals) = (&poison, &stop, &pool, &totals);
            scope.spawn(move || {
                stage("sampler", poison, stop, || {
                    for chunk in chunk_out {
                        let mut mine = Latencies::default();
                        let mut done = |_: usize, record: EpisodeRecord| {
                            mine.record("episode sampling", record.sampling_us);
                            mine.record("episode environment", record.environment_us);
                            // A closed queue means that the sink has failed: the poison says why.
                            if record_in.send((record, Stopwatch::start())).is_err() {
                                stop.store(true, Ordering::SeqCst);
                            }
                        };
                        let stats = if pool.is_inline() {
                            let mut hands = pool::Stoppable::new(InlineHands::new(env.clone()), stop.clone());
                            agent.play(&mut hands, &chunk, &plan.limits, &mut done)?
                        } else {
                            let mut hands = pool.hands();
                            let stats = agent.play(&mut hands, &chunk, &plan.limits, &mut done)?;
                            mine.merge(hands.latencies());
                            stats
                        };
                        let mut totals = totals.lock().unwrap_or_else(|e| e.into_inner());
                        totals.0.add(&stats);
                        totals.1.merge(&mine);
                        if stop.load(Ordering::SeqCst) {
                            break;
                        }
                    }
                    Ok(())
                });
            });
        }
        drop((record_in, chunk_out));
        let planner = {
            let (poison, stop, outside) = (&poison, &stop, &plan.stop);
            scope.spawn(move || {
                stage("planner", poison, stop, || {
                    for chunk in chunks {
                        if stop.load(Ordering::SeqCst)
                            || outside.load(Ordering::SeqCst)
                            || chunk_in.send(chunk).is_err()
                        {
                            break;
                        }
                    }
                    Ok(())
                });
            })
        };
        stage("writer", &poison, &stop, || {
            for (record, waited) in record_out {
                latencies.record("record queue", waited.micros());
                if plan.stop.load(Ordering::SeqCst) {
                    poison.set(PipelineError::Agent(AgentError::Stopped), &stop);
                }
                sink(record).map_err(PipelineError::Sink)?;
            }
            Ok(())
        });
        // A scoped thread that is joined at the end of the scope anyway; stages never panic outwards.
        drop(planner);
    });
    pool.finish(&poison, &stop);
    let (stats, mine) = totals.into_inner().unwrap_or_else(|e| e.into_inner());
    latencies.merge(&mine);
    match poison.take() {
        Some(error) => Err(error),
        None if plan.stop.load(Ordering::SeqCst) => Err(PipelineError::Agent(AgentError::Stopped)),
        None => Ok(stats),
    }
}

/// Whole groups to chunks: one per thread if they fit into an engine, so that batches stay wide.
fn split(groups: Vec<Vec<EpisodeJob>>, threads: usize, concurrent: usize) -> Vec<Vec<EpisodeJob>> {
    let jobs: usize = groups.iter().map(Vec::len).sum();
    let size = jobs.div_ceil(threads).clamp(1, concurrent.max(1));
    let mut chunks: Vec<Vec<EpisodeJob>> = Vec::new();
    for group in groups {
        match chunks.last_mut() {
            Some(last) if last.len() + group.len() <= size => last.extend(group),
            _ => chunks.push(group),
        }
    }
    chunks
}
