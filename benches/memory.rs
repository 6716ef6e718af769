//! Peak memory of a training step with a large vocabulary, fused (as built) against unfused (logits of all
//! tokens). No timing; bytes are counted by the global allocator.
//!
//! `cargo bench --bench memory` (vocabulary 151,936, 8,192 trained tokens; `-- V TOKENS` for others).
//!
//! Result (4 layers, d 256, 16 rollouts of 512 tokens, in MiB; unfused = the same step with f32 logits and their
//! gradient for all tokens at once, the least that autograd can hold; `benches/unfused.py` measures what
//! PyTorch does hold):
//!
//! | form | peak | of which weights, reference, moments | one chunk of logits | unfused | share |
//! |---|---|---|---|---|---|
//! | full | 1,870 | 642 | 37 | 11,328 | 16.5 % |
//! | LoRA, rank 16 | 1,236 | 165 | 37 | 10,695 | 11.6 % |
//!
//! PyTorch 2.15 with TRL 1.16's own functions holds 4.00 copies of the logits, not 2: against that the shares
//! are 9.0 % and 6.1 %. With wider models the share grows (weights, gradient and moments count on both sides).

use coevolve::event::{EndReason, Reward, RolloutFinished, RolloutKey};
use coevolve::learner::{GroupRollouts, Learner, LearnerConfig};
use coevolve::model::{LoraConfig, LoraParams, LoraTarget, ModelConfig, Params};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

struct Counting;

static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call goes to the system allocator unchanged; the counters do not touch the memory.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        PEAK.fetch_max(LIVE.fetch_add(layout.size(), Relaxed) + layout.size(), Relaxed);
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Relaxed);
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const MIB: f64 = (1 << 20) as f64;

fn groups(vocabulary: usize, tokens: usize) -> Vec<GroupRollouts> {
    let (members, each) = (8, (tokens / 16) as u32);
    let rollout = |task: &str, k: u32| RolloutFinished {
        key: RolloutKey { step: 1, task: task.into(), draw: 0, k },
        policy_version: 0,
        ids: (0..each + 64).map(|i| if i < 64 { i } else { (i * 31 + k * 977) % vocabulary as u32 }).collect(),
        prompt_len: 64,
        sampled: vec![(64, each)],
        logprobs: vec![-11.0; each as usize],
        sampling_logprobs: Vec::new(),
        actions: Vec::new(),
        env_steps: 1,
        reward: Reward::Scored(f64::from(k % 2)),
        end: EndReason::Done,
    };
    ["a", "b"].map(|t| GroupRollouts { rollouts: (0..members).map(|k| rollout(t, k)).collect() }).into()
}

fn main() {
    let given: Vec<usize> = std::env::args().filter_map(|a| a.parse().ok()).collect();
    let (vocabulary, tokens) = (given.first().copied().unwrap_or(151_936), given.get(1).copied().unwrap_or(8192));
    let model = ModelConfig::from_json(&format!(
        r#"{{"model_type": "qwen3", "vocab_size": {vocabulary}, "hidden_size": 256, "intermediate_size": 768,
            "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
            "tie_word_embeddings": true, "max_position_embeddings": 4096}}"#
    ))
    .expect("a configuration");
    let config = LearnerConfig { micro_batch_tokens: 2 * tokens as u32, ..LearnerConfig::default() };
    let logits = (4 * vocabulary * tokens) as f64;
    println!("vocabulary {vocabulary}, {tokens} trained tokens: logits of all of them {:.0} MiB", logits / MIB);
    for form in ["full", "lora"] {
        let start = LIVE.load(Relaxed);
        let params = Params::random(&model, 1, 0.05);
        let mut learner = if form == "full" {
            Learner::full(&model, params, 2, config.clone())
        } else {
            let lora = LoraConfig { rank: 16, alpha: 32.0, targets: LoraTarget::ALL.to_vec() };
            let adapters = LoraParams::new(&model, &lora, 1).expect("adapters");
            Learner::lora(&model, params, adapters, 2, config.clone())
        }
        .expect("a learner");
        let groups = groups(vocabulary, tokens);
        let state = (LIVE.load(Relaxed) - start) as f64;
        PEAK.store(LIVE.load(Relaxed), Relaxed);
        let outcome = learner.step(1, 1.0, &groups).expect("a step");
        let peak = (PEAK.load(Relaxed) - start) as f64;
        let chunk = (4 * vocabulary * ((1 << 23) / vocabulary).clamp(64, 4096)) as f64;
        let unfused = peak - chunk + 2.0 * logits;
        println!(
            "{form}: peak {:.0} MiB (weights, reference, optimiser {:.0}; one chunk of logits {:.0}); unfused {:.0}; {:.1} %",
            peak / MIB,
            state / MIB,
            chunk / MIB,
            unfused / MIB,
            100.0 * peak / unfused
        );
        assert_eq!(outcome.computed_tokens as usize, tokens + 2 * 63, "each prompt once, less its last token");
    }
}
