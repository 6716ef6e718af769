//! The three weakness signals (METHOD: stage 1b): forgetting, boundary, rare.
//!
//! [`SignalState`] is what has to be remembered between steps: a window of scores per task and the counts
//! of action patterns. [`SignalState::fold`] takes the finished rollouts of a step, in any order, and
//! walks them in canonical (step, task, draw, k) order, so that the result does not depend on which
//! rollout finished first. Unscored rollouts raise nothing and enter no window and no count.

use std::collections::{BTreeMap, VecDeque};

use serde::{Deserialize, Serialize};

use crate::event::{RolloutFinished, RolloutKey, SignalKind};

/// Scores from this on count as solved, below as failed (forgetting, and the history of a task).
pub const SOLVED: f64 = 0.5;

/// The pattern of a rollout without tool calls.
pub const NO_CALLS: &str = "(none)";

/// Settings of the signals; the defaults are METHOD's.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SignalsConfig {
    /// Forgetting: how many of a task's last scores are looked back on, W. Default 16, at least 1.
    pub window: usize,
    /// Forgetting: whether earlier rollouts of the same group count as history. Default false.
    pub include_group: bool,
    /// Rare: a pattern is rare below this share of all counted rollouts, percent. Default 5.
    pub theta: f64,
    /// Rare: nothing is rare before this many counted rollouts. Default 200.
    pub n_min: u64,
    /// Rare: a pattern must have been seen in this many rollouts, this one included. Default 2.
    pub min_recurrence: u64,
    /// Rare: how many tool names make a pattern (repeats in a row count once). Default 4, at least 1.
    pub pattern_length: usize,
    /// Whether forgetting is raised at all. Default true. History is kept either way.
    pub forgetting: bool,
    /// Whether boundary is raised at all. Default true.
    pub boundary: bool,
    /// Whether rare is raised at all. Default true. Patterns are counted either way.
    pub rare: bool,
}

impl Default for SignalsConfig {
    fn default() -> Self {
        SignalsConfig {
            window: 16,
            include_group: false,
            theta: 5.0,
            n_min: 200,
            min_recurrence: 2,
            pattern_length: 4,
            forgetting: true,
            boundary: true,
            rare: true,
        }
    }
}

/// A setting of the signals that makes no sense.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("{key} = {value} is not usable: {remedy}")]
pub struct SignalsConfigError {
    /// The setting, e.g. `signals.window`.
    pub key: String,
    /// Its value as JSON text.
    pub value: String,
    /// What it may be.
    pub remedy: String,
}

impl SignalsConfig {
    /// Checks the ranges that the documentation of the fields promises.
    pub fn validate(&self) -> Result<(), SignalsConfigError> {
        let fault = |key: &str, value: String, remedy: &str| {
            Err(SignalsConfigError { key: format!("signals.{key}"), value, remedy: remedy.into() })
        };
        if self.window == 0 {
            return fault("window", "0".into(), "a whole number of attempts, 1 or more");
        }
        if self.pattern_length == 0 {
            return fault("pattern_length", "0".into(), "a whole number of tool names, 1 or more");
        }
        if !self.theta.is_finite() || !(0.0..=100.0).contains(&self.theta) {
            return fault("theta", self.theta.to_string(), "a percentage from 0 to 100");
        }
        Ok(())
    }

    /// Reads the settings of a run: a JSON object with `signals: {..}` or dotted keys (`signals.theta`).
    /// Keys may carry the signal's name (`signals.forgetting.include_group`, `signals.rare.theta`), and
    /// `signals.rare = false` or `signals.rare.enabled = false` switches a kind off. Keys that are not
    /// about signals are ignored; a key about signals that is unknown or has the wrong type is an error.
    pub fn from_settings(settings: &serde_json::Value) -> Result<Self, SignalsConfigError> {
        let mut config = SignalsConfig::default();
        config.apply_settings(settings)?;
        Ok(config)
    }

    /// As [`SignalsConfig::from_settings`], but over the present values: what a fork changes.
    pub fn apply_settings(&mut self, settings: &serde_json::Value) -> Result<(), SignalsConfigError> {
        let mut leaves = Vec::new();
        flatten("", settings, &mut leaves);
        for (path, value) in leaves {
            let Some(path) = path.strip_prefix("signals.") else { continue };
            self.set(path, value)?;
        }
        self.validate()
    }

    fn set(&mut self, path: &str, value: &serde_json::Value) -> Result<(), SignalsConfigError> {
        let bare = ["forgetting.", "boundary.", "rare."].iter().find_map(|p| path.strip_prefix(p)).unwrap_or(path);
        let key = if bare == "enabled" { path.trim_end_matches(".enabled") } else { bare };
        let fault = |remedy: &str| SignalsConfigError {
            key: format!("signals.{path}"),
            value: value.to_string(),
            remedy: remedy.into(),
        };
        let whole = || value.as_u64().ok_or_else(|| fault("a whole number, 0 or more"));
        let flag = || value.as_bool().ok_or_else(|| fault("true or false"));
        match key {
            "window" => self.window = usize::try_from(whole()?).unwrap_or(usize::MAX),
            "include_group" => self.include_group = flag()?,
            "theta" => self.theta = value.as_f64().ok_or_else(|| fault("a percentage from 0 to 100"))?,
            "n_min" => self.n_min = whole()?,
            "min_recurrence" => self.min_recurrence = whole()?,
            "pattern_length" => self.pattern_length = usize::try_from(whole()?).unwrap_or(usize::MAX),
            "forgetting" => self.forgetting = flag()?,
            "boundary" => self.boundary = flag()?,
            "rare" => self.rare = flag()?,
            _ => {
                return Err(fault(
                    "known settings are window, include_group, theta, n_min, min_recurrence, pattern_length, \
                     forgetting, boundary, rare",
                ));
            }
        }
        Ok(())
    }
}

fn flatten<'a>(path: &str, value: &'a serde_json::Value, out: &mut Vec<(String, &'a serde_json::Value)>) {
    match value {
        serde_json::Value::Object(map) => {
            for (key, inner) in map {
                let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
                flatten(&path, inner, out);
            }
        }
        leaf => out.push((path.to_owned(), leaf)),
    }
}

/// What the signals look at in one finished rollout.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Attempt {
    /// Which rollout.
    pub key: RolloutKey,
    /// Score in [0, 1]; `None` = unscored.
    pub score: Option<f64>,
    /// Names of the tools called, in order.
    pub calls: Vec<String>,
}

impl Attempt {
    /// The part of a rollout event that matters here. A score that is no finite number counts as unscored.
    pub fn of(rollout: &RolloutFinished) -> Attempt {
        Attempt {
            key: rollout.key.clone(),
            score: rollout.reward.score().filter(|s| s.is_finite()),
            calls: rollout.actions.iter().flat_map(|a| a.calls.iter().map(|c| c.name.clone())).collect(),
        }
    }
}

/// The action pattern of a rollout: tool names, repeats in a row once, the first `length`;
/// [`NO_CALLS`] without calls.
pub fn pattern<S: AsRef<str>>(calls: &[S], length: usize) -> Vec<String> {
    let mut names: Vec<String> = Vec::new();
    for call in calls {
        let name = call.as_ref();
        if names.last().is_some_and(|last| last == name) {
            continue;
        }
        if names.len() == length {
            break;
        }
        names.push(name.to_owned());
    }
    if names.is_empty() {
        names.push(NO_CALLS.to_owned());
    }
    names
}

/// A raised signal.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Raised {
    /// The marked rollout.
    pub key: RolloutKey,
    /// Which signal.
    pub kind: SignalKind,
    /// Evidence, a JSON object (see [`SignalState::fold`]).
    pub because: serde_json::Value,
    /// The rollout's own score.
    pub score: f64,
    /// Mean score of the scored rollouts of its group.
    pub group_mean: f64,
}

/// A past score of a task.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Past {
    /// Training step of the rollout.
    pub step: u32,
    /// Its score.
    pub score: f64,
}

/// What the signals remember.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct SignalState {
    /// Per task its last scores, oldest first, at most `window`.
    pub windows: BTreeMap<String, VecDeque<Past>>,
    /// How often each pattern was seen, c_p.
    #[serde(with = "crate::decide::pairs")]
    pub patterns: BTreeMap<Vec<String>, u64>,
    /// Counted rollouts, N.
    pub counted: u64,
}

impl SignalState {
    /// Folds finished rollouts and returns the signals they raise, in canonical order of the rollouts and
    /// forgetting, boundary, rare within one. Groups must be whole: a group split over two calls would be
    /// two groups. Evidence (`because`):
    /// - forgetting: `score`, `window` (the scores looked back on, oldest first), `last_solved_step`;
    /// - boundary: `scores` (of the group's scored rollouts, by k), `mean`, `above`, `below` (0.5);
    /// - rare: `pattern`, `count` (c_p), `total` (N), `share` (percent), `theta` (percent).
    pub fn fold(&mut self, config: &SignalsConfig, attempts: &[Attempt]) -> Vec<Raised> {
        let mut ordered: Vec<(&Attempt, f64)> =
            attempts.iter().filter_map(|a| a.score.filter(|s| s.is_finite()).map(|s| (a, s))).collect();
        // Stable: equal keys (which a log never holds) stay in the order given.
        ordered.sort_by(|a, b| a.0.key.cmp(&b.0.key));
        let mut raised = Vec::new();
        for group in ordered.chunk_by(|a, b| same_group(&a.0.key, &b.0.key)) {
            self.fold_group(config, group, &mut raised);
        }
        raised
    }

    fn fold_group(&mut self, config: &SignalsConfig, group: &[(&Attempt, f64)], raised: &mut Vec<Raised>) {
        let Some((first, _)) = group.first() else { return };
        let scores: Vec<f64> = group.iter().map(|(_, s)| *s).collect();
        let mean = scores.iter().sum::<f64>() / scores.len() as f64;
        let above = scores.iter().filter(|s| **s > 0.5).count();
        let below = scores.iter().filter(|s| **s < 0.5).count();
        let window = self.windows.entry(first.key.task.clone()).or_default();
        let before = window.clone();
        for (attempt, score) in group {
            let mut raise = |kind, because| {
                raised.push(Raised { key: attempt.key.clone(), kind, because, score: *score, group_mean: mean });
            };
            let history = if config.include_group { &*window } else { &before };
            let forgotten = *score < SOLVED;
            let last_solved = history.iter().rev().find(|p| p.score >= SOLVED);
            if let (true, true, Some(solved)) = (config.forgetting, forgotten, last_solved) {
                raise(
                    SignalKind::Forgetting,
                    serde_json::json!({
                        "score": score,
                        "window": history.iter().map(|p| p.score).collect::<Vec<_>>(),
                        "last_solved_step": solved.step,
                    }),
                );
            }
            if config.boundary && above > 0 && below > 0 {
                raise(
                    SignalKind::Boundary,
                    serde_json::json!({ "scores": scores, "mean": mean, "above": above, "below": below }),
                );
            }
            let pattern = pattern(&attempt.calls, config.pattern_length);
            let count = self.patterns.entry(pattern.clone()).or_insert(0);
            *count += 1;
            self.counted += 1;
            // c/N < theta/100 without the roundings of two divisions.
            let rare = (*count as f64) * 100.0 < config.theta * self.counted as f64;
            if config.rare && self.counted >= config.n_min && *count >= config.min_recurrence && rare {
                raise(
                    SignalKind::Rare,
                    serde_json::json!({
                        "pattern": pattern,
                        "count": *count,
                        "total": self.counted,
                        "share": *count as f64 * 100.0 / self.counted as f64,
                        "theta": config.theta,
                    }),
                );
            }
            window.push_back(Past { step: attempt.key.step, score: *score });
            while window.len() > config.window {
                window.pop_front();
            }
        }
    }

    /// Share of the task's window that was solved (score >= 0.5); `None` without a scored attempt.
    pub fn success_rate(&self, task: &str) -> Option<f64> {
        let window = self.windows.get(task).filter(|w| !w.is_empty())?;
        Some(window.iter().filter(|p| p.score >= SOLVED).count() as f64 / window.len() as f64)
    }
}

/// Whether two rollouts belong to one group: same step, task and draw.
pub fn same_group(a: &RolloutKey, b: &RolloutKey) -> bool {
    a.step == b.step && a.task == b.task && a.draw == b.draw
}
