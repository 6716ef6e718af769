//! Figures per training step, evaluation and evolution round.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::rollouts::Rollouts;
use super::series::{Series, Tally};
use crate::decide::signals::{SOLVED, Tried};
use crate::event::view::Archived;
use crate::event::{
    ArchivedEvaluationFinished, ArchivedEvolutionFinished, ArchivedEvolutionStarted, ArchivedGradientStepTaken,
    EndReason, Origin, SignalKind,
};

/// Scores within this of 1 count as passed (evaluation and pass rate).
const PASSED: f64 = 1.0 - 1e-9;

/// A number for JSON: `None` where it is not finite.
fn finite(x: f64) -> Option<f64> {
    x.is_finite().then_some(x)
}

fn is_zero(n: &u32) -> bool {
    *n == 0
}

/// One training step. Means are `None` where there is nothing to average.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct StepMetrics {
    /// Policy version that sampled.
    pub policy_version: u32,
    /// Groups planned, those of further rounds included.
    pub groups: u32,
    /// Further rounds of dynamic sampling ([`crate::decide::refill`]). Like `left_out`, not written where it is 0: a
    /// run without them keeps its digest.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub refill_rounds: u32,
    /// In a step with further rounds: groups that taught nothing and were left out of the update.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub left_out: u32,
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
    pub ends: Tally<EndReason, 5>,
    /// Signals raised, by kind.
    pub signals: Tally<SignalKind, 3>,
    /// |D| by origin when the step ended.
    pub tasks: Tally<Origin, 3>,
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
    pub steps: Series<u32, StepMetrics>,
    /// By training step (0 = before training) and split.
    pub evaluations: BTreeMap<u32, BTreeMap<String, EvaluationMetrics>>,
    /// By evolution round (0 = building D_0).
    pub rounds: BTreeMap<u32, RoundMetrics>,
}

impl Metrics {
    /// The rollouts of a step are complete.
    pub fn close(&mut self, step: u32, rollouts: &Rollouts) {
        let m = self.steps.get_or_default(step);
        let (mut sum, mut passed, mut solved) = (0.0, 0u32, 0u32);
        let mut before = None;
        let (mut above, mut below) = (false, false);
        m.mixed_groups = 0;
        for rollout in rollouts.iter() {
            if before.is_none_or(|b| !rollout.same_group(&b)) {
                m.mixed_groups += u32::from(above && below);
                (above, below) = (false, false);
            }
            before = Some(rollout);
            m.policy_version = m.policy_version.max(rollout.policy_version());
            m.rollouts += 1;
            m.env_steps += u64::from(rollout.env_steps());
            m.sampled_tokens += rollout.sampled_tokens();
            m.ends.add(rollout.end());
            let Some(score) = rollout.score() else { continue };
            m.scored += 1;
            sum += score;
            passed += u32::from(score >= PASSED);
            solved += u32::from(score >= SOLVED);
            above |= score > SOLVED;
            below |= score < SOLVED;
        }
        m.mixed_groups += u32::from(above && below);
        if m.refill_rounds > 0 {
            m.left_out = m.groups.saturating_sub(rollouts.teaching_groups() as u32);
        }
        if m.scored > 0 {
            let n = f64::from(m.scored);
            m.mean_reward = finite(sum / n);
            m.pass_rate = Some(f64::from(passed) / n);
            m.solve_rate = Some(f64::from(solved) / n);
        }
    }

    /// An update was applied: means over the updates of the step.
    pub fn update(&mut self, event: &ArchivedGradientStepTaken) {
        let m = self.steps.get_or_default(event.step.to_native());
        let before = f64::from(m.updates);
        m.updates += 1;
        let n = f64::from(m.updates);
        let mean = |old: Option<f64>, new: f64| finite((old.unwrap_or(0.0) * before + new) / n);
        m.loss = mean(m.loss, event.loss.to_native());
        m.kl = mean(m.kl, event.kl.to_native());
        m.entropy = mean(m.entropy, event.entropy.to_native());
        m.clip_fraction = mean(m.clip_fraction, event.clip_fraction.to_native());
        m.grad_norm = mean(m.grad_norm, event.grad_norm.to_native());
        m.learning_rate = finite(event.learning_rate.to_native());
        m.trained_tokens += event.trained_tokens.to_native();
    }

    /// A split was evaluated.
    pub fn evaluate(&mut self, event: &ArchivedEvaluationFinished) {
        let scores = || event.results.iter().filter_map(|result| result.1.score()).filter(|s| s.is_finite());
        let scored = scores().count();
        let passed = scores().filter(|s| *s >= PASSED).count();
        let total = event.results.len();
        let metrics = EvaluationMetrics {
            policy_version: event.policy_version.to_native(),
            total: total as u32,
            scored: scored as u32,
            passed: passed as u32,
            success: (total > 0).then(|| passed as f64 / total as f64),
            mean_score: (scored > 0).then(|| scores().sum::<f64>() / scored as f64),
        };
        let of_step = self.evaluations.entry(event.step.to_native()).or_default();
        of_step.insert(event.split.as_str().to_owned(), metrics);
    }

    /// A round began.
    pub fn start_round(&mut self, event: &ArchivedEvolutionStarted) {
        let round = self.rounds.entry(event.round.to_native()).or_default();
        round.step = event.step.to_native();
        round.mode = event.mode.as_str().to_owned();
        for context in event.contexts.iter() {
            match context.kind.as_ref() {
                Some(kind) => *round.contexts.entry(kind.native()).or_insert(0) += 1,
                None => round.unguided += 1,
            }
        }
    }

    /// A round ended. Its own counts stand; those of the event are the runner's.
    pub fn finish_round(&mut self, event: &ArchivedEvolutionFinished) {
        self.rounds.entry(event.round.to_native()).or_default().finished = true;
    }
}
