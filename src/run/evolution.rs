//! One evolution round over the log: contexts, exploration, drafts, validation, admission.

use super::ledger::Ledger;
use super::policy;
use super::{Observer, Progress, Run, RunError};
use crate::decide::admission::AdmissionConfig;
use crate::decide::contexts::select_contexts;
use crate::event::{
    ContextSpec, DraftProposed, DraftRejected, Event, EvolutionFinished, EvolutionStarted, ExplorationStepTaken,
    FailureNoted, Origin, ReflectionWritten, TaskAdmitted,
};
use crate::evolve::validate::validate;
use crate::evolve::{Bounds, Context, ExploreError, Notebook, work_context};
use crate::world::Stopwatch;
use std::collections::BTreeMap;

/// Reason of a draft whose validation could not run, e.g. because no worker or judge answered.
const UNVALIDATED: &str = "unvalidated";
/// The same for a person.
const UNVALIDATED_WHY: &str = "validation could not run; a failure event says why";
/// And where the reason is the token budget; whoever takes the round up knows by it that nothing more is asked.
const SPENT_UP: &str = "the token budget is used up; a failure event says when";

/// The log as the explorer's notebook.
struct Pages<'a> {
    ledger: &'a mut Ledger,
    failed: Option<RunError>,
    since: Stopwatch,
}

impl Notebook for Pages<'_> {
    fn reflection(&self, context: &str) -> Option<ReflectionWritten> {
        self.ledger.state().recorded.round.as_ref()?.reflections.get(context).cloned()
    }

    fn steps(&self, context: &str, round: u32) -> Vec<ExplorationStepTaken> {
        let Some(recorded) = &self.ledger.state().recorded.round else { return Vec::new() };
        recorded.exploration_of(context).filter(|s| s.round == round).cloned().collect()
    }

    fn round_closed(&self, context: &str, round: u32) -> bool {
        let Some(recorded) = &self.ledger.state().recorded.round else { return false };
        recorded.exploration_of(context).any(|s| s.round > round)
            || recorded.drafts.values().any(|d| d.context == context)
    }

    fn drafts(&self, context: &str) -> Vec<DraftProposed> {
        let Some(recorded) = &self.ledger.state().recorded.round else { return Vec::new() };
        recorded.drafts.values().filter(|d| d.context == context).cloned().collect()
    }

    fn context_closed(&self, context: &str) -> bool {
        let Some(recorded) = &self.ledger.state().recorded.round else { return false };
        let judged =
            |d: &&DraftProposed| recorded.validated.contains_key(&d.draft) || recorded.rejected.contains_key(&d.draft);
        if recorded.drafts.values().filter(|d| d.context == context).any(|d| judged(&d)) {
            return true;
        }
        // Contexts are worked in this order, and the log holds a prefix of what was recorded.
        let mut after = recorded.started.contexts.iter().skip_while(|c| c.id != context).skip(1);
        after.any(|c| recorded.reflections.contains_key(&c.id))
    }

    fn record(&mut self, event: Event) {
        let spent = self.since.micros();
        self.since = Stopwatch::start();
        if let Err(error) = self.ledger.record(event, spent) {
            self.failed.get_or_insert(error);
        }
    }
}

impl Run {
    /// Round `round` after training step `step`; round 0 builds D_0 by unguided exploration.
    pub(super) fn evolve(&mut self, round: u32, step: u32, observer: &mut dyn Observer) -> Result<(), RunError> {
        self.settle()?;
        if self.ledger.state().recorded.finished_round.is_some_and(|r| r >= round) {
            return Ok(());
        }
        let watch = Stopwatch::start();
        let started = match &self.ledger.state().recorded.round {
            Some(recorded) if recorded.started.round == round => recorded.started.clone(),
            _ => {
                let started = self.begin_round(round, step);
                self.ledger.record(started.clone(), 0)?;
                self.settle()?;
                started
            }
        };
        let book = self.book_of_round(round)?;
        let explorer = policy::explorer(&self.settings, &self.env, self.trainee.as_ref(), &self.stop, book)?;
        let config = admission(&self.settings);
        let mut known = self.known_tasks();
        let (mut drafts, mut admitted) = (0, 0);
        let mut joined: BTreeMap<String, String> = BTreeMap::new();
        let goal = if round == 0 { self.settings.env.seed_tasks } else { u32::MAX };
        let of = started.contexts.len();
        // The token budget of external LLMs is used up: said once, and the round ends.
        let mut spent_up = false;
        for (index, spec) in started.contexts.into_iter().enumerate() {
            observer.progress(Progress::Evolving { done: index, of });
            if admitted >= goal || spent_up {
                break;
            }
            if self.stop.load(std::sync::atomic::Ordering::SeqCst) {
                return Err(stopped());
            }
            let context = self.context(spec)?;
            let mut pages = Pages { ledger: &mut self.ledger, failed: None, since: Stopwatch::start() };
            let worked = work_context(self.env.as_ref(), explorer.as_ref(), &context, &mut pages);
            if let Some(error) = pages.failed {
                return Err(error);
            }
            let proposed = match worked {
                Ok(drafts) => drafts,
                // Nothing was given up: whoever resumes goes on here.
                Err(ExploreError::Stopped) => return Err(stopped()),
                Err(error) => {
                    spent_up = matches!(error, ExploreError::Budget { .. });
                    self.give_up(&context.spec.id, &error.to_string(), observer)?;
                    continue;
                }
            };
            for draft in proposed {
                drafts += 1;
                if admitted >= goal {
                    self.reject(&draft, "cap", "D_0 is complete")?;
                    continue;
                }
                if let Some(given_up) = self.recorded_rejection(&draft.draft).filter(|r| r.reason == UNVALIDATED) {
                    // Taken up after a kill: what was given up stays so.
                    spent_up |= given_up.detail == SPENT_UP;
                    continue;
                }
                let verdict = match self.recorded_verdict(&draft.draft) {
                    Some(verdict) => verdict,
                    None if spent_up => {
                        self.reject(&draft, UNVALIDATED, SPENT_UP)?;
                        continue;
                    }
                    None => {
                        let since = Stopwatch::start();
                        let seed = self.settings.run.seed;
                        match validate(&self.env, explorer.as_ref(), &draft, seed, &config, &known) {
                            Ok(verdict) => {
                                self.ledger.record(verdict.clone(), since.micros())?;
                                verdict
                            }
                            Err(ExploreError::Stopped) => return Err(stopped()),
                            Err(error) => {
                                spent_up = matches!(error, ExploreError::Budget { .. });
                                self.give_up(&draft.draft, &error.to_string(), observer)?;
                                let why = if spent_up { SPENT_UP } else { UNVALIDATED_WHY };
                                self.reject(&draft, UNVALIDATED, why)?;
                                continue;
                            }
                        }
                    }
                };
                let same = match joined.get(&draft.task.id) {
                    Some(other) => Some(Some(other.clone())),
                    None => self.ledger.state().tasks.tasks.get(&draft.task.id).map(|entry| entry.draft.clone()),
                };
                if verdict.accepted && same.is_some_and(|other| other.as_ref() != Some(&draft.draft)) {
                    // Check (e) finds this, too; where it is off, a task still joins D once.
                    self.reject(&draft, "duplicate", "D holds this very task")?;
                } else if verdict.accepted {
                    admitted += 1;
                    joined.insert(draft.task.id.clone(), draft.draft.clone());
                    known.add("training", &draft.task);
                    let origin = if context.spec.kind.is_some() { Origin::Synthesised } else { Origin::Explored };
                    self.ledger.record(
                        TaskAdmitted { task: draft.task, origin, weight: 1.0, draft: Some(draft.draft), step },
                        0,
                    )?;
                } else {
                    let failed = verdict.checks.iter().find(|c| !c.passed);
                    let (reason, detail) = failed.map_or(("incomplete", ""), |c| (&c.name, &c.detail));
                    self.reject(&draft, reason, detail)?;
                }
            }
        }
        observer.progress(Progress::Evolving { done: of, of });
        let spent = watch.micros();
        self.clock.evolution(spent);
        self.ledger.record(EvolutionFinished { round, step, drafts, admitted }, spent)?;
        self.settle()
    }

    /// Which weaknesses the round looks at. Random mode explores as many contexts as the signals would have
    /// given, so that both have the same budget.
    fn begin_round(&self, round: u32, step: u32) -> EvolutionStarted {
        let state = self.ledger.state();
        let max = self.settings.evolve.max_contexts as usize;
        let unguided = |n: usize| -> Vec<ContextSpec> {
            (0..n)
                .map(|i| ContextSpec { id: format!("c{round}.{i}"), task: None, kind: None, rollouts: Vec::new() })
                .collect()
        };
        if round == 0 {
            // Twice as many as needed: about half of the drafts of unguided exploration fall through.
            let contexts = unguided(self.settings.env.seed_tasks as usize * 2);
            return EvolutionStarted { round, step, mode: "random".into(), contexts };
        }
        let marks: Vec<_> = state.marked();
        let guided = select_contexts(&marks, round, max);
        let mode = self.settings.evolve.mode.clone();
        let contexts = if mode == "random" { unguided(guided.len()) } else { guided };
        EvolutionStarted { round, step, mode, contexts }
    }

    fn context(&self, spec: ContextSpec) -> Result<Context, RunError> {
        let task =
            spec.task.as_ref().and_then(|id| self.ledger.state().tasks.tasks.get(id)).map(|entry| entry.task.clone());
        let rollout = match spec.rollouts.first() {
            Some(key) => self.ledger.rollout(key)?,
            None => None,
        };
        let e = &self.settings.evolve;
        Ok(Context {
            task,
            rollout,
            seed: self.settings.run.seed,
            bounds: Bounds { rounds: e.rounds, steps: e.steps, max_drafts: e.max_drafts, min_solution: e.min_solution },
            spec,
        })
    }

    fn recorded_verdict(&self, draft: &str) -> Option<crate::event::DraftValidated> {
        self.ledger.state().recorded.round.as_ref()?.validated.get(draft).cloned()
    }

    fn recorded_rejection(&self, draft: &str) -> Option<&DraftRejected> {
        self.ledger.state().recorded.round.as_ref()?.rejected.get(draft)
    }

    fn reject(&mut self, draft: &DraftProposed, reason: &str, detail: &str) -> Result<(), RunError> {
        let rejected = DraftRejected { draft: draft.draft.clone(), reason: reason.into(), detail: detail.into() };
        self.ledger.record(rejected, 0)
    }

    /// A context or draft that could not be worked on costs itself, not the run.
    fn give_up(&mut self, what: &str, why: &str, observer: &mut dyn Observer) -> Result<(), RunError> {
        let message = format!("{what} is given up: {why}");
        observer.progress(Progress::Note(message.clone()));
        self.ledger.note(FailureNoted { stage: "explorer".into(), message })
    }
}

fn stopped() -> RunError {
    crate::pipeline::PipelineError::Agent(crate::agent::AgentError::Stopped).into()
}

fn admission(settings: &crate::config::Settings) -> AdmissionConfig {
    let e = &settings.evolve;
    let mut config = if e.validate { AdmissionConfig::default() } else { AdmissionConfig::all_off() };
    config.carried_out &= e.llm_validator;
    config.min_solution_calls = e.min_solution as usize;
    config.novelty.jaccard = e.similarity;
    config.novelty.edit = e.similarity;
    config
}
