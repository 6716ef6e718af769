//! Sampling a step: the missing rollouts of its plan, or of a further round, through the pipeline, into the log.

use super::setup::{limits, play_plan};
use super::{Observer, Progress, Run, RunError};
use crate::agent::{EpisodeJob, Sampling};
use crate::event::{BatchPlanned, FailureNoted, Reward, RolloutKey};
use crate::pipeline::play;
use crate::world::Stopwatch;
use std::collections::BTreeSet;

impl Run {
    /// Plays every rollout of `groups`, planned for the step of `plan`, that the log does not hold.
    pub(super) fn sample(
        &mut self,
        plan: &BatchPlanned,
        groups: &[(String, u32)],
        observer: &mut dyn Observer,
    ) -> Result<(), RunError> {
        self.settle()?;
        let recorded = self.ledger.state().recorded.steps.get(&plan.step);
        if recorded.is_some_and(|r| r.closed) {
            return Ok(());
        }
        let have: BTreeSet<RolloutKey> = recorded.map(|r| r.rollouts.keys().collect()).unwrap_or_default();
        let mut missing = Vec::new();
        for (index, (task, draw)) in groups.iter().enumerate() {
            let Some(entry) = self.ledger.state().tasks.tasks.get(task) else {
                return Err(RunError::internal("planned task is not in D", task));
            };
            let jobs: Vec<EpisodeJob> = (0..plan.group_size)
                .map(|k| RolloutKey { step: plan.step, task: task.clone(), draw: *draw, k })
                .filter(|key| !have.contains(key))
                .map(|key| EpisodeJob {
                    task: entry.task.clone(),
                    key,
                    group: index,
                    sampling: Sampling {
                        temperature: plan.temperature,
                        top_k: plan.top_k,
                        top_p: plan.top_p,
                        min_p: plan.min_p,
                    },
                    seed: self.settings.run.seed,
                    label: "train".into(),
                })
                .collect();
            if !jobs.is_empty() {
                missing.push(jobs);
            }
        }
        // Of every round so far.
        let planned = self.ledger.state().metrics.steps.get(&plan.step).map_or(0, |m| m.groups as usize);
        let of = planned * plan.group_size as usize;
        let mut done = have.len();
        observer.progress(Progress::Sampled { done, of });
        let agent = self.trainee.agent()?;
        let stages = play_plan(&self.settings, limits(&self.settings), self.stop.clone());
        let version = plan.policy_version;
        let mut environment = 0;
        let watch = Stopwatch::start();
        let ledger = &mut self.ledger;
        let played = play(&self.env, agent.as_ref(), missing, &stages, self.clock.latencies(), &mut |record| {
            environment += record.environment_us;
            let duration = record.sampling_us + record.environment_us;
            if let Reward::Unscored(reason) = &record.reward {
                let RolloutKey { step, task, draw, k } = &record.key;
                let message = format!("rollout {step}/{task}/{draw}/{k}: {reason}; it is unscored, the run goes on");
                ledger
                    .note(FailureNoted { stage: "environment".into(), message: message.clone() })
                    .map_err(|e| e.to_string())?;
                observer.progress(Progress::Note(message));
            }
            ledger.record(record.into_event(version), duration).map_err(|e| e.to_string())?;
            done += 1;
            observer.progress(Progress::Sampled { done, of });
            Ok(())
        })?;
        self.clock.sampling(&played, watch.micros(), environment, stages.threads as u64);
        self.settle()
    }
}
