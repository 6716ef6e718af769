//! What learning costs around the model: the fused loss over logits against the same loss composed of candle
//! ops, the flat per-token loss, AdamW.
//!
//! `cargo bench --bench loss`

use candle_core::{D, Device, Result, Tensor, Var};
use coevolve::learner::adamw::{AdamW, AdamWConfig, grad_norm};
use coevolve::learner::kernels::grpo::GrpoOp;
use coevolve::learner::loss::{LossConfig, LossKind, TokenBatch, TokenConstants, loss};
use coevolve::world::draw;
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use std::hint::black_box;

fn random(purpose: &str, n: usize, from: f32, to: f32) -> Vec<f32> {
    let mut d = draw(1, purpose, &[]);
    (0..n).map(|_| from + (to - from) * d.unit() as f32).collect()
}

/// Sequences of 64 tokens, off-policy, with a reference.
fn constants(n: usize) -> TokenConstants {
    let sequences = n / 64;
    TokenConstants {
        logp_old: Some(random("old", n, -9.0, -7.0)),
        logp_ref: Some(random("ref", n, -9.0, -7.0)),
        logp_sampler: None,
        mask: vec![true; n],
        offsets: (0..=sequences).map(|s| s * 64).collect(),
        advantages: random("advantage", sequences, -1.0, 1.0),
        weights: vec![1.0 / n as f64; sequences],
    }
}

/// dapo with k3, written with candle's differentiable ops.
fn composed(logits: &Tensor, index: &Tensor, old: &Tensor, reference: &Tensor, a: &Tensor) -> Result<Tensor> {
    let logp = candle_nn::ops::log_softmax(logits, D::Minus1)?.gather(index, 1)?.squeeze(1)?;
    let ratio = (&logp - old)?.exp()?;
    let surrogate = (&ratio * a)?.minimum(&(ratio.clamp(0.8f32, 1.28f32)? * a)?)?;
    let d = (reference - &logp)?;
    let kl = ((d.exp()? - &d)? - 1.0)?;
    (kl * 1e-3)?.sub(&surrogate)?.mean_all()
}

fn over_logits(c: &mut Criterion) {
    let mut group = c.benchmark_group("loss over logits, forward and backward");
    group.sample_size(10);
    for (n, v) in [(1024usize, 1200usize), (256, 49_152)] {
        group.throughput(Throughput::Elements(n as u64));
        let device = Device::Cpu;
        let logits = Var::from_vec(random("logits", n * v, -2.0, 2.0), (n, v), &device).expect("shape fits");
        let mut d = draw(1, "targets", &[]);
        let targets: Vec<u32> = (0..n).map(|_| d.below(v) as u32).collect();
        let tokens = constants(n);
        let index = Tensor::from_vec(targets.clone(), (n, 1), &device).expect("shape fits");
        let vector = |x: Vec<f32>| Tensor::from_vec(x, n, &device).expect("shape fits");
        let old = vector(tokens.logp_old.clone().unwrap_or_default());
        let reference = vector(tokens.logp_ref.clone().unwrap_or_default());
        let a = vector((0..n).map(|i| tokens.advantages[i / 64]).collect());
        let op = GrpoOp::new(LossConfig::new(LossKind::Dapo), 1.0, targets, tokens).expect("arrays fit");
        let name = format!("{n} x {v}");
        group.bench_function(BenchmarkId::new("composed", &name), |b| {
            b.iter(|| {
                composed(logits.as_tensor(), &index, &old, &reference, &a).and_then(|l| l.backward()).map(black_box)
            })
        });
        group.bench_function(BenchmarkId::new("fused, autograd", &name), |b| {
            b.iter(|| op.forward(logits.as_tensor()).and_then(|f| f.loss.backward()).map(black_box))
        });
        group.bench_function(BenchmarkId::new("fused, in place", &name), |b| {
            b.iter_batched(
                || logits.as_tensor().copy().expect("memory"),
                |chunk| op.forward_backward(&chunk).map(black_box),
                criterion::BatchSize::PerIteration,
            )
        });
    }
    group.finish();
}

fn over_tokens(c: &mut Criterion) {
    let n = 65_536;
    let tokens = constants(n);
    let logp = random("logp", n, -9.0, -7.0);
    let mut group = c.benchmark_group("loss over log-probs");
    group.throughput(Throughput::Elements(n as u64));
    for (kind, name) in LossKind::ALL {
        let config = LossConfig::new(kind);
        let batch: TokenBatch<'_, f32> = tokens.view(&logp, None);
        group.bench_function(name, |b| b.iter(|| loss(&config, black_box(&batch)).map(black_box)));
    }
    group.finish();
}

fn optimizer(c: &mut Criterion) {
    let n = 4 << 20;
    let gradient = random("gradient", n, -1.0, 1.0);
    let mut parameters = random("parameters", n, -1.0, 1.0);
    let mut state = AdamW::new(n);
    let mut group = c.benchmark_group("4 Mi parameters");
    group.sample_size(20);
    group.throughput(Throughput::Elements(n as u64));
    group.bench_function("adamw", |b| {
        b.iter(|| state.update(&mut parameters, &gradient, 0.5, 1e-6, &AdamWConfig::default()))
    });
    group.bench_function("gradient norm", |b| b.iter(|| black_box(grad_norm(&gradient))));
    group.finish();
}

criterion_group!(benches, over_logits, over_tokens, optimizer);
criterion_main!(benches);
