//! Stage 3, validation: a draft is believed when the environment confirms it (METHOD: stage 3, a-e).

use super::{ExploreError, Explorer};
use crate::env::{EnvError, Environment, Executed, Session, ToolDef};
use crate::event::{Check, DraftProposed, DraftValidated, TaskSpec, ToolCall};
use crate::world::{Draw, draw};

/// Answer to check (d).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Belongs {
    /// Whether query and solution belong together.
    pub yes: bool,
    /// Who says so.
    pub judge: String,
    /// Why.
    pub detail: String,
}

impl Belongs {
    /// They do.
    pub fn yes(judge: &str, detail: impl Into<String>) -> Self {
        Belongs { yes: true, judge: judge.into(), detail: detail.into() }
    }
    /// They do not.
    pub fn no(judge: &str, detail: impl Into<String>) -> Self {
        Belongs { yes: false, judge: judge.into(), detail: detail.into() }
    }
}

/// One run of a solution in a fresh instance.
struct Run {
    executed: Vec<Vec<Executed>>,
    digest: Option<[u8; 32]>,
    score: Option<f64>,
}

/// Runs the checks in order, stopping at the first failure. `novel` is check (e): it says what the draft
/// is too close to, if anything. With `enforce` off (the paper's ablation) only check (a)'s execution
/// without error is asked for.
pub fn validate(
    env: &dyn Environment,
    explorer: &dyn Explorer,
    draft: &DraftProposed,
    seed: u64,
    enforce: bool,
    novel: &dyn Fn(&TaskSpec) -> Result<(), String>,
) -> Result<DraftValidated, ExploreError> {
    let mut checks = Vec::new();
    let mut judge = "construction".to_string();
    let wrap = |source| ExploreError::Environment { context: draft.draft.clone(), source };
    let mut stage = || -> Result<bool, ExploreError> {
        let mut note = |name: &str, verdict: Result<String, String>| {
            let passed = verdict.is_ok();
            checks.push(Check { name: name.into(), passed, detail: verdict.unwrap_or_else(|e| e) });
            passed
        };
        let mut session = env.open().map_err(wrap)?;
        let first = run_solution(session.as_mut(), &draft.task, &format!("{}-a", draft.draft), seed).map_err(wrap)?;
        if !enforce {
            return Ok(note("executes", no_errors(&first).map(|n| format!("{n} calls, validation is off"))));
        }
        let second = run_solution(session.as_mut(), &draft.task, &format!("{}-b", draft.draft), seed).map_err(wrap)?;
        let executes = no_errors(&first).and_then(|n| {
            if first.digest != second.digest {
                Err("two runs of the solution end in different states".into())
            } else if first.score != Some(1.0) {
                Err(format!("the solution itself scores {:?}", first.score))
            } else {
                Ok(format!("{n} calls without error, twice, equal end states"))
            }
        });
        if !note("executes", executes) {
            return Ok(false);
        }
        let idle = run_idle(session.as_mut(), &draft.task, &format!("{}-n", draft.draft), seed).map_err(wrap)?;
        let answers = draft.task.turns.iter().filter(|t| t.answer.is_some()).count();
        let changes = if first.digest.is_some() && first.digest != idle.digest {
            Ok("the end state differs from doing nothing".into())
        } else if answers > 0 {
            Ok(format!("{answers} required answers"))
        } else {
            Err("doing nothing ends in the same state and no answer is required".into())
        };
        if !note("changes", changes) {
            return Ok(false);
        }
        if !note("baselines", baselines(session.as_mut(), draft, idle.score, seed).map_err(wrap)?) {
            return Ok(false);
        }
        let belongs = explorer.judge(draft, &first.executed)?;
        judge = belongs.judge.clone();
        if !note("belongs", if belongs.yes { Ok(belongs.detail) } else { Err(belongs.detail) }) {
            return Ok(false);
        }
        Ok(note("novel", novel(&draft.task).map(|()| "no near-duplicate".into())))
    };
    let accepted = stage()?;
    Ok(DraftValidated { draft: draft.draft.clone(), accepted, checks, judge })
}

fn no_errors(run: &Run) -> Result<usize, String> {
    let calls: Vec<&Executed> = run.executed.iter().flatten().collect();
    match calls.iter().find(|e| e.is_error) {
        Some(e) => Err(format!("{}{} fails: {}", e.call.name, e.call.arguments, e.result)),
        None => Ok(calls.len()),
    }
}

/// Plays the task's own solution, answering and asking as the task wants.
fn run_solution(session: &mut dyn Session, task: &TaskSpec, label: &str, seed: u64) -> Result<Run, EnvError> {
    session.reset(task, label, seed)?;
    let mut executed = Vec::new();
    for turn in &task.turns {
        let mut done = false;
        if let Some(missing) = &turn.missing {
            done = session.end_turn(&ask(&missing.field))?.done;
        }
        let mut here = Vec::new();
        for call in &turn.solution {
            if done {
                break;
            }
            let reply = session.step(std::slice::from_ref(call))?;
            done = reply.done;
            for r in reply.results {
                here.push(Executed { call: call.clone(), result: r.content, is_error: r.is_error });
            }
        }
        executed.push(here);
        if done || session.end_turn(turn.answer.as_deref().unwrap_or("done"))?.done {
            break;
        }
    }
    finish(session, executed)
}

/// What the solution player asks when something is missing.
pub fn ask(field: &str) -> String {
    format!("which {field}?")
}

fn finish(session: &mut dyn Session, executed: Vec<Vec<Executed>>) -> Result<Run, EnvError> {
    let score = session.evaluate()?.score();
    Ok(Run { executed, digest: session.state_digest()?, score })
}

/// Ends every turn at once.
fn run_idle(session: &mut dyn Session, task: &TaskSpec, label: &str, seed: u64) -> Result<Run, EnvError> {
    play(session, task, label, seed, |_, _| (Vec::new(), String::new()))
}

fn play(
    session: &mut dyn Session,
    task: &TaskSpec,
    label: &str,
    seed: u64,
    mut act: impl FnMut(&[ToolDef], &str) -> (Vec<ToolCall>, String),
) -> Result<Run, EnvError> {
    let opening = session.reset(task, label, seed)?;
    let mut said = opening.messages.last().map(|m| m.content.clone()).unwrap_or_default();
    // Questions may keep a turn open, so this is bounded by more than the number of turns.
    for _ in 0..task.turns.len().max(1) * 3 {
        let (calls, words) = act(&opening.tools, &said);
        if !calls.is_empty() && session.step(&calls)?.done {
            break;
        }
        let reply = session.end_turn(&words)?;
        if reply.done {
            break;
        }
        said = reply.messages.last().map(|m| m.content.clone()).unwrap_or_default();
    }
    finish(session, Vec::new())
}

/// Check (c): agents that do not understand anything must fail.
fn baselines(
    session: &mut dyn Session,
    draft: &DraftProposed,
    idle: Option<f64>,
    seed: u64,
) -> Result<Result<String, String>, EnvError> {
    let fails = |score: Option<f64>| score.is_some_and(|s| s < 0.5);
    if !fails(idle) {
        return Ok(Err(format!("doing nothing scores {idle:?}")));
    }
    let echo =
        play(session, &draft.task, &format!("{}-e", draft.draft), seed, |_, said| (Vec::new(), said.to_string()))?;
    if !fails(echo.score) {
        return Ok(Err(format!("repeating the query scores {:?}", echo.score)));
    }
    let mut random = draw(seed, "baseline", &[&draft.draft]);
    let shuffled = play(session, &draft.task, &format!("{}-r", draft.draft), seed, |tools, said| {
        let calls = (0..2).filter_map(|_| random_call(tools, said, &mut random)).collect();
        (calls, "done".into())
    })?;
    if !fails(shuffled.score) {
        return Ok(Err(format!("random calls score {:?}", shuffled.score)));
    }
    Ok(Ok("doing nothing, echoing and random calls fail".into()))
}

/// A call of a random tool whose arguments are random words of what the user said: the strongest agent that
/// understands nothing.
fn random_call(tools: &[ToolDef], said: &str, random: &mut Draw) -> Option<ToolCall> {
    let tool = random.pick(tools)?;
    let words: Vec<&str> = said.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|w| !w.is_empty()).collect();
    let mut arguments = serde_json::Map::new();
    for name in tool.parameters.get("properties").and_then(|p| p.as_object()).into_iter().flat_map(|p| p.keys()) {
        arguments.insert(name.clone(), (*random.pick(&words)?).into());
    }
    Some(ToolCall { name: tool.name.clone(), arguments: serde_json::Value::Object(arguments).to_string() })
}
