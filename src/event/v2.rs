//! Frozen payload structs, version 2 of the kinds that have one. The rules of [`super::v1`] hold.

use super::v1::{self, Action, EndReason, Reward, RolloutKey, frozen};
use rkyv::{Archive, Deserialize, Serialize};

frozen! {
    /// The groups of a step were chosen.
    pub struct BatchPlanned {
        /// Training step, from 1.
        pub step: u32,
        /// Policy version that samples.
        pub policy_version: u32,
        /// (task id, draw) of each group, in sampling order.
        pub groups: Vec<(String, u32)>,
        /// Rollouts per group, K.
        pub group_size: u32,
        /// Sampling temperature.
        pub temperature: f32,
        /// Nucleus mass; 1 = off.
        pub top_p: f32,
        /// Most probable tokens kept; 0 = off.
        pub top_k: u32,
        /// Least probability of a token, as a share of the most probable one's; 0 = off.
        pub min_p: f32,
    }

    /// One finished episode.
    pub struct RolloutFinished {
        /// Which rollout.
        pub key: RolloutKey,
        /// Policy version that sampled it.
        pub policy_version: u32,
        /// All token ids of the episode: prompt, sampled and environment tokens in context order.
        pub ids: Vec<u32>,
        /// Length of the prompt (shared by the group): ids[..prompt_len].
        pub prompt_len: u32,
        /// Runs (start, length) in `ids` of tokens that the policy sampled; sorted, disjoint.
        pub sampled: Vec<(u32, u32)>,
        /// Log-probability of each sampled token under the sampler's full distribution at the
        /// sampling temperature, in order of `sampled`. Natural log.
        pub logprobs: Vec<f32>,
        /// The same under the distribution that was sampled from, after top-k, top-p and min-p. Empty where
        /// that is the full one.
        pub sampling_logprobs: Vec<f32>,
        /// What happened, for reading.
        pub actions: Vec<Action>,
        /// Environment steps taken.
        pub env_steps: u32,
        /// The reward.
        pub reward: Reward,
        /// How it ended.
        pub end: EndReason,
    }
}

impl RolloutFinished {
    /// Log-probability of each sampled token under the distribution that was sampled from.
    pub fn sampled_under(&self) -> &[f32] {
        if self.sampling_logprobs.is_empty() { &self.logprobs } else { &self.sampling_logprobs }
    }
}

impl From<v1::BatchPlanned> for BatchPlanned {
    fn from(old: v1::BatchPlanned) -> BatchPlanned {
        let v1::BatchPlanned { step, policy_version, groups, group_size, temperature, top_p } = old;
        BatchPlanned { step, policy_version, groups, group_size, temperature, top_p, top_k: 0, min_p: 0.0 }
    }
}

impl From<v1::RolloutFinished> for RolloutFinished {
    fn from(old: v1::RolloutFinished) -> RolloutFinished {
        let v1::RolloutFinished {
            key,
            policy_version,
            ids,
            prompt_len,
            sampled,
            logprobs,
            actions,
            env_steps,
            reward,
            end,
        } = old;
        let sampling_logprobs = Vec::new();
        RolloutFinished {
            key,
            policy_version,
            ids,
            prompt_len,
            sampled,
            logprobs,
            sampling_logprobs,
            actions,
            env_steps,
            reward,
            end,
        }
    }
}
