//! A log as a long training writes it, and an allocator that counts: for the fold's test and bench.

use coevolve::event::{
    Action, BatchPlanned, Check, ContextSpec, DraftProposed, DraftValidated, EndReason, Event, EvolutionFinished,
    EvolutionStarted, ExplorationStepTaken, GradientStepTaken, Meta, Origin, PolicyPublished, ReflectionWritten,
    Reward, RolloutFinished, RolloutKey, RunStarted, SignalRaised, StepFinished, TaskAdmitted, TaskSpec, ToolCall,
    TurnSpec,
};
use coevolve::log::{EventStore, Log, Options};
use coevolve::project::State;
use coevolve::world::draw;
use std::alloc::{GlobalAlloc, Layout, System};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

/// The system allocator, counting what it is asked for.
pub struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

/// Allocations (growing ones included) since the program began, all threads.
pub fn allocations() -> u64 {
    ALLOCATIONS.load(Ordering::Relaxed)
}

// SAFETY: every call goes to the system allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(pointer, layout) }
    }
    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, new: usize) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.realloc(pointer, layout, new) }
    }
}

/// Groups of a step.
const GROUPS: u64 = 8;
/// Rollouts of a group.
const GROUP_SIZE: u32 = 8;
/// An evolution round follows every so many steps.
pub const ROUND_EVERY: u32 = 500;
const TOOLS: [&str; 12] = [
    "ls",
    "cd",
    "mv",
    "grep",
    "send_message",
    "book_flight",
    "get_stock_info",
    "create_ticket",
    "cancel_booking",
    "post_tweet",
    "cat",
    "fill_fuel_tank",
];

fn task(id: &str) -> TaskSpec {
    TaskSpec {
        id: id.into(),
        env: "desk".into(),
        split: "train".into(),
        family: "files".into(),
        base: "17".into(),
        tools: vec![],
        turns: vec![TurnSpec {
            query: "Move the report to the archive and tell the team where it is.".into(),
            solution: vec![ToolCall { name: "mv".into(), arguments: r#"{"from":"report","to":"archive"}"#.into() }],
            answer: None,
            missing: None,
        }],
    }
}

fn rollout(key: RolloutKey, seed: u64) -> RolloutFinished {
    let mut d = draw(seed, "rollout", &[&key.step.to_string(), &key.task, &key.k.to_string()]);
    // Most groups agree; one in ten is mixed, which raises boundary signals.
    // Tasks are learnt or not, with a slip now and then, which is forgetting.
    let mut of_group = draw(seed, "group", &[&key.step.to_string(), &key.task]);
    let solved = draw(seed, "skill", &[&key.task]).chance(0.6) != of_group.chance(0.02);
    let mixed = of_group.chance(0.1);
    let score = if mixed { d.chance(0.5) } else { solved };
    // A few tools do most of the work.
    let calls: Vec<ToolCall> = (0..1 + d.below(2))
        .map(|_| {
            let common = d.below(4);
            let name = TOOLS[if d.chance(0.9) { common } else { d.below(TOOLS.len()) }];
            ToolCall { name: name.into(), arguments: r#"{"path":"report"}"#.into() }
        })
        .collect();
    let prompt = 48;
    let sampled = 12 + d.below(8) as u32;
    RolloutFinished {
        policy_version: key.step - 1,
        ids: (0..prompt + sampled).map(|i| i * 37 % 1000).collect(),
        prompt_len: prompt,
        sampled: vec![(prompt, sampled)],
        logprobs: (0..sampled).map(|i| -0.01 * i as f32).collect(),
        sampling_logprobs: Vec::new(),
        env_steps: calls.len() as u32,
        actions: vec![Action { turn: 0, text: String::new(), results: vec!["ok".into(); calls.len()], calls }],
        reward: Reward::Scored(f64::from(u8::from(score))),
        end: EndReason::Done,
        key,
    }
}

struct Writer {
    log: Log,
    state: State,
    seq: u64,
    seed: u64,
}

impl Writer {
    fn push(&mut self, event: impl Into<Event>) {
        let event = event.into();
        self.seq += 1;
        let meta = Meta { time_ms: 1_700_000_000_000 + self.seq, duration_us: 1234, ..Meta::default() };
        self.state.apply(self.seq, &event, &meta);
        let _ = self.log.append(event, meta).expect("append");
    }

    fn step(&mut self, step: u32, tasks: u64) {
        let mut d = draw(self.seed, "step", &[&step.to_string()]);
        let groups: Vec<(String, u32)> =
            (0..GROUPS).map(|g| (name((u64::from(step) * GROUPS + g) % tasks), 0)).collect();
        self.push(BatchPlanned {
            step,
            policy_version: step - 1,
            groups: groups.clone(),
            group_size: GROUP_SIZE,
            temperature: 1.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
        });
        let mut keys: Vec<RolloutKey> = groups
            .iter()
            .flat_map(|(task, draw)| (0..GROUP_SIZE).map(|k| RolloutKey { step, task: task.clone(), draw: *draw, k }))
            .collect();
        let sorted = keys.clone();
        d.shuffle(&mut keys);
        for key in keys {
            self.push(rollout(key, self.seed));
        }
        for raised in self.state.due_signals(step) {
            self.push(SignalRaised { because: raised.because.to_string(), key: raised.key, kind: raised.kind });
        }
        let hash = |what: &str| blake3::hash(format!("{what} {step}").as_bytes()).to_hex().to_string();
        for update in 0..1 + step % 2 {
            self.push(GradientStepTaken {
                step,
                update,
                version_before: step - 1,
                version_after: step,
                rollouts: sorted.iter().take(32).map(|key| (key.clone(), 0.5)).collect(),
                loss: 0.1,
                policy_loss: 0.1,
                kl: 0.01,
                entropy: 0.7,
                clip_fraction: 0.02,
                grad_norm: 1.0,
                learning_rate: 1e-6,
                trained_tokens: 500,
                weights_hash: hash("weights"),
            });
        }
        self.push(PolicyPublished { version: step, step, weights_hash: hash("weights") });
        if step.is_multiple_of(ROUND_EVERY) {
            self.round(step / ROUND_EVERY, step);
        }
        // The digest itself costs as much as the state is large; a fold does not look at it.
        self.push(StepFinished { step, mean_reward: 0.5, projection_digest: hash("projections") });
    }

    fn round(&mut self, round: u32, step: u32) {
        let marks = self.state.marked();
        let contexts: Vec<ContextSpec> = coevolve::decide::contexts::select_contexts(&marks, round, 2);
        self.push(EvolutionStarted { round, step, mode: "feedback".into(), contexts: contexts.clone() });
        for context in &contexts {
            let id = &context.id;
            self.push(ReflectionWritten {
                context: id.clone(),
                author: "procedural".into(),
                summary: "moves fail".into(),
                failure_cause: "wrong folder".into(),
                instability_pattern: "cd first".into(),
                focus_pattern: vec!["cd".into(), "mv".into()],
                exploration_objectives: vec!["vary folders".into()],
                do_not_repeat: vec![],
            });
            for step in 0..6 {
                self.push(ExplorationStepTaken {
                    context: id.clone(),
                    round: 0,
                    step,
                    base: "17".into(),
                    reasoning: "try".into(),
                    call: ToolCall { name: "cd".into(), arguments: "{}".into() },
                    observation: "ok".into(),
                    is_error: false,
                });
            }
            let (draft, synthesised) = (format!("d{id}.0"), format!("syn-{id}"));
            self.push(DraftProposed {
                draft: draft.clone(),
                context: id.clone(),
                author: "procedural".into(),
                task: task(&synthesised),
                intent: "move a file".into(),
                completion: "the file is there".into(),
                from_steps: vec![(0, 0), (0, 2)],
            });
            self.push(DraftValidated {
                draft: draft.clone(),
                accepted: true,
                checks: vec![Check { name: "executes".into(), passed: true, detail: "fine".into() }],
                judge: "construction".into(),
            });
            let origin = Origin::Synthesised;
            self.push(TaskAdmitted { task: task(&synthesised), origin, weight: 1.0, draft: Some(draft), step });
        }
        let drafts = contexts.len() as u32;
        self.push(EvolutionFinished { round, step, drafts, admitted: drafts });
    }
}

fn name(task: u64) -> String {
    format!("desk-{task:05}")
}

/// Writes a log of at least `events` events, whole steps; returns their number and the state they fold to.
pub fn write(dir: &Path, events: u64, tasks: u64) -> (u64, State) {
    let started = RunStarted {
        run_id: "00112233445566778899aabbccddeeff".into(),
        seed: 1,
        settings: "{}".into(),
        code_version: "bench".into(),
        policy_digest: String::new(),
        environment: "none".into(),
    };
    let options = Options { sled: false, ..Options::default() };
    let log = Log::create(dir, started.clone(), Meta::default(), options).expect("a log");
    let mut state = State::new();
    state.apply(1, &started.into(), &Meta::default());
    let mut writer = Writer { log, state, seq: 1, seed: 7 };
    for i in 0..tasks {
        writer.push(TaskAdmitted { task: task(&name(i)), origin: Origin::Seed, weight: 1.0, draft: None, step: 0 });
    }
    let mut step = 1;
    while writer.seq < events {
        writer.step(step, tasks);
        step += 1;
    }
    writer.log.barrier().expect("durable");
    assert_eq!(writer.state.anomaly_count, 0, "{:?}", writer.state.anomalies);
    (writer.seq, writer.state)
}
