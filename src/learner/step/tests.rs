//! Whole steps on a bigram policy whose mathematics is done again here in f64.

use super::*;
use crate::event::{Reward, RolloutFinished};
use crate::learner::batch::group_rollouts;
use crate::learner::fake::{Bigram, rollout};
use crate::learner::loss::LossKind;

const V: usize = 12;
const T: f32 = 0.9;

fn config() -> LearnerConfig {
    LearnerConfig { learning_rate: 0.01, weight_decay: 0.1, ..LearnerConfig::default() }
}

fn learner(config: LearnerConfig) -> Learner {
    let (bigram, weights) = Bigram::new(V, 1);
    Learner::new(Box::new(bigram), weights, config).unwrap()
}

/// Two groups of four with rewards that differ, one group without signal.
fn groups(step: u32) -> Vec<GroupRollouts> {
    let reward = |task: &str, k: u32| match (task, k) {
        ("c", _) => Reward::Scored(1.0),
        (_, 3) => Reward::Unscored("deadline".into()),
        (_, k) => Reward::Scored(f64::from(k % 2)),
    };
    let all = ["b", "a", "c"].into_iter().flat_map(|task| (0..4).map(move |k| (task, k)));
    group_rollouts(all.map(|(task, k)| rollout(step, task, k, V, reward(task, k))).collect())
}

fn taken(outcome: &StepOutcome, i: usize) -> &GradientStepTaken {
    match &outcome.updates[i] {
        UpdateOutcome::Taken(event) => event,
        UpdateOutcome::Skipped(skip) => panic!("skipped: {}", skip.reason),
    }
}

fn reason(outcome: &StepOutcome) -> &str {
    match &outcome.updates[0] {
        UpdateOutcome::Taken(_) => panic!("not skipped"),
        UpdateOutcome::Skipped(skip) => &skip.reason,
    }
}

/// (current token, sampled token) of a rollout, straight from the event.
fn pairs(r: &RolloutFinished) -> Vec<(usize, usize)> {
    let positions = r.sampled.iter().flat_map(|(start, n)| *start..start + n);
    positions.map(|p| (r.ids[p as usize - 1] as usize, r.ids[p as usize] as usize)).collect()
}

fn probabilities(w: &[f64], token: usize) -> Vec<f64> {
    let e: Vec<f64> = w[token * V..(token + 1) * V].iter().map(|x| (x / f64::from(T)).exp()).collect();
    let total: f64 = e.iter().sum();
    e.iter().map(|x| x / total).collect()
}

fn wide(w: &[f32]) -> Vec<f64> {
    w.iter().map(|x| f64::from(*x)).collect()
}

/// Advantage of rewards [0, 1, 0, unscored]: mean 1/3, sample std sqrt(1/3).
fn advantage(r: &RolloutFinished) -> f64 {
    match (r.key.task.as_str(), r.reward.score()) {
        ("c", _) | (_, None) => 0.0,
        (_, Some(score)) => (score - 1.0 / 3.0) / ((1.0f64 / 3.0).sqrt() + 1e-4),
    }
}

/// d(dapo loss, ratio 1, no KL)/dw by hand: -sum A / tokens (onehot - p) / T.
fn policy_gradient(w: &[f64], groups: &[GroupRollouts]) -> (Vec<f64>, f64, usize) {
    let rollouts: Vec<&RolloutFinished> = groups.iter().flat_map(|g| &g.rollouts).collect();
    let tokens: usize = rollouts.iter().map(|r| pairs(r).len()).sum();
    let (mut gradient, mut loss) = (vec![0.0; V * V], 0.0);
    for r in rollouts {
        let scale = -advantage(r) / tokens as f64;
        for (token, target) in pairs(r) {
            loss += scale;
            for (j, p) in probabilities(w, token).iter().enumerate() {
                gradient[token * V + j] += scale * (f64::from(u8::from(j == target)) - p) / f64::from(T);
            }
        }
    }
    (gradient, loss, tokens)
}

#[test]
fn the_first_update_is_the_policy_gradient_through_adamw() {
    let mut l = learner(config());
    let before = wide(&l.trainable().unwrap());
    let groups = groups(1);
    let outcome = l.step(1, T, &groups).unwrap();
    let event = taken(&outcome, 0);

    let (gradient, loss, tokens) = policy_gradient(&before, &groups);
    let norm = gradient.iter().map(|g| g * g).sum::<f64>().sqrt();
    assert!((event.loss - loss).abs() < 1e-6 && (event.policy_loss - loss).abs() < 1e-6, "{event:?} {loss}");
    assert!((event.grad_norm - norm).abs() < 1e-6 * norm);
    assert_eq!((event.kl, event.clip_fraction, event.trained_tokens), (0.0, 0.0, tokens as u64));
    let entropies: Vec<f64> = groups
        .iter()
        .flat_map(|g| g.rollouts.iter().flat_map(pairs))
        .map(|(token, _)| probabilities(&before, token).iter().map(|p| -p * p.ln()).sum())
        .collect();
    assert!((event.entropy - entropies.iter().sum::<f64>() / tokens as f64).abs() < 1e-5);

    // First AdamW update from zero moments: lr * g / (|g| + eps) after decay.
    let clip = if norm > 1.0 { 1.0 / (norm + 1e-6) } else { 1.0 };
    let after = l.trainable().unwrap();
    for i in 0..V * V {
        let g = gradient[i] * clip;
        let want = before[i] * (1.0 - 0.01 * 0.1) - 0.01 * g / (g.abs() + 1e-8);
        // Where |g| is near eps the division magnifies f32 noise of g.
        if g.abs() > 1e-5 || g == 0.0 {
            assert!((f64::from(after[i]) - want).abs() < 2e-6, "{i}: {} {want}", after[i]);
        }
    }

    assert_eq!((event.version_before, event.version_after, l.version()), (0, 1, 1));
    let bytes: Vec<u8> = after.iter().flat_map(|x| x.to_le_bytes()).collect();
    assert_eq!(event.weights_hash, blake3::hash(&bytes).to_hex().to_string());
    let mut keys: Vec<_> = groups.iter().flat_map(|g| g.rollouts.iter().map(|r| r.key.clone())).collect();
    keys.sort();
    assert_eq!(event.rollouts.iter().map(|r| r.0.clone()).collect::<Vec<_>>(), keys);
    for ((_, a), r) in event.rollouts.iter().zip(group_rollouts(flat(&groups)).iter().flat_map(|g| &g.rollouts)) {
        assert!((f64::from(*a) - advantage(r)).abs() < 1e-6);
    }
}

fn flat(groups: &[GroupRollouts]) -> Vec<RolloutFinished> {
    groups.iter().flat_map(|g| g.rollouts.clone()).collect()
}

#[test]
fn later_updates_of_a_step_keep_the_old_policy_and_the_reference_stays() {
    let config = LearnerConfig { updates_per_step: 2, learning_rate: 0.2, dual_clip: 0.0, beta: 0.5, ..config() };
    let groups: Vec<GroupRollouts> = groups(1).into_iter().take(2).collect();
    let start = learner(config.clone());
    let first = wide(&start.trainable().unwrap());

    // The weights between the two updates: a learner that only sees the first group.
    let mut halfway = learner(LearnerConfig { updates_per_step: 1, ..config.clone() });
    halfway.step(1, T, &groups[..1]).unwrap();
    let middle = wide(&halfway.trainable().unwrap());

    let mut l = learner(config);
    let outcome = l.step(1, T, &groups).unwrap();
    assert_eq!(outcome.updates.len(), 2);
    let event = taken(&outcome, 1);
    assert_eq!((event.update, event.version_before, event.version_after), (1, 1, 2));

    let rollouts = &groups[1].rollouts;
    let tokens: usize = rollouts.iter().map(|r| pairs(r).len()).sum();
    let (mut policy, mut kl, mut clipped) = (0.0, 0.0, 0);
    for r in rollouts {
        for (token, target) in pairs(r) {
            let (new, old) = (probabilities(&middle, token)[target], probabilities(&first, token)[target]);
            let (ratio, a) = (new / old, advantage(r));
            policy -= (ratio * a).min(ratio.clamp(0.8, 1.28) * a);
            clipped += usize::from((ratio > 1.28 && a > 0.0) || (ratio < 0.8 && a < 0.0));
            let d = old.ln() - new.ln(); // the reference is the initial policy
            kl += d.exp() - d - 1.0;
        }
    }
    let n = tokens as f64;
    assert!(clipped > 0, "the case should clip something");
    assert!((event.policy_loss - policy / n).abs() < 1e-5, "{} {}", event.policy_loss, policy / n);
    assert!((event.kl - kl / n).abs() < 1e-5);
    assert!((event.loss - (policy + 0.5 * kl) / n).abs() < 1e-5);
    assert!((event.clip_fraction - clipped as f64 / n).abs() < 1e-12);
}

#[test]
fn order_and_micro_batches_do_not_matter() {
    let mut one = learner(config());
    one.step(1, T, &groups(1)).unwrap();
    let mut shuffled = groups(1);
    shuffled.reverse();
    shuffled.iter_mut().for_each(|g| g.rollouts.rotate_left(2));
    let mut other = learner(config());
    other.step(1, T, &shuffled).unwrap();
    assert_eq!(one.weights_hash().unwrap(), other.weights_hash().unwrap());

    let mut small = learner(LearnerConfig { micro_batch_tokens: 12, ..config() });
    let outcome = small.step(1, T, &groups(1)).unwrap();
    assert!(!taken(&outcome, 0).rollouts.is_empty());
    for (a, b) in one.trainable().unwrap().iter().zip(small.trainable().unwrap()) {
        assert!((a - b).abs() < 1e-5, "{a} {b}");
    }
}

#[test]
fn leaving_out_zero_advantages_changes_only_the_kl() {
    let run = |skip_zero_advantage| {
        let mut l = learner(LearnerConfig { skip_zero_advantage, beta: 0.0, ..config() });
        let outcomes = [l.step(1, T, &groups(1)).unwrap(), l.step(2, T, &groups(2)).unwrap()];
        (l.trainable().unwrap(), outcomes)
    };
    let ((all, everything), (some, outcomes)) = (run(false), run(true));
    assert_eq!((everything[0].left_out, outcomes[0].left_out), (0, 6));
    assert!(taken(&outcomes[0], 0).rollouts.iter().all(|(_, a)| *a != 0.0));
    assert!(taken(&outcomes[1], 0).trained_tokens < taken(&everything[1], 0).trained_tokens);
    assert!((taken(&outcomes[1], 0).loss - taken(&everything[1], 0).loss).abs() < 1e-12);
    for (a, b) in all.iter().zip(&some) {
        assert!((a - b).abs() < 1e-6);
    }
}

/// A learner with a spoilt model; returns what it was before.
fn poisoned(spoil: impl Fn(&mut Bigram), config: LearnerConfig) -> (Learner, String, String) {
    let (mut bigram, weights) = Bigram::new(V, 1);
    spoil(&mut bigram);
    let l = Learner::new(Box::new(bigram), weights, config).unwrap();
    let hashes = (l.weights_hash().unwrap(), l.optimizer_hash());
    (l, hashes.0, hashes.1)
}

#[test]
fn what_is_not_finite_changes_no_bit() {
    type Spoil = (&'static str, fn(&mut Bigram));
    let spoils: [Spoil; 3] = [
        ("non-finite loss", |b| b.poison_forward = Some(2)),
        ("non-finite gradient", |b| b.poison_backward = Some(2)),
        ("non-finite loss", |b| b.reference[0..V * V].fill(f32::NAN)),
    ];
    for (want, spoil) in spoils {
        // Several micro-batches, so that the fault comes after a good part.
        let (mut l, weights, optimizer) = poisoned(spoil, LearnerConfig { micro_batch_tokens: 12, ..config() });
        let outcome = l.step(1, T, &groups(1)).unwrap();
        assert_eq!(reason(&outcome), want);
        assert_eq!((l.weights_hash().unwrap(), l.optimizer_hash(), l.version()), (weights, optimizer, 0));
    }
    // The next step is as if nothing had happened.
    let (mut l, ..) = poisoned(|b| b.poison_backward = Some(1), config());
    l.step(1, T, &groups(1)).unwrap();
    let outcome = l.step(1, T, &groups(1)).unwrap();
    let mut clean = learner(config());
    assert_eq!(taken(&outcome, 0), taken(&clean.step(1, T, &groups(1)).unwrap(), 0));
}

#[test]
fn steps_without_signal_are_skipped_and_too_many_faults_stop() {
    let mut l = learner(LearnerConfig { skip_zero_advantage: true, max_skips: 1, ..config() });
    let before = l.weights_hash().unwrap();
    let flat: Vec<GroupRollouts> = groups(1).into_iter().filter(|g| g.rollouts[0].key.task == "c").collect();
    for _ in 0..3 {
        assert_eq!(reason(&l.step(1, T, &flat).unwrap()), "no trained tokens");
        assert_eq!(reason(&l.step(1, T, &[]).unwrap()), "no trained tokens");
    }
    assert_eq!((l.weights_hash().unwrap(), l.version()), (before, 0));

    let (mut l, ..) = poisoned(|b| b.reference.fill(f32::NAN), LearnerConfig { max_skips: 2, ..config() });
    assert!(l.step(1, T, &groups(1)).is_ok() && l.step(2, T, &groups(2)).is_ok());
    let error = l.step(3, T, &groups(3)).unwrap_err();
    assert!(matches!(error, LearnerError::TooManySkips { count: 3, .. }), "{error}");
}

#[test]
fn every_loss_takes_a_step_and_entropy_bonus_raises_entropy() {
    for (kind, name) in LossKind::ALL {
        let mut l = learner(LearnerConfig { loss: kind, ..config() });
        let outcome = l.step(1, T, &groups(1)).unwrap();
        assert!(taken(&outcome, 0).grad_norm > 0.0, "{name}");
    }
    let entropy_after = |entropy_coef| {
        let mut l = learner(LearnerConfig { entropy_coef, ..config() });
        for _ in 0..5 {
            l.step(1, T, &groups(1)).unwrap();
        }
        taken(&l.step(1, T, &groups(1)).unwrap(), 0).entropy
    };
    assert!(entropy_after(1.0) > entropy_after(0.0) + 0.01);
}

#[test]
fn settings_without_meaning_are_refused_by_name() {
    let refused = |config| {
        let (bigram, weights) = Bigram::new(V, 1);
        Learner::new(Box::new(bigram), weights, config).unwrap_err().to_string()
    };
    for (config, name) in [
        (LearnerConfig { learning_rate: f64::NAN, ..config() }, "learner.learning_rate"),
        (LearnerConfig { adam_beta1: 1.0, ..config() }, "learner.adam_beta1"),
        (LearnerConfig { updates_per_step: 0, ..config() }, "learner.updates_per_step"),
        (LearnerConfig { dual_clip: 0.5, ..config() }, "dual_clip"),
        (LearnerConfig { beta: -1.0, ..config() }, "beta"),
    ] {
        let text = refused(config);
        assert!(text.contains(name), "{text}");
    }
}
