//! From recorded rollouts to training rows: the only place of shift and mask.
//!
//! The token at position p of a rollout is predicted at position p - 1, so the sampled token ids[p] becomes
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
    /// Log-prob of each token as the sampler reported it.
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
    if targets.len() != rollout.logprobs.len() {
        return Err(fault(format!("{} sampled tokens but {} log-probs", targets.len(), rollout.logprobs.len())));
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
                    m.logp_sampler.extend_from_slice(&row.rollout.logprobs);
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
