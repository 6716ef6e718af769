//! How episodes are played: an [`Agent`] turns jobs into records of what happened.
//!
//! * [`episode`]: one rollout as a state machine without I/O: the only place that keeps ids, sampled
//!   runs and log-probs;
//! * [`dialect`]: how a conversation becomes token ids and a reply becomes tool calls;
//! * [`chat`]: the dialect of real models, over [`template`], [`tools`], [`parse`] and [`write`];
//! * [`hands`]: how an agent reaches environments without blocking the decode loop;
//! * [`sample`]: from logits to a token and its log-prob;
//! * [`engine`]: the policy agent: continuous batching over many episodes;
//! * [`network`]: the CPU decoder as the engine's network;
//! * [`puppet`]: agents without a model, played through the same state machine ([`baseline`],
//!   [`scripted`]).

pub mod baseline;
pub mod chat;
pub mod check_calls;
pub mod check_template;
#[cfg(test)]
mod desk_tests;
pub mod dialect;
pub mod engine;
pub mod episode;
pub mod hands;
pub mod network;
pub mod parse;
pub mod puppet;
pub mod sample;
pub mod scripted;
pub mod template;
mod template_python;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;
pub mod tools;
pub mod write;

pub use baseline::{EchoAgent, NoopAgent, RandomAgent, ReferenceAgent};
pub use chat::{ChatDialect, ChatOptions};
pub use dialect::{ByteDialect, Dialect, DialectError, Fault, Line, Parsed};
pub use engine::{Decode, Policy, PolicyAgent};
pub use episode::{Episode, Next};
pub use hands::{Answer, Hands, InlineHands, Op, Reply};
pub use network::ModelPolicy;
pub use sample::Sampling;
pub use scripted::ScriptedAgent;

use crate::event::{Action, EndReason, Reward, RolloutFinished, RolloutKey, TaskSpec};

/// One episode to play.
#[derive(Debug, Clone, PartialEq)]
pub struct EpisodeJob {
    /// The task.
    pub task: TaskSpec,
    /// Which rollout it is; with `seed` the coordinates of its random stream.
    pub key: RolloutKey,
    /// Jobs with the same number share their prompt (the K rollouts of a group).
    pub group: usize,
    /// From which distribution its tokens are sampled.
    pub sampling: Sampling,
    /// Master seed of the run.
    pub seed: u64,
    /// What the episode is for, e.g. `train` or `test-normal`; part of the label the environment sees,
    /// not of the random stream.
    pub label: String,
}

impl EpisodeJob {
    /// Unique label of the episode for traces and worker state.
    pub fn episode(&self) -> String {
        let k = &self.key;
        format!("{}/{}/{}/{}/{}", self.label, k.step, k.task, k.draw, k.k)
    }

    /// The episode's random stream for `purpose`: the n-th value belongs to the n-th choice, so that a
    /// restarted episode repeats them.
    pub fn draw(&self, purpose: &str) -> crate::world::Draw {
        let k = &self.key;
        crate::world::draw(self.seed, purpose, &[&k.step.to_string(), &k.task, &k.draw.to_string(), &k.k.to_string()])
    }
}

/// What a finished episode left behind: the facts of [`RolloutFinished`] and two durations.
#[derive(Debug, Clone, PartialEq)]
pub struct EpisodeRecord {
    /// Which rollout.
    pub key: RolloutKey,
    /// Prompt, sampled and environment tokens in context order.
    pub ids: Vec<u32>,
    /// Length of the prompt.
    pub prompt_len: u32,
    /// Runs (start, length) of sampled tokens in `ids`; sorted, disjoint.
    pub sampled: Vec<(u32, u32)>,
    /// Natural log-prob of each sampled token in the full distribution, in order of `sampled`.
    pub logprobs: Vec<f32>,
    /// The same in the distribution that was sampled from; empty where that is the full one.
    pub sampling_logprobs: Vec<f32>,
    /// What happened, for reading.
    pub actions: Vec<Action>,
    /// Environment steps taken.
    pub env_steps: u32,
    /// The reward.
    pub reward: Reward,
    /// How it ended.
    pub end: EndReason,
    /// Share of the model's time that went into this episode, microseconds.
    pub sampling_us: u64,
    /// Time the environment worked for it, microseconds.
    pub environment_us: u64,
}

impl EpisodeRecord {
    /// The event; durations belong into [`crate::event::Meta`].
    pub fn into_event(self, policy_version: u32) -> RolloutFinished {
        RolloutFinished {
            key: self.key,
            policy_version,
            ids: self.ids,
            prompt_len: self.prompt_len,
            sampled: self.sampled,
            logprobs: self.logprobs,
            sampling_logprobs: self.sampling_logprobs,
            actions: self.actions,
            env_steps: self.env_steps,
            reward: self.reward,
            end: self.end,
        }
    }

    /// 1 for every sampled token of `ids`, 0 for prompt and environment tokens.
    pub fn mask(&self) -> Vec<u8> {
        let mut mask = vec![0; self.ids.len()];
        for &(start, len) in &self.sampled {
            for slot in mask.iter_mut().skip(start as usize).take(len as usize) {
                *slot = 1;
            }
        }
        mask
    }
}

/// Every bound of an episode. Running over one is a failure, not an error.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Limits {
    /// Sampled tokens per assistant message.
    pub turn_tokens: usize,
    /// Tokens of the whole context; the model's own maximum applies too.
    pub context_tokens: usize,
    /// Environment steps (messages with calls); the environment's own limit applies too.
    pub env_steps: u32,
    /// Messages without calls (ended turns and questions).
    pub turns: u32,
    /// Calls executed per message; further ones are answered with an error.
    pub calls_per_message: usize,
    /// Messages in a row without one valid call after which the episode ends.
    pub invalid_in_a_row: u32,
    /// Bytes of one result; the rest is cut and the cut marked.
    pub observation_bytes: usize,
    /// Tokens of what is appended after one message; results are cut further until they fit.
    pub observation_tokens: usize,
    /// Episodes in flight at once in one engine. No result depends on it.
    pub concurrent: usize,
    /// Tokens of one sequence per forward pass (long prompts go in pieces).
    pub prefill_chunk: usize,
    /// Tokens of longer items per forward pass over all sequences; bounds the network's workspace.
    pub forward_tokens: usize,
    /// Whether the environment scores episodes that ran over a limit (partial credit); otherwise 0.
    pub score_cut_episodes: bool,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            turn_tokens: 4096,
            context_tokens: 32_768,
            env_steps: 30,
            turns: 30,
            calls_per_message: 16,
            invalid_in_a_row: 3,
            observation_bytes: 16 * 1024,
            observation_tokens: 8192,
            concurrent: 64,
            prefill_chunk: 512,
            forward_tokens: 4096,
            score_cut_episodes: false,
        }
    }
}

/// What playing cost. Sums over episodes and engines, but for the peak of the cache; durations differ between equal runs.
#[derive(Debug, Clone, Copy, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct PlayStats {
    /// Episodes finished.
    pub episodes: u64,
    /// Tokens sampled.
    pub sampled_tokens: u64,
    /// Prompt and environment tokens that went through the model.
    pub prefill_tokens: u64,
    /// Prompt tokens that did not, because a sibling had computed them.
    pub shared_tokens: u64,
    /// Tokens of earlier turns that did not, because the episode's own cache still held them when a turn's tokens came.
    pub kept_tokens: u64,
    /// Forward passes.
    pub forwards: u64,
    /// Most bytes of keys and values that an engine held at once, shared ones once.
    pub cache_bytes: u64,
    /// Microseconds inside the model.
    pub model_us: u64,
    /// Microseconds between forward passes: choosing tokens, parsing, templates and, with
    /// [`InlineHands`], environments.
    pub choose_us: u64,
    /// Microseconds with nothing to do but wait for environments.
    pub wait_us: u64,
    /// Wall time of the whole play, microseconds.
    pub total_us: u64,
}

impl PlayStats {
    /// Adds another play's costs.
    pub fn add(&mut self, other: &PlayStats) {
        self.episodes += other.episodes;
        self.sampled_tokens += other.sampled_tokens;
        self.prefill_tokens += other.prefill_tokens;
        self.shared_tokens += other.shared_tokens;
        self.kept_tokens += other.kept_tokens;
        self.forwards += other.forwards;
        self.cache_bytes = self.cache_bytes.max(other.cache_bytes);
        self.model_us += other.model_us;
        self.choose_us += other.choose_us;
        self.wait_us += other.wait_us;
        self.total_us += other.total_us;
    }

    /// Sampled tokens per second of the engines' time (of each engine, where several play side by side); 0 before
    /// anything was played.
    pub fn tokens_per_second(&self) -> f64 {
        if self.total_us == 0 { 0.0 } else { self.sampled_tokens as f64 * 1e6 / self.total_us as f64 }
    }

    /// Share of the context tokens, in [0, 1], that no forward pass had to compute: a sibling had, or an earlier turn. 0
    /// before anything was played.
    pub fn cache_hits(&self) -> f64 {
        let found = self.shared_tokens + self.kept_tokens;
        let all = found + self.prefill_tokens;
        if all == 0 { 0.0 } else { found as f64 / all as f64 }
    }
}

/// What stops a play as a whole. Failures of one episode's environment do not: they end that episode.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum AgentError {
    /// The run is being stopped; unfinished episodes restart with the same draws.
    #[error("sampling was stopped before all episodes were finished; resume plays them again")]
    Stopped,
    /// The environment workers cannot be reached any more.
    #[error("the environment workers are gone: {0}; resume the run after looking at the first error above")]
    Hands(String),
    /// The chat template or tokenizer refused a conversation.
    #[error("episode {episode}: {source}")]
    Dialect {
        /// Episode label.
        episode: String,
        /// What was refused.
        source: DialectError,
    },
    /// The model failed.
    #[error("the policy's forward pass failed: {0}")]
    Model(String),
    /// The model returned logits that are no distribution.
    #[error("episode {episode}: the logits at position {position} are not finite; the weights are damaged")]
    NonFinite {
        /// Episode label.
        episode: String,
        /// Position in the context of the token that was to be sampled.
        position: usize,
    },
    /// A job that cannot be played.
    #[error("episode {episode}: {what}")]
    Job {
        /// Episode label.
        episode: String,
        /// What is wrong and what to do.
        what: String,
    },
    /// Something answered out of turn; a programming error of a `Hands` or of the caller.
    #[error("episode {episode}: {what} while {phase}")]
    OutOfTurn {
        /// Episode label.
        episode: String,
        /// What came.
        what: String,
        /// What was expected.
        phase: String,
    },
}

/// Something that plays episodes.
pub trait Agent: Send + Sync {
    /// Short name, e.g. `policy`, `reference`.
    fn name(&self) -> &str;

    /// Plays all jobs; `done(index, record)` is called as each finishes, in any order. What a record
    /// says depends on its job alone: not on the other jobs, on `limits.concurrent` or on timing.
    fn play(
        &self,
        hands: &mut dyn Hands,
        jobs: &[EpisodeJob],
        limits: &Limits,
        done: &mut dyn FnMut(usize, EpisodeRecord),
    ) -> Result<PlayStats, AgentError>;
}
