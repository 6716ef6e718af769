//! Stage 2 and 3: from a weakness back into the environment, to drafts, to validated tasks.
//!
//! One round works through its contexts in order. Everything an explorer does is an effect, so each piece
//! (reflection, exploration step, draft, verdict) is logged when it is known and looked up before it is
//! done: a round that was killed takes up where it stopped, without asking an LLM twice.
//!
//! An LLM is asked through [`asking`]: what a log holds is not asked, answers have a shape ([`shape`]), tokens a budget;
//! [`client`] is one request over HTTP with its retries. LLMs have five roles: four in [`llm`], and [`carry`] tries drafts
//! out.

pub mod asking;
pub mod carry;
pub mod client;
pub mod judged;
pub mod llm;
pub mod policy;
pub mod procedural;
pub mod retry;
pub mod score;
pub mod shape;
pub mod validate;

use crate::decide::admission::Belonging;
use crate::env::{EnvError, Environment, Executed, ToolDef};
use crate::event::{
    Action, ContextSpec, DraftProposed, ExplorationStepTaken, ReflectionWritten, Reward, RolloutFinished, SignalKind,
    TaskSpec, ToolCall,
};
use std::path::PathBuf;

/// What an explorer may look at in one context.
#[derive(Debug, Clone)]
pub struct Context {
    /// Id, task, signal, marked rollouts.
    pub spec: ContextSpec,
    /// The task whose rollouts raised the signal; `None` in unguided exploration.
    pub task: Option<TaskSpec>,
    /// The marked rollout that the reflection reads: the hardest.
    pub rollout: Option<RolloutFinished>,
    /// Master seed of the run.
    pub seed: u64,
    /// Bounds of the exploration.
    pub bounds: Bounds,
}

/// Bounds of one context's exploration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bounds {
    /// Independent exploration rounds.
    pub rounds: u32,
    /// Steps of a round.
    pub steps: u32,
    /// Drafts taken from the context.
    pub max_drafts: u32,
    /// Shortest solution of a draft, in calls over all its turns.
    pub min_solution: u32,
}

/// An action an explorer wants to take.
#[derive(Debug, Clone, PartialEq)]
pub struct Intent {
    /// Why.
    pub reasoning: String,
    /// What.
    pub call: ToolCall,
}

/// A failure of exploration; the context is given up, the run goes on.
#[derive(Debug, thiserror::Error)]
pub enum ExploreError {
    /// The environment failed.
    #[error("exploring {context}: {source}")]
    Environment {
        /// Context id.
        context: String,
        /// What failed.
        source: EnvError,
    },
    /// The explorer needs something this environment lacks.
    #[error("the {explorer} explorer needs {what}, which {env} does not have; choose another evolve.explorer")]
    Unsupported {
        /// Explorer name.
        explorer: String,
        /// What is missing.
        what: String,
        /// Environment name.
        env: String,
    },
    /// A baseline agent could not be played.
    #[error("draft {draft}: the {agent} agent could not be played: {message}")]
    Baseline {
        /// Agent.
        agent: String,
        /// Draft id.
        draft: String,
        /// Why.
        message: String,
    },
    /// The policy could not be played.
    #[error("exploring {context}: the policy could not be played: {message}")]
    Policy {
        /// Context id.
        context: String,
        /// Why.
        message: String,
    },
    /// An endpoint failed after all retries.
    #[error("explorer endpoint: {0}")]
    Endpoint(String),
    /// An endpoint answered, and each time something that cannot be used.
    #[error("explorer endpoint: no usable answer to `{role}` in {asked} askings (evolve.llm_reasks); last: {fault}")]
    Unusable {
        /// What it was asked to do.
        role: &'static str,
        /// Answers it gave.
        asked: u32,
        /// What is wrong with the last one.
        fault: String,
    },
    /// One more request may pass the token budget.
    #[error(
        "the token budget is used up: {spent} of {budget} tokens (evolve.llm_budget_tokens) are spent and the next request may take {needed}"
    )]
    Budget {
        /// Tokens spent in the run so far.
        spent: u64,
        /// Tokens the request may take.
        needed: u64,
        /// The budget.
        budget: u64,
    },
    /// The recorded run never asked this.
    #[error(
        "{folder} (evolve.llm_replay) holds no answer to request {request} ({role}, {about}): this run asks what the recorded one did not"
    )]
    NotRecorded {
        /// The recorded run.
        folder: PathBuf,
        /// What is asked.
        role: &'static str,
        /// Context or draft id.
        about: String,
        /// Digest of the request, hex.
        request: String,
    },
    /// The answer could not be recorded.
    #[error("recording an answer: {0}")]
    Unrecorded(String),
    /// The run is to stop.
    #[error("stopped")]
    Stopped,
}

/// Who reflects, explores and abstracts. Methods are pure functions of their arguments for the procedural
/// explorer, and effects for the others; either way the caller records every answer.
pub trait Explorer: Send + Sync {
    /// Recorded as the author.
    fn author(&self) -> &str;
    /// Reads the marked rollout and says what is wrong.
    fn reflect(&self, context: &Context) -> Result<ReflectionWritten, ExploreError>;
    /// The next action of exploration round `round`, given the steps of this round so far; `None` ends it.
    fn next_action(
        &self,
        context: &Context,
        reflection: &ReflectionWritten,
        playground: &TaskSpec,
        tools: &[ToolDef],
        round: u32,
        so_far: &[ExplorationStepTaken],
    ) -> Result<Option<Intent>, ExploreError>;
    /// Turns exploration steps into drafts of at least `min_solution` calls.
    fn abstract_drafts(
        &self,
        context: &Context,
        reflection: &ReflectionWritten,
        playgrounds: &[TaskSpec],
        steps: &[ExplorationStepTaken],
    ) -> Result<Vec<DraftProposed>, ExploreError>;
    /// Carries a draft out as an agent that is shown its solution, in a fresh instance: how the environment scores that.
    /// `None` where the explorer has no such agent.
    fn carry_out(
        &self,
        _env: &dyn Environment,
        _draft: &DraftProposed,
        _seed: u64,
    ) -> Result<Option<Reward>, ExploreError> {
        Ok(None)
    }
    /// Check (d): do query and solution belong together? Answered by something that did not write them.
    fn judge(&self, draft: &DraftProposed, executed: &[Vec<Executed>]) -> Result<Belonging, ExploreError>;
}

/// Where the round's facts go to and come from. The run implements it over the log.
pub trait Notebook {
    /// The reflection recorded for a context.
    fn reflection(&self, context: &str) -> Option<ReflectionWritten>;
    /// The recorded steps of one exploration round.
    fn steps(&self, context: &str, round: u32) -> Vec<ExplorationStepTaken>;
    /// Whether a later fact of the context (a draft, or the next round's step) shows that the round was complete.
    fn round_closed(&self, context: &str, round: u32) -> bool;
    /// The recorded drafts of a context.
    fn drafts(&self, context: &str) -> Vec<DraftProposed>;
    /// Whether a later fact (a verdict on one of its drafts, or anything of a later context) shows that all
    /// drafts of the context are recorded.
    fn context_closed(&self, context: &str) -> bool;
    /// Records one fact.
    fn record(&mut self, event: crate::event::Event);
}

/// The playground of one exploration round: a function of context and round alone.
pub fn playground(env: &dyn Environment, context: &Context, round: u32) -> Result<TaskSpec, EnvError> {
    let seed = crate::world::draw(context.seed, "playground", &[&context.spec.id, &round.to_string()]).bits() >> 11;
    env.playground(context.task.as_ref(), seed)
}

/// Reflects, explores and abstracts one context: returns its drafts, recorded.
pub fn work_context(
    env: &dyn Environment,
    explorer: &dyn Explorer,
    context: &Context,
    notebook: &mut dyn Notebook,
) -> Result<Vec<DraftProposed>, ExploreError> {
    let recorded = notebook.drafts(&context.spec.id);
    if notebook.context_closed(&context.spec.id) {
        return Ok(recorded);
    }
    let wrap = |source| ExploreError::Environment { context: context.spec.id.clone(), source };
    let reflection = match notebook.reflection(&context.spec.id) {
        Some(r) => r,
        None => {
            let r = explorer.reflect(context)?;
            notebook.record(r.clone().into());
            r
        }
    };
    let mut playgrounds = Vec::new();
    let mut all = Vec::new();
    for round in 0..context.bounds.rounds {
        let ground = playground(env, context, round).map_err(wrap)?;
        let mut session = env.open().map_err(wrap)?;
        let label = format!("{}-{round}", context.spec.id);
        let opening = session.reset(&ground, &label, context.seed).map_err(wrap)?;
        let mut steps = notebook.steps(&context.spec.id, round);
        // The environment has to stand where the recorded steps left it.
        for step in &steps {
            session.step(std::slice::from_ref(&step.call)).map_err(wrap)?;
        }
        while steps.len() < context.bounds.steps as usize && !notebook.round_closed(&context.spec.id, round) {
            let Some(intent) = explorer.next_action(context, &reflection, &ground, &opening.tools, round, &steps)?
            else {
                break;
            };
            let reply = session.step(std::slice::from_ref(&intent.call)).map_err(wrap)?;
            let result = reply.results.into_iter().next();
            let step = ExplorationStepTaken {
                context: context.spec.id.clone(),
                round,
                step: steps.len() as u32,
                base: ground.base.clone(),
                reasoning: intent.reasoning,
                call: intent.call,
                observation: result.as_ref().map(|r| r.content.clone()).unwrap_or_default(),
                is_error: result.is_none_or(|r| r.is_error),
            };
            notebook.record(step.clone().into());
            steps.push(step);
            if reply.done {
                break;
            }
        }
        playgrounds.push(ground);
        all.extend(steps);
    }
    let mut drafts = explorer.abstract_drafts(context, &reflection, &playgrounds, &all)?;
    drafts.truncate(context.bounds.max_drafts as usize);
    // A kill may have cut the recording short: what is recorded stands, whatever an LLM says when asked again.
    for slot in &mut drafts {
        if let Some(known) = recorded.iter().find(|d| d.draft == slot.draft) {
            *slot = known.clone();
        }
    }
    for draft in &drafts {
        notebook.record(draft.clone().into());
    }
    Ok(drafts)
}

/// The tool names an agent called, over all its actions.
pub fn called_tools(actions: &[Action]) -> Vec<String> {
    actions.iter().flat_map(|a| a.calls.iter().map(|c| c.name.clone())).collect()
}

/// Guidance by signal (METHOD: stage 2), used in prompts and in the procedural explorer's objectives.
pub fn guidance(kind: Option<SignalKind>) -> &'static str {
    match kind {
        Some(SignalKind::Forgetting) => {
            "practise the same operations again, vary parameters, connect to related operations, from simple to complex"
        }
        Some(SignalKind::Boundary) => {
            "vary slightly around the edge of what works, look for what separates success from failure, at several difficulties"
        }
        Some(SignalKind::Rare) => {
            "vary the scenario and the combinations of parameters, try edge cases, collect diverse examples"
        }
        None => "explore what the environment offers, without preference",
    }
}

/// A task id derived from content: equal content, equal id.
pub fn task_id(prefix: &str, task: &TaskSpec) -> String {
    let mut hasher = blake3::Hasher::new();
    for part in [&task.env, &task.base] {
        hasher.update(&(part.len() as u64).to_le_bytes());
        hasher.update(part.as_bytes());
    }
    for turn in &task.turns {
        let text = serde_json::to_string(turn).unwrap_or_default();
        hasher.update(&(text.len() as u64).to_le_bytes());
        hasher.update(text.as_bytes());
    }
    format!("{prefix}-{}", &hasher.finalize().to_hex()[..12])
}
