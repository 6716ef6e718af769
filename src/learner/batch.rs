//! From recorded rollouts to training rows: the only place of shift and mask.
//!
//! The token at position p of a rollout is predicted at position p - 1, so the sampled token `ids[p]` becomes
//! the target `(p - 1, ids[p])`. Everything that was not sampled (prompt, tool results, template) is no
//! target, which is the mask; the ids themselves are trained as stored, never decoded and re-encoded.
//! Groups are taken in canonical (step, task, draw, k) order whatever order they came in.

use super::config::LearnerConfig;
use super::error::LearnerError;
use super::loss::{UpdateShape, token_weights};
use crate::decide::advantage::{Member, advantages, overlong_penalty};
use crate::event::{RolloutFinished, RolloutKey};
use crate::model::{Sequence, TrainBatch};
use std::collections::BTreeMap;

/// The rollouts of one (step, task, draw).
#[derive(Debug, Clone, PartialEq, Default)]
pub struct GroupRollouts {
    /// In any order; they are used in order of k.
    pub rollouts: Vec<RolloutFinished>,
}

/// Sorts rollouts into groups by (step, task, draw), both in canonical order.
pub fn group_rollouts(rollouts: Vec<RolloutFinished>) -> Vec<GroupRollouts> {
    let mut sorted: BTreeMap<(u32, String, u32), Vec<RolloutFinished>> = BTreeMap::new();
    for rollout in rollouts {
        let key = &rollout.key;
        sorted.entry((key.step, key.task.clone(), key.draw)).or_default().push(rollout);
    }
    sorted
        .into_values()
        .map(|mut rollouts| {
            rollouts.sort_by(|a, b| a.key.cmp(&b.key));
            GroupRollouts { rollouts }
        })
        .collect()
}

/// A rollout as the learner sees it.
#[derive(Debug, Clone, PartialEq)]
struct Row<'a> {
    rollout: &'a RolloutFinished,
    advantage: f64,
    targets: Vec<(u32, u32)>,
}

/// Rows that are computed in one forward and backward, flat and aligned.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct MicroBatch {
    /// What the model computes; its outputs are in the order of the arrays below.
    pub batch: TrainBatch,
    /// Which rollout each row is.
    pub keys: Vec<RolloutKey>,
    /// Advantage of each row.
    pub advantages: Vec<f32>,
    /// Loss weight of each row's tokens.
    pub weights: Vec<f64>,
    /// Start of each row's tokens, plus their number at the end.
    pub offsets: Vec<usize>,
    /// Log-prob of each token in the distribution that the sampler sampled from.
    pub logp_sampler: Vec<f32>,
}

impl MicroBatch {
    /// Trained tokens.
    pub fn tokens(&self) -> usize {
        self.logp_sampler.len()
    }
}

/// Everything of one optimiser update.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct UpdateBatch {
    /// In canonical order.
    pub micro_batches: Vec<MicroBatch>,
    /// Rollouts that were left out because their advantage is exactly zero.
    pub left_out: usize,
}

/// The optimiser updates of one step.
///
/// `learner.updates_per_step` splits the groups, in canonical order, into that many parts of nearly equal
/// size (never more parts than groups). Advantages are computed over the whole step. Errors when a rollout
/// contradicts itself.
pub fn updates(groups: &[GroupRollouts], config: &LearnerConfig) -> Result<Vec<UpdateBatch>, LearnerError> {
    let mut sorted: Vec<Vec<&RolloutFinished>> =
        groups.iter().map(|g| g.rollouts.iter().collect()).filter(|g: &Vec<_>| !g.is_empty()).collect();
    for group in &mut sorted {
        group.sort_by(|a, b| a.key.cmp(&b.key));
    }
    sorted.sort_by(|a, b| a[0].key.cmp(&b[0].key));

    let members: Vec<Member> = sorted
        .iter()
        .zip(0u64..)
        .flat_map(|(group, index)| group.iter().map(move |r| (index, *r)))
        .map(|(group, r)| Member { group, reward: r.reward.score().map(|score| score + penalty(r, config)) })
        .collect();
    let mut advantage = advantages(&members, &config.advantage_config()).into_iter();
    let mut rows = Vec::with_capacity(sorted.len());
    for group in sorted {
        let mut of_group = Vec::with_capacity(group.len());
        for rollout in group {
            of_group.push(Row { rollout, advantage: advantage.next().unwrap_or(0.0), targets: targets(rollout)? });
        }
        rows.push(of_group);
    }
    let parts = (config.updates_per_step as usize).min(rows.len());
    (0..parts).map(|i| update(&rows[i * rows.len() / parts..(i + 1) * rows.len() / parts], config)).collect()
}

fn penalty(rollout: &RolloutFinished, config: &LearnerConfig) -> f64 {
    let length = rollout.ids.len().saturating_sub(rollout.prompt_len as usize);
    config.overlong.map_or(0.0, |o| overlong_penalty(length, o.max, o.cache, o.factor))
}

/// The shift: sampled token at p, predicted at p - 1.
fn targets(rollout: &RolloutFinished) -> Result<Vec<(u32, u32)>, LearnerError> {
    let key = &rollout.key;
    let fault = |fault: String| LearnerError::Rollout {
        rollout: format!("{}/{}/{}/{}", key.step, key.task, key.draw, key.k),
        fault,
    };
    let mut targets = Vec::with_capacity(rollout.logprobs.len());
    let mut end = u64::from(rollout.prompt_len.max(1));
    for &(start, length) in &rollout.sampled {
        let (from, to) = (u64::from(start), u64::from(start) + u64::from(length));
        if from < end || to > rollout.ids.len() as u64 {
            return Err(fault(format!(
                "sampled run {start}+{length} must begin at or after {end} (prompt, earlier runs) and end within {} tokens",
                rollout.ids.len()
            )));
        }
        end = to;
        targets.extend((start..start + length).map(|p| (p - 1, rollout.ids[p as usize])));
    }
    for logprobs in [&rollout.logprobs[..], rollout.sampled_under()] {
        if targets.len() != logprobs.len() {
            return Err(fault(format!("{} sampled tokens but {} log-probs", targets.len(), logprobs.len())));
        }
    }
    Ok(targets)
}

fn update(groups: &[Vec<Row<'_>>], config: &LearnerConfig) -> Result<UpdateBatch, LearnerError> {
    // Indices over all sequences of the update, left out or not: they are the loss's denominators.
    let mut trained = Vec::new();
    let mut kept: Vec<Vec<(usize, &Row<'_>)>> = Vec::new();
    let mut left_out = 0;
    for group in groups {
        let mut of_group = Vec::new();
        for row in group {
            let index = trained.len();
            trained.push(row.targets.len());
            if config.skip_zero_advantage && row.advantage == 0.0 {
                left_out += 1;
            } else if !row.targets.is_empty() {
                of_group.push((index, row));
            }
        }
        if !of_group.is_empty() {
            kept.push(of_group);
        }
    }

    let mut packer = Packer { budget: config.micro_batch_tokens as usize, ..Packer::default() };
    for group in &kept {
        packer.add(group);
    }
    packer.close();

    let split: Vec<Vec<usize>> =
        packer.done.iter().map(|m| m.iter().flatten().map(|(index, _)| *index).collect()).collect();
    let weights = token_weights(&config.loss_config(), &UpdateShape { trained: &trained, micro_batches: &split })?;
    let micro_batches = packer
        .done
        .iter()
        .map(|groups| {
            let mut m = MicroBatch { offsets: vec![0], ..MicroBatch::default() };
            for group in groups {
                m.batch.push_group(&sequences(group));
                for (index, row) in group {
                    m.keys.push(row.rollout.key.clone());
                    m.advantages.push(row.advantage as f32);
                    m.weights.push(weights[*index]);
                    m.logp_sampler.extend_from_slice(row.rollout.sampled_under());
                    m.offsets.push(m.logp_sampler.len());
                }
            }
            m
        })
        .collect();
    Ok(UpdateBatch { micro_batches, left_out })
}

type Indexed<'a> = (usize, &'a Row<'a>);

fn sequences<'a>(group: &[Indexed<'a>]) -> Vec<Sequence<'a>> {
    group.iter().map(|(_, row)| Sequence { ids: &row.rollout.ids, targets: &row.targets }).collect()
}

/// Tokens the model computes for these rows of one group, the shared beginning once.
fn cost(group: &[Indexed<'_>]) -> usize {
    let mut batch = TrainBatch::default();
    batch.push_group(&sequences(group));
    batch.tokens()
}

/// Fills micro-batches up to the budget in order; a group stays whole where it fits into one.
#[derive(Default)]
struct Packer<'a> {
    budget: usize,
    used: usize,
    open: Vec<Vec<Indexed<'a>>>,
    done: Vec<Vec<Vec<Indexed<'a>>>>,
}

impl<'a> Packer<'a> {
    fn close(&mut self) {
        if !self.open.is_empty() {
            self.done.push(std::mem::take(&mut self.open));
        }
        self.used = 0;
    }

    fn add(&mut self, mut group: &[Indexed<'a>]) {
        while !group.is_empty() {
            let whole = cost(group);
            if self.used + whole > self.budget && !self.open.is_empty() {
                self.close();
            }
            let mut take = group.len();
            if whole > self.budget {
                // Larger than any micro-batch: as many rows as fit, at least one.
                take = (1..group.len()).take_while(|n| cost(&group[..*n]) <= self.budget).last().unwrap_or(1);
            }
            self.used += cost(&group[..take]);
            self.open.push(group[..take].to_vec());
            group = &group[take..];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::{EndReason, Reward};
    use crate::learner::fake::rollout;
    use proptest::prelude::*;

    fn by_hand() -> RolloutFinished {
        RolloutFinished {
            key: RolloutKey { step: 1, task: "t".into(), draw: 0, k: 0 },
            policy_version: 0,
            //         prompt      sampled  tool  sampled
            ids: vec![10, 11, 12, 20, 21, 30, 22, 31],
            prompt_len: 3,
            sampled: vec![(3, 2), (6, 1)],
            logprobs: vec![-0.1, -0.2, -0.3],
            sampling_logprobs: Vec::new(),
            actions: Vec::new(),
            env_steps: 1,
            reward: Reward::Scored(1.0),
            end: EndReason::Done,
        }
    }

    #[test]
    fn sampled_tokens_are_predicted_one_position_earlier() {
        assert_eq!(targets(&by_hand()).unwrap(), [(2, 20), (3, 21), (5, 22)]);
        let groups = [GroupRollouts { rollouts: vec![by_hand()] }];
        let updates = updates(&groups, &LearnerConfig::default()).unwrap();
        let m = &updates[0].micro_batches[0];
        // Nothing follows the last target's prediction.
        assert_eq!(m.batch.rows[0].ids, [10, 11, 12, 20, 21, 30]);
        assert_eq!(m.batch.rows[0].targets, [(2, 20), (3, 21), (5, 22)]);
        assert_eq!((m.offsets.clone(), m.logp_sampler.clone()), (vec![0, 3], vec![-0.1, -0.2, -0.3]));
        assert_eq!(m.weights, [1.0 / 3.0]);
    }

    #[test]
    fn contradictions_are_refused() {
        let broken: [fn(&mut RolloutFinished); 6] = [
            |r| r.sampled[0].0 = 2,        // inside the prompt
            |r| r.sampled[1].0 = 4,        // overlaps
            |r| r.sampled[1].1 = 3,        // past the end
            |r| r.sampled[1].1 = u32::MAX, // far past the end
            |r| r.logprobs.truncate(2),    // a log-prob is missing
            |r| r.sampled.swap(0, 1),      // not sorted
        ];
        for (i, damage) in broken.iter().enumerate() {
            let mut r = by_hand();
            damage(&mut r);
            let error = targets(&r).unwrap_err();
            assert!(matches!(&error, LearnerError::Rollout { rollout, .. } if rollout == "1/t/0/0"), "{i} {error}");
        }
        let mut promptless = by_hand();
        (promptless.prompt_len, promptless.sampled) = (0, vec![(0, 3)]);
        assert!(targets(&promptless).is_err(), "the first token has nothing that predicts it");
    }

    #[test]
    fn an_empty_completion_and_an_unscored_one_are_sequences_without_effect() {
        let mut empty = by_hand();
        (empty.key.k, empty.sampled, empty.logprobs, empty.reward) = (1, vec![], vec![], Reward::Scored(0.0));
        let mut unscored = by_hand();
        (unscored.key.k, unscored.reward) = (2, Reward::Unscored("worker died".into()));
        let groups = [GroupRollouts { rollouts: vec![unscored, empty, by_hand()] }];
        let config = LearnerConfig { loss: crate::learner::LossKind::Grpo, ..LearnerConfig::default() };
        let update = updates(&groups, &config).unwrap().remove(0);
        let m = &update.micro_batches[0];
        // Rewards 1 and 0: std sqrt(1/2). Three sequences share the weight.
        assert_eq!(m.keys.iter().map(|k| k.k).collect::<Vec<_>>(), [0, 2]);
        assert!((f64::from(m.advantages[0]) - 0.5 / (0.5f64.sqrt() + 1e-4)).abs() < 1e-6);
        assert_eq!(m.advantages[1], 0.0);
        assert_eq!(m.weights, [1.0 / 9.0, 1.0 / 9.0]);
        let config = LearnerConfig { skip_zero_advantage: true, ..config };
        let update = updates(&groups, &config).unwrap().remove(0);
        assert_eq!((update.left_out, update.micro_batches[0].weights.clone()), (1, vec![1.0 / 9.0]));
    }

    #[test]
    fn overlong_completions_lose_reward() {
        let mut long = by_hand();
        (long.key.k, long.prompt_len) = (1, 3);
        long.ids.extend([40; 5]);
        let groups = [GroupRollouts { rollouts: vec![by_hand(), long] }];
        // Completions of 5 and 10 positions; the ramp begins at 5: equal rewards, but the second loses 0.5.
        let overlong = Some(crate::learner::loss::Overlong { max: 15, cache: 10, factor: 1.0 });
        let config = LearnerConfig { overlong, ..LearnerConfig::default() };
        let update = updates(&groups, &config).unwrap().remove(0);
        let want = 0.25 / (0.5 / 2f64.sqrt() + 1e-4);
        assert!((f64::from(update.micro_batches[0].advantages[0]) - want).abs() < 1e-6);
    }

    proptest! {
        /// Every sampled token is trained exactly once, within the budget, in canonical order.
        #[test]
        fn packing_keeps_every_token(
            sizes in prop::collection::vec(1u32..6, 1..6),
            budget in 1u32..80,
            parts in 1u32..4,
        ) {
            let mut rollouts = Vec::new();
            for (g, size) in sizes.iter().enumerate() {
                for k in 0..*size {
                    rollouts.push(rollout(1, &format!("task{g}"), k, 50, Reward::Scored(f64::from(k % 2))));
                }
            }
            let tokens: usize = rollouts.iter().map(|r| r.logprobs.len()).sum();
            let mut keys: Vec<_> = rollouts.iter().map(|r| r.key.clone()).collect();
            keys.sort();
            rollouts.reverse();
            let groups = group_rollouts(rollouts);
            let config = LearnerConfig {
                micro_batch_tokens: budget,
                updates_per_step: parts,
                ..LearnerConfig::default()
            };
            let updates = updates(&groups, &config).unwrap();
            prop_assert_eq!(updates.len(), (parts as usize).min(sizes.len()));
            let all: Vec<&MicroBatch> = updates.iter().flat_map(|u| &u.micro_batches).collect();
            prop_assert_eq!(all.iter().map(|m| m.tokens()).sum::<usize>(), tokens);
            prop_assert_eq!(all.iter().flat_map(|m| m.keys.clone()).collect::<Vec<_>>(), keys);
            for m in all {
                prop_assert!(m.batch.tokens() <= budget as usize || m.keys.len() == 1);
                prop_assert_eq!(m.batch.targets(), m.tokens());
                prop_assert_eq!(m.offsets.len(), m.keys.len() + 1);
                prop_assert_eq!(m.batch.rows.len(), m.keys.len());
            }
        }
    }
}
