//! Stage 3, validation: a draft is believed when the environment confirms it (METHOD: stage 3, a-e).
//!
//! This file has the effects (running solutions and baselines); the verdicts are
//! [`crate::decide::admission`]'s.

use super::{ExploreError, Explorer};
use crate::agent::{Agent, EchoAgent, EpisodeJob, InlineHands, Limits, NoopAgent, RandomAgent, Sampling};
use crate::decide::admission::{self, Admission, AdmissionConfig, Execution};
use crate::decide::similarity::NoveltyIndex;
use crate::env::{EnvError, Environment, Executed, Session};
use crate::event::{Check, DraftProposed, DraftValidated, Reward, RolloutKey, TaskSpec};
use std::sync::Arc;

/// Runs the checks in order, stopping at the first failure. `known` are the tasks of D and of the
/// evaluation splits. The draft's solution runs twice in fresh instances; nothing of that is kept.
///
/// # Errors
/// When the environment fails or the judge cannot be asked: no verdict is better than a made-up one.
pub fn validate(
    env: &Arc<dyn Environment>,
    explorer: &dyn Explorer,
    draft: &DraftProposed,
    seed: u64,
    config: &AdmissionConfig,
    known: &NoveltyIndex,
) -> Result<DraftValidated, ExploreError> {
    let wrap = |source| ExploreError::Environment { context: draft.draft.clone(), source };
    let mut session = env.open().map_err(wrap)?;
    let mut admission = Admission::of(&draft.draft);
    admission.judged_by(admission::BY_CONSTRUCTION);

    let mut runs = Vec::new();
    for copy in ["a", "b"] {
        let label = format!("{}-{copy}", draft.draft);
        runs.push(run_solution(session.as_mut(), &draft.task, &label, seed).map_err(wrap)?);
    }
    let executions: Vec<Execution> = runs.iter().map(|(e, _)| e.clone()).collect();
    if !admission.check("executes", config, || admission::executes(&executions, config)) {
        return Ok(admission.verdict());
    }
    let untouched =
        untouched_state(session.as_mut(), &draft.task, &format!("{}-n", draft.draft), seed).map_err(wrap)?;
    let answers = draft.task.turns.iter().any(|t| t.answer.is_some());
    let solved = executions[0].end_state;
    if !admission.check("changes", config, || admission::changes(solved, untouched, answers, config.baselines)) {
        return Ok(admission.verdict());
    }
    drop(session);
    let mut failed = None;
    if !admission.check("baselines", config, || match play_baselines(env, draft, seed) {
        Ok(outcomes) => admission::baselines(&outcomes),
        Err(error) => {
            let detail = error.to_string();
            failed = Some(error);
            Check { name: "baselines".into(), passed: false, detail }
        }
    }) {
        return failed.map_or_else(|| Ok(admission.verdict()), Err);
    }
    if config.belongs {
        let verdict = explorer.judge(draft, &runs[0].1)?;
        admission.judged_by(&verdict.judge);
        if !admission.check("belongs", config, || admission::belongs(&verdict)) {
            return Ok(admission.verdict());
        }
    } else {
        admission.check("belongs", config, || Check { name: "belongs".into(), passed: true, detail: String::new() });
    }
    if !admission.check("novel", config, || admission::novel(&draft.task, known, &config.novelty)) {
        return Ok(admission.verdict());
    }
    // Last, as it asks the most of an LLM.
    if config.carried_out
        && let Some(reward) = explorer.carry_out(env.as_ref(), draft, seed)?
    {
        admission.check("carried_out", config, || admission::carried_out(&reward));
    }
    Ok(admission.verdict())
}

/// Plays the task's own solution, answering and asking as the task wants. Returns what validation looks
/// at, and the executed calls per turn.
fn run_solution(
    session: &mut dyn Session,
    task: &TaskSpec,
    label: &str,
    seed: u64,
) -> Result<(Execution, Vec<Vec<Executed>>), EnvError> {
    session.reset(task, label, seed)?;
    let mut executed = Vec::new();
    'turns: for turn in &task.turns {
        if let Some(missing) = &turn.missing
            && session.end_turn(&format!("which {}?", missing.field))?.done
        {
            break;
        }
        let mut here = Vec::new();
        for call in &turn.solution {
            let reply = session.step(std::slice::from_ref(call))?;
            for r in reply.results {
                here.push(Executed { call: call.clone(), result: r.content, is_error: r.is_error });
            }
            if reply.done {
                executed.push(here);
                break 'turns;
            }
        }
        executed.push(here);
        if session.end_turn(turn.answer.as_deref().unwrap_or("done"))?.done {
            break;
        }
    }
    let reward = session.evaluate()?;
    let all = || executed.iter().flatten();
    let execution = Execution {
        calls: all().count(),
        errors: all()
            .filter(|e| e.is_error)
            .map(|e| format!("{}{}: {}", e.call.name, e.call.arguments, e.result))
            .collect(),
        results: all().map(|e| e.result.clone()).collect(),
        end_state: session.state_digest()?,
        reward: Some(reward),
    };
    Ok((execution, executed))
}

/// The end state when every turn is ended at once.
fn untouched_state(
    session: &mut dyn Session,
    task: &TaskSpec,
    label: &str,
    seed: u64,
) -> Result<Option<[u8; 32]>, EnvError> {
    session.reset(task, label, seed)?;
    for _ in &task.turns {
        if session.end_turn("")?.done {
            break;
        }
    }
    session.state_digest()
}

/// Check (c): agents that understand nothing.
fn play_baselines(
    env: &Arc<dyn Environment>,
    draft: &DraftProposed,
    seed: u64,
) -> Result<Vec<(String, Reward)>, ExploreError> {
    let limits = Limits { turns: 8, env_steps: 12, ..Limits::default() };
    let key = RolloutKey { step: 0, task: draft.task.id.clone(), draw: 0, k: 0 };
    let agents: [(&str, Box<dyn Agent>); 3] =
        [("noop", Box::new(NoopAgent)), ("random", Box::new(RandomAgent)), ("echo", Box::new(EchoAgent))];
    let mut outcomes = Vec::new();
    for (name, agent) in agents {
        let job = EpisodeJob {
            task: draft.task.clone(),
            key: key.clone(),
            group: 0,
            sampling: Sampling::at(1.0),
            seed,
            label: format!("{}-{name}", draft.draft),
        };
        let mut hands = InlineHands::new(env.clone());
        agent
            .play(&mut hands, &[job], &limits, &mut |_, record| outcomes.push((name.to_string(), record.reward)))
            .map_err(|e| ExploreError::Baseline {
                agent: name.into(),
                draft: draft.draft.clone(),
                message: e.to_string(),
            })?;
    }
    Ok(outcomes)
}
