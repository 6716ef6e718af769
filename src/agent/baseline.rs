//! Agents without a model: the reference that knows the solution, and three that must fail.

use std::sync::Arc;

use serde_json::{Map, Value};

use super::dialect::{ByteDialect, Dialect, Line};
use super::episode::Episode;
use super::hands::Hands;
use super::puppet::{self, Mind, Utterance};
use super::{Agent, AgentError, EpisodeJob, EpisodeRecord, Limits, PlayStats};
use crate::env::{Role, ToolDef};
use crate::event::{TaskSpec, ToolCall, TurnSpec};
use crate::world::Draw;

macro_rules! plays_with_minds {
    ($agent:ty, $name:literal) => {
        impl Agent for $agent {
            fn name(&self) -> &str {
                $name
            }

            fn play(
                &self,
                hands: &mut dyn Hands,
                jobs: &[EpisodeJob],
                limits: &Limits,
                done: &mut dyn FnMut(usize, EpisodeRecord),
            ) -> Result<PlayStats, AgentError> {
                let dialect: Arc<dyn Dialect> = Arc::new(ByteDialect);
                puppet::play(&|job| self.mind(job, limits), &dialect, hands, jobs, limits, done)
            }
        }
    };
}

/// Where the turns of an official task come from when the environment holds them.
pub type Solutions = Arc<dyn Fn(&TaskSpec) -> Option<Vec<TurnSpec>> + Send + Sync>;

/// Plays the task's own solution: asks for what a turn leaves out, makes the calls, gives the answer.
#[derive(Clone, Default)]
pub struct ReferenceAgent {
    solutions: Option<Solutions>,
    dialect: Option<Arc<dyn Dialect>>,
}

impl ReferenceAgent {
    /// Plays the solutions in [`TaskSpec::turns`].
    pub fn new() -> ReferenceAgent {
        ReferenceAgent::default()
    }

    /// Takes solutions from elsewhere for tasks that have no turns of their own.
    pub fn with_solutions(solutions: Solutions) -> ReferenceAgent {
        ReferenceAgent { solutions: Some(solutions), dialect: None }
    }

    /// Speaks a model's dialect instead of bytes: the records are what that model should have sampled.
    pub fn speaking(self, dialect: Arc<dyn Dialect>) -> ReferenceAgent {
        ReferenceAgent { dialect: Some(dialect), ..self }
    }

    fn mind(&self, job: &EpisodeJob, limits: &Limits) -> Result<Box<dyn Mind>, AgentError> {
        let turns = if job.task.turns.is_empty() {
            self.solutions.as_ref().and_then(|find| find(&job.task))
        } else {
            Some(job.task.turns.clone())
        };
        let Some(turns) = turns else {
            return Err(AgentError::Job {
                episode: job.episode(),
                what: format!("task {} has no solution to play; the reference agent needs one", job.task.id),
            });
        };
        Ok(Box::new(Reference { turns, at: 0, asked: false, made: 0, per_message: 0, limits: *limits }))
    }
}

impl Agent for ReferenceAgent {
    fn name(&self) -> &str {
        "reference"
    }

    fn play(
        &self,
        hands: &mut dyn Hands,
        jobs: &[EpisodeJob],
        limits: &Limits,
        done: &mut dyn FnMut(usize, EpisodeRecord),
    ) -> Result<PlayStats, AgentError> {
        let dialect = self.dialect.clone().unwrap_or_else(|| Arc::new(ByteDialect));
        puppet::play(&|job| self.mind(job, limits), &dialect, hands, jobs, limits, done)
    }
}

/// Plays turns one after the other.
struct Reference {
    turns: Vec<TurnSpec>,
    at: usize,
    asked: bool,
    made: usize,
    per_message: usize,
    limits: Limits,
}

impl Reference {
    /// The fewest calls per message with which all turns fit two thirds of the step limit: one, unless
    /// the solution is long.
    fn plan(&self, step_limit: u32) -> usize {
        let room = (step_limit.min(self.limits.env_steps) as usize * 2 / 3).max(1);
        let most = self.turns.iter().map(|t| t.solution.len()).max().unwrap_or(1).max(1);
        (1..=most)
            .find(|n| self.turns.iter().map(|t| t.solution.len().div_ceil(*n)).sum::<usize>() <= room)
            .unwrap_or(most)
            .min(self.limits.calls_per_message.max(1))
    }
}

impl Mind for Reference {
    fn speak(&mut self, episode: &Episode) -> Utterance {
        if self.per_message == 0 {
            self.per_message = self.plan(episode.opening().map_or(u32::MAX, |o| o.step_limit));
        }
        let Some(turn) = self.turns.get(self.at) else { return Utterance::words("Done.") };
        if let (Some(missing), false) = (&turn.missing, self.asked) {
            self.asked = true;
            return Utterance::words(format!("What is the {}?", missing.field));
        }
        let left = &turn.solution[self.made.min(turn.solution.len())..];
        if !left.is_empty() {
            let calls: Vec<ToolCall> = left.iter().take(self.per_message).cloned().collect();
            self.made += calls.len();
            return Utterance::calls(calls);
        }
        let answer = turn.answer.clone().unwrap_or_else(|| "Done.".to_string());
        self.at += 1;
        self.asked = false;
        self.made = 0;
        Utterance::words(answer)
    }
}

/// Ends every turn at once and does nothing.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoopAgent;

impl NoopAgent {
    fn mind(&self, _job: &EpisodeJob, _limits: &Limits) -> Result<Box<dyn Mind>, AgentError> {
        struct Noop;
        impl Mind for Noop {
            fn speak(&mut self, _episode: &Episode) -> Utterance {
                Utterance::words("Okay.")
            }
        }
        Ok(Box::new(Noop))
    }
}

plays_with_minds!(NoopAgent, "none");

/// Answers every turn with the user's own words.
#[derive(Debug, Clone, Copy, Default)]
pub struct EchoAgent;

impl EchoAgent {
    fn mind(&self, _job: &EpisodeJob, _limits: &Limits) -> Result<Box<dyn Mind>, AgentError> {
        struct Echo;
        impl Mind for Echo {
            fn speak(&mut self, episode: &Episode) -> Utterance {
                Utterance::words(last_query(episode))
            }
        }
        Ok(Box::new(Echo))
    }
}

plays_with_minds!(EchoAgent, "echo");

/// The user's latest words.
pub fn last_query(episode: &Episode) -> &str {
    let later = episode.history().iter().rev().find_map(|line| match line {
        Line::User(text) => Some(text.as_str()),
        _ => None,
    });
    let first = || {
        let messages = &episode.opening()?.messages;
        messages.iter().rev().find(|m| m.role == Role::User).map(|m| m.content.as_str())
    };
    later.or_else(first).unwrap_or_default()
}

/// Makes random calls that satisfy the schemas, a few per turn, then says something random.
#[derive(Debug, Clone, Copy, Default)]
pub struct RandomAgent;

impl RandomAgent {
    fn mind(&self, job: &EpisodeJob, _limits: &Limits) -> Result<Box<dyn Mind>, AgentError> {
        Ok(Box::new(Random { draw: job.draw("random agent"), left: None }))
    }
}

plays_with_minds!(RandomAgent, "random");

struct Random {
    draw: Draw,
    left: Option<usize>,
}

impl Mind for Random {
    fn speak(&mut self, episode: &Episode) -> Utterance {
        let words: Vec<String> = last_query(episode)
            .split(|c: char| !c.is_alphanumeric() && c != '_' && c != '-')
            .filter(|w| !w.is_empty())
            .map(str::to_string)
            .collect();
        let left = self.left.take().unwrap_or_else(|| 1 + self.draw.below(4));
        let tool = self.draw.pick(episode.tools()).cloned();
        match tool {
            Some(tool) if left > 0 => {
                self.left = Some(left - 1);
                Utterance::calls(vec![random_call(&tool, &words, &mut self.draw)])
            }
            _ => Utterance::words(self.draw.pick(&words).cloned().unwrap_or_default()),
        }
    }
}

/// A call of `tool` with random arguments that satisfy its schema as far as JSON types and enums go;
/// strings come from `words`.
pub fn random_call(tool: &ToolDef, words: &[String], draw: &mut Draw) -> ToolCall {
    let arguments = random_object(&tool.parameters, words, draw, 0);
    ToolCall { name: tool.name.clone(), arguments: Value::Object(arguments).to_string() }
}

/// Nesting after which only empty values are made.
const MAX_DEPTH: usize = 4;

fn random_object(schema: &Value, words: &[String], draw: &mut Draw, depth: usize) -> Map<String, Value> {
    let required: Vec<&str> =
        schema["required"].as_array().map_or(Vec::new(), |r| r.iter().filter_map(Value::as_str).collect());
    let mut arguments = Map::new();
    for (name, property) in schema["properties"].as_object().into_iter().flatten() {
        if required.contains(&name.as_str()) || draw.chance(0.25) {
            arguments.insert(name.clone(), random_value(property, words, draw, depth + 1));
        }
    }
    arguments
}

fn random_value(schema: &Value, words: &[String], draw: &mut Draw, depth: usize) -> Value {
    if let Some(options) = schema["enum"].as_array() {
        return draw.pick(options).cloned().unwrap_or(Value::Null);
    }
    let kind = match &schema["type"] {
        Value::Array(kinds) => draw.pick(kinds).and_then(Value::as_str).unwrap_or("string").to_string(),
        other => other.as_str().unwrap_or("string").to_string(),
    };
    match kind.as_str() {
        "integer" => Value::from(draw.below(100)),
        "number" => Value::from(draw.below(1000) as f64 / 10.0),
        "boolean" => Value::from(draw.chance(0.5)),
        "null" => Value::Null,
        "array" if depth >= MAX_DEPTH => Value::Array(Vec::new()),
        "array" => {
            let n = 1 + draw.below(2);
            Value::Array((0..n).map(|_| random_value(&schema["items"], words, draw, depth + 1)).collect())
        }
        "object" if depth >= MAX_DEPTH => Value::Object(Map::new()),
        "object" => Value::Object(random_object(schema, words, draw, depth)),
        _ => Value::from(draw.pick(words).cloned().unwrap_or_else(|| "x".to_string())),
    }
}
