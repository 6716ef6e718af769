//! The three weakness signals (METHOD: stage 1b): forgetting, boundary, rare.
//!
//! [`SignalState`] is what has to be remembered between steps: a window of scores per task and the counts
//! of action patterns. [`SignalState::fold`] takes the finished rollouts of a step, in any order, and
//! walks them in canonical (step, task, draw, k) order, so that the result does not depend on which
//! rollout finished first. Unscored rollouts raise nothing and enter no window and no count.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::event::{RolloutFinished, RolloutKey, SignalKind, order};

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

/// A finished rollout as the folds look at it, wherever it lies. Handles are small and copied freely.
pub trait Tried {
    /// Training step.
    fn step(&self) -> u32;
    /// Task id.
    fn task(&self) -> &str;
    /// Which draw of the task within the step.
    fn draw(&self) -> u32;
    /// Index within the group.
    fn k(&self) -> u32;
    /// Score in [0, 1], finite; `None` = unscored.
    fn score(&self) -> Option<f64>;
    /// Names of the tools called, in order.
    fn calls(&self) -> impl Iterator<Item = &str>;

    /// Whether two rollouts belong to one group: same step, task and draw.
    fn same_group(&self, other: &Self) -> bool {
        self.step() == other.step() && self.draw() == other.draw() && self.task() == other.task()
    }

    /// Its key, owned.
    fn key(&self) -> RolloutKey {
        RolloutKey { step: self.step(), task: self.task().to_owned(), draw: self.draw(), k: self.k() }
    }
}

impl Tried for &Attempt {
    fn step(&self) -> u32 {
        self.key.step
    }
    fn task(&self) -> &str {
        &self.key.task
    }
    fn draw(&self) -> u32 {
        self.key.draw
    }
    fn k(&self) -> u32 {
        self.key.k
    }
    fn score(&self) -> Option<f64> {
        self.score.filter(|s| s.is_finite())
    }
    fn calls(&self) -> impl Iterator<Item = &str> {
        self.calls.iter().map(String::as_str)
    }
}

/// The action pattern of a rollout: tool names, repeats in a row once, the first `length`;
/// [`NO_CALLS`] without calls.
pub fn pattern<S: AsRef<str>>(calls: &[S], length: usize) -> Vec<String> {
    let mut key = Vec::new();
    pattern_key(calls.iter().map(AsRef::as_ref), length, &mut key);
    order::texts(&key)
}

/// [`pattern`] as a key ([`order`]) in a buffer that is used again.
fn pattern_key<'a>(calls: impl Iterator<Item = &'a str>, length: usize, key: &mut Vec<u8>) {
    key.clear();
    let (mut last, mut names) = (None, 0);
    for name in calls {
        if last == Some(name) {
            continue;
        }
        if names == length {
            break;
        }
        order::push_text(key, name);
        last = Some(name);
        names += 1;
    }
    if names == 0 {
        order::push_text(key, NO_CALLS);
    }
}

/// How often each pattern was seen, c_p, in the order of the patterns as lists of names. In JSON a list of
/// `[pattern, count]`.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Patterns(BTreeMap<Vec<u8>, u64>);

impl Patterns {
    /// Count of a pattern; 0 for one never seen.
    pub fn get<S: AsRef<str>>(&self, pattern: &[S]) -> u64 {
        let mut key = Vec::new();
        pattern.iter().for_each(|name| order::push_text(&mut key, name.as_ref()));
        self.0.get(&key).copied().unwrap_or(0)
    }

    /// Patterns and counts, in order.
    pub fn iter(&self) -> impl Iterator<Item = (Vec<String>, u64)> {
        self.0.iter().map(|(key, count)| (order::texts(key), *count))
    }

    /// Counts one more rollout; returns the new count.
    fn count(&mut self, key: &[u8]) -> u64 {
        match self.0.get_mut(key) {
            Some(count) => {
                *count += 1;
                *count
            }
            None => {
                self.0.insert(key.to_vec(), 1);
                1
            }
        }
    }
}

impl Serialize for Patterns {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_seq(self.iter())
    }
}

impl<'de> Deserialize<'de> for Patterns {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Patterns, D::Error> {
        let pairs = Vec::<(Vec<String>, u64)>::deserialize(from)?;
        let key = |names: Vec<String>| {
            let mut key = Vec::new();
            names.iter().for_each(|name| order::push_text(&mut key, name));
            key
        };
        Ok(Patterns(pairs.into_iter().map(|(names, count)| (key(names), count)).collect()))
    }
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

/// The evidence of a signal, borrowed; it becomes JSON only where somebody asks for it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Because<'a> {
    /// See [`SignalKind::Forgetting`].
    Forgetting {
        /// The rollout's score.
        score: f64,
        /// The scores looked back on, oldest first.
        window: &'a [f64],
        /// Step of the last solved one of them.
        last_solved_step: u32,
    },
    /// See [`SignalKind::Boundary`].
    Boundary {
        /// Scores of the group's scored rollouts, by k.
        scores: &'a [f64],
        /// Their mean.
        mean: f64,
        /// How many are above 0.5.
        above: usize,
        /// How many are below 0.5.
        below: usize,
    },
    /// See [`SignalKind::Rare`].
    Rare {
        /// The pattern, as texts of [`order`].
        pattern: &'a [u8],
        /// How often it was seen, c_p.
        count: u64,
        /// Counted rollouts, N.
        total: u64,
        /// The threshold, percent.
        theta: f64,
    },
}

impl Because<'_> {
    /// Which signal it is the evidence of.
    pub fn kind(&self) -> SignalKind {
        match self {
            Because::Forgetting { .. } => SignalKind::Forgetting,
            Because::Boundary { .. } => SignalKind::Boundary,
            Because::Rare { .. } => SignalKind::Rare,
        }
    }

    /// As a JSON object (see [`SignalState::fold`]).
    pub fn json(&self) -> serde_json::Value {
        match *self {
            Because::Forgetting { score, window, last_solved_step } => {
                serde_json::json!({ "score": score, "window": window, "last_solved_step": last_solved_step })
            }
            Because::Boundary { scores, mean, above, below } => {
                serde_json::json!({ "scores": scores, "mean": mean, "above": above, "below": below })
            }
            Because::Rare { pattern, count, total, theta } => serde_json::json!({
                "pattern": order::texts(pattern),
                "count": count,
                "total": total,
                "share": count as f64 * 100.0 / total as f64,
                "theta": theta,
            }),
        }
    }
}

/// Buffers that [`SignalState::fold_ordered`] uses again from call to call.
#[derive(Debug, Clone, Default)]
pub struct Scratch {
    scores: Vec<f64>,
    before: Vec<Past>,
    window: Vec<f64>,
    pattern: Vec<u8>,
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
    pub patterns: Patterns,
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
        let mut ordered: Vec<&Attempt> = attempts.iter().collect();
        // Stable: equal keys (which a log never holds) stay in the order given.
        ordered.sort_by(|a, b| a.key.cmp(&b.key));
        let mut raised = Vec::new();
        self.fold_ordered(config, &mut Scratch::default(), ordered.len(), &|i| ordered[i], &mut |i, mean, because| {
            raised.push(Raised {
                key: ordered[i].key.clone(),
                kind: because.kind(),
                because: because.json(),
                score: ordered[i].score.unwrap_or_default(),
                group_mean: mean,
            });
        });
        raised
    }

    /// As [`SignalState::fold`] for `n` rollouts that `at` gives in canonical order. A raised signal is told to
    /// `raise` as (place of the rollout, mean score of its group, evidence). Allocates only for what was never seen.
    pub fn fold_ordered<A: Tried>(
        &mut self,
        config: &SignalsConfig,
        scratch: &mut Scratch,
        n: usize,
        at: &impl Fn(usize) -> A,
        raise: &mut impl FnMut(usize, f64, Because<'_>),
    ) {
        for_each_group(n, at, |group| self.fold_group(config, scratch, group, at, raise));
    }

    fn fold_group<A: Tried>(
        &mut self,
        config: &SignalsConfig,
        scratch: &mut Scratch,
        group: Range<usize>,
        at: &impl Fn(usize) -> A,
        raise: &mut impl FnMut(usize, f64, Because<'_>),
    ) {
        let Scratch { scores, before, window: looked_back_on, pattern } = scratch;
        scores.clear();
        scores.extend(group.clone().filter_map(|i| at(i).score()));
        if scores.is_empty() {
            return;
        }
        let mean = scores.iter().sum::<f64>() / scores.len() as f64;
        let above = scores.iter().filter(|s| **s > 0.5).count();
        let below = scores.iter().filter(|s| **s < 0.5).count();
        let first = at(group.start);
        let SignalState { windows, patterns, counted } = self;
        with_entry(windows, first.task(), |window| {
            before.clear();
            before.extend(window.iter().copied());
            for i in group {
                let attempt = at(i);
                let Some(score) = attempt.score() else { continue };
                if config.forgetting && score < SOLVED {
                    let (old, new) = if config.include_group { window.as_slices() } else { (&before[..], &[][..]) };
                    let history = || old.iter().chain(new);
                    if let Some(solved) = history().rev().find(|p| p.score >= SOLVED) {
                        looked_back_on.clear();
                        looked_back_on.extend(history().map(|p| p.score));
                        let last_solved_step = solved.step;
                        raise(i, mean, Because::Forgetting { score, window: looked_back_on, last_solved_step });
                    }
                }
                if config.boundary && above > 0 && below > 0 {
                    raise(i, mean, Because::Boundary { scores, mean, above, below });
                }
                pattern_key(attempt.calls(), config.pattern_length, pattern);
                let count = patterns.count(pattern);
                *counted += 1;
                // c/N < theta/100 without the roundings of two divisions.
                let rare = (count as f64) * 100.0 < config.theta * *counted as f64;
                if config.rare && *counted >= config.n_min && count >= config.min_recurrence && rare {
                    raise(i, mean, Because::Rare { pattern, count, total: *counted, theta: config.theta });
                }
                window.push_back(Past { step: attempt.step(), score });
                while window.len() > config.window {
                    window.pop_front();
                }
            }
        });
    }

    /// Share of the task's window that was solved (score >= 0.5); `None` without a scored attempt.
    pub fn success_rate(&self, task: &str) -> Option<f64> {
        let window = self.windows.get(task).filter(|w| !w.is_empty())?;
        Some(window.iter().filter(|p| p.score >= SOLVED).count() as f64 / window.len() as f64)
    }
}

/// Calls `f` with the entry of a text, made when missing; an owned key is made only then.
pub(crate) fn with_entry<V: Default, R>(map: &mut BTreeMap<String, V>, key: &str, f: impl FnOnce(&mut V) -> R) -> R {
    match map.get_mut(key) {
        Some(value) => f(value),
        None => f(map.entry(key.to_owned()).or_default()),
    }
}

/// Calls `f` for each group of `n` rollouts in canonical order.
pub(crate) fn for_each_group<A: Tried>(n: usize, at: &impl Fn(usize) -> A, mut f: impl FnMut(Range<usize>)) {
    let mut start = 0;
    while start < n {
        let first = at(start);
        let end = (start + 1..n).find(|i| !at(*i).same_group(&first)).unwrap_or(n);
        f(start..end);
        start = end;
    }
}
