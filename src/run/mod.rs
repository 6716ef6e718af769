//! The co-evolution loop as one readable page: see [`Run::drive`].
//!
//! Every line of the page is "look the fact up, or do it and record it". A run that was killed is
//! therefore resumed by walking the same page again: what the log holds is taken from there, the rest is
//! done, with the same draws. The learner is rebuilt from the nearest checkpoint by recomputing the logged
//! gradient steps.

mod answers;
mod checkpoints;
mod clock;
mod error;
mod evaluate;
mod evolution;
mod ledger;
mod observe;
pub mod policy;
mod refill;
mod sample;
mod setup;
mod summary;

pub use checkpoints::{repair, superseded, verify};
pub use clock::{Clock, Seconds};
pub use error::RunError;
pub use evaluate::evaluate_split;
pub use ledger::state_at;
pub use observe::{Observer, Progress, Silent};
pub use setup::{limits, open_environment, play_plan};
pub use summary::{Summary, summarise};

use crate::config::Settings;
use crate::decide::curriculum::{BatchOptions, plan_batch};
use crate::decide::refill::used;
use crate::decide::similarity::NoveltyIndex;
use crate::env::Environment;
use crate::event::{
    BatchPlanned, CheckpointSaved, Origin, PolicyPublished, RunFinished, RunResumed, RunStarted, SignalRaised,
    StepFinished, TaskAdmitted, TaskSpec,
};
use crate::evolve::asking::{Purse, Recording};
use crate::evolve::score::LlmJudge;
use crate::world::Stopwatch;
use checkpoints::SUPERSEDED;
use ledger::Ledger;
use policy::{Trainee, Update};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// A run in progress.
pub struct Run {
    dir: PathBuf,
    settings: Settings,
    ledger: Ledger,
    env: Arc<dyn Environment>,
    trainee: Box<dyn Trainee>,
    clock: Clock,
    stop: Arc<AtomicBool>,
    /// Tasks of the evaluation splits, loaded once.
    held_out: Vec<(String, Vec<TaskSpec>)>,
    /// The run that answers for external LLMs, if one does.
    recording: Option<Arc<Recording>>,
    /// Tokens of external LLMs that it has spent.
    purse: Arc<Purse>,
}

impl Run {
    /// Starts a run in `dir`, which must not exist, be empty, or hold nothing but what a kill before the
    /// first event leaves.
    pub fn create(dir: &Path, settings: Settings, stop: Arc<AtomicBool>) -> Result<Run, RunError> {
        let (env, judge) = policy::judged(&settings, open_environment(&settings)?);
        let trainee = policy::open(&settings, env.as_ref())?;
        let started = RunStarted {
            run_id: crate::world::new_run_id(),
            seed: settings.run.seed,
            settings: crate::config::to_recorded(&settings)?,
            code_version: env!("CARGO_PKG_VERSION").into(),
            policy_digest: trainee.policy_digest(),
            environment: format!("{} {}", env.name(), env.version()),
        };
        // What cannot work is refused before the folder is made.
        let held_out = held_out(&settings, env.as_ref())?;
        if settings.evolve.initial == "split" {
            env.tasks(&settings.env.split, settings.run.seed, 1)?;
        }
        if settings.evolve.mode != "off" || settings.evolve.initial == "explore" {
            policy::explorer(&settings, &env, trainee.as_ref(), &stop, answers::no_book())?;
        }
        let recording = answers::recording(&settings)?;
        setup::write_plan(dir, &settings)?;
        let ledger = Ledger::create(dir, started, &settings.log)?;
        let run = Run { recording, ..Run::assemble(dir, settings, ledger, env, trainee, held_out, stop) };
        run.appoint(judge)?;
        Ok(run)
    }

    /// Takes up the run in `dir`. With nothing in it but what a kill before the first event leaves, this is
    /// an error that says to start afresh ([`RunError::NothingToResume`]). `set` changes execution settings.
    pub fn resume(dir: &Path, set: &[String], stop: Arc<AtomicBool>) -> Result<Run, RunError> {
        let planned = setup::planned_settings(dir).unwrap_or_default();
        let execution = crate::config::with_execution(planned.clone(), &planned, set)?;
        let ledger = Ledger::open(dir, &execution.log)?;
        let Some(info) = ledger.state().run.clone() else {
            return Err(RunError::NothingToResume { dir: dir.to_path_buf() });
        };
        let recorded = crate::config::from_recorded(&info.settings, dir)?;
        let settings = crate::config::with_execution(recorded, &execution, &[])?;
        let (env, judge) = policy::judged(&settings, open_environment(&settings)?);
        let trainee = policy::open(&settings, env.as_ref())?;
        let environment = format!("{} {}", env.name(), env.version());
        if environment != info.environment {
            return Err(RunError::Changed { what: "the environment", recorded: info.environment, found: environment });
        }
        if trainee.policy_digest() != info.policy_digest {
            let found = trainee.policy_digest();
            return Err(RunError::Changed { what: "the initial policy", recorded: info.policy_digest, found });
        }
        let held_out = held_out(&settings, env.as_ref())?;
        let recording = answers::recording(&settings)?;
        let mut run = Run { recording, ..Run::assemble(dir, settings, ledger, env, trainee, held_out, stop) };
        run.appoint(judge)?;
        if !run.ledger.state().recorded.run_finished {
            ledger::Past::read(dir)?.restore(dir, run.trainee.as_mut())?;
            let step = run.next_step();
            run.ledger.note(RunResumed { step, code_version: env!("CARGO_PKG_VERSION").into() })?;
        }
        Ok(run)
    }

    /// Starts afresh what a kill stopped before its first event, with the settings it left behind. `set` changes
    /// execution settings.
    pub fn restart(dir: &Path, set: &[String], stop: Arc<AtomicBool>) -> Result<Run, RunError> {
        let planned = setup::planned_settings(dir)?;
        let settings = crate::config::with_execution(planned.clone(), &planned, set)?;
        Run::create(dir, settings, stop)
    }

    /// The latest policy of a run, for evaluation: reads the folder without taking it over.
    pub fn policy_of(dir: &Path) -> Result<(Settings, Arc<dyn crate::agent::Agent>), RunError> {
        let ledger = ledger::Past::read(dir)?;
        let info = ledger.state.run.clone().ok_or_else(|| RunError::NothingToResume { dir: dir.to_path_buf() })?;
        let settings = crate::config::from_recorded(&info.settings, dir)?;
        let env = open_environment(&settings)?;
        let mut trainee = policy::open(&settings, env.as_ref())?;
        ledger.restore(dir, trainee.as_mut())?;
        Ok((settings, trainee.agent()?))
    }

    /// Lends the judge what it asks with.
    fn appoint(&self, judge: Option<Arc<LlmJudge>>) -> Result<(), RunError> {
        if let Some(judge) = judge {
            judge.lend(policy::asker(&self.settings, &self.stop, self.book_of_steps()?)?);
        }
        Ok(())
    }

    fn assemble(
        dir: &Path,
        settings: Settings,
        ledger: Ledger,
        env: Arc<dyn Environment>,
        trainee: Box<dyn Trainee>,
        held_out: Vec<(String, Vec<TaskSpec>)>,
        stop: Arc<AtomicBool>,
    ) -> Run {
        let purse = Arc::new(Purse::new(ledger.state().times.llm.tokens()));
        Run {
            dir: dir.to_path_buf(),
            settings,
            ledger,
            env,
            trainee,
            clock: Clock::start(),
            stop,
            held_out,
            recording: None,
            purse,
        }
    }

    /// The settings of the run.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// The loop. Returns the summary; of a finished run at once.
    pub fn drive(&mut self, observer: &mut dyn Observer) -> Result<Summary, RunError> {
        if !self.ledger.state().recorded.run_finished {
            self.prepare(observer)?;
            for step in self.next_step()..=self.settings.run.steps {
                self.train_step(step, observer)?;
                // Open files outlive their names: a run whose folder is gone would end without a trace.
                if !self.dir.join("HEAD").exists() {
                    let message = "its files were removed while it ran".into();
                    return Err(RunError::Folder { dir: self.dir.clone(), message });
                }
            }
            let step = self.settings.run.steps;
            self.ledger.record(RunFinished { step, weights_hash: self.trainee.weights_hash()? }, 0)?;
            self.settle()?;
        }
        let mut summary = summarise(&self.dir, self.ledger.state(), self.ledger.facts_digest(), self.ledger.events())?;
        summary.measured(self.clock.seconds(), self.clock.played(), self.clock.latencies().rows());
        Ok(summary)
    }

    /// Step 0: the task set, the first policy version, the evaluation before training.
    fn prepare(&mut self, observer: &mut dyn Observer) -> Result<(), RunError> {
        if self.finished_step().is_some() {
            return Ok(());
        }
        let weights_hash = self.trainee.weights_hash()?;
        self.ledger.record(PolicyPublished { version: 0, step: 0, weights_hash }, 0)?;
        if self.settings.evolve.initial == "explore" {
            self.evolve(0, 0, observer)?;
        } else {
            let s = &self.settings;
            let tasks = self.env.tasks(&s.env.split, s.run.seed, s.env.seed_tasks as usize)?;
            if tasks.len() < s.env.seed_tasks as usize {
                let (n, asked, split) = (tasks.len(), s.env.seed_tasks, &s.env.split);
                observer.progress(Progress::Note(format!(
                    "split `{split}` has {n} tasks, env.seed_tasks asks for {asked}"
                )));
            }
            for task in tasks {
                let seed = TaskAdmitted { task, origin: Origin::Seed, weight: 1.0, draft: None, step: 0 };
                self.ledger.record(seed, 0)?;
            }
        }
        self.settle()?;
        if self.ledger.state().tasks.is_empty() {
            return Err(RunError::NoTasks { split: self.settings.env.split.clone() });
        }
        self.evaluate(0, observer)?;
        self.finish_step(0, observer)
    }

    fn train_step(&mut self, step: u32, observer: &mut dyn Observer) -> Result<(), RunError> {
        let last = step == self.settings.run.steps;
        let due = |every: u32| step.is_multiple_of(every) && every > 0;
        observer.progress(Progress::StepStarted { step, of: self.settings.run.steps });
        let plan = self.plan(step)?;
        self.sample(&plan, &plan.groups, observer)?;
        self.refill(&plan, observer)?;
        self.raise_signals(step)?;
        self.learn(step, observer)?;
        if self.settings.evolve.mode != "off" && due(self.settings.evolve.every) && !last {
            self.evolve(step / self.settings.evolve.every, step, observer)?;
        }
        if last || due(self.settings.eval.every) {
            self.evaluate(step, observer)?;
        }
        if last || due(self.settings.run.checkpoint_every) {
            self.checkpoint(step)?;
        }
        self.finish_step(step, observer)
    }

    /// Which groups a step trains on.
    fn plan(&mut self, step: u32) -> Result<BatchPlanned, RunError> {
        let recorded = self.ledger.state().recorded.steps.get(&step).map(|s| s.plan()).transpose();
        if let Some(plan) = recorded.map_err(|e| RunError::internal("a recorded plan", e))?.flatten() {
            return Ok(plan);
        }
        let batch = &self.settings.batch;
        let options = self.batch_options(batch.tasks as usize);
        let candidates = self.ledger.state().tasks.candidates();
        let plan = BatchPlanned {
            step,
            policy_version: self.trainee.version(),
            groups: plan_batch(&candidates, step, self.settings.run.seed, &options),
            group_size: batch.group,
            temperature: batch.temperature as f32,
            top_p: batch.top_p as f32,
            top_k: batch.top_k,
            min_p: batch.min_p as f32,
        };
        self.ledger.record(plan.clone(), 0)?;
        Ok(plan)
    }

    /// How `groups` groups are drawn.
    fn batch_options(&self, groups: usize) -> BatchOptions {
        BatchOptions { tasks: groups, fresh_share: self.settings.batch.fresh_share, ..BatchOptions::default() }
    }

    /// Signals of the step's rollouts. The fold knows which follow; here they become events.
    fn raise_signals(&mut self, step: u32) -> Result<(), RunError> {
        for raised in self.ledger.state().due_signals(step) {
            self.ledger
                .record(SignalRaised { because: raised.because.to_string(), key: raised.key, kind: raised.kind }, 0)?;
        }
        self.settle()
    }

    /// The step's optimiser updates, and the policy version they make.
    fn learn(&mut self, step: u32, observer: &mut dyn Observer) -> Result<(), RunError> {
        let recorded = self.ledger.state().recorded.steps.get(&step);
        if recorded.is_some_and(|r| r.is_published()) {
            // `restore` has recomputed this step: the learner stands behind it already.
            return Ok(());
        }
        let refilled = recorded.is_some_and(|r| r.rounds() > 0);
        observer.progress(Progress::Learning { step });
        let rollouts = self.ledger.state().recorded.rollouts(step);
        let rollouts = rollouts.map_err(|e| RunError::internal("recorded rollouts", e))?;
        let rollouts = if refilled { used(rollouts) } else { rollouts };
        let watch = Stopwatch::start();
        let updates = self.trainee.learn(step, rollouts)?;
        let spent = watch.micros();
        self.clock.learning(spent);
        let share = spent / updates.len().max(1) as u64;
        for update in updates {
            match update {
                Update::Taken(e) => self.ledger.record(e, share)?,
                Update::Skipped(e) => self.ledger.record(e, share)?,
            }
        }
        let weights_hash = self.trainee.weights_hash()?;
        self.ledger.record(PolicyPublished { version: self.trainee.version(), step, weights_hash }, 0)?;
        self.settle()
    }

    fn checkpoint(&mut self, step: u32) -> Result<(), RunError> {
        let version = self.trainee.version();
        if self.ledger.state().places.checkpoints.contains_key(&version) {
            return Ok(());
        }
        // Two branches may have weights of the same version.
        let path = format!("checkpoints/{version:06}-{:.8}", self.trainee.weights_hash()?);
        let watch = Stopwatch::start();
        let (weights_hash, optimizer_hash) = self.trainee.save(&self.dir.join(&path))?;
        self.clock.log(watch.micros());
        self.ledger.note(CheckpointSaved { step, version, path, weights_hash, optimizer_hash })?;
        self.settle()?;
        let keep = self.settings.run.keep_checkpoints;
        if keep > 0 && !self.ledger.has_forks() {
            let paths = self.ledger.state().places.checkpoints.values().rev().map(|saved| saved.path.clone());
            let old = paths.skip(keep as usize).filter(|path| self.dir.join(path).exists());
            let old: Vec<_> = old.map(|path| (path, SUPERSEDED.to_string())).collect();
            if !old.is_empty() {
                self.ledger.remove(old)?;
            }
        }
        Ok(())
    }

    fn finish_step(&mut self, step: u32, observer: &mut dyn Observer) -> Result<(), RunError> {
        self.settle()?;
        let state = self.ledger.state();
        let mean_reward = state.metrics.steps.get(&step).and_then(|m| m.mean_reward).unwrap_or(0.0);
        let projection_digest = state.digest();
        let duration = self.clock.step_ended();
        self.ledger.record(StepFinished { step, mean_reward, projection_digest }, duration)?;
        self.settle()?;
        let every = self.settings.run.checkpoint_every;
        if step > 0 && (step == self.settings.run.steps || step.is_multiple_of(every)) {
            let watch = Stopwatch::start();
            self.ledger.snapshot()?;
            self.clock.log(watch.micros());
        }
        observer.progress(Progress::StepFinished { step, of: self.settings.run.steps, state: self.ledger.state() });
        Ok(())
    }

    /// Everything recorded so far is durable and folded.
    fn settle(&mut self) -> Result<(), RunError> {
        let spent = self.ledger.settle()?;
        self.clock.log(spent);
        Ok(())
    }

    fn finished_step(&self) -> Option<u32> {
        self.ledger.state().places.steps.keys().next_back().copied()
    }

    fn next_step(&self) -> u32 {
        self.finished_step().map_or(1, |s| s + 1)
    }

    /// Tasks that a draft must not come close to: D as the round found it, and the evaluation splits. Tasks of
    /// the round itself are left out: a resumed round walks its drafts again and adds them one by one.
    fn known_tasks(&self) -> NoveltyIndex {
        let mut index = NoveltyIndex::new();
        for (split, tasks) in &self.held_out {
            for task in tasks {
                index.add(split, task);
            }
        }
        let state = self.ledger.state();
        let of_this_round =
            |draft: &String| state.recorded.round.as_ref().is_some_and(|r| r.drafts.contains_key(draft));
        for entry in state.tasks.tasks.values() {
            if !entry.draft.as_ref().is_some_and(of_this_round) {
                index.add("training", &entry.task);
            }
        }
        index
    }
}

/// The tasks of the evaluation splits.
fn held_out(settings: &Settings, env: &dyn Environment) -> Result<Vec<(String, Vec<TaskSpec>)>, RunError> {
    let (seed, limit) = (settings.run.seed, settings.eval.tasks as usize);
    settings.eval.splits.iter().map(|split| Ok((split.clone(), env.tasks(split, seed, limit)?))).collect()
}
