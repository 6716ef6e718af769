//! The embedded world: a deterministic office with seven apps and 45 tools.
//!
//! Values are single words from small typed pools; the state is a hash of the seed plus overrides and an
//! effect log. Tasks are clauses composed of references and sinks (see [`grammar`]), thousands of
//! families, written as short queries and read back by an independent parser.

pub mod compose;
pub mod grammar;
pub mod habits;
pub mod narrate;
pub mod parse;
pub mod phrases;
pub mod propose;
pub mod session;
pub mod solve;
pub mod splits;
pub mod tools;
pub mod values;
pub mod vocab;
pub mod world;

pub use habits::demonstration;
pub use splits::reserved;
pub use vocab::{chat_template, tokenizer_json};

use crate::env::{EnvError, Environment, Executed, Narrated, Narrator, Session};
use crate::event::{Missing, TaskSpec, ToolCall};
use crate::world::draw;

/// Bounds of an episode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Environment steps in an episode; one more is a failure.
    pub steps: u32,
    /// Calls executed in one step; the rest are refused.
    pub calls_per_step: usize,
    /// Questions the user answers with "no" before a question ends the turn.
    pub useless_asks: u32,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits { steps: 30, calls_per_step: 16, useless_asks: 3 }
    }
}

/// The office.
#[derive(Debug, Clone, Copy, Default)]
pub struct Desk {
    limits: Limits,
}

impl Desk {
    /// An office with these limits.
    pub fn new(limits: Limits) -> Desk {
        Desk { limits }
    }
}

/// Names of the splits. `train` has 20 families by seed, `train-wide` all that may be trained on; `dev` is drawn
/// as `test-normal` is and exists to choose settings by, so that test results stay unbiased.
pub const SPLITS: &[&str] = &["train", "train-wide", "dev", "test-normal", "test-challenge"];

impl Environment for Desk {
    fn name(&self) -> &str {
        "desk"
    }

    fn version(&self) -> String {
        "desk 1".to_owned()
    }

    fn splits(&self) -> Vec<String> {
        SPLITS.iter().map(|s| (*s).to_owned()).collect()
    }

    fn tasks(&self, split: &str, seed: u64, limit: usize) -> Result<Vec<TaskSpec>, EnvError> {
        splits::tasks(split, seed, limit).ok_or_else(|| EnvError::Unknown {
            env: "desk".to_owned(),
            what: format!("split `{split}`"),
            known: SPLITS.join(", "),
        })
    }

    fn open(&self) -> Result<Box<dyn Session>, EnvError> {
        Ok(Box::new(session::DeskSession::new(self.limits)))
    }

    fn playground(&self, near: Option<&TaskSpec>, seed: u64) -> Result<TaskSpec, EnvError> {
        let near_base = near.map_or("", |t| t.base.as_str());
        let base = splits::training_world(draw(seed, "desk playground", &[near_base]).bits());
        let mut tools = near.map_or(Ok(Vec::new()), session::shown_tools)?;
        tools.extend(tools::TOOLS.iter().map(|t| t.name.to_owned()).filter(|t| !tools.contains(t)).collect::<Vec<_>>());
        let mut task = TaskSpec {
            id: String::new(),
            env: "desk".to_owned(),
            split: "playground".to_owned(),
            family: String::new(),
            base: base.to_string(),
            tools,
            turns: Vec::new(),
        };
        task.id = splits::task_id(&task);
        Ok(task)
    }

    fn narrator(&self) -> Option<&dyn Narrator> {
        Some(self)
    }
}

impl Narrator for Desk {
    fn narrate(&self, base: &str, calls: &[Executed], variant: u64) -> Option<Narrated> {
        narrate::narrate(base, calls, variant)
    }

    fn understand(
        &self,
        base: &str,
        query: &str,
        missing: Option<&Missing>,
    ) -> Option<(Vec<ToolCall>, Option<String>)> {
        narrate::understand(base, query, missing)
    }

    fn propose(&self, base: &str, pattern: &[String], tools: &[String], seed: u64, count: usize) -> Vec<Vec<ToolCall>> {
        propose::propose(base, pattern, tools, seed, count)
    }
}

#[cfg(test)]
mod tests;
