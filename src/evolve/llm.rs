//! The LLM explorer: the same reflect, explore, abstract, judge, and the agent that tries drafts out, asked of any
//! OpenAI-compatible endpoint.
//!
//! Every answer is read leniently (the first JSON value in it that has the role's shape, see [`super::shape`]) and used
//! strictly: an answer without one is asked for again with the fault named, and unknown tools, empty queries and
//! solutions that are too short are dropped, not repaired.

use super::asking::Asker;
use super::carry::carry_out;
use super::shape::Role;
use super::{Context, ExploreError, Explorer, Intent, guidance, task_id};
use crate::decide::admission::Belonging;
use crate::env::{Environment, Executed, ToolDef};
use crate::event::{DraftProposed, ExplorationStepTaken, ReflectionWritten, Reward, TaskSpec, ToolCall, TurnSpec};
use crate::world::draw;
use serde_json::{Value, json};

/// See the module's documentation.
pub struct Llm(Asker);

impl Llm {
    /// An explorer that asks through `asker`.
    pub fn new(asker: Asker) -> Self {
        Llm(asker)
    }
}

const REFLECT: &str = "You study attempts of a tool-using agent. Read the task, what the agent did and the signal it raised. Answer with one JSON object: {\"summary\": string, \"failure_cause\": string, \"instability_pattern\": string, \"focus_pattern\": [tool names], \"exploration_objectives\": [strings], \"do_not_repeat\": [strings]}. Write the summary first and ground every statement in the evidence.";
const EXPLORE: &str = "You explore a tool environment to understand a weakness of an agent. Take one action at a time. Answer with one JSON object: {\"reasoning\": string, \"tool\": name, \"arguments\": object}, or {\"stop\": true} when the round has shown enough. Use only the tools given and values seen in observations.";
const ABSTRACT: &str = "From exploration steps in a tool environment, write new tasks that a user could ask for. Answer with a JSON array of objects: {\"intent\": string, \"query\": string in the user's words with every value that is needed, \"solution\": [{\"name\": tool, \"arguments\": object}], \"answer\": string or null when the user asks a question, \"completion\": string that says when it is done, \"from_steps\": [[round, step]]}. A solution has at least the stated number of calls, works from the initial state and is not a copy of the steps.";
const JUDGE: &str = "You check tasks for a tool-using agent. Given a user's query, a sequence of calls with their results and a required answer, decide whether carrying out the query in this environment means exactly these calls and this answer: nothing missing, nothing extra, no value the query or an earlier result does not give. Answer with one JSON object: {\"belongs\": true or false, \"reason\": string}.";

fn text(value: &Value, key: &str) -> String {
    value.get(key).and_then(Value::as_str).unwrap_or_default().to_string()
}

fn texts(value: &Value, key: &str) -> Vec<String> {
    let items = value.get(key).and_then(Value::as_array);
    items.into_iter().flatten().filter_map(|v| v.as_str().map(str::to_string)).collect()
}

fn evidence(context: &Context) -> Value {
    json!({
        "signal": context.spec.kind,
        "guidance": guidance(context.spec.kind),
        "task": context.task.as_ref().map(|t| t.turns.iter().map(|t| &t.query).collect::<Vec<_>>()),
        "attempt": context.rollout.as_ref().map(|r| json!({"actions": r.actions, "reward": r.reward, "end": r.end})),
    })
}

impl Explorer for Llm {
    fn author(&self) -> &str {
        self.0.model()
    }

    fn reflect(&self, context: &Context) -> Result<ReflectionWritten, ExploreError> {
        let seed = draw(context.seed, "llm reflect", &[&context.spec.id]).bits();
        let answer = self.0.ask(Role::Reflect, &context.spec.id, REFLECT, &evidence(context), seed)?;
        Ok(ReflectionWritten {
            context: context.spec.id.clone(),
            author: self.author().into(),
            summary: text(&answer, "summary"),
            failure_cause: text(&answer, "failure_cause"),
            instability_pattern: text(&answer, "instability_pattern"),
            focus_pattern: texts(&answer, "focus_pattern"),
            exploration_objectives: texts(&answer, "exploration_objectives"),
            do_not_repeat: texts(&answer, "do_not_repeat"),
        })
    }

    fn next_action(
        &self,
        context: &Context,
        reflection: &ReflectionWritten,
        _playground: &TaskSpec,
        tools: &[ToolDef],
        round: u32,
        so_far: &[ExplorationStepTaken],
    ) -> Result<Option<Intent>, ExploreError> {
        let seed =
            draw(context.seed, "llm explore", &[&context.spec.id, &round.to_string(), &so_far.len().to_string()])
                .bits();
        let user = json!({
            "guidance": guidance(context.spec.kind),
            "reflection": reflection,
            "tools": tools,
            "round": round,
            "steps_left": context.bounds.steps as usize - so_far.len(),
            "steps": so_far.iter().map(|s| json!({"call": s.call, "observation": s.observation})).collect::<Vec<_>>(),
        });
        let answer = self.0.ask(Role::Explore, &context.spec.id, EXPLORE, &user, seed)?;
        let name = text(&answer, "tool");
        if answer.get("stop") == Some(&Value::Bool(true)) || name.is_empty() {
            return Ok(None);
        }
        let arguments = answer.get("arguments").filter(|a| a.is_object()).cloned().unwrap_or_else(|| json!({}));
        // Unknown tools are the environment's to refuse: the explorer reads the error like any observation.
        Ok(Some(Intent {
            reasoning: text(&answer, "reasoning"),
            call: ToolCall { name, arguments: arguments.to_string() },
        }))
    }

    fn abstract_drafts(
        &self,
        context: &Context,
        reflection: &ReflectionWritten,
        playgrounds: &[TaskSpec],
        steps: &[ExplorationStepTaken],
    ) -> Result<Vec<DraftProposed>, ExploreError> {
        let mut drafts: Vec<DraftProposed> = Vec::new();
        for (round, ground) in (0u32..).zip(playgrounds) {
            let mine: Vec<&ExplorationStepTaken> = steps.iter().filter(|s| s.round == round).collect();
            if mine.is_empty() || drafts.len() >= context.bounds.max_drafts as usize {
                continue;
            }
            let user = json!({
                "intent": reflection.exploration_objectives,
                "minimum_calls": context.bounds.min_solution,
                "at_most_tasks": context.bounds.max_drafts,
                "steps": mine.iter().map(|s| json!({"round": s.round, "step": s.step, "call": s.call, "observation": s.observation})).collect::<Vec<_>>(),
            });
            let seed = draw(context.seed, "llm abstract", &[&context.spec.id, &round.to_string()]).bits();
            let answer = self.0.ask(Role::Abstract, &context.spec.id, ABSTRACT, &user, seed)?;
            for item in answer.as_array().cloned().unwrap_or_else(|| vec![answer]) {
                let solution: Vec<ToolCall> = item
                    .get("solution")
                    .and_then(Value::as_array)
                    .into_iter()
                    .flatten()
                    .filter_map(|c| {
                        let arguments = c.get("arguments").filter(|a| a.is_object())?.to_string();
                        Some(ToolCall { name: c.get("name")?.as_str()?.to_string(), arguments })
                    })
                    .collect();
                let query = text(&item, "query");
                if query.trim().is_empty() || solution.len() < context.bounds.min_solution as usize {
                    continue;
                }
                let turn = TurnSpec {
                    query,
                    solution,
                    answer: item.get("answer").and_then(Value::as_str).map(str::to_string),
                    missing: None,
                };
                let mut task = TaskSpec {
                    id: String::new(),
                    env: ground.env.clone(),
                    split: "synthesised".into(),
                    family: String::new(),
                    base: ground.base.clone(),
                    tools: ground.tools.clone(),
                    turns: vec![turn],
                };
                task.id = task_id("syn", &task);
                let known: Vec<(u32, u32)> = mine.iter().map(|s| (s.round, s.step)).collect();
                let named: Vec<(u32, u32)> =
                    serde_json::from_value(item.get("from_steps").cloned().unwrap_or_default()).unwrap_or_default();
                let from_steps: Vec<(u32, u32)> = named.into_iter().filter(|s| known.contains(s)).collect();
                drafts.push(DraftProposed {
                    draft: format!("d{}.{}", context.spec.id.trim_start_matches('c'), drafts.len()),
                    context: context.spec.id.clone(),
                    author: self.author().into(),
                    task,
                    intent: text(&item, "intent"),
                    completion: text(&item, "completion"),
                    from_steps: if from_steps.is_empty() { known } else { from_steps },
                });
            }
        }
        Ok(drafts)
    }

    fn carry_out(
        &self,
        env: &dyn Environment,
        draft: &DraftProposed,
        seed: u64,
    ) -> Result<Option<Reward>, ExploreError> {
        carry_out(&self.0, env, draft, seed).map(Some)
    }

    /// A conversation of its own that never saw how the draft came about.
    fn judge(&self, draft: &DraftProposed, executed: &[Vec<Executed>]) -> Result<Belonging, ExploreError> {
        let turns: Vec<Value> = draft
            .task
            .turns
            .iter()
            .zip(executed)
            .map(|(t, run)| {
                let calls: Vec<Value> = run.iter().map(|e| json!({"call": e.call, "result": e.result})).collect();
                json!({"query": t.query, "answer": t.answer, "executed": calls})
            })
            .collect();
        let seed = draw(0, "llm judge", &[&draft.draft]).bits();
        let answer = self.0.ask(Role::Judge, &draft.draft, JUDGE, &json!({ "turns": turns }), seed)?;
        let belongs = answer.get("belongs").and_then(Value::as_bool);
        Ok(Belonging {
            // The same endpoint may judge, but in a conversation that never saw how the draft came about.
            judge: format!("{} as judge", self.author()),
            author: draft.author.clone(),
            confirmed: belongs == Some(true),
            detail: match belongs {
                Some(_) => text(&answer, "reason"),
                None => "the judge did not answer the question".into(),
            },
        })
    }
}
