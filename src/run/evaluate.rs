//! Held-out evaluation at temperature 0.

use super::setup::{limits, play_plan};
use super::{Observer, Progress, Run, RunError};
use crate::agent::{Agent, EpisodeJob, Sampling};
use crate::env::Environment;
use crate::event::{EvaluationFinished, Reward, RolloutKey, TaskSpec};
use crate::pipeline::{Latencies, Plan, play};
use crate::world::Stopwatch;
use std::sync::Arc;

/// Plays every task once at temperature 0 and returns (task id, reward) sorted by id.
pub fn evaluate_split(
    env: &Arc<dyn Environment>,
    agent: &dyn Agent,
    split: &str,
    tasks: &[TaskSpec],
    seed: u64,
    plan: &Plan,
    finished: &mut dyn FnMut(usize),
) -> Result<Vec<(String, Reward)>, RunError> {
    let groups = tasks
        .iter()
        .enumerate()
        .map(|(group, task)| {
            vec![EpisodeJob {
                task: task.clone(),
                key: RolloutKey { step: 0, task: task.id.clone(), draw: 0, k: 0 },
                group,
                sampling: Sampling::at(0.0),
                seed,
                label: split.to_string(),
            }]
        })
        .collect();
    let mut results = Vec::new();
    play(env, agent, groups, plan, &mut Latencies::default(), &mut |record| {
        results.push((record.key.task, record.reward));
        finished(results.len());
        Ok(())
    })?;
    results.sort_by(|a, b| a.0.cmp(&b.0));
    Ok(results)
}

impl Run {
    /// Evaluates the splits that are not recorded for this step.
    pub(super) fn evaluate(&mut self, step: u32, observer: &mut dyn Observer) -> Result<(), RunError> {
        self.settle()?;
        let agent = self.trainee.agent()?;
        for (split, tasks) in self.held_out.clone() {
            let done = self.ledger.state().metrics.evaluations.get(&step).is_some_and(|e| e.contains_key(&split));
            if done {
                continue;
            }
            let watch = Stopwatch::start();
            let plan = play_plan(&self.settings, limits(&self.settings), self.stop.clone());
            let results = evaluate_split(
                &self.env,
                agent.as_ref(),
                &split,
                &tasks,
                self.settings.run.seed,
                &plan,
                &mut |done| observer.progress(Progress::Evaluating { split: &split, done, of: tasks.len() }),
            )?;
            let spent = watch.micros();
            self.clock.evaluation(spent);
            let policy_version = self.trainee.version();
            self.ledger.record(EvaluationFinished { step, policy_version, split, results }, spent)?;
        }
        self.settle()
    }
}
