//! The trainer against the candle reference in f64, and against itself.

use candle_core::{DType, Device, Tensor};

use super::super::config::Family;
use super::super::lora::{LoraConfig, LoraTarget};
use super::super::params::tests::tiny;
use super::super::reference::Reference;
use super::*;
use crate::world::draw;

const FAMILIES: [Family; 3] = [Family::Llama, Family::Qwen2, Family::Qwen3];

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
fn batch(c: &ModelConfig) -> TrainBatch {
    let mut d = draw(8, "test batch", &[]);
    let mut b = TrainBatch::default();
    b.prefixes = vec![ids(&mut d, 70, c.vocab_size), ids(&mut d, 3, c.vocab_size)];
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
        check_against_reference(&c, Some(adapters(&c, &LoraTarget::ALL)), 1.3);
        check_against_reference(&c, Some(adapters(&c, &[LoraTarget::V, LoraTarget::Down])), 1.0);
    }
}
