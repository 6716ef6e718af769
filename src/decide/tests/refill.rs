use proptest::prelude::*;

use super::key;
use crate::decide::advantage::{AdvantageConfig, Estimator, Member, Scale, advantages};
use crate::decide::refill::{teaches, used};
use crate::event::{EndReason, Reward, RolloutFinished};

fn rollout(task: &str, draw: u32, k: u32, score: Option<f64>) -> RolloutFinished {
    RolloutFinished {
        key: key(3, task, draw, k),
        policy_version: 0,
        ids: vec![],
        prompt_len: 0,
        sampled: vec![],
        logprobs: vec![],
        sampling_logprobs: vec![],
        actions: vec![],
        env_steps: 0,
        reward: score.map_or(Reward::Unscored("gone".into()), Reward::Scored),
        end: EndReason::Done,
    }
}

#[test]
fn equal_scores_teach_nothing() {
    for (scores, expected) in [
        (vec![], false),
        (vec![1.0], false),
        (vec![0.7; 8], false),
        (vec![0.5, 0.5 + 0.9e-9], false),
        (vec![0.5, 0.5 + 1.1e-9], true),
        (vec![0.0, 0.0, 1.0], true),
        // Two successes of different worth are no failure, and teach all the same.
        (vec![0.8, 1.0], true),
        (vec![1.0, f64::NAN], false),
        (vec![1.0, f64::INFINITY, 1.0], false),
    ] {
        assert_eq!(teaches(scores.clone()), expected, "{scores:?}");
    }
}

#[test]
fn groups_without_signal_leave_whole_and_the_others_stay_whole() {
    let (s, f, none) = (Some(1.0), Some(0.0), None);
    // The same task twice: two groups. Unscored members of a group that is used stay in it.
    let groups: &[(&str, u32, &[Option<f64>], bool)] = &[
        ("a", 0, &[s, s, s], false),
        ("a", 1, &[s, f, none], true),
        ("b", 0, &[f, f, f], false),
        ("c", 0, &[s, none, none], false),
        ("c", 1, &[none, none, none], false),
        ("d", 0, &[f, f, s], true),
    ];
    let (mut rollouts, mut wanted) = (Vec::new(), Vec::new());
    for (task, draw, scores, stays) in groups {
        for (k, score) in scores.iter().enumerate() {
            let rollout = rollout(task, *draw, k as u32, *score);
            wanted.extend(stays.then(|| rollout.key.clone()));
            rollouts.push(rollout);
        }
    }
    let kept: Vec<_> = used(rollouts).into_iter().map(|r| r.key).collect();
    assert_eq!(kept, wanted);
    assert!(used(Vec::new()).is_empty());
}

proptest! {
    /// What is left out are exactly the groups whose advantages are all 0, by every estimator.
    #[test]
    fn a_group_teaches_exactly_when_an_advantage_is_not_zero(
        rewards in prop::collection::vec(prop::option::of(prop_oneof![Just(0.0), Just(0.5), Just(1.0), 0.0f64..1.0]), 0..9),
    ) {
        let members: Vec<Member> = rewards.iter().map(|reward| Member { group: 0, reward: *reward }).collect();
        for estimator in [Estimator::Grpo, Estimator::Rloo, Estimator::Gpg] {
            let config = AdvantageConfig { estimator, scale: Scale::Group, eps: 1e-4 };
            let some = advantages(&members, &config).iter().any(|a| *a != 0.0);
            prop_assert_eq!(teaches(rewards.iter().flatten().copied()), some);
        }
    }
}
