//! One rollout as a state machine without I/O.
//!
//! The engine feeds it sampled tokens and environment replies; it says what comes next. Invariants:
//!
//! * sampled ids are the truth: what was sampled stays in `ids` as sampled, the stop token included, and
//!   is never decoded and re-encoded;
//! * `ids` only grows; the runs of `sampled` are sorted, disjoint and cover exactly the sampled tokens,
//!   one log-prob each;
//! * an environment's failure ends the episode as [`Reward::Unscored`]; it never becomes a number;
//! * running over a limit is a failure: reward 0, or the environment's own score of the state as it
//!   stands with [`Limits::score_cut_episodes`].

use std::sync::Arc;

use super::dialect::Fault;
use super::hands::{Answer, Op, Reply};
use super::{AgentError, Dialect, EpisodeJob, EpisodeRecord, Limits, Line};
use crate::env::{EnvError, Opening, StepReply, ToolDef, TurnReply};
use crate::event::{Action, EndReason, Reward, ToolCall};

/// What an episode needs next.
#[derive(Debug, Clone, PartialEq)]
pub enum Next {
    /// An environment operation; feed its reply with [`Episode::reply`].
    Op(Op),
    /// A token sampled after the current context; feed it with [`Episode::sampled`].
    Token,
    /// Nothing: take the record, close the slot.
    Finished,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Created,
    Resetting,
    Sampling,
    Stepping,
    EndingTurn,
    Evaluating,
    Finished,
}

impl Phase {
    fn name(self) -> &'static str {
        match self {
            Phase::Created => "the episode has not started",
            Phase::Resetting => "the environment resets",
            Phase::Sampling => "a token is sampled",
            Phase::Stepping => "calls are executed",
            Phase::EndingTurn => "a turn is ended",
            Phase::Evaluating => "the episode is scored",
            Phase::Finished => "the episode is over",
        }
    }
}

/// Longest failure text that is recorded, bytes.
const FAILURE_BYTES: usize = 600;

/// One rollout in progress.
pub struct Episode {
    job: EpisodeJob,
    limits: Limits,
    dialect: Arc<dyn Dialect>,
    phase: Phase,
    opening: Option<Opening>,
    tools: Vec<ToolDef>,
    history: Vec<Line>,
    ids: Vec<u32>,
    prompt_len: usize,
    runs: Vec<(u32, u32)>,
    logprobs: Vec<f32>,
    sampling_logprobs: Vec<f32>,
    actions: Vec<Action>,
    /// Where the reply that is being sampled starts in `ids`.
    reply_start: usize,
    /// What the agent must hear besides the results: errors of malformed or surplus calls.
    notes: Vec<Fault>,
    step_limit: u32,
    env_steps: u32,
    turn: u32,
    invalid: u32,
    reward: Option<Reward>,
    end: EndReason,
    sampling_us: u64,
    environment_us: u64,
}

impl Episode {
    /// An episode that has not started.
    pub fn new(job: EpisodeJob, limits: Limits, dialect: Arc<dyn Dialect>) -> Episode {
        Episode {
            job,
            limits,
            dialect,
            phase: Phase::Created,
            opening: None,
            tools: Vec::new(),
            history: Vec::new(),
            ids: Vec::new(),
            prompt_len: 0,
            runs: Vec::new(),
            logprobs: Vec::new(),
            sampling_logprobs: Vec::new(),
            actions: Vec::new(),
            reply_start: 0,
            notes: Vec::new(),
            step_limit: limits.env_steps,
            env_steps: 0,
            turn: 0,
            invalid: 0,
            reward: None,
            end: EndReason::Done,
            sampling_us: 0,
            environment_us: 0,
        }
    }

    /// The first operation.
    pub fn start(&mut self) -> Op {
        self.phase = Phase::Resetting;
        Op::Reset { task: Box::new(self.job.task.clone()), episode: self.job.episode(), seed: self.job.seed }
    }

    /// The job.
    pub fn job(&self) -> &EpisodeJob {
        &self.job
    }

    /// The context so far. What the model has not seen of it is to be computed before sampling.
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// Length of the prompt; 0 before the reset.
    pub fn prompt_len(&self) -> usize {
        self.prompt_len
    }

    /// What the agent saw first; `None` before the reset.
    pub fn opening(&self) -> Option<&Opening> {
        self.opening.as_ref()
    }

    /// Tools available now.
    pub fn tools(&self) -> &[ToolDef] {
        &self.tools
    }

    /// The conversation after the opening.
    pub fn history(&self) -> &[Line] {
        &self.history
    }

    /// Adds model time, microseconds.
    pub fn charge(&mut self, micros: u64) {
        self.sampling_us += micros;
    }

    /// Takes a sampled token with its log-probs in the full distribution and in the one it was sampled from.
    pub fn sampled(&mut self, id: u32, logprob: f32, sampling_logprob: f32) -> Result<Next, AgentError> {
        if self.phase != Phase::Sampling {
            return Err(self.out_of_turn("a sampled token"));
        }
        let at = self.ids.len() as u32;
        match self.runs.last_mut() {
            Some((start, len)) if *start + *len == at => *len += 1,
            _ => self.runs.push((at, 1)),
        }
        self.ids.push(id);
        self.logprobs.push(logprob);
        if self.job.sampling.truncates() {
            self.sampling_logprobs.push(sampling_logprob);
        }
        if self.dialect.is_stop(id) {
            return self.message_ended();
        }
        let written = self.ids.len() - self.reply_start;
        if written >= self.limits.turn_tokens || self.ids.len() >= self.limits.context_tokens {
            let text = self.dialect.decode(&self.ids[self.reply_start..]);
            self.act(text, Vec::new(), Vec::new());
            return Ok(self.cut(EndReason::TokenLimit));
        }
        Ok(Next::Token)
    }

    /// Takes the environment's reply to the operation under way.
    pub fn reply(&mut self, reply: Reply) -> Result<Next, AgentError> {
        self.environment_us += reply.micros;
        let answer = match reply.result {
            Ok(answer) => answer,
            Err(error) => return Ok(self.failed(&error.to_string())),
        };
        match (self.phase, answer) {
            (Phase::Resetting, Answer::Opening(opening)) => self.opened(opening),
            (Phase::Stepping, Answer::Step(step)) => self.stepped(step),
            (Phase::EndingTurn, Answer::Turn(turn)) => self.turned(turn),
            (Phase::Evaluating, Answer::Reward(reward)) => {
                Ok(match reward {
                    Reward::Scored(x) if !(0.0..=1.0).contains(&x) => {
                        self.failed(&format!("the environment's score {x} is not in [0, 1]"))
                    }
                    Reward::Scored(x) => self.finish(Reward::Scored(x)),
                    // The environment is intact but cannot judge: the end stands as it was.
                    Reward::Unscored(why) => self.finish(Reward::Unscored(clip(&why, FAILURE_BYTES))),
                })
            }
            (_, answer) => Err(self.out_of_turn(answer.name())),
        }
    }

    /// Ends the episode because its environment cannot be used.
    pub fn failed(&mut self, why: &str) -> Next {
        self.end = EndReason::EnvironmentFailure;
        self.finish(Reward::Unscored(clip(why, FAILURE_BYTES)))
    }

    /// The record of a finished episode.
    pub fn into_record(self) -> EpisodeRecord {
        EpisodeRecord {
            key: self.job.key,
            ids: self.ids,
            prompt_len: self.prompt_len as u32,
            sampled: self.runs,
            logprobs: self.logprobs,
            sampling_logprobs: self.sampling_logprobs,
            actions: self.actions,
            env_steps: self.env_steps,
            reward: self.reward.unwrap_or_else(|| Reward::Unscored("the episode was not finished".to_string())),
            end: self.end,
            sampling_us: self.sampling_us,
            environment_us: self.environment_us,
        }
    }

    fn opened(&mut self, opening: Opening) -> Result<Next, AgentError> {
        self.ids = self.dialect.opening(&opening).map_err(|source| self.refused(source))?;
        self.prompt_len = self.ids.len();
        self.step_limit = self.limits.env_steps.min(opening.step_limit);
        self.tools.clone_from(&opening.tools);
        self.opening = Some(opening);
        self.reply_start = self.ids.len();
        if self.ids.is_empty() {
            return Err(AgentError::Job {
                episode: self.job.episode(),
                what: "the prompt has no tokens; look at the chat template".to_string(),
            });
        }
        if self.ids.len() >= self.limits.context_tokens {
            return Ok(self.cut(EndReason::TokenLimit));
        }
        self.phase = Phase::Sampling;
        Ok(Next::Token)
    }

    /// A stop token was sampled: the reply is complete.
    fn message_ended(&mut self) -> Result<Next, AgentError> {
        let text = self.dialect.decode(&self.ids[self.reply_start..self.ids.len() - 1]);
        let mut parsed = self.dialect.parse(&text, &self.tools);
        self.notes = std::mem::take(&mut parsed.errors);
        if parsed.calls.is_empty() && self.notes.is_empty() {
            self.act(text, Vec::new(), Vec::new());
            if self.turn >= self.limits.turns {
                return Ok(self.cut(EndReason::StepLimit));
            }
            self.phase = Phase::EndingTurn;
            return Ok(Next::Op(Op::EndTurn(parsed.text.trim().to_string())));
        }
        if parsed.calls.is_empty() {
            self.invalid += 1;
            let notes = std::mem::take(&mut self.notes);
            self.act(text, Vec::new(), Vec::new());
            let lines: Vec<Line> =
                notes.iter().map(|n| Line::Tool { name: String::new(), content: self.note(&n.message) }).collect();
            if self.invalid >= self.limits.invalid_in_a_row {
                self.heard(&lines);
                return Ok(self.cut(EndReason::InvalidCalls));
            }
            return self.extend(lines);
        }
        self.invalid = 0;
        if parsed.calls.len() > self.limits.calls_per_message {
            let surplus = parsed.calls.split_off(self.limits.calls_per_message);
            self.notes.push(Fault {
                message: format!(
                    "{} calls were not executed: at most {} per message",
                    surplus.len(),
                    self.limits.calls_per_message
                ),
                after_calls: usize::MAX,
            });
        }
        self.act(text, parsed.calls.clone(), Vec::new());
        if self.env_steps >= self.step_limit || parsed.calls.is_empty() {
            return Ok(self.cut(EndReason::StepLimit));
        }
        self.env_steps += 1;
        self.phase = Phase::Stepping;
        Ok(Next::Op(Op::Step(parsed.calls)))
    }

    fn stepped(&mut self, step: StepReply) -> Result<Next, AgentError> {
        let calls = self.actions.last().map_or(&[][..], |a| &a.calls);
        if step.results.len() != calls.len() {
            return Ok(
                self.breach("step", format!("{} calls were answered with {} results", calls.len(), step.results.len()))
            );
        }
        let names: Vec<String> = calls.iter().map(|c| c.name.clone()).collect();
        let mut notes = std::mem::take(&mut self.notes).into_iter().peekable();
        let mut lines = Vec::with_capacity(names.len());
        for (i, (name, result)) in names.into_iter().zip(step.results).enumerate() {
            while let Some(fault) = notes.next_if(|n| n.after_calls <= i) {
                lines.push(Line::Tool { name: String::new(), content: self.note(&fault.message) });
            }
            lines.push(Line::Tool { name, content: self.cut_text(result.content, self.limits.observation_bytes) });
        }
        lines.extend(notes.map(|n| Line::Tool { name: String::new(), content: self.note(&n.message) }));
        if step.done {
            self.heard(&lines);
            return Ok(self.evaluate());
        }
        self.extend(lines)
    }

    fn turned(&mut self, turn: TurnReply) -> Result<Next, AgentError> {
        use crate::env::Role;
        self.turn += 1;
        if turn.done {
            return Ok(self.evaluate());
        }
        if turn.messages.is_empty() {
            return Ok(self.breach("end_turn", "neither done nor a next message".to_string()));
        }
        let mut lines = Vec::new();
        if !turn.released.is_empty() {
            self.tools.extend(turn.released.iter().cloned());
            lines.push(Line::Released(turn.released));
        }
        for message in turn.messages {
            let content = self.cut_text(message.content, self.limits.observation_bytes);
            lines.push(match message.role {
                Role::System => Line::System(content),
                Role::Assistant => Line::Assistant { text: content, calls: Vec::new() },
                Role::Tool => Line::Tool { name: String::new(), content },
                Role::User => Line::User(content),
            });
        }
        self.extend(lines)
    }

    /// Appends the template's continuation and goes on sampling.
    fn extend(&mut self, whole: Vec<Line>) -> Result<Next, AgentError> {
        let mut bytes = self.limits.observation_bytes;
        let mut lines = whole.clone();
        let added = loop {
            let Some(opening) = &self.opening else { return Err(self.out_of_turn("lines to append")) };
            let added = self.dialect.append(opening, &self.history, &lines).map_err(|source| self.refused(source))?;
            if added.len() <= self.limits.observation_tokens || bytes < 64 {
                break added;
            }
            bytes /= 2;
            lines.clone_from(&whole);
            for line in &mut lines {
                if let Line::Tool { content, .. } = line {
                    *content = self.cut_text(std::mem::take(content), bytes);
                }
            }
        };
        self.heard(&lines);
        self.history.extend(lines);
        // The reply needs room for at least one token.
        if self.ids.len() + added.len() >= self.limits.context_tokens {
            return Ok(self.cut(EndReason::TokenLimit));
        }
        self.ids.extend(added);
        self.reply_start = self.ids.len();
        self.phase = Phase::Sampling;
        Ok(Next::Token)
    }

    /// Records a message of the agent.
    fn act(&mut self, text: String, calls: Vec<ToolCall>, results: Vec<String>) {
        self.history.push(Line::Assistant { text: text.clone(), calls: calls.clone() });
        self.actions.push(Action { turn: self.turn, text, calls, results });
    }

    /// Records what the last message was answered with.
    fn heard(&mut self, lines: &[Line]) {
        if let Some(action) = self.actions.last_mut() {
            action.results.extend(lines.iter().filter_map(|line| match line {
                Line::Tool { content, .. } => Some(content.clone()),
                Line::User(text) | Line::System(text) => Some(text.clone()),
                Line::Assistant { .. } | Line::Released(_) => None,
            }));
        }
    }

    fn note(&self, text: &str) -> String {
        self.cut_text(format!("error: {text}"), self.limits.observation_bytes)
    }

    fn cut_text(&self, text: String, bytes: usize) -> String {
        if text.len() <= bytes {
            return text;
        }
        let kept = clip(&text, bytes);
        format!("{kept}[cut: {} of {} bytes shown]", kept.len(), text.len())
    }

    /// A limit was reached.
    fn cut(&mut self, end: EndReason) -> Next {
        self.end = end;
        if self.limits.score_cut_episodes { self.evaluate() } else { self.finish(Reward::Scored(0.0)) }
    }

    fn evaluate(&mut self) -> Next {
        self.phase = Phase::Evaluating;
        Next::Op(Op::Evaluate)
    }

    fn breach(&mut self, op: &str, detail: String) -> Next {
        let error = EnvError::Protocol { env: self.job.task.env.clone(), op: op.to_string(), detail };
        self.failed(&error.to_string())
    }

    fn finish(&mut self, reward: Reward) -> Next {
        self.reward = Some(reward);
        self.phase = Phase::Finished;
        Next::Finished
    }

    fn refused(&self, source: super::DialectError) -> AgentError {
        AgentError::Dialect { episode: self.job.episode(), source }
    }

    fn out_of_turn(&self, what: &str) -> AgentError {
        AgentError::OutOfTurn {
            episode: self.job.episode(),
            what: format!("{what} came"),
            phase: self.phase.name().to_string(),
        }
    }
}

/// The longest prefix of whole characters with at most `bytes` bytes.
fn clip(text: &str, bytes: usize) -> String {
    text[..text.floor_char_boundary(bytes)].to_string()
}
