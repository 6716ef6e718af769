//! Figures per training step, evaluation and evolution round.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::decide::signals::SOLVED;
use crate::event::{
    EndReason, EvaluationFinished, EvolutionFinished, EvolutionStarted, GradientStepTaken, Origin, RolloutFinished,
    SignalKind,
};

/// Scores within this of 1 count as passed (evaluation and pass rate).
const PASSED: f64 = 1.0 - 1e-9;

/// A number for JSON: `None` where it is not finite.
fn finite(x: f64) -> Option<f64> {
    x.is_finite().then_some(x)
}

/// One training step. Means are `None` where there is nothing to average.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct StepMetrics {
    /// Policy version that sampled.
    pub policy_version: u32,
    /// Groups planned.
    pub groups: u32,
    /// Rollouts finished.
    pub rollouts: u32,
    /// Of these, scored.
    pub scored: u32,
    /// Mean score of the scored rollouts, in [0, 1].
    pub mean_reward: Option<f64>,
    /// Share of scored rollouts with full score.
    pub pass_rate: Option<f64>,
    /// Share of scored rollouts with a score >= 0.5.
    pub solve_rate: Option<f64>,
    /// Groups with at least one score above and one below 0.5.
    pub mixed_groups: u32,
    /// Environment steps taken, all rollouts together.
    pub env_steps: u64,
    /// Tokens sampled, all rollouts together.
    pub sampled_tokens: u64,
    /// How episodes ended.
    pub ends: BTreeMap<EndReason, u32>,
    /// Signals raised, by kind.
    pub signals: BTreeMap<SignalKind, u32>,
    /// |D| by origin when the step ended.
    pub tasks: BTreeMap<Origin, u64>,
    /// Optimiser updates applied.
    pub updates: u32,
    /// Updates skipped.
    pub skipped: u32,
    /// Mean total loss of the updates.
    pub loss: Option<f64>,
    /// Mean KL to the reference per trained token, over updates.
    pub kl: Option<f64>,
    /// Mean entropy per trained token, nats, over updates.
    pub entropy: Option<f64>,
    /// Mean share of clipped tokens, over updates.
    pub clip_fraction: Option<f64>,
    /// Mean gradient norm before clipping, over updates.
    pub grad_norm: Option<f64>,
    /// Learning rate of the last update.
    pub learning_rate: Option<f64>,
    /// Tokens with mask 1, over updates.
    pub trained_tokens: u64,
    /// Whether `StepFinished` is there.
    pub finished: bool,
}

/// One evaluation of a split.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EvaluationMetrics {
    /// Policy version evaluated.
    pub policy_version: u32,
    /// Tasks.
    pub total: u32,
    /// Of these, scored.
    pub scored: u32,
    /// Tasks with full score.
    pub passed: u32,
    /// passed / total; unscored tasks count as not passed. `None` without tasks.
    pub success: Option<f64>,
    /// Mean score of the scored tasks.
    pub mean_score: Option<f64>,
}

/// One evolution round.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct RoundMetrics {
    /// Training step after which it ran.
    pub step: u32,
    /// `feedback` or `random`.
    pub mode: String,
    /// Contexts explored, by signal; unguided ones are not counted here.
    pub contexts: BTreeMap<SignalKind, u32>,
    /// Contexts without a signal.
    pub unguided: u32,
    /// Exploration steps taken.
    pub exploration_steps: u64,
    /// Drafts proposed.
    pub drafts: u32,
    /// Drafts admitted.
    pub admitted: u32,
    /// Drafts rejected, by reason.
    pub rejected: BTreeMap<String, u32>,
    /// Whether `EvolutionFinished` is there.
    pub finished: bool,
}

/// All figures.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Metrics {
    /// By training step.
    pub steps: BTreeMap<u32, StepMetrics>,
    /// By training step (0 = before training) and split.
    pub evaluations: BTreeMap<u32, BTreeMap<String, EvaluationMetrics>>,
    /// By evolution round (0 = building D_0).
    pub rounds: BTreeMap<u32, RoundMetrics>,
}

impl Metrics {
    /// Rollouts of a step, in canonical order.
    pub fn close<'a>(&mut self, step: u32, rollouts: impl Iterator<Item = &'a RolloutFinished>) {
        let m = self.steps.entry(step).or_default();
        let (mut sum, mut passed, mut solved) = (0.0, 0u32, 0u32);
        let mut groups: BTreeMap<(&str, u32), (bool, bool)> = BTreeMap::new();
        for rollout in rollouts {
            m.policy_version = m.policy_version.max(rollout.policy_version);
            m.rollouts += 1;
            m.env_steps += u64::from(rollout.env_steps);
            m.sampled_tokens += rollout.sampled.iter().map(|(_, n)| u64::from(*n)).sum::<u64>();
            *m.ends.entry(rollout.end).or_insert(0) += 1;
            let Some(score) = rollout.reward.score().filter(|s| s.is_finite()) else { continue };
            m.scored += 1;
            sum += score;
            passed += u32::from(score >= PASSED);
            solved += u32::from(score >= SOLVED);
            let group = groups.entry((&rollout.key.task, rollout.key.draw)).or_default();
            group.0 |= score > SOLVED;
            group.1 |= score < SOLVED;
        }
        m.mixed_groups = groups.values().filter(|g| g.0 && g.1).count() as u32;
        if m.scored > 0 {
            let n = f64::from(m.scored);
            m.mean_reward = finite(sum / n);
            m.pass_rate = Some(f64::from(passed) / n);
            m.solve_rate = Some(f64::from(solved) / n);
        }
    }

    /// An update was applied: means over the updates of the step.
    pub fn update(&mut self, event: &GradientStepTaken) {
        let m = self.steps.entry(event.step).or_default();
        let before = f64::from(m.updates);
        m.updates += 1;
        let n = f64::from(m.updates);
        let mean = |old: Option<f64>, new: f64| finite((old.unwrap_or(0.0) * before + new) / n);
        m.loss = mean(m.loss, event.loss);
        m.kl = mean(m.kl, event.kl);
        m.entropy = mean(m.entropy, event.entropy);
        m.clip_fraction = mean(m.clip_fraction, event.clip_fraction);
        m.grad_norm = mean(m.grad_norm, event.grad_norm);
        m.learning_rate = finite(event.learning_rate);
        m.trained_tokens += event.trained_tokens;
    }

    /// A split was evaluated.
    pub fn evaluate(&mut self, event: &EvaluationFinished) {
        let scores: Vec<f64> = event.results.iter().filter_map(|(_, r)| r.score()).filter(|s| s.is_finite()).collect();
        let passed = scores.iter().filter(|s| **s >= PASSED).count();
        let total = event.results.len();
        let metrics = EvaluationMetrics {
            policy_version: event.policy_version,
            total: total as u32,
            scored: scores.len() as u32,
            passed: passed as u32,
            success: (total > 0).then(|| passed as f64 / total as f64),
            mean_score: (!scores.is_empty()).then(|| scores.iter().sum::<f64>() / scores.len() as f64),
        };
        self.evaluations.entry(event.step).or_default().insert(event.split.clone(), metrics);
    }

    /// A round began.
    pub fn start_round(&mut self, event: &EvolutionStarted) {
        let round = self.rounds.entry(event.round).or_default();
        round.step = event.step;
        round.mode.clone_from(&event.mode);
        for context in &event.contexts {
            match context.kind {
                Some(kind) => *round.contexts.entry(kind).or_insert(0) += 1,
                None => round.unguided += 1,
            }
        }
    }

    /// A round ended. Its own counts stand; those of the event are the runner's.
    pub fn finish_round(&mut self, event: &EvolutionFinished) {
        self.rounds.entry(event.round).or_default().finished = true;
    }
}
