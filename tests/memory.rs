//! A training step holds one chunk of logits, however many tokens it trains. Bytes are counted by the global
//! allocator, so this file has one test only.

use candle_core::{D, Device, Tensor, Var};
use coevolve::event::{EndReason, Reward, RolloutFinished, RolloutKey};
use coevolve::learner::{GroupRollouts, Learner, LearnerConfig, UpdateOutcome};
use coevolve::model::{Keep, ModelConfig, Params, Trainer};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

struct Counting;

static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call goes to the system allocator unchanged; the counters do not touch the memory.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        PEAK.fetch_max(LIVE.fetch_add(layout.size(), SeqCst) + layout.size(), SeqCst);
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), SeqCst);
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Most bytes alive at once during `f`, beyond those alive before.
fn peak(f: impl FnOnce()) -> usize {
    let before = LIVE.load(SeqCst);
    PEAK.store(before, SeqCst);
    f();
    PEAK.load(SeqCst) - before
}

const V: usize = 1 << 16;

/// A group of four whose members have `length` sampled tokens each.
fn group(length: u32) -> GroupRollouts {
    let rollout = |k: u32| RolloutFinished {
        key: RolloutKey { step: 1, task: "t".into(), draw: 0, k },
        policy_version: 0,
        ids: (0..length + 4).map(|i| if i < 4 { i } else { (i * 31 + k * 7) % 64 }).collect(),
        prompt_len: 4,
        sampled: vec![(4, length)],
        logprobs: vec![-11.0; length as usize],
        sampling_logprobs: Vec::new(),
        actions: Vec::new(),
        env_steps: 1,
        reward: Reward::Scored(f64::from(k % 2)),
        end: EndReason::Done,
    };
    GroupRollouts { rollouts: (0..4).map(rollout).collect() }
}

/// Qwen3 of this many layers and width.
fn model(vocabulary: usize, layers: usize, width: usize) -> ModelConfig {
    ModelConfig::from_json(&format!(
        r#"{{"model_type": "qwen3", "vocab_size": {vocabulary}, "hidden_size": {width}, "intermediate_size": {width},
            "num_hidden_layers": {layers}, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 16,
            "tie_word_embeddings": true, "max_position_embeddings": 4096}}"#
    ))
    .expect("a configuration")
}

fn learner(threads: usize) -> Learner {
    let model = model(V, 1, 16);
    let config = LearnerConfig { entropy_coef: 0.01, ..LearnerConfig::default() };
    Learner::full(&model, Params::random(&model, 1, 0.1), threads, config).expect("a learner")
}

/// Peak of the first step of a new learner: everything that it allocates, and nothing of what it was given.
fn step(length: u32) -> usize {
    step_of(learner(2), length)
}

fn step_of(mut learner: Learner, length: u32) -> usize {
    let groups = [group(length)];
    peak(|| {
        let outcome = learner.step(1, 1.0, &groups).expect("a step");
        assert!(matches!(&outcome.updates[0], UpdateOutcome::Taken(e) if e.trained_tokens == u64::from(4 * length)));
    })
}

/// Peak of logits, log-probs of the targets and their gradient with candle's own ops: the unfused path.
fn unfused(tokens: usize) -> usize {
    let random = |n: usize| (0..n).map(|i| ((i * 2_654_435_761) % 1000) as f32 / 500.0 - 1.0).collect::<Vec<_>>();
    let device = Device::Cpu;
    let h = Var::from_vec(random(tokens * 16), (tokens, 16), &device).expect("fits");
    let w = Var::from_vec(random(V * 16), (V, 16), &device).expect("fits");
    let y = Tensor::zeros((tokens, 1), candle_core::DType::U32, &device).expect("fits");
    peak(|| {
        let logits = h.matmul(&w.t().expect("transposes")).expect("logits");
        let logp = candle_nn::ops::log_softmax(&logits, D::Minus1).and_then(|l| l.gather(&y, 1)).expect("log-probs");
        drop(logp.mean_all().and_then(|l| l.backward()).expect("gradient"));
    })
}

#[test]
fn a_step_holds_one_chunk_of_logits() {
    let row = 4 * V; // bytes of the logits of one token
    let (few, many) = (step(64), step(256)); // 256 and 1024 trained tokens
    assert!(few > 128 * row, "one chunk of 128 rows is alive: {few}");
    let per_token = (many - few) / 768;
    assert!(per_token < row / 20, "a token costs {per_token} bytes, its logits would be {row}");
    // The unfused path holds several copies of all of them, so the counter does see logits.
    let unfused = (unfused(96) - unfused(32)) / 64;
    assert!(unfused > 2 * row, "unfused: {unfused} bytes a token, logits are {row}");
    assert!(many < unfused * 1024 / 4, "{many} against {}", unfused * 1024);

    // And step after step the same: nothing is kept. (One thread: with several, each has scratch of its own, which it gets
    // when it first happens to do a piece of work of some kind.)
    let (mut learner, groups) = (learner(1), [group(2)]);
    let mut steps = |n: u32| {
        let top = peak(|| (0..n).for_each(|s| drop(learner.step(s, 1.0, &groups).expect("a step"))));
        (top, LIVE.load(SeqCst))
    };
    let (_, warm) = steps(3);
    let ((early, _), (late, end)) = (steps(3), steps(200));
    assert!(late < early + 4096 && end < warm + 4096, "{early} {late}, {warm} {end}");

    // A token of a deep model costs what is said of it, and less where layers are run again.
    let deep = model(64, 12, 64);
    let cost = |keep: Keep| {
        let recompute_activations = keep == Keep::Inputs;
        let config = LearnerConfig { recompute_activations, beta: 0.0, ..LearnerConfig::default() };
        let new = || Learner::full(&deep, Params::random(&deep, 1, 0.1), 2, config.clone()).expect("a learner");
        ((step_of(new(), 768) - step_of(new(), 256)) / (4 * 512), Trainer::bytes_per_token(&deep, keep))
    };
    let (kept, again) = (cost(Keep::Activations), cost(Keep::Inputs));
    for (measured, said) in [kept, again] {
        // Beyond that: logits, ids, masks, log-probs and terms of the loss, which do not grow with the model.
        assert!(measured > said * 9 / 10 && measured < said + 2048, "{measured} bytes a token, {said} said");
    }
    assert!(again.0 * 2 < kept.0, "{again:?} {kept:?}");
}
