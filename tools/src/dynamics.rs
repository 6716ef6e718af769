//! How a run developed: success, reward, signals and the size of the training set D over its steps.

use std::collections::{BTreeMap, BTreeSet};

use coevolve::event::{Origin, SignalKind};
use coevolve::project::State;
use serde::Serialize;

use crate::chart::{Line, Panel, Style};

/// One row: a training step, or step 0 for what was before training.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Row {
    /// Training step; 0 = before training.
    pub step: u32,
    /// Whether the step is finished (step 0 always is).
    pub finished: bool,
    /// Finished rollouts; `null` at step 0.
    pub rollouts: Option<u32>,
    /// Further rounds of dynamic sampling, and groups that were left out of the update for teaching nothing; 0 in a
    /// step without further rounds.
    pub refill_rounds: u32,
    /// See `refill_rounds`.
    pub left_out: u32,
    /// Mean score of the scored rollouts, in [0, 1].
    pub mean_reward: Option<f64>,
    /// Share of scored rollouts with full score.
    pub pass_rate: Option<f64>,
    /// Signals raised by kind; 0 where none was.
    pub signals: BTreeMap<SignalKind, u32>,
    /// |D| by origin once everything admitted after this step is in.
    pub tasks: BTreeMap<Origin, u64>,
    /// Mean loss of the updates.
    pub loss: Option<f64>,
    /// Mean KL to the reference per trained token.
    pub kl: Option<f64>,
    /// Mean entropy per trained token, nats.
    pub entropy: Option<f64>,
    /// Success by split where it was evaluated after this step: passed / total, in [0, 1].
    pub success: BTreeMap<String, f64>,
}

/// An evolution round.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Round {
    /// Round; 0 = building D_0.
    pub round: u32,
    /// Training step after which it ran.
    pub step: u32,
    /// `feedback` or `random`.
    pub mode: String,
    /// Contexts explored.
    pub contexts: u32,
    /// Drafts proposed.
    pub drafts: u32,
    /// Drafts admitted.
    pub admitted: u32,
    /// Drafts rejected by reason.
    pub rejected: BTreeMap<String, u32>,
    /// Duration, seconds; `null` where it was not measured.
    pub seconds: Option<f64>,
}

/// The whole development; the JSON of `dynamics --json`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Dynamics {
    /// Run id.
    pub run: String,
    /// Master seed.
    pub seed: u64,
    /// Environment.
    pub environment: String,
    /// Last event read.
    pub at_event: u64,
    /// Whether the run reached its last step.
    pub finished: bool,
    /// Splits that were evaluated.
    pub splits: Vec<String>,
    /// One row per step, in order.
    pub steps: Vec<Row>,
    /// One row per evolution round, in order.
    pub rounds: Vec<Round>,
}

/// Names of the signals, in the order of every output.
pub const SIGNALS: [(SignalKind, &str); 3] =
    [(SignalKind::Forgetting, "forgetting"), (SignalKind::Boundary, "boundary"), (SignalKind::Rare, "rare")];

/// Names of the origins, in the order of every output.
pub const ORIGINS: [(Origin, &str); 3] =
    [(Origin::Seed, "seed"), (Origin::Explored, "explored"), (Origin::Synthesised, "synthesised")];

impl Dynamics {
    /// Reads the development off a state.
    pub fn of(state: &State) -> Dynamics {
        let metrics = &state.metrics;
        let steps: BTreeSet<u32> =
            [0].into_iter().chain(metrics.steps.keys().copied()).chain(metrics.evaluations.keys().copied()).collect();
        let splits: BTreeSet<&String> = metrics.evaluations.values().flat_map(|of| of.keys()).collect();
        let run = state.run.as_ref();
        Dynamics {
            run: run.map_or_else(String::new, |r| r.run_id.clone()),
            seed: run.map_or(0, |r| r.seed),
            environment: run.map_or_else(String::new, |r| r.environment.clone()),
            at_event: state.last_seq.unwrap_or(0),
            finished: state.recorded.run_finished,
            splits: splits.into_iter().cloned().collect(),
            steps: steps.into_iter().map(|step| row(state, step)).collect(),
            rounds: metrics
                .rounds
                .iter()
                .map(|(round, m)| Round {
                    round: *round,
                    step: m.step,
                    mode: m.mode.clone(),
                    contexts: m.contexts.values().sum::<u32>() + m.unguided,
                    drafts: m.drafts,
                    admitted: m.admitted,
                    rejected: m.rejected.clone(),
                    seconds: state.times.rounds_us.get(round).filter(|us| **us > 0).map(|us| *us as f64 / 1e6),
                })
                .collect(),
        }
    }

    /// The panels of the plot: success and reward, signals, D.
    pub fn panels(&self) -> Vec<Panel> {
        let points = |of: &dyn Fn(&Row) -> Option<f64>| -> Vec<(f64, f64)> {
            self.steps.iter().filter_map(|r| of(r).map(|y| (f64::from(r.step), y))).collect()
        };
        let mut success: Vec<Line> = self
            .splits
            .iter()
            .enumerate()
            .map(|(i, split)| Line {
                name: format!("success, {split}"),
                colour: i,
                style: Style::Dots,
                points: points(&|r| r.success.get(split).map(|s| s * 100.0)),
            })
            .collect();
        success.push(Line {
            name: "mean reward, training".into(),
            colour: self.splits.len(),
            style: Style::Dashed,
            points: points(&|r| r.mean_reward.map(|m| m * 100.0)),
        });
        let trained = |r: &Row| r.rollouts.is_some();
        let signals = SIGNALS.iter().enumerate().map(|(i, (kind, name))| Line {
            name: (*name).into(),
            colour: i,
            style: Style::Plain,
            points: points(&|r| trained(r).then(|| f64::from(r.signals.get(kind).copied().unwrap_or(0)))),
        });
        // Stacked: each line is the sum up to its origin, drawn from the top down.
        let stacked = (0..ORIGINS.len()).rev().map(|i| Line {
            name: ORIGINS[i].1.into(),
            colour: i,
            style: Style::Area,
            points: points(&|r| {
                let upto = &ORIGINS[..=i];
                Some(upto.iter().map(|(o, _)| r.tasks.get(o).copied().unwrap_or(0) as f64).sum())
            }),
        });
        vec![
            Panel { title: "Success".into(), y_label: "per cent".into(), y_max: Some(100.0), lines: success },
            Panel { title: "Signals".into(), y_label: "raised per step".into(), y_max: None, lines: signals.collect() },
            Panel { title: "Training set D".into(), y_label: "tasks".into(), y_max: None, lines: stacked.collect() },
        ]
    }
}

impl Dynamics {
    /// The plot, with the evolution rounds during training as vertical lines.
    pub fn svg(&self) -> String {
        let rounds: Vec<f64> = self.rounds.iter().filter(|r| r.step > 0).map(|r| f64::from(r.step)).collect();
        let title = format!("Run {}, {}, seed {}", self.run, self.environment, self.seed);
        crate::chart::svg(&title, "training step", &self.panels(), &rounds, "evolution round")
    }
}

fn row(state: &State, step: u32) -> Row {
    let mut tasks = BTreeMap::new();
    for entry in state.tasks.tasks.values().filter(|t| t.admitted_step <= step) {
        *tasks.entry(entry.origin).or_insert(0) += 1;
    }
    let evaluated = state.metrics.evaluations.get(&step);
    let success = evaluated.into_iter().flatten().filter_map(|(split, m)| m.success.map(|s| (split.clone(), s)));
    let mut row = Row { step, finished: step == 0, tasks, success: success.collect(), ..Row::default() };
    if let Some(m) = state.metrics.steps.get(&step) {
        row.finished = m.finished;
        row.rollouts = Some(m.rollouts);
        row.refill_rounds = m.refill_rounds;
        row.left_out = m.left_out;
        row.mean_reward = m.mean_reward;
        row.pass_rate = m.pass_rate;
        row.signals = SIGNALS.iter().map(|(kind, _)| (*kind, m.signals.get(*kind))).collect();
        row.loss = m.loss;
        row.kl = m.kl;
        row.entropy = m.entropy;
    }
    row
}
