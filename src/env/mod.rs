//! Environments: where an agent acts and what says whether it succeeded.
//!
//! An [`Environment`] is a factory shared by all threads; a [`Session`] is one episode's own state and
//! lives on one worker thread. The life of an episode: `reset`, then any number of `step` (tool calls)
//! and `end_turn` (a reply without calls), then `evaluate`. Two sessions never share state.

pub mod appworld;
pub mod bfcl;
pub mod desk;
pub mod service;
pub mod stdio;
pub mod textworld;

use crate::event::{Missing, Reward, TaskSpec, ToolCall};

/// The one tool of environments that are spoken to in words: `act(text)`, which `policy.calls = text` makes of a message.
pub const ACT: &str = "act";

/// How the reason of an unscored episode ends where the environment works but has no evaluation for the task.
pub const NEEDS_JUDGE: &str = "a judge has to score it";

/// A tool as the agent sees it (OpenAI function schema).
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct ToolDef {
    /// Name, unique within the environment.
    pub name: String,
    /// One sentence.
    pub description: String,
    /// JSON schema of the arguments: `{"type":"object","properties":{..},"required":[..]}`.
    pub parameters: serde_json::Value,
}

/// Who speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// Instructions.
    System,
    /// The user.
    User,
    /// The agent.
    Assistant,
    /// A tool's result.
    Tool,
}

/// One chat message.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Message {
    /// Who speaks.
    pub role: Role,
    /// The words.
    pub content: String,
}

/// What the agent sees first.
#[derive(Debug, Clone, PartialEq)]
pub struct Opening {
    /// System and user messages.
    pub messages: Vec<Message>,
    /// Tools available from the start.
    pub tools: Vec<ToolDef>,
    /// Number of user turns, if known.
    pub turns: u32,
    /// Environment steps allowed in the episode.
    pub step_limit: u32,
}

/// Result of one tool call.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct ToolResult {
    /// What the agent reads.
    pub content: String,
    /// Whether the environment reports an error.
    pub is_error: bool,
}

/// Reply to a `step`.
#[derive(Debug, Clone, PartialEq)]
pub struct StepReply {
    /// One result per call, in order.
    pub results: Vec<ToolResult>,
    /// The episode is over.
    pub done: bool,
}

/// Reply to an `end_turn`.
#[derive(Debug, Clone, PartialEq)]
pub struct TurnReply {
    /// Next user messages; empty when done.
    pub messages: Vec<Message>,
    /// Tools that become available now.
    pub released: Vec<ToolDef>,
    /// The episode is over.
    pub done: bool,
}

/// What can go wrong. An environment error never becomes a reward.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum EnvError {
    /// The environment does not know this task, split or state.
    #[error("{env}: {what} is unknown; known: {known}")]
    Unknown {
        /// Environment name.
        env: String,
        /// What was asked for.
        what: String,
        /// What there is.
        known: String,
    },
    /// A worker missed its deadline and was killed.
    #[error("{env}: no answer to `{op}` within {after_ms} ms; the worker was killed")]
    Deadline {
        /// Environment name.
        env: String,
        /// Operation.
        op: String,
        /// Deadline in milliseconds.
        after_ms: u64,
    },
    /// A worker died.
    #[error("{env}: the worker died during `{op}`: {detail}")]
    Died {
        /// Environment name.
        env: String,
        /// Operation.
        op: String,
        /// Exit status and the last lines it wrote.
        detail: String,
    },
    /// A server did not answer, or not whole, or not in time.
    #[error("{env}: `{op}` got no answer: {detail}")]
    Unreachable {
        /// Environment name.
        env: String,
        /// Operation.
        op: String,
        /// What happened.
        detail: String,
    },
    /// A worker answered something that is not the protocol.
    #[error("{env}: `{op}` was answered with something that is not the protocol: {detail}")]
    Protocol {
        /// Environment name.
        env: String,
        /// Operation.
        op: String,
        /// What is wrong with it.
        detail: String,
    },
    /// The environment refused the operation.
    #[error("{env}: `{op}` failed: {kind}: {message}")]
    Refused {
        /// Environment name.
        env: String,
        /// Operation.
        op: String,
        /// Error kind as the environment names it.
        kind: String,
        /// Message.
        message: String,
    },
    /// Something needed is not installed; says how to install it.
    #[error("{env}: {what}. {remedy}")]
    NotInstalled {
        /// Environment name.
        env: String,
        /// What is missing.
        what: String,
        /// The command that helps.
        remedy: String,
    },
}

/// Of how many scored episodes something holds that the score does not ask for.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Figure {
    /// Name, e.g. `abstained`.
    pub name: String,
    /// Episodes of which it holds.
    pub count: u64,
    /// Episodes to which it applies.
    pub of: u64,
}

/// A factory of episodes, shared by all threads.
pub trait Environment: Send + Sync {
    /// Short name, e.g. `desk`.
    fn name(&self) -> &str;
    /// Version of rules and data; part of the run's facts.
    fn version(&self) -> String;
    /// Names of the splits.
    fn splits(&self) -> Vec<String>;
    /// The tasks of a split, in a fixed order. `limit` bounds generated splits.
    fn tasks(&self, split: &str, seed: u64, limit: usize) -> Result<Vec<TaskSpec>, EnvError>;
    /// A session for one episode at a time; may be reset many times.
    fn open(&self) -> Result<Box<dyn Session>, EnvError>;
    /// An initial state to explore, with tools but without turns. Near `task` if given: the same tools
    /// (and neighbours), fresh values where the environment can make them.
    fn playground(&self, near: Option<&TaskSpec>, seed: u64) -> Result<TaskSpec, EnvError>;
    /// Sessions that may be open at once, where each costs something outside this process.
    fn max_sessions(&self) -> Option<usize> {
        None
    }
    /// Stricter figures than the score, over all episodes that were scored so far; empty if there are none.
    fn figures(&self) -> Vec<Figure> {
        Vec::new()
    }
    /// Writes user queries from executed calls without an LLM, if the environment can.
    fn narrator(&self) -> Option<&dyn Narrator> {
        None
    }
}

/// One episode's own state.
pub trait Session: Send {
    /// Starts an episode. `episode` is a unique label for traces and worker state; `seed` is for
    /// whatever the environment randomises (nothing in desk and BFCL).
    fn reset(&mut self, task: &TaskSpec, episode: &str, seed: u64) -> Result<Opening, EnvError>;
    /// Executes calls in order. Unknown tools and bad arguments are error *results*, not errors.
    fn step(&mut self, calls: &[ToolCall]) -> Result<StepReply, EnvError>;
    /// The agent ended its turn with these words and no call.
    fn end_turn(&mut self, say: &str) -> Result<TurnReply, EnvError>;
    /// Scores the episode as it stands, against the task's own solution.
    fn evaluate(&mut self) -> Result<Reward, EnvError>;
    /// Digest of everything the evaluation could look at (state, effects); `None` if it has no such thing.
    fn state_digest(&mut self) -> Result<Option<[u8; 32]>, EnvError>;
}

/// A call that was executed, with its result.
#[derive(Debug, Clone, PartialEq)]
pub struct Executed {
    /// The call.
    pub call: ToolCall,
    /// Result text.
    pub result: String,
    /// Whether it was an error.
    pub is_error: bool,
}

/// What a narrator makes of executed calls.
#[derive(Debug, Clone, PartialEq)]
pub struct Narrated {
    /// The user's words.
    pub query: String,
    /// What the user wants, in one sentence.
    pub intent: String,
    /// Required answer, if the query asks for one.
    pub answer: Option<String>,
    /// Left-out information, if the narrator left some out.
    pub missing: Option<Missing>,
    /// The environment's family label of this turn.
    pub family: String,
    /// The solution: usually the calls given, in the order the query implies.
    pub solution: Vec<ToolCall>,
}

/// Procedural abstraction: from executed calls to a user's turn and back.
pub trait Narrator: Send + Sync {
    /// Whether `calls` form one user-level intent (values flow from earlier results into later
    /// arguments), and how a user would say it. `variant` chooses among phrasings.
    fn narrate(&self, base: &str, calls: &[Executed], variant: u64) -> Option<Narrated>;
    /// The round trip of check (d): reads the query alone and returns the calls it asks for in the
    /// world `base`. Independent of [`Narrator::narrate`].
    fn understand(&self, base: &str, query: &str, missing: Option<&Missing>)
    -> Option<(Vec<ToolCall>, Option<String>)>;
    /// Plans to try next to a pattern: sequences of calls with concrete values from the world `base`,
    /// close to `pattern` (tool names) first when given. The procedural explorer's hands.
    fn propose(&self, base: &str, pattern: &[String], tools: &[String], seed: u64, count: usize) -> Vec<Vec<ToolCall>>;
}
