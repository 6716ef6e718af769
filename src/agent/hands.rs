//! How an agent reaches environments: operations go out, replies come back, never in lockstep.
//!
//! The decode loop must not wait for one slow environment while other episodes could sample, so
//! environments are reached through a queue: [`Hands::submit`] returns at once, [`Hands::wait`] hands
//! over whatever has been answered. [`InlineHands`] executes at once on the calling thread; the
//! pipeline has a pooled one.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use super::AgentError;
use crate::env::{EnvError, Environment, Opening, Session, StepReply, TurnReply};
use crate::event::{Reward, TaskSpec, ToolCall};
use crate::world::Stopwatch;

/// An operation on one episode's session.
#[derive(Debug, Clone, PartialEq)]
pub enum Op {
    /// Start the episode.
    Reset {
        /// The task.
        task: Box<TaskSpec>,
        /// Unique label.
        episode: String,
        /// For whatever the environment randomises.
        seed: u64,
    },
    /// Execute calls.
    Step(Vec<ToolCall>),
    /// End the turn with these words.
    EndTurn(String),
    /// Score the episode as it stands.
    Evaluate,
    /// The slot is free again. Has no reply.
    Close,
}

impl Op {
    /// Name for messages and traces.
    pub fn name(&self) -> &'static str {
        match self {
            Op::Reset { .. } => "reset",
            Op::Step(_) => "step",
            Op::EndTurn(_) => "end_turn",
            Op::Evaluate => "evaluate",
            Op::Close => "close",
        }
    }

    /// Executes the operation on a session. `Close` answers nothing.
    pub fn execute(&self, session: &mut dyn Session) -> Option<Reply> {
        let watch = Stopwatch::start();
        let result = match self {
            Op::Reset { task, episode, seed } => session.reset(task, episode, *seed).map(Answer::Opening),
            Op::Step(calls) => session.step(calls).map(Answer::Step),
            Op::EndTurn(say) => session.end_turn(say).map(Answer::Turn),
            Op::Evaluate => session.evaluate().map(Answer::Reward),
            Op::Close => return None,
        };
        Some(Reply { result, micros: watch.micros() })
    }
}

/// What an environment answered.
#[derive(Debug, Clone, PartialEq)]
pub enum Answer {
    /// To `Reset`.
    Opening(Opening),
    /// To `Step`.
    Step(StepReply),
    /// To `EndTurn`.
    Turn(TurnReply),
    /// To `Evaluate`.
    Reward(Reward),
}

impl Answer {
    /// Name for messages.
    pub fn name(&self) -> &'static str {
        match self {
            Answer::Opening(_) => "an opening",
            Answer::Step(_) => "step results",
            Answer::Turn(_) => "a turn reply",
            Answer::Reward(_) => "a reward",
        }
    }
}

/// An answer or the environment's failure, and how long the environment worked on it.
#[derive(Debug, Clone, PartialEq)]
pub struct Reply {
    /// What came back.
    pub result: Result<Answer, EnvError>,
    /// Working time, microseconds.
    pub micros: u64,
}

/// A queue of operations to environments. A slot is one episode in flight: it has at most one
/// operation under way, is opened by `Reset` and freed by `Close`. A run that is being stopped answers
/// [`AgentError::Stopped`]: the play ends, unfinished episodes are played again after a resume.
pub trait Hands {
    /// Queues an operation; never blocks for the environment.
    fn submit(&mut self, slot: usize, op: Op) -> Result<(), AgentError>;

    /// Replies that have come in. With `block`, waits for at least one if any operation is under way;
    /// without operations under way the answer is empty.
    fn wait(&mut self, block: bool) -> Result<Vec<(usize, Reply)>, AgentError>;
}

/// Executes every operation at once on the calling thread; sessions are reused over episodes.
pub struct InlineHands {
    environment: Arc<dyn Environment>,
    busy: BTreeMap<usize, Box<dyn Session>>,
    idle: Vec<Box<dyn Session>>,
    replies: VecDeque<(usize, Reply)>,
}

impl InlineHands {
    /// Hands on one environment.
    pub fn new(environment: Arc<dyn Environment>) -> InlineHands {
        InlineHands { environment, busy: BTreeMap::new(), idle: Vec::new(), replies: VecDeque::new() }
    }

    fn session(&mut self, slot: usize, op: &Op) -> Result<&mut Box<dyn Session>, EnvError> {
        use std::collections::btree_map::Entry;
        match self.busy.entry(slot) {
            Entry::Occupied(held) => Ok(held.into_mut()),
            Entry::Vacant(free) if matches!(op, Op::Reset { .. }) => {
                let session = match self.idle.pop() {
                    Some(session) => session,
                    None => self.environment.open()?,
                };
                Ok(free.insert(session))
            }
            Entry::Vacant(_) => Err(EnvError::Refused {
                env: self.environment.name().to_string(),
                op: op.name().to_string(),
                kind: "no_episode".to_string(),
                message: format!("slot {slot} has no running episode; reset it first"),
            }),
        }
    }
}

impl Hands for InlineHands {
    fn submit(&mut self, slot: usize, op: Op) -> Result<(), AgentError> {
        if op == Op::Close {
            self.idle.extend(self.busy.remove(&slot));
            return Ok(());
        }
        let reply = match self.session(slot, &op) {
            Ok(session) => op.execute(session.as_mut()),
            Err(error) => Some(Reply { result: Err(error), micros: 0 }),
        };
        if let Some(reply) = reply {
            if reply.result.is_err() {
                // A session that failed may be in any state: the next episode gets a fresh one.
                self.busy.remove(&slot);
            }
            self.replies.push_back((slot, reply));
        }
        Ok(())
    }

    fn wait(&mut self, _block: bool) -> Result<Vec<(usize, Reply)>, AgentError> {
        Ok(self.replies.drain(..).collect())
    }
}
