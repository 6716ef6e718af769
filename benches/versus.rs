//! One side of the comparison with PyTorch and llama.cpp (`benches/pytorch/README.md`): does a named case once for every
//! line on standard input, and answers with its seconds and its tokens.
//!
//! `cargo bench --bench versus -- [--threads N]`, then lines `train`, `train-recompute`, `agentic`, `lora`, `sample`, `sample-shared`, `smol-sample`.

use coevolve::agent::sample::{Chooser, Sampling};
use coevolve::event::{EndReason, Reward, RolloutFinished, RolloutKey};
use coevolve::learner::{GroupRollouts, Learner, LearnerConfig};
use coevolve::model::{
    Cache, Decoder, Family, LoraConfig, LoraParams, LoraTarget, ModelConfig, Params, RopeScaling, SeqId,
};
use coevolve::world::{Draw, draw};
use std::collections::BTreeMap;
use std::io::{BufRead, Write};
use std::time::Instant;

// The allocator of `coevolve`.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// Qwen3 with 4 layers of width 256: 4.7 million parameters.
fn small() -> ModelConfig {
    ModelConfig {
        family: Family::Qwen3,
        vocab_size: 2048,
        hidden_size: 256,
        intermediate_size: 1024,
        num_hidden_layers: 4,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        head_dim: 64,
        rms_norm_eps: 1e-6,
        rope_theta: 10_000.0,
        rope_scaling: RopeScaling::None,
        moe: None,
        max_position_embeddings: 4096,
        tie_word_embeddings: true,
        qkv_bias: false,
        qk_norm: true,
        bos_token_id: None,
        eos_token_ids: Vec::new(),
    }
}

/// The shape of SmolLM2-135M.
fn smollm2() -> ModelConfig {
    ModelConfig {
        family: Family::Llama,
        vocab_size: 49_152,
        hidden_size: 576,
        intermediate_size: 1536,
        num_hidden_layers: 30,
        num_attention_heads: 9,
        num_key_value_heads: 3,
        head_dim: 64,
        rope_theta: 100_000.0,
        max_position_embeddings: 8192,
        qk_norm: false,
        ..small()
    }
}

fn tokens(noise: &mut Draw, n: usize, vocab: usize) -> Vec<u32> {
    (0..n).map(|_| noise.below(vocab) as u32).collect()
}

/// Groups of rollouts whose rewards differ, so that every token is trained.
fn rollouts(c: &ModelConfig, groups: usize, k: usize, prompt: usize, response: usize) -> Vec<GroupRollouts> {
    let mut noise = draw(1, "bench", &[]);
    let mut group = |g: usize| {
        let before = tokens(&mut noise, prompt, c.vocab_size);
        let rollout = |k: usize| RolloutFinished {
            key: RolloutKey { step: 1, task: format!("t{g}"), draw: 0, k: k as u32 },
            policy_version: 0,
            ids: [before.clone(), tokens(&mut noise, response, c.vocab_size)].concat(),
            prompt_len: prompt as u32,
            sampled: vec![(prompt as u32, response as u32)],
            logprobs: vec![-7.0; response],
            sampling_logprobs: Vec::new(),
            actions: Vec::new(),
            env_steps: 1,
            reward: Reward::Scored((k % 2) as f64),
            end: EndReason::Done,
        };
        GroupRollouts { rollouts: (0..k).map(rollout).collect() }
    };
    (0..groups).map(&mut group).collect()
}

/// A case, ready to be done again and again; tells its tokens.
type Case = Box<dyn FnMut() -> Result<u64>>;

fn learning(mut learner: Learner, groups: Vec<GroupRollouts>) -> Case {
    let mut step = 0;
    Box::new(move || {
        step += 1;
        let outcome = learner.step(step, 1.0, &groups)?;
        Ok(outcome.computed_tokens)
    })
}

/// One update per step, no reference, everything in one micro-batch.
fn settings() -> LearnerConfig {
    LearnerConfig { beta: 0.0, learning_rate: 1e-5, micro_batch_tokens: 1 << 20, ..LearnerConfig::default() }
}

/// `prompts` prompts, each continued `k` times for `steps` tokens at temperature 1. With `share` a prompt is computed once.
fn sampling(c: ModelConfig, threads: usize, shape: (usize, usize, usize, usize), share: bool) -> Result<Case> {
    let (prompts, k, prompt, steps) = shape;
    let params = Params::random(&c, 1, 0.02);
    let decoder = Decoder::new(&c, &params, None)?;
    let mut noise = draw(1, "bench", &[]);
    let all: Vec<Vec<u32>> = (0..prompts).map(|_| tokens(&mut noise, prompt, c.vocab_size)).collect();
    // An engine a thread, as in training; a group stays on its engine.
    let parts: Vec<Vec<Vec<u32>>> = all.chunks(prompts.div_ceil(threads)).map(<[_]>::to_vec).collect();
    Ok(Box::new(move || {
        std::thread::scope(|scope| {
            let engines: Vec<_> = parts
                .iter()
                .zip(0u64..)
                .map(|(part, engine)| {
                    scope.spawn({
                        let (decoder, c) = (&decoder, &c);
                        move || play(decoder, c, part, k, steps, share, engine).map_err(|e| e.to_string())
                    })
                })
                .collect();
            for engine in engines {
                engine.join().map_err(|_| "an engine panicked")??;
            }
            Ok((prompts * k * steps) as u64)
        })
    }))
}

fn play(
    decoder: &Decoder,
    c: &ModelConfig,
    prompts: &[Vec<u32>],
    k: usize,
    steps: usize,
    share: bool,
    engine: u64,
) -> Result<()> {
    let (mut cache, mut chooser, mut noise) = (Cache::new(c), Chooser::default(), draw(engine, "bench", &[]));
    let copies = if share { 1 } else { k };
    let roots: Vec<SeqId> = (0..prompts.len() * copies).map(|_| cache.create()).collect();
    let work: Vec<_> = roots.iter().enumerate().map(|(i, s)| (*s, prompts[i / copies].as_slice())).collect();
    let logits = decoder.forward(&mut cache, &work)?;
    let vocab = c.vocab_size;
    let (mut sequences, mut next) = (Vec::new(), Vec::new());
    for (i, root) in roots.iter().enumerate() {
        for _ in 0..k / copies {
            sequences.push(if share { cache.fork(*root)? } else { *root });
            next.push(chooser.choose(&logits[i * vocab..(i + 1) * vocab], &Sampling::at(1.0), noise.unit())?.id);
        }
    }
    for _ in 1..steps {
        let work: Vec<_> = sequences.iter().zip(&next).map(|(s, t)| (*s, std::slice::from_ref(t))).collect();
        let logits = decoder.forward(&mut cache, &work)?;
        let chosen: std::result::Result<Vec<u32>, _> = logits
            .chunks_exact(vocab)
            .map(|row| chooser.choose(row, &Sampling::at(1.0), noise.unit()).map(|c| c.id))
            .collect();
        next = chosen?;
    }
    Ok(())
}

fn case(name: &str, threads: usize) -> Result<Case> {
    Ok(match name {
        "train" | "agentic" => {
            let c = small();
            let groups = if name == "train" { rollouts(&c, 2, 8, 1, 255) } else { rollouts(&c, 1, 8, 2000, 256) };
            learning(Learner::full(&c, Params::random(&c, 1, 0.02), threads, settings())?, groups)
        }
        // No other side: what running the layers again costs.
        "train-recompute" => {
            let (c, settings) = (small(), LearnerConfig { recompute_activations: true, ..settings() });
            learning(Learner::full(&c, Params::random(&c, 1, 0.02), threads, settings)?, rollouts(&c, 2, 8, 1, 255))
        }
        "lora" => {
            let c = smollm2();
            let lora = LoraConfig { rank: 16, alpha: 32.0, targets: LoraTarget::ALL.to_vec() };
            let lora = LoraParams::new(&c, &lora, 1)?;
            let groups = rollouts(&c, 1, 8, 1, 511);
            learning(Learner::lora(&c, Params::random(&c, 1, 0.02), lora, threads, settings())?, groups)
        }
        "sample" => sampling(small(), threads, (32, 1, 64, 128), false)?,
        "sample-shared" => sampling(small(), threads, (4, 8, 64, 128), true)?,
        "smol-sample" => sampling(smollm2(), threads, (8, 1, 64, 64), false)?,
        other => return Err(format!("no case is called {other}").into()),
    })
}

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().collect();
    let threads = match args.iter().position(|a| a == "--threads") {
        Some(at) => args.get(at + 1).ok_or("--threads: a number is missing")?.parse()?,
        None => 2,
    };
    let mut cases: BTreeMap<String, Case> = BTreeMap::new();
    for line in std::io::stdin().lock().lines() {
        let name = line?.trim().to_string();
        let case = match cases.remove(&name) {
            Some(case) => case,
            None => case(&name, threads)?,
        };
        let case = cases.entry(name).or_insert(case);
        let begin = Instant::now();
        let tokens = case()?;
        println!("{} {tokens}", begin.elapsed().as_secs_f64());
        std::io::stdout().flush()?;
    }
    Ok(())
}
