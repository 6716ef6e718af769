//! Steps of the built-in decoder: every family, whole and through adapters.

use super::*;
use crate::event::Reward;
use crate::learner::batch::group_rollouts;
use crate::learner::fake::rollout;
use crate::learner::loss::LossKind;
use crate::model::{Family, LoraConfig, LoraTarget, MoeConfig, RopeScaling};

const V: usize = 37;

fn model(family: Family) -> ModelConfig {
    ModelConfig {
        family,
        vocab_size: V,
        hidden_size: 24,
        intermediate_size: 40,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        head_dim: 8,
        rms_norm_eps: 1e-5,
        rope_theta: 1000.0,
        rope_scaling: RopeScaling::None,
        max_position_embeddings: 128,
        tie_word_embeddings: family != Family::Qwen2,
        qkv_bias: family == Family::Qwen2,
        qk_norm: matches!(family, Family::Qwen3 | Family::Qwen3Moe),
        moe: (family == Family::Qwen3Moe).then(|| MoeConfig {
            num_experts: 3,
            num_experts_per_tok: 2,
            moe_intermediate_size: 12,
            norm_topk_prob: true,
            decoder_sparse_step: 1,
            mlp_only_layers: vec![],
        }),
        bos_token_id: None,
        eos_token_ids: vec![],
    }
}

fn config() -> LearnerConfig {
    LearnerConfig { learning_rate: 1e-3, ..LearnerConfig::default() }
}

fn groups(step: u32) -> Vec<GroupRollouts> {
    let all = ["a", "b"].into_iter().flat_map(|task| (0..4).map(move |k| (task, k)));
    let scored = |k: u32| Reward::Scored(f64::from(u8::from(k == 0)));
    group_rollouts(all.map(|(task, k)| rollout(step, task, k, V, scored(k))).collect())
}

fn full(family: Family, threads: usize, config: LearnerConfig) -> Learner {
    let model = model(family);
    Learner::full(&model, Params::random(&model, 3, 0.2), threads, config).unwrap()
}

fn lora(family: Family, threads: usize, config: LearnerConfig) -> Learner {
    let model = model(family);
    let lora = LoraConfig { rank: 4, alpha: 8.0, targets: LoraTarget::all(&model) };
    let adapters = LoraParams::new(&model, &lora, 5).unwrap();
    Learner::lora(&model, Params::random(&model, 3, 0.2), adapters, threads, config).unwrap()
}

fn taken(outcome: StepOutcome) -> GradientStepTaken {
    match outcome.updates.into_iter().next().unwrap() {
        UpdateOutcome::Taken(event) => event,
        UpdateOutcome::Skipped(skip) => panic!("skipped: {}", skip.reason),
    }
}

const FAMILIES: [Family; 4] = [Family::Llama, Family::Qwen2, Family::Qwen3, Family::Qwen3Moe];

#[test]
fn the_first_update_is_on_policy_and_changes_every_tensor() {
    for family in FAMILIES {
        for (whole, mut l) in [(true, full(family, 1, config())), (false, lora(family, 1, config()))] {
            let start = l.trainable().unwrap();
            let event = taken(l.step(1, 0.9, &groups(1)).unwrap());
            assert_eq!((event.kl, event.clip_fraction), (0.0, 0.0), "{family:?}");
            assert!(event.grad_norm > 0.0);
            if !whole {
                // B starts at zero, so A has no gradient before B has moved.
                taken(l.step(2, 0.9, &groups(2)).unwrap());
            }
            let end = l.trainable().unwrap();
            for t in lock(l.compute()).tensors() {
                let moved = start[t.range()].iter().zip(&end[t.range()]).filter(|(a, b)| a != b).count();
                assert!(moved * 2 > t.len() || t.name.contains("embed"), "{family:?} {}: {moved}/{}", t.name, t.len());
                assert!(moved > 0, "{family:?} {} did not change", t.name);
                // A mere decay would leave all ratios equal: there was a gradient.
                let moments = l.optimizer.first_moments();
                assert!(moments[t.range()].iter().any(|m| *m != 0.0), "{family:?} {} has no gradient", t.name);
            }
        }
    }
}

#[test]
fn kl_to_the_fixed_reference_grows_from_zero() {
    for mut l in [full(Family::Qwen3, 1, config()), lora(Family::Llama, 1, config())] {
        let kl: Vec<f64> = (1..4).map(|s| taken(l.step(s, 0.9, &groups(s)).unwrap()).kl).collect();
        assert!(kl[0] == 0.0 && kl[1] > 0.0 && kl[2] > kl[1], "{kl:?}");
    }
}

#[test]
fn bf16_weights_are_trained_through_f32_masters() {
    use crate::model::Precision;
    let settings = LearnerConfig { learning_rate: 1e-5, weight_decay: 0.0, grad_clip: 0.0, ..config() };
    let bf16 = LearnerConfig { precision: Precision::Bf16, ..settings.clone() };
    for family in FAMILIES {
        let c = model(family);
        let params = Params::random(&c, 3, 0.2);
        let mut rounded = params.clone();
        Precision::Bf16.round(rounded.data_mut());
        assert_ne!(params, rounded);
        let mut masters = Learner::full(&c, params.clone(), 1, bf16.clone()).unwrap();
        let mut plain = Learner::full(&c, rounded.clone(), 1, settings.clone()).unwrap();
        assert_eq!(masters.policy_weights().unwrap(), rounded.data());
        let (a, b) = (taken(masters.step(1, 0.9, &groups(1)).unwrap()), taken(plain.step(1, 0.9, &groups(1)).unwrap()));
        // The same policy, the same reference: the same numbers and gradient, added to other weights.
        assert_eq!((a.loss, a.kl, a.entropy, a.grad_norm), (b.loss, b.kl, b.entropy, b.grad_norm), "{family:?}");
        assert_eq!(masters.optimizer.first_moments(), plain.optimizer.first_moments());
        let (after, other) = (masters.trainable().unwrap(), plain.trainable().unwrap());
        for (i, ((new, old), (n, o))) in
            after.iter().zip(params.data()).zip(other.iter().zip(rounded.data())).enumerate()
        {
            assert!(((new - old) - (n - o)).abs() < 2e-7, "{family:?} {i}: {old} became {new}, {o} became {n}");
        }
        // Most moves are below what bf16 can show, and are not lost.
        let mut shown = after.clone();
        Precision::Bf16.round(&mut shown);
        assert_eq!(masters.policy_weights().unwrap(), shown);
        let moved = after.iter().zip(params.data()).filter(|(a, b)| a != b).count();
        let visible = shown.iter().zip(rounded.data()).filter(|(a, b)| a != b).count();
        assert!(visible * 10 < moved, "{family:?}: {visible} of {moved}");
        assert_eq!(taken(masters.step(2, 0.9, &groups(2)).unwrap()).step, 2);
    }
    // A frozen base is rounded once, adapters are not.
    let (c, settings) = (model(Family::Llama), LearnerConfig { learning_rate: 1e-3, ..settings });
    let layout = LoraConfig { rank: 4, alpha: 8.0, targets: LoraTarget::all(&c) };
    let (params, adapters) = (Params::random(&c, 3, 0.2), LoraParams::new(&c, &layout, 5).unwrap());
    let mut rounded = params.clone();
    Precision::Bf16.round(rounded.data_mut());
    let bf16 = LearnerConfig { precision: Precision::Bf16, ..settings.clone() };
    let mut a = Learner::lora(&c, params, adapters.clone(), 1, bf16).unwrap();
    let mut b = Learner::lora(&c, rounded, adapters, 1, settings).unwrap();
    for step in 1..3 {
        assert_eq!(taken(a.step(step, 0.9, &groups(step)).unwrap()), taken(b.step(step, 0.9, &groups(step)).unwrap()));
    }
    assert_eq!(a.policy_weights().unwrap(), a.trainable().unwrap());
}

#[test]
fn recomputed_activations_give_the_same_bits() {
    for family in FAMILIES {
        for make in [full, lora] {
            let again = LearnerConfig { recompute_activations: true, ..config() };
            let (mut kept, mut made) = (make(family, 1, config()), make(family, 2, again));
            for step in 1..3 {
                let (a, b) =
                    (kept.step(step, 0.9, &groups(step)).unwrap(), made.step(step, 0.9, &groups(step)).unwrap());
                assert_eq!(taken(a), taken(b), "{family:?}");
            }
        }
    }
}

#[test]
fn same_bits_for_any_thread_count() {
    let run = |threads: usize| {
        let mut l = full(Family::Qwen3, threads, LearnerConfig { entropy_coef: 0.01, ..config() });
        let events: Vec<_> = (1..3).map(|s| taken(l.step(s, 0.9, &groups(s)).unwrap())).collect();
        (events, l.optimizer_hash())
    };
    let one = run(1);
    assert!(one == run(2) && one == run(4));
}

#[test]
fn rewarded_completions_become_likelier() {
    let config = LearnerConfig { learning_rate: 3e-3, weight_decay: 0.0, ..config() };
    for mut l in [full(Family::Qwen3, 1, config.clone()), lora(Family::Qwen2, 1, config)] {
        let groups = groups(1);
        let batch = updates(&groups, l.config()).unwrap().remove(0);
        let sums = |l: &Learner| -> Vec<f64> {
            let m = &batch.micro_batches[0];
            let logp = l.old_logp(&batch, 0.9).unwrap().remove(0);
            m.offsets.windows(2).map(|o| logp[o[0]..o[1]].iter().map(|x| f64::from(*x)).sum()).collect()
        };
        let before = sums(&l);
        for _ in 0..20 {
            l.step(1, 0.9, &groups).unwrap();
        }
        let after = sums(&l);
        let winners = [0, 4]; // k = 0 of each group
        for i in winners {
            assert!(after[i] > before[i] + 1.0, "{i}: {} {}", before[i], after[i]);
        }
        let losers: f64 = (0..8).filter(|i| !winners.contains(i)).map(|i| after[i] - before[i]).sum();
        assert!(losers < 0.0);
    }
}

#[test]
fn resumed_equals_uninterrupted_bit_for_bit() {
    let folder = tempfile::tempdir().unwrap();
    let builders: [fn() -> Learner; 2] = [|| full(Family::Qwen3, 2, config()), || lora(Family::Llama, 2, config())];
    for (i, build) in builders.into_iter().enumerate() {
        let path = folder.path().join(i.to_string());
        let mut straight = build();
        straight.step(1, 0.9, &groups(1)).unwrap();
        straight.save(&path).unwrap();
        let mut resumed = build();
        resumed.load(&path).unwrap();
        for s in 2..4 {
            assert_eq!(straight.step(s, 0.9, &groups(s)).unwrap(), resumed.step(s, 0.9, &groups(s)).unwrap());
        }
        assert_eq!(straight.optimizer_hash(), resumed.optimizer_hash());
    }
}

/// First moments after one update from zero: the clipped gradient, times 1 - beta1.
fn moments(config: LearnerConfig, groups: &[GroupRollouts]) -> (Vec<f32>, GradientStepTaken) {
    let mut l = full(Family::Qwen3, 1, config);
    let event = taken(l.step(1, 0.9, groups).unwrap());
    (l.optimizer.first_moments().to_vec(), event)
}

fn relative(a: &[f32], b: &[f32]) -> f64 {
    let square = |x: f32| f64::from(x) * f64::from(x);
    let difference: f64 = a.iter().zip(b).map(|(a, b)| square(a - b)).sum();
    (difference / b.iter().map(|b| square(*b)).sum::<f64>()).sqrt()
}

/// The gradient of an update is the same sum for every token budget, for every loss but bnpo, which is defined
/// by its micro-batches.
#[test]
fn every_micro_batch_split_gives_the_gradient_of_the_whole() {
    for (kind, name) in LossKind::ALL.into_iter().filter(|(kind, _)| *kind != LossKind::Bnpo) {
        let config = LearnerConfig { loss: kind, entropy_coef: 0.01, ..config() };
        let (whole, event) = moments(config.clone(), &groups(1));
        for micro_batch_tokens in [1, 30, 60] {
            let (split, other) = moments(LearnerConfig { micro_batch_tokens, ..config.clone() }, &groups(1));
            let error = relative(&split, &whole);
            assert!(error < 1e-5, "{name} {micro_batch_tokens}: {error}");
            assert!((other.loss - event.loss).abs() < 1e-6 && other.trained_tokens == event.trained_tokens);
        }
    }
    // The comparison can fail: without the bonus it does.
    let plain = moments(LearnerConfig { entropy_coef: 0.0, ..config() }, &groups(1)).0;
    assert!(relative(&plain, &moments(LearnerConfig { entropy_coef: 0.01, ..config() }, &groups(1)).0) > 1e-4);
}

/// What stands behind the last sampled token is padding, whatever its ids; the order in which rollouts arrive
/// is none. Both leave every bit of the update as it is.
#[test]
fn padding_and_order_leave_every_bit() {
    let run = |groups: &[GroupRollouts]| {
        let mut l = full(Family::Qwen3, 2, config());
        let event = taken(l.step(1, 0.9, groups).unwrap());
        (event, l.weights_hash().unwrap(), l.optimizer_hash())
    };
    let plain = run(&groups(1));
    let mut changed = groups(1);
    changed.reverse();
    for (g, group) in changed.iter_mut().enumerate() {
        group.rollouts.rotate_left(1 + g);
        for (k, rollout) in group.rollouts.iter_mut().enumerate() {
            let end = rollout.sampled.iter().map(|(start, n)| start + n).max().unwrap();
            rollout.ids.truncate(end as usize);
            rollout.ids.extend((0..3 * k as u32).map(|i| i % V as u32));
        }
    }
    assert_eq!(run(&changed), plain);
}

#[test]
fn shared_prompts_and_micro_batches_change_only_rounding() {
    let mut together = full(Family::Llama, 1, config());
    let mut apart = full(Family::Llama, 1, LearnerConfig { micro_batch_tokens: 1, ..config() });
    let (a, b) = (together.step(1, 0.9, &groups(1)).unwrap(), apart.step(1, 0.9, &groups(1)).unwrap());
    assert!(a.computed_tokens < b.computed_tokens);
    let (a, b) = (taken(a), taken(b));
    assert!((a.loss - b.loss).abs() < 1e-6 && (a.entropy - b.entropy).abs() < 1e-5);
    assert!((a.grad_norm - b.grad_norm).abs() < 1e-4 * a.grad_norm, "{} {}", a.grad_norm, b.grad_norm);
}
