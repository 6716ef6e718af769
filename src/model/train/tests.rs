//! The trainer against the candle reference in f64, and against itself.

use candle_core::{DType, Device, Tensor};

use super::super::config::Family;
use super::super::lora::{LoraConfig, LoraTarget};
use super::super::params::tests::{FAMILIES, tiny};
use super::super::reference::Reference;
use super::*;
use crate::world::draw;

/// Weights large enough that every part of the model matters; norms and biases away from 1 and 0.
pub(crate) fn weights(c: &ModelConfig) -> Params {
    let mut p = Params::random(c, 5, 0.25);
    let mut d = draw(6, "test weights", &[]);
    for spec in p.layout().table().tensors().to_vec() {
        if spec.shape.len() == 1 {
            let at = if spec.name.ends_with("bias") { 0.0 } else { 1.0 };
            p.data_mut()[spec.range()].iter_mut().for_each(|v| *v = at + 0.5 * (d.unit() as f32 - 0.5));
        }
    }
    p
}

pub(crate) fn adapters(c: &ModelConfig, targets: &[LoraTarget]) -> LoraParams {
    let mut l = LoraParams::new(c, &LoraConfig { rank: 3, alpha: 4.5, targets: targets.to_vec() }, 9).unwrap();
    let mut d = draw(7, "test adapters", &[]);
    // B away from zero, as after some steps.
    l.data_mut().iter_mut().for_each(|v| *v += 0.3 * (d.unit() as f32 - 0.5));
    l
}

fn ids(d: &mut crate::world::Draw, n: usize, vocab: usize) -> Vec<u32> {
    (0..n).map(|_| d.below(vocab) as u32).collect()
}

/// Two groups with shared prefixes (one longer than a key block), one row alone, every third position trained.
pub(crate) fn batch(c: &ModelConfig) -> TrainBatch {
    let mut d = draw(8, "test batch", &[]);
    let prefixes = vec![ids(&mut d, 70, c.vocab_size), ids(&mut d, 3, c.vocab_size)];
    let mut b = TrainBatch { prefixes, rows: vec![] };
    for (n, prefix) in [(9, Some(0)), (40, Some(1)), (1, Some(0)), (83, None), (17, Some(1))] {
        let ids = ids(&mut d, n, c.vocab_size);
        let targets = (0..n as u32).step_by(3).map(|p| (p, d.below(c.vocab_size) as u32)).collect();
        b.rows.push(TrainRow { ids, prefix, targets });
    }
    b
}

fn repeated(b: &TrainBatch) -> TrainBatch {
    let row = |r: &TrainRow| {
        let before = r.prefix.map_or(&[][..], |p| &b.prefixes[p]);
        TrainRow {
            ids: [before, &r.ids].concat(),
            prefix: None,
            targets: r.targets.iter().map(|t| (t.0 + before.len() as u32, t.1)).collect(),
        }
    };
    TrainBatch { prefixes: vec![], rows: b.rows.iter().map(row).collect() }
}

fn coefficients(n: usize) -> (Vec<f32>, Vec<f32>) {
    let mut d = draw(10, "test loss", &[]);
    let mut v = || (0..n).map(|_| d.unit() as f32 * 2.0 - 1.0).collect();
    (v(), v())
}

fn relative(a: &[f32], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    let diff: f64 = a.iter().zip(b).map(|(a, b)| (f64::from(*a) - b).powi(2)).sum();
    let norm: f64 = b.iter().map(|b| b * b).sum();
    assert!(norm > 0.0, "the reference gradient is zero");
    (diff / norm).sqrt()
}

fn f64s(t: &Tensor) -> Vec<f64> {
    t.flatten_all().unwrap().to_dtype(DType::F64).unwrap().to_vec1().unwrap()
}

/// Forward and gradient of every tensor against candle in f64.
fn check_against_reference(c: &ModelConfig, lora: Option<LoraParams>, temperature: f32) {
    let (p, b) = (weights(c), batch(c));
    let (dl, de) = coefficients(b.targets());
    let reference = Reference::new(c, &p, lora.as_ref(), DType::F64, &Device::Cpu).unwrap();
    let (lp, h) = reference.forward(&b, f64::from(temperature)).unwrap();
    let as_f64 = |v: &[f32]| Tensor::new(v, &Device::Cpu).unwrap().to_dtype(DType::F64).unwrap();
    let loss = ((&lp * as_f64(&dl)).unwrap() + (&h * as_f64(&de)).unwrap()).unwrap().sum_all().unwrap();
    let grads = loss.backward().unwrap();

    let mut t = Trainer::new(c, 1).unwrap();
    let f = t.forward(&p, lora.as_ref(), &b, temperature).unwrap();
    for (what, ours, theirs) in [("logp", &f.logp, f64s(&lp)), ("entropy", &f.entropy, f64s(&h))] {
        for (i, (a, b)) in ours.iter().zip(&theirs).enumerate() {
            assert!((f64::from(*a) - b).abs() < 2e-5 * b.abs().max(1.0), "{what} {i}: {a} against {b}");
        }
    }
    let total = lora.as_ref().map_or(p.data().len(), |l| l.data().len());
    let mut grad = vec![0.0; total];
    t.backward(f.generation, &p, lora.as_ref(), &dl, Some(&de), &mut grad).unwrap();
    let table = lora.as_ref().map_or(p.layout().table(), |l| l.layout().table());
    for spec in table.tensors() {
        let want = grads.get(reference.var(&spec.name).unwrap()).expect("candle has a gradient");
        let error = relative(&grad[spec.range()], &f64s(want));
        assert!(error < 1e-4, "{:?} {}: relative error {error}", c.family, spec.name);
    }
}

#[test]
fn log_probs_and_every_gradient_are_those_of_the_f64_reference() {
    for family in FAMILIES {
        check_against_reference(&tiny(family), None, 0.9);
    }
}

#[test]
fn wider_heads_and_groups_are_right_too() {
    // One kv head, heads wider than hidden / heads, a multiple of 16; and one head per kv head.
    let base = ModelConfig { head_dim: 32, num_attention_heads: 3, num_key_value_heads: 1, ..tiny(Family::Qwen3) };
    check_against_reference(&base, None, 1.0);
    check_against_reference(&ModelConfig { num_key_value_heads: 3, hidden_size: 48, ..base }, None, 1.0);
}

#[test]
fn adapter_gradients_are_those_of_the_f64_reference() {
    for family in FAMILIES {
        let c = tiny(family);
        check_against_reference(&c, Some(adapters(&c, &LoraTarget::all(&c))), 1.3);
        check_against_reference(&c, Some(adapters(&c, &[LoraTarget::V, LoraTarget::O])), 1.0);
    }
}

struct Run {
    logp: Vec<f32>,
    entropy: Vec<f32>,
    grad: Vec<f32>,
}

fn run(t: &mut Trainer, p: &Params, lora: Option<&LoraParams>, b: &TrainBatch) -> Run {
    let (dl, de) = coefficients(b.targets());
    let f = t.forward(p, lora, b, 0.9).unwrap();
    let mut grad = vec![0.0; lora.map_or(p.data().len(), |l| l.data().len())];
    t.backward(f.generation, p, lora, &dl, Some(&de), &mut grad).unwrap();
    Run { logp: f.logp, entropy: f.entropy, grad }
}

#[test]
fn a_shared_prefix_equals_a_repeated_one() {
    for family in FAMILIES {
        let c = tiny(family);
        let (p, b) = (weights(&c), batch(&c));
        let mut t = Trainer::new(&c, 1).unwrap();
        let shared = run(&mut t, &p, None, &b);
        let apart = run(&mut t, &p, None, &repeated(&b));
        for (a, b) in shared.logp.iter().chain(&shared.entropy).zip(apart.logp.iter().chain(&apart.entropy)) {
            assert!((a - b).abs() < 1e-5 * b.abs().max(1.0), "{family:?}: {a} {b}");
        }
        let wide: Vec<f64> = apart.grad.iter().map(|g| f64::from(*g)).collect();
        assert!(relative(&shared.grad, &wide) < 1e-5);
    }
}

#[test]
fn bits_do_not_depend_on_threads_instruction_set_or_earlier_batches() {
    for family in FAMILIES {
        let c = tiny(family);
        let (p, b) = (weights(&c), batch(&c));
        let l = adapters(&c, &LoraTarget::all(&c));
        for lora in [None, Some(&l)] {
            let want = run(&mut Trainer::on(&c, 1, Level::PORTABLE).unwrap(), &p, lora, &b);
            for level in Level::available() {
                for threads in [1, 2, 4] {
                    let mut t = Trainer::on(&c, threads, level).unwrap();
                    // A larger batch first: nothing of it may be left in the workspace.
                    run(&mut t, &p, lora, &repeated(&b));
                    let got = run(&mut t, &p, lora, &b);
                    assert_eq!(got.logp, want.logp, "{family:?} {level:?} {threads}");
                    assert_eq!(got.entropy, want.entropy, "{family:?} {level:?} {threads}");
                    assert_eq!(got.grad, want.grad, "{family:?} {level:?} {threads}");
                }
            }
        }
    }
}

#[test]
fn layers_run_again_give_the_same_bits_as_kept_ones() {
    for family in FAMILIES {
        let c = ModelConfig { num_hidden_layers: 3, ..tiny(family) };
        let (p, b) = (weights(&c), batch(&c));
        let l = adapters(&c, &LoraTarget::all(&c));
        for lora in [None, Some(&l)] {
            let want = run(&mut Trainer::new(&c, 1).unwrap(), &p, lora, &b);
            let mut t = Trainer::new(&c, 2).unwrap();
            t.keep(Keep::Inputs);
            run(&mut t, &p, lora, &repeated(&b));
            let got = run(&mut t, &p, lora, &b);
            assert_eq!((got.logp, got.grad), (want.logp, want.grad.clone()), "{family:?}");
            // A second backward of one forward, when the activations at hand are those of the first layer.
            let (dl, de) = coefficients(b.targets());
            let f = t.forward(&p, lora, &b, 0.9).unwrap();
            for _ in 0..2 {
                let mut grad = vec![0.0; want.grad.len()];
                t.backward(f.generation, &p, lora, &dl, Some(&de), &mut grad).unwrap();
                assert_eq!(grad, want.grad, "{family:?}");
            }
        }
    }
}

#[test]
fn parts_of_a_batch_add_up_and_a_second_backward_repeats_the_first() {
    let c = tiny(Family::Qwen3);
    let (p, b) = (weights(&c), batch(&c));
    let mut t = Trainer::new(&c, 1).unwrap();
    let whole = run(&mut t, &p, None, &b);
    let (dl, _) = coefficients(b.targets());
    let (mut parts, mut again) = (vec![0.0; whole.grad.len()], vec![0.0; whole.grad.len()]);
    let mut only_logp = vec![0.0; whole.grad.len()];
    let f = t.forward(&p, None, &b, 0.9).unwrap();
    t.backward(f.generation, &p, None, &dl, None, &mut only_logp).unwrap();
    t.backward(f.generation, &p, None, &dl, None, &mut again).unwrap();
    assert_eq!(only_logp, again);
    let mut at = 0;
    for row in &b.rows {
        let one = TrainBatch { prefixes: b.prefixes.clone(), rows: vec![row.clone()] };
        let f = t.forward(&p, None, &one, 0.9).unwrap();
        t.backward(f.generation, &p, None, &dl[at..at + row.targets.len()], None, &mut parts).unwrap();
        at += row.targets.len();
    }
    let wide: Vec<f64> = only_logp.iter().map(|g| f64::from(*g)).collect();
    assert!(relative(&parts, &wide) < 1e-5);
}

#[test]
fn many_logit_chunks_give_the_same_as_one() {
    // 4,096 rows are the longest chunk: 4,300 targets of one vocabulary need two, in two halves one each.
    let c = ModelConfig { num_hidden_layers: 1, max_position_embeddings: 5000, ..tiny(Family::Llama) };
    let p = weights(&c);
    let mut d = draw(11, "long", &[]);
    let row = |d: &mut crate::world::Draw| TrainRow {
        ids: ids(d, 50, c.vocab_size),
        prefix: None,
        targets: (0..50).map(|i| (i, d.below(c.vocab_size) as u32)).collect(),
    };
    let rows: Vec<_> = (0..86).map(|_| row(&mut d)).collect();
    let all = TrainBatch { prefixes: vec![], rows: rows.clone() };
    let (dl, de) = coefficients(all.targets());
    let mut t = Trainer::new(&c, 2).unwrap();
    let mut grad = vec![0.0; p.data().len()];
    let f = t.forward(&p, None, &all, 1.0).unwrap();
    t.backward(f.generation, &p, None, &dl, Some(&de), &mut grad).unwrap();
    let (mut logp, mut parts) = (Vec::new(), vec![0.0; grad.len()]);
    for (i, half) in rows.chunks(43).enumerate() {
        let half = TrainBatch { prefixes: vec![], rows: half.to_vec() };
        let at = i * 43 * 50..(i + 1) * 43 * 50;
        let f = t.forward(&p, None, &half, 1.0).unwrap();
        t.backward(f.generation, &p, None, &dl[at.clone()], Some(&de[at]), &mut parts).unwrap();
        logp.extend(f.logp);
    }
    assert_eq!(f.logp, logp);
    let wide: Vec<f64> = parts.iter().map(|g| f64::from(*g)).collect();
    assert!(relative(&grad, &wide) < 1e-5);
}

#[test]
fn every_trainable_tensor_gets_a_gradient() {
    for family in FAMILIES {
        let c = tiny(family);
        // As a run starts: fresh weights and fresh adapters.
        let p = Params::random(&c, 1, 0.02);
        let lora = LoraConfig { rank: 2, alpha: 4.0, targets: LoraTarget::all(&c) };
        let l = LoraParams::new(&c, &lora, 1).unwrap();
        let mut t = Trainer::new(&c, 1).unwrap();
        let full = run(&mut t, &p, None, &batch(&c));
        for s in p.layout().table().tensors() {
            assert!(full.grad[s.range()].iter().any(|g| *g != 0.0), "{family:?} {}", s.name);
            assert!(full.grad[s.range()].iter().all(|g| g.is_finite()), "{family:?} {}", s.name);
        }
        let low = run(&mut t, &p, Some(&l), &batch(&c));
        for s in l.layout().table().tensors() {
            // B starts at zero, so at first only B moves.
            let moves = low.grad[s.range()].iter().any(|g| *g != 0.0);
            assert_eq!(moves, s.name.ends_with("lora_B.weight"), "{family:?} {}", s.name);
        }
        let base = t.forward(&p, None, &batch(&c), 1.0).unwrap();
        assert_eq!(base.logp, t.forward(&p, Some(&l), &batch(&c), 1.0).unwrap().logp);
    }
}

#[test]
fn a_backward_meets_its_own_forward_or_fails() {
    let c = tiny(Family::Llama);
    let (p, b) = (weights(&c), batch(&c));
    let l = adapters(&c, &LoraTarget::ALL);
    let mut t = Trainer::new(&c, 1).unwrap();
    let (dl, _) = coefficients(b.targets());
    let mut grad = vec![0.0; p.data().len()];
    assert!(matches!(t.backward(0, &p, None, &dl, None, &mut grad), Err(ModelError::Generation { held: 0, .. })));
    let first = t.forward(&p, None, &b, 1.0).unwrap().generation;
    let second = t.forward(&p, None, &b, 1.0).unwrap().generation;
    let error = t.backward(first, &p, None, &dl, None, &mut grad).unwrap_err();
    assert_eq!(error, ModelError::Generation { asked: first, held: second });
    let mut low = vec![0.0; l.data().len()];
    assert!(matches!(t.backward(second, &p, Some(&l), &dl, None, &mut low), Err(ModelError::Batch(_))));
    assert!(matches!(t.backward(second, &p, None, &dl[1..], None, &mut grad), Err(ModelError::Length { .. })));
    assert!(matches!(t.backward(second, &p, None, &dl, None, &mut grad[1..]), Err(ModelError::Length { .. })));
    assert!(grad.iter().all(|g| *g == 0.0));
    // A refused forward holds nothing.
    assert!(t.forward(&p, None, &b, 0.0).is_err());
    assert!(matches!(t.backward(second, &p, None, &dl, None, &mut grad), Err(ModelError::Generation { held: 0, .. })));
    let other = Params::random(&tiny(Family::Qwen3), 1, 0.1);
    assert!(matches!(t.forward(&other, None, &b, 1.0), Err(ModelError::Length { .. })));
}

#[test]
fn extremes_stay_finite_and_nan_is_not_hidden() {
    let c = tiny(Family::Qwen3);
    let mut p = weights(&c);
    let one =
        TrainBatch { prefixes: vec![], rows: vec![TrainRow { ids: vec![1], prefix: None, targets: vec![(0, 2)] }] };
    let mut t = Trainer::new(&c, 1).unwrap();
    assert!(t.forward(&p, None, &TrainBatch::default(), 1.0).unwrap().logp.is_empty());
    let none = TrainBatch { prefixes: vec![], rows: vec![TrainRow { ids: vec![1, 2], prefix: None, targets: vec![] }] };
    let f = t.forward(&p, None, &none, 1.0).unwrap();
    let mut grad = vec![0.0; p.data().len()];
    t.backward(f.generation, &p, None, &[], None, &mut grad).unwrap();
    assert!(grad.iter().all(|g| *g == 0.0));
    // Logits thousands apart: the probability underflows, the log-prob does not.
    let name = "model.norm.weight";
    p.tensor_mut(name).unwrap().iter_mut().for_each(|v| *v *= 3000.0);
    let f = t.forward(&p, None, &one, 0.5).unwrap();
    assert!(f.logp[0].is_finite() && f.logp[0] < -100.0 && f.entropy[0] >= 0.0, "{f:?}");
    t.backward(f.generation, &p, None, &[1.0], Some(&[1.0]), &mut grad).unwrap();
    assert!(grad.iter().all(|g| g.is_finite()));
    p.tensor_mut("model.layers.1.mlp.up_proj.weight").unwrap()[0] = f32::NAN;
    let f = t.forward(&p, None, &one, 1.0).unwrap();
    assert!(f.logp[0].is_nan() && f.entropy[0].is_nan());
}
