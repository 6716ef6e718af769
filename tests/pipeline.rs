//! The stages under stress: tiny queues, panics, refusals, failing environments.
//!
//! Real parts (desk, scripted and reference agents); a wrapper around the environment misbehaves on order.

mod common;

use coevolve::agent::{
    Agent, AgentError, EpisodeJob, EpisodeRecord, Hands, InlineHands, Limits, PlayStats, ReferenceAgent, Sampling,
    ScriptedAgent,
};
use coevolve::env::desk::Desk;
use coevolve::env::{EnvError, Environment, Opening, Session, StepReply, TurnReply};
use coevolve::event::{EndReason, Reward, RolloutKey, TaskSpec, ToolCall};
use coevolve::pipeline::{Latencies, PipelineError, Plan, play};
use common::not_hanging;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

/// What happens to the episodes whose label contains a word.
#[derive(Clone, Copy, PartialEq)]
enum Fault {
    None,
    PanicInStep,
    PanicInOpen,
    ErrorInReset,
    ErrorInStep,
    ErrorInEndTurn,
    ErrorInEvaluate,
}

struct Trouble {
    fault: Fault,
    /// Episodes it happens to: label contains this.
    word: String,
    started: Arc<AtomicUsize>,
}

struct Troubled {
    inner: Box<dyn Session>,
    fault: Fault,
    word: String,
    mine: bool,
    started: Arc<AtomicUsize>,
}

impl Environment for Trouble {
    fn name(&self) -> &str {
        "trouble"
    }
    fn version(&self) -> String {
        "trouble 1".into()
    }
    fn splits(&self) -> Vec<String> {
        Desk::default().splits()
    }
    fn tasks(&self, split: &str, seed: u64, limit: usize) -> Result<Vec<TaskSpec>, EnvError> {
        Desk::default().tasks(split, seed, limit)
    }
    fn open(&self) -> Result<Box<dyn Session>, EnvError> {
        assert!(self.fault != Fault::PanicInOpen, "planted panic in open");
        Ok(Box::new(Troubled {
            inner: Desk::default().open()?,
            fault: self.fault,
            word: self.word.clone(),
            mine: false,
            started: self.started.clone(),
        }))
    }
    fn playground(&self, near: Option<&TaskSpec>, seed: u64) -> Result<TaskSpec, EnvError> {
        Desk::default().playground(near, seed)
    }
}

impl Troubled {
    fn at(&self, fault: Fault, op: &str) -> Result<(), EnvError> {
        if self.mine && self.fault == fault {
            return Err(EnvError::Died { env: "trouble".into(), op: op.into(), detail: "planted".into() });
        }
        Ok(())
    }
}

impl Session for Troubled {
    fn reset(&mut self, task: &TaskSpec, episode: &str, seed: u64) -> Result<Opening, EnvError> {
        self.started.fetch_add(1, Ordering::SeqCst);
        self.mine = episode.contains(&self.word);
        self.at(Fault::ErrorInReset, "reset")?;
        self.inner.reset(task, episode, seed)
    }
    fn step(&mut self, calls: &[ToolCall]) -> Result<StepReply, EnvError> {
        assert!(!(self.mine && self.fault == Fault::PanicInStep), "planted panic in step");
        self.at(Fault::ErrorInStep, "step")?;
        self.inner.step(calls)
    }
    fn end_turn(&mut self, say: &str) -> Result<TurnReply, EnvError> {
        self.at(Fault::ErrorInEndTurn, "end_turn")?;
        self.inner.end_turn(say)
    }
    fn evaluate(&mut self) -> Result<Reward, EnvError> {
        self.at(Fault::ErrorInEvaluate, "evaluate")?;
        self.inner.evaluate()
    }
    fn state_digest(&mut self) -> Result<Option<[u8; 32]>, EnvError> {
        self.inner.state_digest()
    }
}

fn trouble(fault: Fault, word: &str) -> Arc<dyn Environment> {
    Arc::new(Trouble { fault, word: word.into(), started: Arc::default() })
}

const GROUP: u32 = 4;

fn groups(count: usize) -> Vec<Vec<EpisodeJob>> {
    let tasks = Desk::default().tasks("train", 3, count).expect("tasks");
    let job = |group: usize, task: &TaskSpec, k: u32| EpisodeJob {
        task: task.clone(),
        key: RolloutKey { step: 1, task: task.id.clone(), draw: group as u32, k },
        group,
        sampling: Sampling::at(1.0),
        seed: 5,
        label: "train".into(),
    };
    tasks.iter().enumerate().map(|(g, task)| (0..GROUP).map(|k| job(g, task, k)).collect()).collect()
}

fn plan(threads: usize, env_workers: usize, concurrent: usize) -> Plan {
    Plan {
        threads,
        env_workers,
        limits: Limits { concurrent, ..Limits::default() },
        stop: Arc::new(AtomicBool::new(false)),
    }
}

/// Facts of a record: without durations.
fn facts(record: &EpisodeRecord) -> EpisodeRecord {
    EpisodeRecord { sampling_us: 0, environment_us: 0, ..record.clone() }
}

/// The records of a healthy play without threads: what every other play is compared with.
fn wanted(agent: &dyn Agent, count: usize) -> BTreeMap<RolloutKey, EpisodeRecord> {
    let jobs: Vec<EpisodeJob> = groups(count).into_iter().flatten().collect();
    let mut hands = InlineHands::new(Arc::new(Desk::default()));
    let mut out = BTreeMap::new();
    let limits = Limits { concurrent: 1, ..Limits::default() };
    agent
        .play(&mut hands, &jobs, &limits, &mut |_, r| {
            out.insert(r.key.clone(), facts(&r));
        })
        .expect("plays");
    out
}

type Outcome = (Result<PlayStats, PipelineError>, Vec<EpisodeRecord>);

/// Plays and collects what reaches the sink.
fn collect(env: Arc<dyn Environment>, agent: Arc<dyn Agent>, count: usize, plan: Plan) -> Outcome {
    not_hanging(move || {
        let mut taken = Vec::new();
        let result = play(&env, agent.as_ref(), groups(count), &plan, &mut Latencies::default(), &mut |r| {
            taken.push(facts(&r));
            Ok(())
        });
        (result, taken)
    })
}

/// Everything taken is what a healthy play gives, nothing twice.
fn assert_valid(taken: &[EpisodeRecord], wanted: &BTreeMap<RolloutKey, EpisodeRecord>) {
    let mut seen = std::collections::BTreeSet::new();
    for record in taken {
        assert_eq!(wanted.get(&record.key), Some(record));
        assert!(seen.insert(record.key.clone()), "{:?} twice", record.key);
    }
}

#[test]
fn every_shape_of_threads_and_queues_gives_the_same_records() {
    let scripted = ScriptedAgent::new(3);
    let wanted = wanted(&scripted, 12);
    let scores: std::collections::BTreeSet<String> = wanted.values().map(|r| format!("{:?}", r.reward)).collect();
    assert!(scores.len() > 1, "all episodes score the same: this proves little");
    for (threads, workers, concurrent) in
        [(1, 0, 1), (1, 1, 1), (2, 1, 1), (3, 2, 1), (5, 3, 2), (2, 0, 64), (8, 8, 64)]
    {
        let (result, taken) =
            collect(trouble(Fault::None, ""), Arc::new(scripted), 12, plan(threads, workers, concurrent));
        let stats = result.unwrap_or_else(|e| panic!("{threads} {workers} {concurrent}: {e}"));
        assert_eq!(taken.len(), wanted.len());
        assert_eq!(stats.episodes as usize, wanted.len());
        assert_valid(&taken, &wanted);
    }
}

#[test]
fn a_slow_sink_holds_the_samplers_back() {
    // 3 samplers x 1 episode each, 64 records in the queue: the environment may be ahead of the sink by
    // those, one finished episode in each sampler's hand, and the one the sink holds; never by all 400.
    let (threads, queue) = (3, 64);
    let started = Arc::new(AtomicUsize::new(0));
    let env = Trouble { fault: Fault::None, word: String::new(), started: started.clone() };
    let (taken, ahead) = not_hanging(move || {
        let env: Arc<dyn Environment> = Arc::new(env);
        let (mut taken, mut ahead) = (0, 0);
        let plan = plan(threads, 2, 1);
        play(&env, &ReferenceAgent::new(), groups(100), &plan, &mut Latencies::default(), &mut |_| {
            if taken == 0 {
                std::thread::sleep(Duration::from_millis(300));
            }
            ahead = ahead.max(started.load(Ordering::SeqCst) - taken);
            taken += 1;
            Ok(())
        })
        .expect("plays");
        (taken, ahead)
    });
    assert_eq!(taken, 400);
    assert!(ahead <= queue + 2 * threads + 1, "the environment was {ahead} episodes ahead");
}

#[test]
fn a_panicking_environment_stops_the_play_with_its_name() {
    let scripted = ScriptedAgent::new(3);
    let wanted = wanted(&scripted, 12);
    // One task's episodes panic; several worker threads, several sizes.
    let word = groups(12)[7][0].task.id.clone();
    for (workers, stage) in [(1, "environment"), (3, "environment"), (0, "sampler")] {
        for fault in [Fault::PanicInStep, Fault::PanicInOpen] {
            let (result, taken) = collect(trouble(fault, &word), Arc::new(scripted), 12, plan(2, workers, 2));
            match result {
                Err(PipelineError::Panic { stage: found, message }) => {
                    assert_eq!(found, stage);
                    assert!(message.contains("planted panic"), "{message}");
                }
                other => panic!("{workers} workers: {other:?}"),
            }
            assert!(taken.len() < wanted.len());
            assert_valid(&taken, &wanted);
        }
    }
}

/// Plays the first jobs, then panics.
struct Nervous(ScriptedAgent);

impl Agent for Nervous {
    fn name(&self) -> &str {
        "nervous"
    }
    fn play(
        &self,
        hands: &mut dyn Hands,
        jobs: &[EpisodeJob],
        limits: &Limits,
        done: &mut dyn FnMut(usize, EpisodeRecord),
    ) -> Result<PlayStats, AgentError> {
        self.0.play(hands, &jobs[..2], limits, done)?;
        panic!("planted panic in the agent");
    }
}

#[test]
fn a_panicking_agent_stops_the_play_and_what_was_taken_is_valid() {
    let wanted = wanted(&ScriptedAgent::new(3), 12);
    for (threads, workers) in [(1, 0), (1, 2), (3, 0), (3, 2)] {
        let agent = Arc::new(Nervous(ScriptedAgent::new(3)));
        let (result, taken) = collect(trouble(Fault::None, ""), agent, 12, plan(threads, workers, 8));
        let error = result.expect_err("panics");
        assert!(matches!(&error, PipelineError::Panic { stage: "sampler", .. }), "{error}");
        assert!(error.to_string().contains("planted panic in the agent"), "{error}");
        assert!(!taken.is_empty() && taken.len() < wanted.len(), "{}", taken.len());
        assert_valid(&taken, &wanted);
    }
}

/// Refuses to play.
struct Unwilling;

impl Agent for Unwilling {
    fn name(&self) -> &str {
        "unwilling"
    }
    fn play(
        &self,
        _hands: &mut dyn Hands,
        _jobs: &[EpisodeJob],
        _limits: &Limits,
        _done: &mut dyn FnMut(usize, EpisodeRecord),
    ) -> Result<PlayStats, AgentError> {
        Err(AgentError::Model("planted".into()))
    }
}

#[test]
fn an_agents_error_comes_back_as_it_is() {
    for (threads, workers) in [(1, 0), (3, 2)] {
        let (result, taken) = collect(trouble(Fault::None, ""), Arc::new(Unwilling), 6, plan(threads, workers, 8));
        let error = result.expect_err("fails");
        assert!(matches!(&error, PipelineError::Agent(AgentError::Model(m)) if m == "planted"), "{error}");
        assert!(taken.is_empty());
    }
}

#[test]
fn a_refusing_sink_is_not_asked_again() {
    for (threads, workers, concurrent) in [(1, 0, 1), (1, 0, 64), (3, 2, 1), (3, 0, 64)] {
        let (error, asked, started) = not_hanging(move || {
            let started = Arc::new(AtomicUsize::new(0));
            let env: Arc<dyn Environment> =
                Arc::new(Trouble { fault: Fault::None, word: String::new(), started: started.clone() });
            let mut asked = 0;
            let plan = plan(threads, workers, concurrent);
            let result = play(&env, &ScriptedAgent::new(3), groups(200), &plan, &mut Latencies::default(), &mut |_| {
                asked += 1;
                if asked == 5 { Err("the disk is full".into()) } else { Ok(()) }
            });
            (result.expect_err("refused"), asked, started.load(Ordering::SeqCst))
        });
        assert!(matches!(&error, PipelineError::Sink(m) if m == "the disk is full"), "{error}");
        assert_eq!(asked, 5);
        // Nobody goes on sampling for a sink that is gone: at most what the queue and the engines held, and
        // one refill of each engine.
        assert!(started <= 5 + 64 + threads * (2 * concurrent + 2), "{started} episodes were started");
    }
}

#[test]
fn a_panicking_sink_is_the_writer_stage() {
    let error = not_hanging(|| {
        let env = trouble(Fault::None, "");
        play(&env, &ScriptedAgent::new(3), groups(20), &plan(3, 2, 2), &mut Latencies::default(), &mut |_| {
            panic!("planted panic in the sink")
        })
        .expect_err("panics")
    });
    assert!(matches!(&error, PipelineError::Panic { stage: "writer", .. }), "{error}");
}

#[test]
fn an_episode_whose_environment_fails_is_unscored_and_its_siblings_are_untouched() {
    let reference = ReferenceAgent::new();
    let wanted = wanted(&reference, 6);
    assert!(wanted.values().all(|r| r.reward == Reward::Scored(1.0)), "the reference solves everything");
    // One member of one group.
    let key = groups(6)[2][1].key.clone();
    let word = format!("{}/{}/{}", key.task, key.draw, key.k);
    for fault in [Fault::ErrorInReset, Fault::ErrorInStep, Fault::ErrorInEndTurn, Fault::ErrorInEvaluate] {
        for workers in [0, 2] {
            let (result, taken) = collect(trouble(fault, &word), Arc::new(reference.clone()), 6, plan(2, workers, 3));
            result.expect("one failed episode is not a failed play");
            assert_eq!(taken.len(), wanted.len());
            for record in &taken {
                if record.key != key {
                    assert_eq!(wanted.get(&record.key), Some(record));
                    continue;
                }
                let Reward::Unscored(reason) = &record.reward else { panic!("scored: {:?}", record.reward) };
                assert!(reason.contains("trouble") && reason.contains("planted"), "{reason}");
                assert_eq!(record.end, EndReason::EnvironmentFailure);
                let sampled: usize = record.sampled.iter().map(|(_, n)| *n as usize).sum();
                assert_eq!(sampled, record.logprobs.len());
                assert!(record.sampled.iter().all(|(at, n)| (at + n) as usize <= record.ids.len()));
            }
        }
    }
}

#[test]
fn a_play_that_is_stopped_from_outside_says_so() {
    let (error, taken) = not_hanging(|| {
        let env = trouble(Fault::None, "");
        let plan = plan(2, 1, 1);
        let stop = plan.stop.clone();
        let mut taken = 0;
        let result = play(&env, &ScriptedAgent::new(3), groups(100), &plan, &mut Latencies::default(), &mut |_| {
            taken += 1;
            stop.store(true, Ordering::SeqCst);
            Ok(())
        });
        (result.expect_err("stopped"), taken)
    });
    assert!(matches!(error, PipelineError::Agent(AgentError::Stopped)), "{error}");
    assert!(taken < 400, "{taken}");
}

#[test]
fn nothing_to_play_is_no_error() {
    let (result, taken) = collect(trouble(Fault::None, ""), Arc::new(ScriptedAgent::new(0)), 0, plan(3, 2, 4));
    assert_eq!((result.expect("plays").episodes, taken.len()), (0, 0));
}
