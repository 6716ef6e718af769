//! AdamW against its reference in f64, its state on disk, and its bits over thread counts.

use super::cpu::BLOCK;
use super::reference::Reference;
use super::*;
use crate::world::draw;
use proptest::prelude::*;

fn random(n: usize, purpose: &str) -> Vec<f32> {
    let mut d = draw(5, purpose, &[]);
    (0..n).map(|_| d.unit() as f32 - 0.5).collect()
}

#[test]
fn follows_an_f64_reference() {
    let n = 1000;
    let config = AdamWConfig { weight_decay: 0.1, ..AdamWConfig::default() };
    let mut p = random(n, "p");
    let mut reference = Reference::new(&p);
    let mut adam = AdamW::new(n);
    for t in 1..=5 {
        let g = random(n, &format!("g{t}"));
        adam.update(&mut p, &g, 0.5, 0.01, &config).unwrap();
        reference.update(&g, 0.5, 0.01, &config);
    }
    for (a, b) in p.iter().zip(&reference.parameters) {
        assert!((f64::from(*a) - b).abs() < 2e-6, "{a} {b}");
    }
    assert_eq!(adam.step_count(), 5);
}

#[test]
fn same_bits_for_any_thread_count() {
    let n = 3 * BLOCK + 17;
    let run = |threads: usize| {
        rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap().install(|| {
            let mut p = random(n, "p");
            let g = random(n, "g");
            let mut adam = AdamW::new(n);
            let norm = grad_norm(&g);
            adam.update(&mut p, &g, clip_scale(norm, 1.0), 1e-3, &AdamWConfig::default()).unwrap();
            (p, adam, norm.to_bits())
        })
    };
    let one = run(1);
    assert!(one == run(2) && one == run(4));
    let sum: f64 = random(n, "g").iter().map(|g| f64::from(*g).powi(2)).sum();
    assert!((f64::from_bits(one.2) - sum.sqrt()).abs() < 1e-9);
}

#[test]
fn clipping_by_hand() {
    assert_eq!(clip_scale(0.5, 1.0), 1.0);
    assert_eq!(clip_scale(5.0, 0.0), 1.0);
    assert!((clip_scale(5.0, 1.0) - 0.2).abs() < 1e-7);
}

#[test]
fn lengths_must_agree_and_nothing_moves_otherwise() {
    let mut adam = AdamW::new(3);
    let mut p = vec![1.0; 3];
    assert!(adam.update(&mut p, &[1.0; 2], 1.0, 0.1, &AdamWConfig::default()).is_err());
    assert_eq!((adam, p), (AdamW::new(3), vec![1.0; 3]));
}

proptest! {
    #[test]
    fn bytes_round_trip_and_every_damage_is_found(n in 0usize..40, at in 0usize..400, bit in 0u8..8) {
        let mut adam = AdamW::new(n);
        let mut p = random(n, "p");
        adam.update(&mut p, &random(n, "g"), 1.0, 0.1, &AdamWConfig::default()).unwrap();
        let mut bytes = adam.to_bytes();
        prop_assert_eq!(&AdamW::from_bytes(&bytes).unwrap(), &adam);
        let at = at % bytes.len();
        prop_assert!(AdamW::from_bytes(&bytes[..at]).is_err());
        bytes[at] ^= 1 << bit;
        prop_assert!(AdamW::from_bytes(&bytes).is_err());
    }
}
