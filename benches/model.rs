//! Training steps and sampling of the decoder. Throughput is floating-point operations (Gelem/s = GFLOP/s).
//!
//! Measured once on one thread of a 2-core virtual Xeon with AVX-512, processor time, other work running
//! beside it (expect more on a quiet machine). The matrix tile alone reaches 172 GFLOP/s there, 91 on AVX2.
//!
//! | case | time | GFLOP/s |
//! |---|---|---|
//! | train tiny (2.2 M parameters), 64 rows x 256 tokens, forward / backward | 1.10 / 2.08 s | 67 / 71 |
//! | the same with shared prompts | 0.41 / 0.74 s | 68 / 75 |
//! | SmolLM2-135M LoRA rank 16, prompt 600 shared by 4 x 60, forward / backward | 3.0 / 3.6 s | 72 / 60 |
//! | decode tiny, 32 rows | 3.3 ms a step, 9,700 tokens/s | 51 |
//! | decode tiny, 1 row | 0.5 ms a step, 2,100 tokens/s | 11 |
//! | prefill tiny, 200 tokens | 10 ms | 76 |
//! | decode SmolLM2-135M, 8 rows | 70 ms a step, 114 tokens/s | 33 |
//! | prefill SmolLM2-135M, 300 tokens | 0.66 s | 97 |
//! | pack weights, tiny / SmolLM2-135M | 6 ms / 0.39 s | |

use std::hint::black_box;

use coevolve::model::{
    Cache, Decoder, Family, LoraConfig, LoraParams, LoraTarget, ModelConfig, Params, RopeScaling, Sequence, TrainBatch,
    Trainer,
};
use coevolve::world::draw;
use criterion::{Criterion, Throughput, criterion_group, criterion_main};

/// Ids and targets of a sequence.
type Row = (Vec<u32>, Vec<(u32, u32)>);

/// About the size of the embedded policy: 2.2 million parameters.
fn tiny() -> ModelConfig {
    ModelConfig {
        family: Family::Qwen3,
        vocab_size: 1200,
        hidden_size: 192,
        intermediate_size: 512,
        num_hidden_layers: 5,
        num_attention_heads: 6,
        num_key_value_heads: 2,
        head_dim: 32,
        rms_norm_eps: 1e-6,
        rope_theta: 10_000.0,
        rope_scaling: RopeScaling::None,
        max_position_embeddings: 2048,
        tie_word_embeddings: true,
        qkv_bias: false,
        qk_norm: true,
        moe: None,
        bos_token_id: None,
        eos_token_ids: vec![],
    }
}

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
        rope_scaling: RopeScaling::None,
        max_position_embeddings: 8192,
        qk_norm: false,
        moe: None,
        ..tiny()
    }
}

fn tokens(seed: u64, n: usize, c: &ModelConfig) -> Vec<u32> {
    let mut d = draw(seed, "bench", &[]);
    (0..n).map(|_| d.below(c.vocab_size) as u32).collect()
}

/// `groups` prompts of `prompt` tokens, `k` completions each, every completion token trained.
fn batch(c: &ModelConfig, groups: usize, k: usize, prompt: usize, completion: usize, share: bool) -> TrainBatch {
    let mut b = TrainBatch::default();
    for g in 0..groups {
        let before = tokens(g as u64, prompt, c);
        let rows: Vec<Row> = (0..k)
            .map(|i| {
                let ids = [before.clone(), tokens((1000 + g * k + i) as u64, completion, c)].concat();
                let targets = (prompt - 1..ids.len() - 1).map(|p| (p as u32, ids[p + 1])).collect();
                (ids, targets)
            })
            .collect();
        let rows: Vec<_> = rows.iter().map(|(ids, targets)| Sequence { ids, targets }).collect();
        if share {
            b.push_group(&rows);
        } else {
            rows.iter().for_each(|r| b.push_group(std::slice::from_ref(r)));
        }
    }
    b
}

fn linear_params(c: &ModelConfig) -> usize {
    c.num_hidden_layers * c.hidden_size * (c.qkv_dim() + c.q_dim() + 3 * c.intermediate_size)
}

/// Operations of a forward: two per weight and token, two per head float and visible key for scores and for
/// values, and the head for scored rows.
fn forward_flops(c: &ModelConfig, b: &TrainBatch) -> u64 {
    let mut keys = 0;
    for p in &b.prefixes {
        keys += p.len() * (p.len() + 1) / 2;
    }
    for r in &b.rows {
        let before = r.prefix.map_or(0, |p| b.prefixes[p].len());
        keys += r.ids.len() * before + r.ids.len() * (r.ids.len() + 1) / 2;
    }
    let linear = 2 * linear_params(c) * b.tokens() + 2 * c.vocab_size * c.hidden_size * b.targets();
    (linear + 4 * keys * c.q_dim() * c.num_hidden_layers) as u64
}

fn train(c: &mut Criterion) {
    let mut g = c.benchmark_group("train");
    g.sample_size(10);
    let config = tiny();
    let params = Params::random(&config, 1, 0.02);
    let mut grad = vec![0.0; params.data().len()];
    for (name, share) in [("tiny 64 x 256 (8 prompts of 192, 8 x 64)", false), ("the same, prompts shared", true)] {
        let b = batch(&config, 8, 8, 192, 64, share);
        // A backward costs twice its forward, here of the same targets.
        g.throughput(Throughput::Elements(3 * forward_flops(&config, &b)));
        for threads in [1, 2] {
            let mut t = Trainer::new(&config, threads).unwrap();
            let dlogp = vec![-1.0 / b.targets() as f32; b.targets()];
            g.bench_function(format!("{name}, {threads} threads"), |bench| {
                bench.iter(|| {
                    let f = t.forward(&params, None, &b, 0.9).unwrap();
                    grad.fill(0.0);
                    t.backward(f.generation, &params, None, &dlogp, None, &mut grad).unwrap();
                    black_box(&grad);
                });
            });
        }
    }
    let config = smollm2();
    let params = Params::random(&config, 1, 0.02);
    let lora = LoraConfig { rank: 16, alpha: 32.0, targets: LoraTarget::ALL.to_vec() };
    let lora = LoraParams::new(&config, &lora, 1).unwrap();
    let mut grad = vec![0.0; lora.data().len()];
    let b = batch(&config, 1, 4, 600, 60, true);
    // Frozen weights have no gradient of their own: a backward costs about its forward.
    g.throughput(Throughput::Elements(2 * forward_flops(&config, &b)));
    let mut t = Trainer::new(&config, 2).unwrap();
    let dlogp = vec![-1.0 / b.targets() as f32; b.targets()];
    g.bench_function("SmolLM2-135M LoRA, prompt 600 shared by 4 x 60, 2 threads", |bench| {
        bench.iter(|| {
            let f = t.forward(&params, Some(&lora), &b, 0.9).unwrap();
            t.backward(f.generation, &params, Some(&lora), &dlogp, None, &mut grad).unwrap();
            black_box(&grad);
        });
    });
    g.finish();
}

fn decode(c: &mut Criterion) {
    let mut g = c.benchmark_group("decode");
    g.sample_size(10);
    for (name, config, rows, prompt, steps) in [
        ("tiny", tiny(), 32_usize, 200_usize, 32_usize),
        ("tiny", tiny(), 1, 200, 32),
        ("SmolLM2-135M", smollm2(), 8, 300, 4),
    ] {
        let params = Params::random(&config, 1, 0.02);
        let decoder = Decoder::new(&config, &params, None).unwrap();
        let mut cache = Cache::new(&config);
        let prompts: Vec<_> = (0..rows.div_ceil(8)).map(|i| tokens(i as u64, prompt, &config)).collect();
        let roots: Vec<_> = prompts.iter().map(|_| cache.create()).collect();
        let work: Vec<_> = roots.iter().zip(&prompts).map(|(s, p)| (*s, p.as_slice())).collect();
        decoder.forward(&mut cache, &work).unwrap();
        let seqs: Vec<_> = (0..rows).map(|i| cache.fork(roots[i / 8]).unwrap()).collect();
        let per_token = 2 * (linear_params(&config) + config.vocab_size * config.hidden_size)
            + 4 * (prompt + steps / 2) * config.q_dim() * config.num_hidden_layers;
        g.throughput(Throughput::Elements((per_token * rows * steps) as u64));
        g.bench_function(format!("{name}: {rows} rows after a prompt of {prompt} (8 share one), {steps} steps"), |b| {
            b.iter(|| {
                for i in 0..steps {
                    let token = [i as u32];
                    let work: Vec<_> = seqs.iter().map(|s| (*s, &token[..])).collect();
                    black_box(decoder.forward(&mut cache, &work).unwrap());
                }
                seqs.iter().for_each(|s| cache.truncate(*s, prompt).unwrap());
            });
        });
        g.throughput(Throughput::Elements((2 * linear_params(&config) * prompt) as u64));
        g.bench_function(format!("{name}: prefill of {prompt}"), |b| {
            b.iter(|| {
                let s = cache.create();
                black_box(decoder.forward(&mut cache, &[(s, &prompts[0])]).unwrap());
                cache.free(s).unwrap();
            });
        });
        g.throughput(Throughput::Elements(params.data().len() as u64));
        g.bench_function(format!("{name}: pack weights"), |b| {
            b.iter(|| black_box(Decoder::new(&config, &params, None).unwrap()));
        });
    }
    g.finish();
}

criterion_group!(benches, train, decode);
criterion_main!(benches);
