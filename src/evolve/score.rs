//! An LLM as the judge of episodes that their environment cannot score.

use std::sync::{Arc, PoisonError, RwLock};

use super::ExploreError;
use super::asking::Asker;
use super::judged::{Judge, Transcript};
use super::shape::Role;
use crate::world::draw;
use serde_json::{Value, json};

const SCORE: &str = "You judge whether an agent did what a user asked of it in a tool environment. Read what was asked and everything that happened: the agent's calls with their results, and its words. Judge by results, not by what the agent says of itself; doing half of it, or more than was asked, is no success. Answer with one JSON object: {\"reason\": string, grounded in the record, \"success\": true or false}.";

/// The judge. It can be asked once a run has lent it the means.
pub struct LlmJudge {
    model: String,
    asker: RwLock<Option<Arc<Asker>>>,
}

impl LlmJudge {
    /// A judge that will ask `model`.
    pub fn new(model: &str) -> LlmJudge {
        LlmJudge { model: model.into(), asker: RwLock::new(None) }
    }

    /// From now on it asks through `asker`.
    pub fn lend(&self, asker: Asker) {
        *self.asker.write().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(asker));
    }
}

impl Judge for LlmJudge {
    fn name(&self) -> &str {
        &self.model
    }

    fn score(&self, transcript: &Transcript) -> Result<(bool, String), ExploreError> {
        let asker = self.asker.read().unwrap_or_else(PoisonError::into_inner).clone();
        let Some(asker) = asker else {
            return Err(ExploreError::Endpoint("no run has begun that could ask it".into()));
        };
        let user = json!({ "asked": transcript.asked, "happened": transcript.happened });
        // Of siblings that did the same each is a question of its own.
        let seed = draw(0, "llm score", &[&transcript.episode]).bits();
        let answer = asker.ask(Role::Score, &transcript.episode, SCORE, &user, seed)?;
        let reason = answer.get("reason").and_then(Value::as_str).unwrap_or_default().to_owned();
        Ok((answer.get("success") == Some(&Value::Bool(true)), reason))
    }
}
