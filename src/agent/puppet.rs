//! Agents without a model, played through the same state machine as the policy.
//!
//! A [`Mind`] says what to do after each thing it hears; the puppeteer writes it down as tokens of a
//! dialect and feeds them to the [`Episode`] one by one, so that everything a policy's reply goes
//! through (parsing, limits, bookkeeping) is gone through here too.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use super::episode::{Episode, Next};
use super::hands::{Hands, Op};
use super::{AgentError, Dialect, EpisodeJob, EpisodeRecord, Limits, PlayStats};
use crate::event::ToolCall;
use crate::world::Stopwatch;

/// What a mind wants to say: calls, or words that end the turn.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Utterance {
    /// Words.
    pub text: String,
    /// Calls.
    pub calls: Vec<ToolCall>,
}

impl Utterance {
    /// Words alone: they end the turn.
    pub fn words(text: impl Into<String>) -> Utterance {
        Utterance { text: text.into(), calls: Vec::new() }
    }

    /// Calls alone.
    pub fn calls(calls: Vec<ToolCall>) -> Utterance {
        Utterance { text: String::new(), calls }
    }
}

/// The head of one episode.
pub trait Mind {
    /// What to say now; `episode` shows the opening, the tools and the conversation.
    fn speak(&mut self, episode: &Episode) -> Utterance;

    /// Log-prob to record for the next token. Certain by default.
    fn logprob(&mut self) -> f32 {
        0.0
    }
}

/// Makes the head of an episode.
pub type MindMaker<'a> = dyn Fn(&EpisodeJob) -> Result<Box<dyn Mind>, AgentError> + 'a;

/// Plays jobs with minds. Token limits do not apply: these agents do not sample.
pub fn play(
    make: &MindMaker<'_>,
    dialect: &Arc<dyn Dialect>,
    hands: &mut dyn Hands,
    jobs: &[EpisodeJob],
    limits: &Limits,
    done: &mut dyn FnMut(usize, EpisodeRecord),
) -> Result<PlayStats, AgentError> {
    let watch = Stopwatch::start();
    let mut limits = *limits;
    limits.turn_tokens = usize::MAX;
    limits.context_tokens = usize::MAX;
    limits.observation_tokens = usize::MAX;
    let mut stats = PlayStats::default();
    let mut running: BTreeMap<usize, (Episode, Box<dyn Mind>)> = BTreeMap::new();
    let mut queue: VecDeque<usize> = (0..jobs.len()).collect();
    loop {
        while running.len() < limits.concurrent.max(1) {
            let Some(index) = queue.pop_front() else { break };
            let mind = make(&jobs[index])?;
            let mut episode = Episode::new(jobs[index].clone(), limits, dialect.clone());
            let op = episode.start();
            running.insert(index, (episode, mind));
            hands.submit(index, op)?;
        }
        if running.is_empty() {
            stats.total_us = watch.micros();
            return Ok(stats);
        }
        let waiting = Stopwatch::start();
        let replies = hands.wait(true)?;
        stats.wait_us += waiting.micros();
        if replies.is_empty() {
            return Err(AgentError::Hands("no reply came although episodes wait for one".to_string()));
        }
        for (index, reply) in replies {
            let Some((episode, mind)) = running.get_mut(&index) else {
                return Err(AgentError::Hands(format!("a reply came for slot {index}, which has no episode")));
            };
            let mut next = episode.reply(reply)?;
            while next == Next::Token {
                next = utter(episode, mind.as_mut(), dialect, &mut stats)?;
            }
            match next {
                Next::Token => {}
                Next::Op(op) => hands.submit(index, op)?,
                Next::Finished => {
                    hands.submit(index, Op::Close)?;
                    stats.episodes += 1;
                    if let Some((episode, _)) = running.remove(&index) {
                        done(index, episode.into_record());
                    }
                }
            }
        }
    }
}

/// Says one message, token by token.
fn utter(
    episode: &mut Episode,
    mind: &mut dyn Mind,
    dialect: &Arc<dyn Dialect>,
    stats: &mut PlayStats,
) -> Result<Next, AgentError> {
    let utterance = mind.speak(episode);
    let mut ids = dialect
        .utter(&utterance.text, &utterance.calls)
        .map_err(|source| AgentError::Dialect { episode: episode.job().episode(), source })?;
    ids.push(dialect.stop());
    let mut next = Next::Token;
    for id in ids {
        let logprob = mind.logprob();
        next = episode.sampled(id, logprob, logprob)?;
        stats.sampled_tokens += 1;
        if next != Next::Token {
            break;
        }
    }
    Ok(next)
}
