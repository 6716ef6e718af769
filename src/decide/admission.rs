//! Whether a draft may join D (METHOD: stage 3 a-e), as pure functions over what was observed.
//!
//! One function per check turns observations into an [`event::Check`](crate::event::Check); an
//! [`Admission`] collects them in order and stops at the first failure, so that a caller can skip the
//! work of later checks. A switched-off check passes and says so.

use serde::{Deserialize, Serialize};

use super::signals::SOLVED;
use super::similarity::{NoveltyConfig, NoveltyIndex};
use crate::event::{Check, DraftValidated, Reward, TaskSpec};

/// Names of the checks, in order (METHOD: stage 3 a-e). Where an LLM explores there is one more, `carried_out`.
pub const CHECKS: [&str; 5] = ["executes", "changes", "baselines", "belongs", "novel"];

/// Agents that have to fail a task before it is worth training on.
pub const BASELINES: [&str; 3] = ["noop", "random", "echo"];

/// The judge's name where query and solution belong together by construction.
pub const BY_CONSTRUCTION: &str = "construction";

/// Settings of admission (`evolve.admission.*`).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct AdmissionConfig {
    /// (a) The solution runs without error in two fresh instances with equal end states. Default true.
    pub executes: bool,
    /// (b) End state or required answer differ from doing nothing. Default true.
    pub changes: bool,
    /// (c) No-op, random and echo agents fail. Default true.
    pub baselines: bool,
    /// (d) Query and solution belong together. Default true.
    pub belongs: bool,
    /// (e) No near-duplicate of a task of D or of an evaluation task. Default true.
    pub novel: bool,
    /// An LLM agent that is shown the solution carries the draft out; only where an LLM explores. Default true.
    pub carried_out: bool,
    /// Calls that a solution has at least, all turns together. Default 3.
    pub min_solution_calls: usize,
    /// Thresholds of (e).
    pub novelty: NoveltyConfig,
}

impl Default for AdmissionConfig {
    fn default() -> Self {
        AdmissionConfig {
            executes: true,
            changes: true,
            baselines: true,
            belongs: true,
            novel: true,
            carried_out: true,
            min_solution_calls: 3,
            novelty: NoveltyConfig::default(),
        }
    }
}

impl AdmissionConfig {
    /// Whether a check is on; unknown names are.
    pub fn is_on(&self, check: &str) -> bool {
        match check {
            "executes" => self.executes,
            "changes" => self.changes,
            "baselines" => self.baselines,
            "belongs" => self.belongs,
            "novel" => self.novel,
            "carried_out" => self.carried_out,
            _ => true,
        }
    }

    /// The ablation "without validation": every check off.
    pub fn all_off() -> AdmissionConfig {
        AdmissionConfig {
            executes: false,
            changes: false,
            baselines: false,
            belongs: false,
            novel: false,
            carried_out: false,
            ..AdmissionConfig::default()
        }
    }
}

/// One execution of a draft's solution in a fresh instance.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Execution {
    /// Calls that were executed.
    pub calls: usize,
    /// Texts of the error results; empty = all calls succeeded.
    pub errors: Vec<String>,
    /// Result texts in order.
    pub results: Vec<String>,
    /// Digest of the end state; `None` = the environment has none.
    pub end_state: Option<[u8; 32]>,
    /// The evaluation of the executed solution, where the environment can score it by state.
    pub reward: Option<Reward>,
}

fn check(name: &str, verdict: Result<String, String>) -> Check {
    let (passed, detail) = match verdict {
        Ok(detail) => (true, detail),
        Err(detail) => (false, detail),
    };
    Check { name: name.into(), passed, detail }
}

/// (a) At least two executions, each without errors and with enough calls, with equal end states (equal
/// results where the environment has no state digest). A scored execution must be positive: the solution
/// itself earns a reward above 0 (METHOD: kept if the reward is positive).
pub fn executes(executions: &[Execution], config: &AdmissionConfig) -> Check {
    check("executes", executes_verdict(executions, config))
}

fn executes_verdict(executions: &[Execution], config: &AdmissionConfig) -> Result<String, String> {
    let [first, second, ..] = executions else {
        return Err(format!("executed {} times, twice is needed", executions.len()));
    };
    for (i, run) in executions.iter().enumerate() {
        if let Some(error) = run.errors.first() {
            return Err(format!(
                "execution {}: {} of {} calls failed, first: {error}",
                i + 1,
                run.errors.len(),
                run.calls
            ));
        }
        if run.calls < config.min_solution_calls {
            return Err(format!("{} calls, a solution has at least {}", run.calls, config.min_solution_calls));
        }
        match &run.reward {
            Some(Reward::Scored(score)) if score.is_nan() || *score <= 0.0 => {
                return Err(format!("execution {}: the solution itself scores {score}", i + 1));
            }
            Some(Reward::Unscored(reason)) => {
                return Err(format!("execution {}: the solution could not be scored: {reason}", i + 1));
            }
            _ => {}
        }
    }
    for (i, run) in executions.iter().enumerate().skip(1) {
        let equal = match (&first.end_state, &run.end_state) {
            (Some(a), Some(b)) => a == b,
            (None, None) => first.results == run.results,
            _ => false,
        };
        if !equal {
            return Err(format!("executions 1 and {} end in different states", i + 1));
        }
    }
    let what = if second.end_state.is_some() { "end states" } else { "results (no state digest here)" };
    Ok(format!("{} calls, no errors, equal {what} in {} executions", first.calls, executions.len()))
}

/// (b) `solved` and `untouched` are the end-state digests after the solution and after doing nothing;
/// `answers` says whether some turn requires an answer. Where the environment shows no state and no answer is required,
/// it takes check (c), that doing nothing fails the task: `baselines` says whether that is on.
pub fn changes(solved: Option<[u8; 32]>, untouched: Option<[u8; 32]>, answers: bool, baselines: bool) -> Check {
    let verdict = match (solved, untouched) {
        (Some(a), Some(b)) if a != b => Ok("the end state differs from doing nothing".into()),
        _ if answers => Ok("an answer is required that doing nothing does not give".into()),
        (Some(_), Some(_)) => Err("the end state equals that of doing nothing and no answer is required".into()),
        (None, None) if baselines => Ok("no state digest here; the noop agent has to fail".into()),
        _ => Err("the environment has no state digest and no answer is required".into()),
    };
    check("changes", verdict)
}

/// (c) `outcomes` are (agent, reward) of the [`BASELINES`]; all must be there and score below 0.5.
pub fn baselines(outcomes: &[(String, Reward)]) -> Check {
    let verdict = BASELINES.iter().try_for_each(|agent| {
        let mut of_agent = outcomes.iter().filter(|(name, _)| name == agent).peekable();
        if of_agent.peek().is_none() {
            return Err(format!("the {agent} agent was not tried"));
        }
        of_agent.try_for_each(|(_, reward)| match reward {
            Reward::Scored(score) if *score < SOLVED => Ok(()),
            Reward::Scored(score) => Err(format!("the {agent} agent scores {score}")),
            Reward::Unscored(reason) => Err(format!("the {agent} agent could not be scored: {reason}")),
        })
    });
    check("baselines", verdict.map(|()| format!("{} fail it", BASELINES.join(", "))))
}

/// Who says that query and solution belong together.
#[derive(Debug, Clone, PartialEq)]
pub struct Belonging {
    /// [`BY_CONSTRUCTION`], or the name of the agent or judge.
    pub judge: String,
    /// Who wrote the draft.
    pub author: String,
    /// The judgement.
    pub confirmed: bool,
    /// Its reason.
    pub detail: String,
}

/// (d) Confirmed, and not by the author itself.
pub fn belongs(judgement: &Belonging) -> Check {
    let Belonging { judge, author, confirmed, detail } = judgement;
    let verdict = if judge != BY_CONSTRUCTION && judge == author {
        Err(format!("`{judge}` wrote the draft and cannot confirm it"))
    } else if *confirmed {
        Ok(format!("confirmed by {judge}: {detail}"))
    } else {
        Err(format!("{judge}: {detail}"))
    };
    check("belongs", verdict)
}

/// (e) No near-duplicate among the known tasks (see [`super::similarity`]).
pub fn novel(task: &TaskSpec, known: &NoveltyIndex, config: &NoveltyConfig) -> Check {
    let verdict = match known.near_duplicate(task, config) {
        None => Ok(format!("no near-duplicate among {} tasks", known.len())),
        Some(d) => Err(format!(
            "near-duplicate of {} task {} ({}; Jaccard {:.2}, edit {:.2})",
            d.set, d.of, d.rule, d.jaccard, d.edit
        )),
    };
    check("novel", verdict)
}

/// METHOD: kept if an agent that carries it out meets the objective, or earns a positive reward without.
pub fn carried_out(reward: &Reward) -> Check {
    let verdict = match reward {
        Reward::Scored(score) if *score > 0.0 => Ok(format!("carried out to a score of {score}")),
        Reward::Scored(score) => Err(format!("carried out to a score of {score}")),
        Reward::Unscored(reason) => Err(format!("carrying it out could not be scored: {reason}")),
    };
    check("carried_out", verdict)
}

/// A validation in progress: checks in order, up to the first failure.
#[derive(Debug, Clone, PartialEq)]
pub struct Admission {
    draft: String,
    judge: String,
    checks: Vec<Check>,
}

impl Admission {
    /// Nothing checked yet.
    pub fn of(draft: &str) -> Admission {
        Admission { draft: draft.into(), judge: String::new(), checks: Vec::new() }
    }

    /// Runs a check unless it is switched off or an earlier one failed, and returns whether the draft is
    /// still in. `run` is only called when its result matters.
    pub fn check(&mut self, name: &str, config: &AdmissionConfig, run: impl FnOnce() -> Check) -> bool {
        if self.is_open() {
            let result = if config.is_on(name) { run() } else { check(name, Ok("switched off".into())) };
            self.checks.push(result);
        }
        self.is_open()
    }

    /// Notes who judged check (d).
    pub fn judged_by(&mut self, judge: &str) {
        self.judge = judge.into();
    }

    /// Whether no check has failed so far.
    pub fn is_open(&self) -> bool {
        self.checks.iter().all(|c| c.passed)
    }

    /// The failed check, if any: reason and detail of the rejection.
    pub fn failure(&self) -> Option<&Check> {
        self.checks.iter().find(|c| !c.passed)
    }

    /// The verdict as an event: accepted when all five checks were made (or switched off) and passed.
    pub fn verdict(self) -> DraftValidated {
        let complete = CHECKS.iter().all(|name| self.checks.iter().any(|c| c.name == *name));
        DraftValidated {
            accepted: complete && self.is_open(),
            draft: self.draft,
            checks: self.checks,
            judge: self.judge,
        }
    }
}
