//! An LLM agent that carries a draft out (METHOD: stage 3, 2).
//!
//! It is shown what the user asks *and* the author's solution, and acts in a fresh instance of its own. The solution is for
//! this agent alone: the policy never sees one.

use super::ExploreError;
use super::asking::Asker;
use super::shape::Role;
use crate::env::Environment;
use crate::event::{DraftProposed, Reward, ToolCall};
use crate::world::draw;
use serde_json::{Value, json};

const SOLVE: &str = "You try out a task of a tool environment. You are given what the user asks, the calls that the task's author takes for its solution, and the answer that is required, if one is. Take one call at a time and look at its result. Do what the user asks and nothing else: follow the author's calls only as far as they do that. Answer with one JSON object: {\"reasoning\": string, \"tool\": name, \"arguments\": object} for the next call, or {\"done\": true, \"say\": string} to end the turn with these words to the user.";

/// Calls in a turn beyond twice those of its solution.
const MORE_CALLS: usize = 2;

/// Carries the draft out, turn by turn; how the environment scores it.
///
/// # Errors
/// When the environment fails or the LLM cannot be asked.
pub fn carry_out(
    asker: &Asker,
    env: &dyn Environment,
    draft: &DraftProposed,
    seed: u64,
) -> Result<Reward, ExploreError> {
    let wrap = |source| ExploreError::Environment { context: draft.draft.clone(), source };
    let mut session = env.open().map_err(wrap)?;
    let opening = session.reset(&draft.task, &format!("{}-v", draft.draft), seed).map_err(wrap)?;
    let mut executed: Vec<Value> = Vec::new();
    'turns: for (index, turn) in draft.task.turns.iter().enumerate() {
        if let Some(missing) = &turn.missing
            && session.end_turn(&format!("which {}?", missing.field)).map_err(wrap)?.done
        {
            break;
        }
        let mut say = String::new();
        for left in (1..=2 * turn.solution.len() + MORE_CALLS).rev() {
            let user = json!({
                "query": turn.query,
                "solution": turn.solution,
                "answer": turn.answer,
                "tools": opening.tools,
                "turn": index,
                "executed": executed,
                "calls_left": left,
            });
            let at = [draft.draft.as_str(), &index.to_string(), &executed.len().to_string()];
            let next = asker.ask(Role::Solve, &draft.draft, SOLVE, &user, draw(seed, "llm solve", &at).bits())?;
            let text = |key: &str| next.get(key).and_then(Value::as_str).unwrap_or_default().to_owned();
            if next.get("done") == Some(&Value::Bool(true)) {
                say = text("say");
                break;
            }
            let arguments = next.get("arguments").map_or_else(|| "{}".into(), Value::to_string);
            let call = ToolCall { name: text("tool"), arguments };
            let reply = session.step(std::slice::from_ref(&call)).map_err(wrap)?;
            for result in reply.results {
                executed.push(json!({"turn": index, "call": call, "result": result.content}));
            }
            if reply.done {
                break 'turns;
            }
        }
        if session.end_turn(&say).map_err(wrap)?.done {
            break;
        }
    }
    session.evaluate().map_err(wrap)
}
