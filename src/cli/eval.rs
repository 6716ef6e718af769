//! `eval`: a run's policy, or a named agent.

use super::output::{Failure, json, line, percent};
use clap::Args;
use coevolve::agent::{Agent, EchoAgent, NoopAgent, RandomAgent, ReferenceAgent};
use coevolve::config::{Layer, Settings, load};
use coevolve::env::Figure;
use coevolve::event::{Reward, TaskSpec};
use coevolve::run::{Run, evaluate_split, limits, open_environment, play_plan, policy};
use indicatif::{ProgressBar, ProgressStyle};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Evaluate on a split at temperature 0.
#[derive(Args, Debug)]
#[command(
    after_help = "Examples:\n  coevolve eval runs/desk-7 --split test-challenge\n  coevolve eval --env bfcl --split base --policy reference\n  coevolve eval --env desk --split test-normal --policy random"
)]
pub struct Eval {
    /// Run folder: evaluates its latest policy on its environment.
    dir: Option<PathBuf>,
    /// Environment, when no run is given.
    #[arg(long, conflicts_with = "dir")]
    env: Option<String>,
    /// reference | none | random | echo, or a model as in the setting policy.model.
    #[arg(long, conflicts_with = "dir", default_value = "embedded")]
    policy: String,
    /// Split.
    #[arg(long)]
    split: String,
    /// At most so many tasks.
    #[arg(long, default_value_t = 200)]
    tasks: u32,
    /// One setting on top; may be repeated.
    #[arg(long = "set", value_name = "KEY=VALUE", conflicts_with = "dir")]
    set: Vec<String>,
    /// Print one JSON line: split, passed, scored, total, score, families, families_passed, and figures the environment adds.
    #[arg(long)]
    json: bool,
}

#[derive(serde::Serialize)]
struct Outcome {
    split: String,
    passed: usize,
    scored: usize,
    total: usize,
    score: f64,
    /// Families of tasks in the split (AppWorld: scenarios).
    families: usize,
    /// Families whose tasks were all passed; their share is AppWorld's scenario goal completion (SGC).
    families_passed: usize,
    /// What the environment counts beside the score.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    figures: Vec<Figure>,
}

impl Eval {
    /// Runs it.
    pub fn run(self) -> Result<(), Failure> {
        let (settings, agent): (Settings, Arc<dyn Agent>) = match &self.dir {
            Some(dir) => Run::policy_of(dir)?,
            None => {
                let mut layers: Vec<Layer> = self.set.iter().cloned().map(Layer::Set).collect();
                layers.insert(0, Layer::Set(format!("env.name={}", self.env.as_deref().unwrap_or("desk"))));
                let mut settings = load(&layers)?;
                let agent: Arc<dyn Agent> = match self.policy.as_str() {
                    "reference" => Arc::new(ReferenceAgent::new()),
                    "none" | "noop" => Arc::new(NoopAgent),
                    "random" => Arc::new(RandomAgent),
                    "echo" => Arc::new(EchoAgent),
                    model => {
                        settings.policy.model = model.into();
                        policy::open(&settings, open_environment(&settings)?.as_ref())?.agent()?
                    }
                };
                (settings, agent)
            }
        };
        let env = open_environment(&settings)?;
        let tasks = env.tasks(&self.split, settings.run.seed, self.tasks as usize).map_err(Failure::usage)?;
        let bar = ProgressBar::new(tasks.len() as u64)
            .with_style(
                ProgressStyle::with_template("{prefix} {wide_bar} {pos}/{len} {eta} to go")
                    .unwrap_or_else(|_| ProgressStyle::default_bar()),
            )
            .with_prefix(self.split.clone());
        let plan = play_plan(&settings, limits(&settings), Arc::new(AtomicBool::new(false)));
        let results = evaluate_split(&env, agent.as_ref(), &self.split, &tasks, settings.run.seed, &plan, &mut |n| {
            bar.set_position(n as u64);
        })?;
        bar.finish_and_clear();
        let scores: Vec<f64> = results.iter().filter_map(|(_, r)| r.score()).collect();
        let passed = |score: f64| score >= 1.0 - 1e-9;
        let families = by_family(&tasks, &results, passed);
        let outcome = Outcome {
            split: self.split,
            passed: scores.iter().filter(|s| passed(**s)).count(),
            scored: scores.len(),
            total: results.len(),
            // An empty sum is -0.
            score: scores.iter().sum::<f64>().abs() / results.len().max(1) as f64,
            families: families.len(),
            families_passed: families.values().filter(|whole| **whole).count(),
            figures: env.figures(),
        };
        let scored = match (outcome.scored, outcome.total) {
            (0, n) if n > 0 => Err(Failure::failed(format!("none of {n} episodes could be scored: this says nothing"))),
            _ => Ok(()),
        };
        if self.json {
            json(&outcome)?;
            return scored;
        }
        for (task, reward) in &results {
            if let Reward::Unscored(reason) = reward {
                line(format!("{task}: unscored: {reason}"))?;
            }
        }
        let rate = outcome.passed as f64 / outcome.total.max(1) as f64;
        line(format!(
            "{}: passed {} of {} ({}), {} scored, mean score {:.3}",
            outcome.split,
            outcome.passed,
            outcome.total,
            percent(Some(rate)),
            outcome.scored,
            outcome.score
        ))?;
        if env.name() == "appworld" {
            let whole = outcome.families_passed as f64 / outcome.families.max(1) as f64;
            line(format!(
                "task goal completion (TGC) {}, scenario goal completion (SGC) {} ({} of {})",
                percent(Some(rate)),
                percent(Some(whole)),
                outcome.families_passed,
                outcome.families
            ))?;
        }
        for figure in &outcome.figures {
            line(format!("  {}: {} of {}", figure.name, figure.count, figure.of))?;
        }
        scored
    }
}

/// Per family, whether every task of it was passed.
fn by_family(tasks: &[TaskSpec], results: &[(String, Reward)], passed: impl Fn(f64) -> bool) -> BTreeMap<String, bool> {
    let rewards: BTreeMap<&str, &Reward> = results.iter().map(|(id, reward)| (id.as_str(), reward)).collect();
    let mut families = BTreeMap::new();
    for task in tasks {
        let right = rewards.get(task.id.as_str()).and_then(|r| r.score()).is_some_and(&passed);
        *families.entry(task.family.clone()).or_insert(true) &= right;
    }
    families
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_family_is_passed_when_all_its_tasks_are() {
        let task = |id: &str, family: &str| TaskSpec {
            id: id.into(),
            env: "e".into(),
            split: "s".into(),
            family: family.into(),
            base: id.into(),
            tools: Vec::new(),
            turns: Vec::new(),
        };
        let tasks = [task("1", "a"), task("2", "a"), task("3", "b"), task("4", "b"), task("5", "c")];
        let scored = |id: &str, score: f64| (id.to_owned(), Reward::Scored(score));
        let results = [
            scored("1", 1.0),
            scored("2", 1.0),
            scored("3", 1.0),
            scored("4", 0.5),
            ("5".into(), Reward::Unscored("x".into())),
        ];
        let families = by_family(&tasks, &results, |s| s >= 1.0);
        assert_eq!(
            families.into_iter().collect::<Vec<_>>(),
            [("a".into(), true), ("b".into(), false), ("c".into(), false)]
        );
    }
}
