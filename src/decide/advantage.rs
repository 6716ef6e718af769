//! Advantages of the rollouts of one step, from their rewards. Pure, f64.
//!
//! Definitions (R = reward, n = scored members of the group):
//!
//! * `grpo`: `(R - mean) / (std + eps)`, **sample** standard deviation (n - 1) over the scored members.
//!   [`Scale::Batch`] divides by the sample standard deviation of all scored rewards of the step,
//!   [`Scale::None`] does not divide (Dr. GRPO).
//! * `rloo`: `n / (n - 1) * (R - mean)`, never divided by a standard deviation.
//! * `gpg`: `alpha * (R - mean)`, `alpha = B / (B - M)` with B the scored rollouts of the step and M those
//!   of them whose group carries no signal; never divided by a standard deviation.
//!
//! Unscored members get exactly 0 and enter neither mean nor deviation. A group whose rewards span at most
//! [`EQUAL_RANGE`], or that has fewer than two scored members, gets exactly 0: the *range* is tested because
//! eight times 0.7 has a standard deviation of 1.2e-16 in f64, not 0.

use std::collections::BTreeMap;

/// Rewards closer than this count as equal.
pub const EQUAL_RANGE: f64 = 1e-9;

/// How a reward becomes an advantage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Estimator {
    /// Group-relative, divided according to [`Scale`].
    #[default]
    Grpo,
    /// Leave-one-out baseline.
    Rloo,
    /// Group policy gradient, corrected for groups without signal.
    Gpg,
}

/// What a `grpo` advantage is divided by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Scale {
    /// The group's standard deviation.
    #[default]
    Group,
    /// The step's standard deviation.
    Batch,
    /// Nothing (Dr. GRPO).
    None,
}

/// Settings of [`advantages`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdvantageConfig {
    /// Estimator.
    pub estimator: Estimator,
    /// Divisor, for [`Estimator::Grpo`] only.
    pub scale: Scale,
    /// Added to the standard deviation. Default 1e-4.
    pub eps: f64,
}

impl Default for AdvantageConfig {
    fn default() -> Self {
        AdvantageConfig { estimator: Estimator::Grpo, scale: Scale::Group, eps: 1e-4 }
    }
}

/// One rollout as this module sees it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Member {
    /// Which group: an index or any number that is equal for equal (step, task, draw).
    pub group: u64,
    /// Reward; `None` = unscored. A reward that is not finite counts as unscored.
    pub reward: Option<f64>,
}

/// Mean and sample standard deviation; `None` with fewer than two values or when they are all equal.
fn spread(values: &[f64]) -> Option<(f64, f64)> {
    let low = values.iter().copied().fold(f64::INFINITY, f64::min);
    let high = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    if values.len() < 2 || high - low <= EQUAL_RANGE {
        return None;
    }
    let n = values.len() as f64;
    let mean = values.iter().sum::<f64>() / n;
    let variance = values.iter().map(|v| (v - mean) * (v - mean)).sum::<f64>() / (n - 1.0);
    Some((mean, variance.sqrt()))
}

/// One advantage per member, in the order given.
pub fn advantages(members: &[Member], config: &AdvantageConfig) -> Vec<f64> {
    let mut groups: BTreeMap<u64, Vec<f64>> = BTreeMap::new();
    let mut all = Vec::new();
    for member in members {
        if let Some(reward) = scored(member) {
            groups.entry(member.group).or_default().push(reward);
            all.push(reward);
        }
    }
    let batch_std = spread(&all).map_or(0.0, |(_, std)| std);
    let flat: usize = groups.values().filter(|g| spread(g).is_none()).map(Vec::len).sum();
    // With only flat groups every advantage is zero and alpha is never used.
    let alpha = if flat < all.len() { all.len() as f64 / (all.len() - flat) as f64 } else { 1.0 };
    let statistics: BTreeMap<u64, (f64, f64, f64)> =
        groups.iter().filter_map(|(g, v)| spread(v).map(|(mean, std)| (*g, (mean, std, v.len() as f64)))).collect();

    members
        .iter()
        .map(|member| {
            let (Some(reward), Some((mean, std, n))) = (scored(member), statistics.get(&member.group)) else {
                return 0.0;
            };
            let centred = reward - mean;
            match (config.estimator, config.scale) {
                (Estimator::Grpo, Scale::Group) => centred / (std + config.eps),
                (Estimator::Grpo, Scale::Batch) => centred / (batch_std + config.eps),
                (Estimator::Grpo, Scale::None) => centred,
                (Estimator::Rloo, _) => centred * n / (n - 1.0),
                (Estimator::Gpg, _) => centred * alpha,
            }
        })
        .collect()
}

fn scored(member: &Member) -> Option<f64> {
    member.reward.filter(|r| r.is_finite())
}

/// DAPO's soft penalty for long completions, added to the reward before the advantages:
/// `min(-(length - (max - cache)) / cache * factor, 0)`. Lengths in tokens; `cache` 0 gives no penalty.
pub fn overlong_penalty(length: usize, max: u32, cache: u32, factor: f64) -> f64 {
    if cache == 0 {
        return 0.0;
    }
    let exceeding = length as f64 - (f64::from(max) - f64::from(cache));
    (-exceeding / f64::from(cache) * factor).min(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn group(rewards: &[Option<f64>]) -> Vec<Member> {
        rewards.iter().map(|r| Member { group: 0, reward: *r }).collect()
    }

    fn with(estimator: Estimator, scale: Scale) -> AdvantageConfig {
        AdvantageConfig { estimator, scale, eps: 1e-4 }
    }

    #[test]
    fn golden_group_of_four() {
        let a = advantages(&group(&[Some(1.0), Some(0.0), Some(0.0), Some(1.0)]), &AdvantageConfig::default());
        for (got, want) in a.iter().zip([0.865875, -0.865875, -0.865875, 0.865875]) {
            assert!((got - want).abs() < 5e-7, "{got} {want}");
        }
    }

    #[test]
    fn equal_rewards_give_exact_zero() {
        for value in [0.7, 0.1, 1.0, 0.0] {
            for scale in [Scale::Group, Scale::Batch, Scale::None] {
                let a = advantages(&group(&[Some(value); 8]), &with(Estimator::Grpo, scale));
                assert!(a.iter().all(|x| *x == 0.0), "{value} {a:?}");
            }
        }
        assert_eq!(advantages(&group(&[Some(1.0), None]), &AdvantageConfig::default()), [0.0, 0.0]);
        assert_eq!(advantages(&[], &AdvantageConfig::default()), Vec::<f64>::new());
    }

    #[test]
    fn unscored_members_do_not_count() {
        // Scored: 1, 0, 0.5: mean 0.5, sample variance 0.25.
        let a = advantages(
            &group(&[Some(1.0), None, Some(0.0), Some(0.5), Some(f64::NAN)]),
            &with(Estimator::Grpo, Scale::Group),
        );
        let want = 0.5 / (0.5 + 1e-4);
        assert!((a[0] - want).abs() < 1e-15 && (a[2] + want).abs() < 1e-15);
        assert_eq!((a[1], a[3], a[4]), (0.0, 0.0, 0.0));
    }

    #[test]
    fn rloo_is_leave_one_out() {
        let r = [1.0, 0.25, 0.0];
        let a = advantages(&group(&r.map(Some)), &with(Estimator::Rloo, Scale::Group));
        // The baseline of each is the mean of the others.
        for (i, want) in [1.0 - 0.125, 0.25 - 0.5, 0.0 - 0.625].into_iter().enumerate() {
            assert!((a[i] - want).abs() < 1e-15, "{a:?}");
        }
    }

    #[test]
    fn gpg_scales_by_groups_with_signal() {
        let members: Vec<Member> = [(0, 1.0), (0, 0.0), (1, 1.0), (1, 1.0), (2, 0.5), (2, 0.5)]
            .map(|(group, r)| Member { group, reward: Some(r) })
            .into();
        // B = 6, M = 4: alpha = 3.
        assert_eq!(advantages(&members, &with(Estimator::Gpg, Scale::Group)), [1.5, -1.5, 0.0, 0.0, 0.0, 0.0]);
    }

    #[test]
    fn batch_scale_divides_by_the_std_of_all() {
        let members: Vec<Member> =
            [(0, 1.0), (0, 0.0), (7, 1.0), (7, 1.0)].map(|(group, r)| Member { group, reward: Some(r) }).into();
        // All four: mean 0.75, squared deviations 3/16 + 9/16 = 0.75, sample variance 0.25, std 0.5.
        let a = advantages(&members, &with(Estimator::Grpo, Scale::Batch));
        assert!((a[0] - 0.5 / 0.5001).abs() < 1e-12 && a[2] == 0.0, "{a:?}");
    }

    #[test]
    fn overlong_ramp() {
        assert_eq!(overlong_penalty(80, 100, 20, 1.0), 0.0);
        assert_eq!(overlong_penalty(90, 100, 20, 1.0), -0.5);
        assert_eq!(overlong_penalty(100, 100, 20, 2.0), -2.0);
        assert_eq!(overlong_penalty(1, 100, 20, 1.0), 0.0);
        assert_eq!(overlong_penalty(500, 100, 0, 1.0), 0.0);
    }

    proptest! {
        #[test]
        fn groups_are_centred_and_order_free(
            rewards in prop::collection::vec((0u64..3, prop::option::of(0.0f64..1.0)), 0..24),
            turn in 0usize..24,
        ) {
            let members: Vec<Member> =
                rewards.iter().map(|(group, reward)| Member { group: *group, reward: *reward }).collect();
            for estimator in [Estimator::Grpo, Estimator::Rloo, Estimator::Gpg] {
                let a = advantages(&members, &with(estimator, Scale::Group));
                for g in 0..3 {
                    let sum: f64 = a.iter().zip(&members).filter(|(_, m)| m.group == g).map(|(a, _)| a).sum();
                    prop_assert!(sum.abs() < 1e-9);
                }
                let mut turned = members.clone();
                if !turned.is_empty() {
                    let k = turn % turned.len();
                    turned.rotate_left(k);
                    let mut b = advantages(&turned, &with(estimator, Scale::Group));
                    b.rotate_right(k);
                    for (x, y) in a.iter().zip(&b) {
                        prop_assert!((x - y).abs() < 1e-9);
                    }
                }
            }
        }
    }
}
