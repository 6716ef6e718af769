//! Golden numbers, an independent formulation of every loss, finite differences, invariances.

use super::*;
use crate::world::{Draw, draw};
use proptest::prelude::*;

/// An update as lists per sequence, the way one would write it in a script.
#[derive(Clone, Debug, Default)]
struct Case {
    logp: Vec<Vec<f64>>,
    old: Vec<Vec<f64>>,
    reference: Vec<Vec<f64>>,
    sampler: Vec<Vec<f64>>,
    entropy: Vec<Vec<f64>>,
    mask: Vec<Vec<bool>>,
    advantage: Vec<f64>,
}

impl Case {
    fn random(seed: u64, sequences: usize, spread: f64) -> Case {
        let mut d = draw(seed, "case", &[]);
        let mut case = Case::default();
        for s in 0..sequences {
            let n = 1 + d.below(7);
            let near = |d: &mut Draw, base: &[f64], spread: f64| -> Vec<f64> {
                base.iter().map(|x| x + spread * (2.0 * d.unit() - 1.0)).collect()
            };
            let logp: Vec<f64> = (0..n).map(|_| -0.1 - 3.0 * d.unit()).collect();
            case.old.push(near(&mut d, &logp, spread));
            case.sampler.push(near(&mut d, &case.old[s].clone(), spread));
            case.reference.push(near(&mut d, &logp, 2.0 * spread));
            case.entropy.push((0..n).map(|_| d.unit()).collect());
            // The first sequence has no trained token in every third case, the others at least one.
            let nothing = s == 0 && seed.is_multiple_of(3);
            case.mask.push((0..n).map(|t| !nothing && (t == 0 || d.chance(0.7))).collect());
            case.advantage.push(if d.chance(0.15) { 0.0 } else { 4.0 * d.unit() - 2.0 });
            case.logp.push(logp);
        }
        case
    }

    fn trained(&self) -> Vec<usize> {
        self.mask.iter().map(|m| m.iter().filter(|x| **x).count()).collect()
    }

    /// Runs the code under test, micro-batch by micro-batch; gradients per sequence.
    fn run<F: Real>(&self, config: &LossConfig, split: &[Vec<usize>]) -> (Summary, Vec<Vec<F>>, Vec<Vec<F>>) {
        let shape = UpdateShape { trained: &self.trained(), micro_batches: split };
        let weights = token_weights(config, &shape).unwrap();
        let everything: Vec<usize> = (0..self.logp.len()).collect();
        let batches = if split.is_empty() { vec![everything] } else { split.to_vec() };
        let mut total = Summary::default();
        let (mut dlogp, mut dentropy) = (vec![vec![]; self.logp.len()], vec![vec![]; self.logp.len()]);
        for members in &batches {
            let flat = |lists: &[Vec<f64>]| -> Vec<F> {
                members.iter().flat_map(|s| lists[*s].iter().map(|x| F::of(*x))).collect()
            };
            let mut offsets = vec![0];
            members.iter().for_each(|s| offsets.push(offsets[offsets.len() - 1] + self.logp[*s].len()));
            let mask: Vec<bool> = members.iter().flat_map(|s| self.mask[*s].clone()).collect();
            let weights: Vec<f64> = members.iter().map(|s| weights[*s]).collect();
            let advantages: Vec<F> = members.iter().map(|s| F::of(self.advantage[*s])).collect();
            let out = loss(
                config,
                &TokenBatch {
                    logp: &flat(&self.logp),
                    logp_old: Some(&flat(&self.old)),
                    logp_ref: Some(&flat(&self.reference)),
                    logp_sampler: Some(&flat(&self.sampler)),
                    entropy: Some(&flat(&self.entropy)),
                    mask: &mask,
                    offsets: &offsets,
                    advantages: &advantages,
                    weights: &weights,
                },
            )
            .unwrap();
            total.add(&out.summary);
            for (s, o) in members.iter().zip(offsets.windows(2)) {
                dlogp[*s] = out.dlogp[o[0]..o[1]].to_vec();
                if !out.dentropy.is_empty() {
                    dentropy[*s] = out.dentropy[o[0]..o[1]].to_vec();
                }
            }
        }
        (total, dlogp, dentropy)
    }
}

/// The loss as one would write it after TRL and verl: per-token values first, then the aggregation by name.
/// `frozen` gives the log-probs that a stop-gradient looks at.
fn formulation(config: &LossConfig, case: &Case, split: &[Vec<usize>], frozen: &Case) -> f64 {
    let clamp = |x: f64| x.clamp(-20.0, 20.0);
    let mut per_token: Vec<Vec<f64>> = Vec::new();
    for s in 0..case.logp.len() {
        let a = case.advantage[s];
        let on: Vec<usize> = (0..case.logp[s].len()).filter(|t| case.mask[s][*t]).collect();
        let mean_ratio = on.iter().map(|t| case.logp[s][*t] - case.old[s][*t]).sum::<f64>() / on.len().max(1) as f64;
        let sampler_sum: f64 = on.iter().map(|t| case.old[s][*t] - case.sampler[s][*t]).sum();
        per_token.push(
            on.iter()
                .map(|&t| {
                    let lp = case.logp[s][t];
                    let log_ratio = if config.kind == LossKind::Gspo { mean_ratio } else { lp - case.old[s][t] };
                    let r = clamp(log_ratio).exp();
                    let surrogate = match config.kind {
                        LossKind::Gpg => -a * lp,
                        LossKind::Cispo => {
                            let r = clamp(frozen.logp[s][t] - frozen.old[s][t]).exp();
                            -r.min(config.epsilon_high) * a * lp
                        }
                        _ => {
                            let first = config.delta.map_or(r, |delta| r.min(delta)) * a;
                            let second = r.clamp(1.0 - config.epsilon_low, 1.0 + config.epsilon_high) * a;
                            let loss = (-first).max(-second);
                            match config.dual_clip {
                                Some(c) if a < 0.0 => loss.min(-c * a),
                                _ => loss,
                            }
                        }
                    };
                    let w = config.correction.map_or(1.0, |c| {
                        let log_w = match c.level {
                            CorrectionLevel::Token => case.old[s][t] - case.sampler[s][t],
                            CorrectionLevel::Sequence => sampler_sum,
                        };
                        let w = clamp(log_w).exp();
                        match c.kind {
                            CorrectionKind::Tis => w.min(c.max).max(c.min.unwrap_or(0.0)),
                            CorrectionKind::Mis if (c.min.unwrap_or(0.0)..=c.max).contains(&w) => w,
                            CorrectionKind::Mis => 0.0,
                        }
                    });
                    let d = case.reference[s][t] - lp;
                    let kl = match config.kl {
                        KlKind::K1 => -d,
                        KlKind::K2 => d * d / 2.0,
                        KlKind::K3 => clamp(d).exp() - clamp(d) - 1.0,
                    };
                    let beta = if config.kind == LossKind::Gpg { 0.0 } else { config.beta };
                    w * surrogate + beta * kl - config.entropy_coef * case.entropy[s][t]
                })
                .collect(),
        );
    }
    let sum = |v: &Vec<f64>| v.iter().sum::<f64>();
    let n = per_token.len() as f64;
    let tokens: usize = per_token.iter().map(Vec::len).sum();
    match config.kind {
        LossKind::Grpo | LossKind::Gspo => per_token.iter().map(|v| sum(v) / v.len().max(1) as f64).sum::<f64>() / n,
        LossKind::Dapo | LossKind::Cispo | LossKind::Gpg => per_token.iter().map(sum).sum::<f64>() / tokens as f64,
        LossKind::DrGrpo => per_token.iter().map(sum).sum::<f64>() / (n * f64::from(config.max_completion_length)),
        LossKind::Bnpo => {
            let mean = |members: &Vec<usize>| {
                let count: usize = members.iter().map(|s| per_token[*s].len()).sum();
                members.iter().map(|s| sum(&per_token[*s])).sum::<f64>() / count.max(1) as f64
            };
            split.iter().map(mean).sum::<f64>() / split.len() as f64
        }
    }
}

/// Every family with every option switched on somewhere.
fn configs() -> Vec<LossConfig> {
    let mut all = Vec::new();
    for (kind, _) in LossKind::ALL {
        let plain = LossConfig { beta: 0.0, max_completion_length: 11, ..LossConfig::new(kind) };
        let wide = LossConfig { epsilon_low: 0.1, epsilon_high: 0.15, ..plain.clone() };
        all.push(plain.clone());
        for kl in [KlKind::K1, KlKind::K2, KlKind::K3] {
            all.push(LossConfig { beta: 0.3, kl, ..plain.clone() });
        }
        all.push(LossConfig { delta: Some(1.25), ..wide.clone() });
        all.push(LossConfig { delta: Some(1.05), ..wide.clone() });
        all.push(LossConfig { dual_clip: Some(1.2), ..wide.clone() });
        all.push(LossConfig { dual_clip: Some(1.3), delta: Some(1.4), beta: 0.01, entropy_coef: 0.02, ..wide });
        for kind in [CorrectionKind::Tis, CorrectionKind::Mis] {
            for level in [CorrectionLevel::Token, CorrectionLevel::Sequence] {
                for min in [None, Some(0.8)] {
                    let correction = Some(Correction { kind, level, max: 1.3, min });
                    all.push(LossConfig { correction, beta: 0.1, ..plain.clone() });
                }
            }
        }
    }
    all
}

fn halves(n: usize) -> Vec<Vec<usize>> {
    let mut parts = vec![Vec::new(); 2];
    (0..n).for_each(|i| parts[i % 2].push(i));
    parts
}

#[test]
fn values_equal_the_independent_formulation() {
    for seed in 0..12 {
        let case = Case::random(seed, 5, 0.6);
        let split = halves(5);
        for config in configs() {
            let (summary, ..) = case.run::<f64>(&config, &split);
            let want = formulation(&config, &case, &split, &case);
            assert!((summary.loss - want).abs() < 1e-12, "{seed} {config:?}: {} {want}", summary.loss);
        }
    }
}

#[test]
fn gradients_equal_finite_differences() {
    const H: f64 = 1e-6;
    for seed in 0..6 {
        let case = Case::random(seed, 4, 0.6);
        let split = halves(4);
        for config in configs() {
            let (_, dlogp, dentropy) = case.run::<f64>(&config, &split);
            for s in 0..4 {
                for t in 0..case.logp[s].len() {
                    let moved = |by: f64, of_entropy: bool| {
                        let mut c = case.clone();
                        let place = if of_entropy { &mut c.entropy } else { &mut c.logp };
                        place[s][t] += by;
                        formulation(&config, &c, &split, &case)
                    };
                    let slope = (moved(H, false) - moved(-H, false)) / (2.0 * H);
                    let got = dlogp[s][t];
                    assert!((slope - got).abs() < 2e-8, "{seed} {config:?} [{s}][{t}]: {got} {slope}");
                    assert!(case.mask[s][t] || got == 0.0);
                    if config.entropy_coef != 0.0 {
                        let slope = (moved(H, true) - moved(-H, true)) / (2.0 * H);
                        assert!((slope - dentropy[s][t]).abs() < 2e-8);
                    }
                }
            }
        }
    }
}

/// Sequences of ratio 1 with the given lengths and advantages.
fn on_policy(shape: &[(usize, f64)]) -> Case {
    let lists: Vec<Vec<f64>> = shape.iter().map(|(n, _)| vec![-1.0; *n]).collect();
    Case {
        old: lists.clone(),
        reference: lists.clone(),
        sampler: lists.clone(),
        entropy: lists.clone(),
        mask: shape.iter().map(|(n, _)| vec![true; *n]).collect(),
        advantage: shape.iter().map(|(_, a)| *a).collect(),
        logp: lists,
    }
}

#[test]
fn golden_aggregations_for_every_split() {
    let case = on_policy(&[(2, 1.0), (8, -1.0)]);
    for split in [vec![], vec![vec![0, 1]], vec![vec![0], vec![1]], vec![vec![1], vec![0]]] {
        for (kind, want) in [(LossKind::Grpo, 0.0), (LossKind::Dapo, 0.6), (LossKind::DrGrpo, 0.3)] {
            let config = LossConfig { beta: 0.0, max_completion_length: 10, ..LossConfig::new(kind) };
            let (summary, ..) = case.run::<f64>(&config, &split);
            assert!((summary.loss - want).abs() < 1e-15, "{kind:?} {split:?} {}", summary.loss);
        }
    }
    // bnpo: (-2 + 8)/10 in one micro-batch; mean of -1 and +1 in two.
    let config = LossConfig { beta: 0.0, ..LossConfig::new(LossKind::Bnpo) };
    assert!((case.run::<f64>(&config, &[]).0.loss - 0.6).abs() < 1e-15);
    assert_eq!(case.run::<f64>(&config, &[vec![0], vec![1]]).0.loss, 0.0);
}

#[test]
fn golden_clip_table() {
    let config = LossConfig { beta: 0.0, ..LossConfig::new(LossKind::Dapo) };
    for (r, a, value, slope, clipped) in [
        (1.0, 1.0, -1.0, -1.0, 0),
        (1.5, 1.0, -1.28, 0.0, 1),
        (1.5, -1.0, 1.5, 1.5, 0),
        (0.5, 1.0, -0.5, -0.5, 0),
        (0.5, -1.0, 0.8, 0.0, 1),
    ] {
        let mut case = on_policy(&[(1, a)]);
        case.logp[0][0] = case.old[0][0] + f64::ln(r);
        let (s, d, _) = case.run::<f64>(&config, &[]);
        assert!((s.loss - value).abs() < 1e-12 && (d[0][0] - slope).abs() < 1e-12, "{r} {a}: {s:?} {d:?}");
        assert_eq!(s.clipped, clipped);
    }
}

#[test]
fn golden_k3() {
    let config = LossConfig { beta: 1.0, ..LossConfig::new(LossKind::Dapo) };
    for (d, value) in [(0.1, 0.00517092), (-0.1, 0.00483742), (0.0, 0.0)] {
        let mut case = on_policy(&[(1, 0.0)]);
        case.reference[0][0] = case.logp[0][0] + d;
        let (s, g, _) = case.run::<f64>(&config, &[]);
        assert!((s.loss - value).abs() < 5e-9 && (s.kl() - value).abs() < 5e-9);
        assert!((g[0][0] - (1.0 - f64::exp(d))).abs() < 1e-12);
        let (single, ..) = case.run::<f32>(&config, &[]);
        assert!((single.loss - value).abs() < 1e-8, "f32 must not cancel: {}", single.loss);
    }
}

#[test]
fn dual_clip_and_delta_hold_large_ratios() {
    // r = 10, A = -1: 10 unbounded, 3 with dual clip 3, 4 with delta 4.
    let mut case = on_policy(&[(1, -1.0)]);
    case.logp[0][0] = case.old[0][0] + f64::ln(10.0);
    let base = LossConfig { beta: 0.0, ..LossConfig::new(LossKind::Dapo) };
    for (config, value, slope, capped) in [
        (base.clone(), 10.0, 10.0, 0),
        (LossConfig { dual_clip: Some(3.0), ..base.clone() }, 3.0, 0.0, 1),
        (LossConfig { delta: Some(4.0), ..base }, 4.0, 0.0, 1),
    ] {
        let (s, d, _) = case.run::<f64>(&config, &[]);
        assert!((s.loss - value).abs() < 1e-12 && (d[0][0] - slope).abs() < 1e-12, "{config:?} {s:?}");
        assert_eq!((s.capped, s.clipped), (capped, 0));
    }
}

#[test]
fn extreme_and_masked_values_stay_finite() {
    for config in configs() {
        for far in [100.0, 1e30, -100.0, -1e30] {
            let mut case = on_policy(&[(3, 1.0), (2, -1.0)]);
            case.old[0][0] -= far;
            case.old[1][1] += far;
            case.reference[0][0] += if config.kl == KlKind::K3 { far } else { 0.0 };
            case.mask[0][1] = false;
            for lists in [&mut case.logp, &mut case.old, &mut case.reference, &mut case.sampler, &mut case.entropy] {
                lists[0][1] = f64::NAN;
            }
            let (s, d, _) = case.run::<f32>(&config, &[]);
            assert!(s.loss.is_finite() && s.skip().is_none(), "{config:?} {far} {s:?}");
            assert!(d.iter().flatten().all(|g| g.is_finite()));
            assert_eq!(d[0][1], 0.0);
            assert_eq!(s.trained_tokens, 4);
        }
    }
}

#[test]
fn non_finite_and_empty_are_skipped_with_a_reason() {
    let config = LossConfig::new(LossKind::Dapo);
    for kind in LossKind::ALL.map(|k| k.0) {
        let config = LossConfig::new(kind);
        let mut case = on_policy(&[(3, 1.0)]);
        case.logp[0][2] = f64::NAN;
        assert_eq!(case.run::<f64>(&config, &[]).0.skip(), Some(SkipReason::NonFiniteLoss), "{kind:?}");
        let mut case = on_policy(&[(3, 1.0)]);
        case.old[0][2] = f64::NAN;
        let want = (kind != LossKind::Gpg).then_some(SkipReason::NonFiniteLoss);
        assert_eq!(case.run::<f64>(&config, &[]).0.skip(), want, "{kind:?}");
    }
    let mut case = on_policy(&[(3, 1.0), (0, 1.0)]);
    case.mask[0].fill(false);
    let (s, d, _) = case.run::<f64>(&config, &[]);
    assert_eq!((s.loss, s.skip()), (0.0, Some(SkipReason::NoTrainedTokens)));
    assert!(d.iter().flatten().all(|g| *g == 0.0));
    assert_eq!(Case::default().run::<f64>(&config, &[]).0.skip(), Some(SkipReason::NoTrainedTokens));
}

#[test]
fn on_policy_means_ratio_exactly_one() {
    let case = Case::random(4, 3, 0.5);
    let logp: Vec<f32> = case.logp.iter().flatten().map(|x| *x as f32).collect();
    let mut offsets = vec![0];
    case.logp.iter().for_each(|l| offsets.push(offsets[offsets.len() - 1] + l.len()));
    let (weights, mask) = (vec![0.1; 3], vec![true; logp.len()]);
    for (kind, _) in LossKind::ALL {
        let config = LossConfig { beta: 0.5, ..LossConfig::new(kind) };
        let batch = |old, reference| TokenBatch {
            logp: &logp,
            logp_old: old,
            logp_ref: reference,
            logp_sampler: None,
            entropy: None,
            mask: &mask,
            offsets: &offsets,
            advantages: &[1.0, -0.5, 2.0],
            weights: &weights,
        };
        let out = loss(&config, &batch(None, Some(&logp))).unwrap();
        assert_eq!(out, loss(&config, &batch(Some(&logp), Some(&logp))).unwrap());
        assert_eq!((out.summary.kl_sum, out.summary.clipped), (0.0, 0));
        assert!(out.dlogp.iter().all(|g| *g != 0.0), "{kind:?}");
    }
}

#[test]
fn wrong_inputs_are_named() {
    let config = LossConfig::new(LossKind::Dapo);
    let batch = TokenBatch::<f64> {
        logp: &[-1.0, -1.0],
        logp_old: None,
        logp_ref: None,
        logp_sampler: None,
        entropy: None,
        mask: &[true, true],
        offsets: &[0, 2],
        advantages: &[1.0],
        weights: &[1.0],
    };
    assert!(loss(&config, &batch).is_ok());
    let length = |field, got, expected| Err(LossError::Length { field, got, expected });
    assert_eq!(loss(&config, &TokenBatch { mask: &[true], ..batch }), length("mask", 1, 2));
    assert_eq!(loss(&config, &TokenBatch { logp_old: Some(&[0.0]), ..batch }), length("logp_old", 1, 2));
    assert_eq!(loss(&config, &TokenBatch { offsets: &[0, 1], ..batch }), length("logp", 2, 1));
    assert_eq!(loss(&config, &TokenBatch { offsets: &[1, 2], ..batch }), Err(LossError::Offsets { at: 0, value: 1 }));
    let correction = Some(Correction { kind: CorrectionKind::Tis, level: CorrectionLevel::Token, max: 2.0, min: None });
    let corrected = LossConfig { correction, ..config.clone() };
    assert_eq!(loss(&corrected, &batch), Err(LossError::Missing { option: "correction", field: "logp_sampler" }));
    let bad = LossConfig { dual_clip: Some(0.5), ..config.clone() };
    assert!(matches!(loss(&bad, &batch), Err(LossError::Setting { field: "dual_clip", .. })));
    let shape = |split: &[Vec<usize>]| token_weights(&config, &UpdateShape { trained: &[1, 1], micro_batches: split });
    assert!(matches!(shape(&[vec![0, 0]]), Err(LossError::Split { sequence: 0, .. })));
    assert!(matches!(shape(&[vec![2]]), Err(LossError::Split { sequence: 2, .. })));
}

proptest! {
    /// Splitting an update, reordering its sequences and padding them changes nothing but rounding.
    #[test]
    fn split_order_and_padding_do_not_matter(
        seed in 0u64..1000,
        config in prop::sample::select(configs()),
        parts in prop::collection::vec(0usize..3, 5),
        turn in 0usize..5,
    ) {
        let case = Case::random(seed, 5, 0.6);
        let whole = vec![(0..5).collect::<Vec<usize>>()];
        let (base, gradient, _) = case.run::<f64>(&config, &whole);

        if config.kind != LossKind::Bnpo {
            let split: Vec<Vec<usize>> =
                (0..3).map(|p| (0..5).filter(|s| parts[*s] == p).collect::<Vec<usize>>()).filter(|p| !p.is_empty()).collect();
            let (summary, parted, _) = case.run::<f64>(&config, &split);
            prop_assert!((summary.loss - base.loss).abs() < 1e-12);
            prop_assert_eq!(&parted, &gradient);
        }

        let mut turned = case.clone();
        turned.advantage.rotate_left(turn);
        turned.mask.rotate_left(turn);
        for lists in [&mut turned.logp, &mut turned.old, &mut turned.reference, &mut turned.sampler, &mut turned.entropy] {
            lists.rotate_left(turn);
        }
        let (summary, mut moved, _) = turned.run::<f64>(&config, &whole);
        moved.rotate_right(turn);
        prop_assert!((summary.loss - base.loss).abs() < 1e-12);
        prop_assert_eq!(&moved, &gradient);

        let mut padded = case.clone();
        for s in 0..5 {
            padded.mask[s].extend([false, false]);
            for lists in [&mut padded.logp, &mut padded.old, &mut padded.reference, &mut padded.sampler, &mut padded.entropy] {
                lists[s].extend([f64::NAN, 1e300]);
            }
        }
        let (summary, padded, _) = padded.run::<f64>(&config, &whole);
        prop_assert_eq!(summary, base);
        for (p, g) in padded.iter().zip(&gradient) {
            prop_assert_eq!(&p[..g.len()], &g[..]);
            prop_assert!(p[g.len()..].iter().all(|x| *x == 0.0));
        }
    }

    /// f32 follows f64 (cases near a clip bound may fall on either side: the value is continuous there).
    #[test]
    fn f32_follows_f64(seed in 0u64..1000, config in prop::sample::select(configs())) {
        if config.correction.is_some_and(|c| c.kind == CorrectionKind::Mis) {
            return Ok(()); // a mask is not continuous
        }
        let case = Case::random(seed, 5, 0.6);
        let (double, ..) = case.run::<f64>(&config, &[]);
        let (single, ..) = case.run::<f32>(&config, &[]);
        prop_assert!((double.loss - single.loss).abs() < 1e-5 * (1.0 + double.loss.abs()));
    }
}
