//! Decoding against training, and its own bits against themselves in other batches, splits and forks.

use super::super::config::Family;
use super::super::lora::LoraTarget;
use super::super::params::tests::{FAMILIES, tiny};
use super::super::train::tests::{adapters, weights};
use super::super::train::{TrainBatch, TrainRow, Trainer};
use super::*;
use crate::world::draw;

fn tokens(seed: u64, n: usize, vocab: usize) -> Vec<u32> {
    let mut d = draw(seed, "decode test", &[]);
    (0..n).map(|_| d.below(vocab) as u32).collect()
}

/// Logits after each token, one call per token.
fn one_by_one(d: &Decoder, ids: &[u32]) -> Vec<Vec<f32>> {
    let mut cache = Cache::new(d.config());
    let s = cache.create();
    ids.iter().map(|id| d.forward(&mut cache, &[(s, &[*id])]).unwrap()).collect()
}

fn log_prob(logits: &[f32], token: u32) -> f64 {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|l| f64::from(l - max).exp()).sum();
    f64::from(logits[token as usize] - max) - sum.ln()
}

#[test]
fn log_probs_are_those_of_training() {
    for family in FAMILIES {
        let c = tiny(family);
        let (p, l) = (weights(&c), adapters(&c, &LoraTarget::all(&c)));
        for lora in [None, Some(&l)] {
            let ids = tokens(1, 150, c.vocab_size);
            let targets = (0..149).map(|i| (i as u32, ids[i + 1])).collect();
            let rows = vec![TrainRow { ids: ids.clone(), prefix: None, targets }];
            let batch = TrainBatch { prefixes: vec![], rows };
            let f = Trainer::new(&c, 1).unwrap().forward(&p, lora, &batch, 1.0).unwrap();
            let d = Decoder::new(&c, &p, lora).unwrap();
            for (i, logits) in one_by_one(&d, &ids).iter().take(149).enumerate() {
                let (ours, want) = (log_prob(logits, ids[i + 1]), f64::from(f.logp[i]));
                assert!((ours - want).abs() < 1e-5 * want.abs().max(1.0), "{family:?} {i}: {ours} {want}");
            }
        }
    }
}

#[test]
fn bits_do_not_depend_on_the_batch() {
    for family in FAMILIES {
        let c = tiny(family);
        let d = Decoder::new(&c, &weights(&c), None).unwrap();
        let ids: Vec<_> = (0..32).map(|i| tokens(i, 5 + (i as usize * 37) % 140, c.vocab_size)).collect();
        let steps: Vec<_> = (0..32).map(|i| tokens(100 + i, 3, c.vocab_size)).collect();
        // Each sequence alone: its prompt, then three single tokens.
        let alone: Vec<Vec<Vec<f32>>> = (0..32)
            .map(|i| {
                let mut cache = Cache::new(&c);
                let s = cache.create();
                let mut out = vec![d.forward(&mut cache, &[(s, &ids[i])]).unwrap()];
                out.extend(steps[i].iter().map(|t| d.forward(&mut cache, &[(s, &[*t])]).unwrap()));
                out
            })
            .collect();
        for size in [2, 7, 32] {
            let mut cache = Cache::new(&c);
            let seqs: Vec<_> = (0..size).map(|_| cache.create()).collect();
            // Mixed prefill and decode: the first half starts one call earlier.
            for call in 0..5usize {
                let mut work: Vec<(usize, usize, &[u32])> = Vec::new();
                for i in 0..size {
                    let step = if i < size / 2 { call } else { call.wrapping_sub(1) };
                    match step {
                        0 => work.push((i, step, &ids[i])),
                        1..=3 => work.push((i, step, &steps[i][step - 1..step])),
                        _ => {}
                    }
                }
                let items: Vec<_> = work.iter().map(|(i, _, t)| (seqs[*i], *t)).collect();
                let logits = d.forward(&mut cache, &items).unwrap();
                for ((i, step, _), row) in work.iter().zip(logits.chunks_exact(c.vocab_size)) {
                    assert_eq!(row, alone[*i][*step], "{family:?}: sequence {i} step {step} in a batch of {size}");
                }
            }
        }
    }
}

#[test]
fn bits_do_not_depend_on_the_split_or_on_forks() {
    for family in FAMILIES {
        let c = ModelConfig { max_position_embeddings: 1000, ..tiny(family) };
        let d = Decoder::new(&c, &weights(&c), None).unwrap();
        // Longer than a chunk of the workspace, so that the inner split is covered too.
        let ids = tokens(3, 700, c.vocab_size);
        let want = one_by_one(&d, &ids);
        let mut cache = Cache::new(&c);
        let s = cache.create();
        for (from, to) in [(0, 1), (1, 64), (64, 65), (65, 600), (600, 700)] {
            assert_eq!(d.forward(&mut cache, &[(s, &ids[from..to])]).unwrap(), want[to - 1], "{family:?} {from}..{to}");
        }
        let whole = cache.create();
        assert_eq!(d.forward(&mut cache, &[(whole, &ids)]).unwrap(), want[699]);

        // Three forks in the middle of a page go different ways; one of them is truncated back and continued.
        let base = cache.create();
        d.forward(&mut cache, &[(base, &ids[..100])]).unwrap();
        let before = cache.bytes();
        let forks: Vec<_> = (0..3).map(|_| cache.fork(base).unwrap()).collect();
        assert_eq!(cache.bytes(), before, "forks copy nothing yet");
        let other = tokens(4, 50, c.vocab_size);
        let logits = d
            .forward(&mut cache, &[(forks[0], &ids[100..130]), (forks[1], &other), (forks[2], &ids[100..101])])
            .unwrap();
        let rows: Vec<_> = logits.chunks_exact(c.vocab_size).collect();
        assert_eq!((rows[0], rows[2]), (&want[129][..], &want[100][..]));
        let fresh = one_by_one(&d, &[&ids[..100], &other[..]].concat());
        assert_eq!(rows[1], fresh[149]);
        assert_eq!(d.forward(&mut cache, &[(base, &ids[100..103])]).unwrap(), want[102]);
        cache.truncate(forks[1], 70).unwrap();
        assert_eq!(cache.len(forks[1]), Ok(70));
        assert_eq!(d.forward(&mut cache, &[(forks[1], &ids[70..90])]).unwrap(), want[89]);
        for seq in [forks[0], forks[1], forks[2], s, whole, base] {
            cache.free(seq).unwrap();
        }
        assert_eq!((cache.bytes(), cache.sequences()), (0, 0), "every page came back");
    }
}

#[test]
fn every_instruction_set_has_the_same_bits() {
    for family in FAMILIES {
        let c = tiny(family);
        let ids = tokens(5, 90, c.vocab_size);
        let run = |level| {
            let d = Decoder::on(&c, &weights(&c), None, level).unwrap();
            let mut cache = Cache::new(&c);
            let s = cache.create();
            d.forward(&mut cache, &[(s, &ids)]).unwrap()
        };
        let first = run(Level::PORTABLE);
        for level in Level::available() {
            assert_eq!(run(level), first, "{family:?} {level:?}");
        }
    }
}

#[test]
fn refusals_leave_the_cache_as_it_was() {
    let c = tiny(Family::Llama);
    let d = Decoder::new(&c, &weights(&c), None).unwrap();
    let mut cache = Cache::new(&c);
    let (a, b) = (cache.create(), cache.create());
    let mut err = |work: &[(SeqId, &[u32])]| d.forward(&mut cache, work).unwrap_err();
    assert!(matches!(err(&[(a, &[1]), (b, &[])]), ModelError::Work(_)));
    assert!(matches!(err(&[(a, &[1]), (a, &[2])]), ModelError::Work(_)));
    assert!(matches!(err(&[(a, &[1]), (b, &[37])]), ModelError::Token { id: 37, .. }));
    assert!(matches!(err(&[(a, &[1; 513])]), ModelError::TooLong { len: 513, max: 512, .. }));
    assert_eq!((cache.len(a), cache.len(b), cache.bytes()), (Ok(0), Ok(0), 0));
    cache.free(b).unwrap();
    assert!(matches!(d.forward(&mut cache, &[(b, &[1])]), Err(ModelError::NoSequence(_))));
    assert!(cache.fork(b).is_err() && cache.free(b).is_err());
    let mut other = Cache::new(&tiny(Family::Qwen3));
    let s = other.create();
    assert!(d.forward(&mut other, &[(s, &[1])]).is_ok(), "the same shape of cache");
    let mut wider = Cache::new(&ModelConfig { head_dim: 8, ..c.clone() });
    let s = wider.create();
    assert!(matches!(d.forward(&mut wider, &[(s, &[1])]), Err(ModelError::Work(_))));
}
