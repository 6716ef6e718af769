//! Frozen payload structs, version 1 of every kind.
//!
//! Nothing in this file may change once a release has written it: a change of meaning, order, type or
//! name is a new version in a new file, with an upcast (`From<V1>`) and golden bytes (see
//! `schema/README.md`). All structs derive both `rkyv` (the bytes in the log) and `serde` (`--json`,
//! `export`). Facts only: time, host, durations and cost live in [`super::Meta`].
//!
//! Maps are sorted `Vec`s of pairs: a `HashMap` would give different bytes each time.
//! JSON documents (tool arguments, schemas) are stored as canonical JSON text (keys sorted, no spaces).

use rkyv::{Archive, Deserialize, Serialize};

macro_rules! frozen {
    ($($(#[$meta:meta])* pub struct $name:ident { $($(#[$fmeta:meta])* pub $field:ident : $ty:ty),* $(,)? })*) => {$(
        $(#[$meta])*
        #[derive(Archive, Serialize, Deserialize, serde::Serialize, serde::Deserialize, Debug, Clone, PartialEq)]
        pub struct $name { $($(#[$fmeta])* pub $field: $ty),* }
    )*};
}
pub(super) use frozen;

/// Which rollout: the field's four coordinates, also the canonical order of facts.
#[derive(
    Archive,
    Serialize,
    Deserialize,
    serde::Serialize,
    serde::Deserialize,
    Debug,
    Clone,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
)]
pub struct RolloutKey {
    /// Training step, from 1.
    pub step: u32,
    /// Task id.
    pub task: String,
    /// Which draw of this task within the step, from 0 (a task may be drawn twice: two groups).
    pub draw: u32,
    /// Index within the group, 0..group size.
    pub k: u32,
}

/// Why a task is in the training set.
#[derive(
    Archive,
    Serialize,
    Deserialize,
    serde::Serialize,
    serde::Deserialize,
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
)]
#[serde(rename_all = "snake_case")]
pub enum Origin {
    /// From the environment's own split or seed generator.
    Seed,
    /// Synthesised by unguided exploration (no signal).
    Explored,
    /// Synthesised from a signal.
    Synthesised,
}

/// The three weakness signals (METHOD: stage 1b).
#[derive(
    Archive,
    Serialize,
    Deserialize,
    serde::Serialize,
    serde::Deserialize,
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
)]
#[serde(rename_all = "snake_case")]
pub enum SignalKind {
    /// A task that was solved within its window now fails.
    Forgetting,
    /// The group holds both successes and failures.
    Boundary,
    /// The rollout's action pattern is rare but recurring.
    Rare,
}

/// The reward of an episode. Never a made-up number: what could not be scored says why.
#[derive(Archive, Serialize, Deserialize, serde::Serialize, serde::Deserialize, Debug, Clone, PartialEq)]
#[serde(rename_all = "snake_case")]
pub enum Reward {
    /// In [0, 1].
    Scored(f64),
    /// Worker crash, deadline, refusal to judge.
    Unscored(String),
}

impl Reward {
    /// The score, if there is one.
    pub fn score(&self) -> Option<f64> {
        match self {
            Reward::Scored(x) => Some(*x),
            Reward::Unscored(_) => None,
        }
    }
}

/// How an episode ended.
#[derive(
    Archive,
    Serialize,
    Deserialize,
    serde::Serialize,
    serde::Deserialize,
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
)]
#[serde(rename_all = "snake_case")]
pub enum EndReason {
    /// The environment said the episode is done.
    Done,
    /// The environment step limit was reached (a failure).
    StepLimit,
    /// The token limit of a turn or of the context was reached.
    TokenLimit,
    /// Too many malformed tool calls in a row.
    InvalidCalls,
    /// The environment failed; the reward is `Unscored`.
    EnvironmentFailure,
}

frozen! {
    /// One tool call.
    pub struct ToolCall {
        /// Tool name as the environment knows it.
        pub name: String,
        /// Canonical JSON object text.
        pub arguments: String,
    }

    /// Information that a turn's query leaves out; the right move is to ask for it.
    pub struct Missing {
        /// What the agent has to ask for: the argument's name, e.g. `day`.
        pub field: String,
        /// What the user answers when asked.
        pub reply: String,
    }

    /// One user turn of a task.
    pub struct TurnSpec {
        /// The user's words.
        pub query: String,
        /// Calls that solve the turn, in order, with concrete arguments.
        pub solution: Vec<ToolCall>,
        /// The answer the agent must give, if the turn asks for one.
        pub answer: Option<String>,
        /// What the query leaves out, if anything.
        pub missing: Option<Missing>,
    }

    /// A task, whole: enough to run and score it again years later.
    pub struct TaskSpec {
        /// Unique within a run; derived from the content.
        pub id: String,
        /// Environment name, e.g. `desk`, `bfcl`.
        pub env: String,
        /// Split it belongs to, e.g. `train`, `test-normal`.
        pub split: String,
        /// The environment's label for its composition; empty where it has none.
        pub family: String,
        /// The initial state: for desk the world seed in decimal, for BFCL the official entry id.
        pub base: String,
        /// Names of the tools shown to the agent; empty = the environment decides.
        pub tools: Vec<String>,
        /// User turns; empty = an official task whose turns the environment holds.
        pub turns: Vec<TurnSpec>,
    }

    /// First event of every run.
    pub struct RunStarted {
        /// Random 128-bit id in hex, not a fact of the method but of this run.
        pub run_id: String,
        /// Master seed of all draws.
        pub seed: u64,
        /// Every setting, as canonical JSON text.
        pub settings: String,
        /// `coevolve` version that started the run.
        pub code_version: String,
        /// BLAKE3 of weights + tokenizer + chat template of the initial policy, hex.
        pub policy_digest: String,
        /// Name and version of the environment.
        pub environment: String,
    }

    /// A task joined the training set D.
    pub struct TaskAdmitted {
        /// The task.
        pub task: TaskSpec,
        /// Why it is here.
        pub origin: Origin,
        /// Sampling weight, 1.0 by default.
        pub weight: f64,
        /// The draft it came from; `None` for seeds.
        pub draft: Option<String>,
        /// Step after which it joined; 0 = before training.
        pub step: u32,
    }

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
    }

    /// One assistant action of an episode, for reading; the ids are the truth.
    pub struct Action {
        /// Turn index, from 0.
        pub turn: u32,
        /// What the model wrote, decoded.
        pub text: String,
        /// Calls parsed from it.
        pub calls: Vec<ToolCall>,
        /// The environment's results (one per call), or the next user message after a final text.
        pub results: Vec<String>,
    }

    /// A further round of a step: groups drawn in place of those that taught nothing. Policy version, group size
    /// and sampling are those of the step's plan.
    pub struct BatchRefilled {
        /// Training step, from 1.
        pub step: u32,
        /// Round within the step, from 1; the groups of the plan are round 0.
        pub round: u32,
        /// (task id, draw) of each group, in sampling order; draws go on from those of the step's earlier rounds.
        pub groups: Vec<(String, u32)>,
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
        /// What happened, for reading.
        pub actions: Vec<Action>,
        /// Environment steps taken.
        pub env_steps: u32,
        /// The reward.
        pub reward: Reward,
        /// How it ended.
        pub end: EndReason,
    }

    /// A signal was raised by one rollout.
    pub struct SignalRaised {
        /// The rollout.
        pub key: RolloutKey,
        /// Which signal.
        pub kind: SignalKind,
        /// Evidence as canonical JSON text (`because` of `coevolve check signals`).
        pub because: String,
    }

    /// One optimiser update was applied.
    pub struct GradientStepTaken {
        /// Training step.
        pub step: u32,
        /// Update within the step, from 0.
        pub update: u32,
        /// Policy version before.
        pub version_before: u32,
        /// Policy version after.
        pub version_after: u32,
        /// Rollouts that had a non-zero mask in this update, in canonical order, with their advantage.
        pub rollouts: Vec<(RolloutKey, f32)>,
        /// Total loss.
        pub loss: f64,
        /// Policy (surrogate) part of the loss.
        pub policy_loss: f64,
        /// Mean KL estimate per trained token.
        pub kl: f64,
        /// Mean entropy per trained token, nats.
        pub entropy: f64,
        /// Share of trained tokens whose ratio was clipped.
        pub clip_fraction: f64,
        /// Global gradient norm before clipping.
        pub grad_norm: f64,
        /// Learning rate used.
        pub learning_rate: f64,
        /// Tokens with mask 1.
        pub trained_tokens: u64,
        /// BLAKE3 of the trainable weights after the update, hex.
        pub weights_hash: String,
    }

    /// An update was not applied; weights and moments are unchanged.
    pub struct StepSkipped {
        /// Training step.
        pub step: u32,
        /// Update within the step.
        pub update: u32,
        /// Why: no trained tokens, non-finite loss or gradient.
        pub reason: String,
    }

    /// A new policy version is what samplers use from here on.
    pub struct PolicyPublished {
        /// Version, from 0 (the initial policy).
        pub version: u32,
        /// Training step that made it.
        pub step: u32,
        /// BLAKE3 of the trainable weights, hex.
        pub weights_hash: String,
    }

    /// Weights and optimiser state were written. A cache: it can be recomputed.
    pub struct CheckpointSaved {
        /// Training step.
        pub step: u32,
        /// Policy version.
        pub version: u32,
        /// Folder relative to the run folder.
        pub path: String,
        /// BLAKE3 of the trainable weights, hex.
        pub weights_hash: String,
        /// BLAKE3 of the optimiser state, hex.
        pub optimizer_hash: String,
    }

    /// One split was evaluated at temperature 0.
    pub struct EvaluationFinished {
        /// Training step after which; 0 = before training.
        pub step: u32,
        /// Policy version.
        pub policy_version: u32,
        /// Split name.
        pub split: String,
        /// (task id, reward), sorted by task id.
        pub results: Vec<(String, Reward)>,
    }

    /// An evolution round began: which weaknesses it looks at.
    pub struct EvolutionStarted {
        /// Round, from 0 (round 0 = building D_0 by unguided exploration).
        pub round: u32,
        /// Training step after which; 0 = before training.
        pub step: u32,
        /// `feedback` or `random`.
        pub mode: String,
        /// Context ids in working order.
        pub contexts: Vec<ContextSpec>,
    }

    /// One (task, signal kind) that is explored in a round.
    pub struct ContextSpec {
        /// `c<round>.<index>`.
        pub id: String,
        /// Task explored; `None` for unguided exploration.
        pub task: Option<String>,
        /// Signal; `None` for unguided exploration.
        pub kind: Option<SignalKind>,
        /// The marked rollouts, hardest first; the first one is read by the reflection.
        pub rollouts: Vec<RolloutKey>,
    }

    /// What the explorer made of a marked rollout.
    pub struct ReflectionWritten {
        /// Context id.
        pub context: String,
        /// Who wrote it: `procedural`, `policy`, or the LLM's model name.
        pub author: String,
        /// One paragraph, grounded in the evidence.
        pub summary: String,
        /// Why it failed, if it did.
        pub failure_cause: String,
        /// What differs between good and bad attempts.
        pub instability_pattern: String,
        /// Tool names (or actions) to look at.
        pub focus_pattern: Vec<String>,
        /// What to try.
        pub exploration_objectives: Vec<String>,
        /// What not to repeat.
        pub do_not_repeat: Vec<String>,
    }

    /// One exploration step in the real environment.
    pub struct ExplorationStepTaken {
        /// Context id.
        pub context: String,
        /// Exploration round within the context, from 0.
        pub round: u32,
        /// Step within the round, from 0.
        pub step: u32,
        /// Initial state explored ([`TaskSpec::base`]).
        pub base: String,
        /// Why this action.
        pub reasoning: String,
        /// The action.
        pub call: ToolCall,
        /// What the environment answered.
        pub observation: String,
        /// Whether the environment reported an error.
        pub is_error: bool,
    }

    /// A task was abstracted from exploration steps.
    pub struct DraftProposed {
        /// Draft id: `d<round>.<context index>.<n>`.
        pub draft: String,
        /// Context id.
        pub context: String,
        /// Who wrote it.
        pub author: String,
        /// The task as it would join D.
        pub task: TaskSpec,
        /// What the user wants, in one sentence.
        pub intent: String,
        /// When the task counts as done.
        pub completion: String,
        /// Exploration steps it was abstracted from: (round, step).
        pub from_steps: Vec<(u32, u32)>,
    }

    /// One check of a validation.
    pub struct Check {
        /// `executes`, `changes`, `baselines`, `belongs`, `novel` (METHOD: stage 3 a-e).
        pub name: String,
        /// Whether it passed.
        pub passed: bool,
        /// What was seen.
        pub detail: String,
    }

    /// A draft was executed and judged.
    pub struct DraftValidated {
        /// Draft id.
        pub draft: String,
        /// Whether it may join D.
        pub accepted: bool,
        /// The checks in order; stops at the first failure.
        pub checks: Vec<Check>,
        /// Who judged check (d), or `construction`.
        pub judge: String,
    }

    /// A draft was turned down.
    pub struct DraftRejected {
        /// Draft id.
        pub draft: String,
        /// Name of the failed check, or `cap`, `duplicate`, `unvalidated`.
        pub reason: String,
        /// What was seen.
        pub detail: String,
    }

    /// An evolution round ended.
    pub struct EvolutionFinished {
        /// Round.
        pub round: u32,
        /// Training step after which.
        pub step: u32,
        /// Drafts proposed.
        pub drafts: u32,
        /// Drafts admitted.
        pub admitted: u32,
    }

    /// A training step ended; everything of it is in the log.
    pub struct StepFinished {
        /// Training step.
        pub step: u32,
        /// Mean score of the scored rollouts.
        pub mean_reward: f64,
        /// Digest of all projections right before this event, hex; `replay` compares it.
        pub projection_digest: String,
    }

    /// The run reached its last step.
    pub struct RunFinished {
        /// Last step.
        pub step: u32,
        /// BLAKE3 of the trainable weights, hex.
        pub weights_hash: String,
    }

    /// A later process took the run up again. Not a fact.
    pub struct RunResumed {
        /// Step that was in progress.
        pub step: u32,
        /// `coevolve` version.
        pub code_version: String,
    }

    /// Something failed and was survived (a worker died, an endpoint refused). Not a fact.
    pub struct FailureNoted {
        /// Stage, e.g. `environment`, `explorer`.
        pub stage: String,
        /// What, where, what was done about it.
        pub message: String,
    }

    /// A branch was created. Not a fact of any branch.
    pub struct BranchCreated {
        /// Name.
        pub name: String,
        /// Numeric id used in keys.
        pub branch: u32,
        /// Parent branch id.
        pub parent: u32,
        /// Last sequence number shared with the parent.
        pub at: u64,
        /// Settings changed from here on, as canonical JSON text.
        pub settings: String,
    }

    /// A branch goes on from an earlier event; what lies between stays in the log, hidden. Not a fact of any branch.
    pub struct BranchUndone {
        /// Branch id.
        pub branch: u32,
        /// Last event that counts.
        pub to: u64,
        /// Last event that was there; `to + 1..=at` are hidden in what comes after.
        pub at: u64,
        /// Why, in words.
        pub reason: String,
    }

    /// A branch was deleted: hidden; its events stay for its forks. Not a fact of any branch.
    pub struct BranchDeleted {
        /// Branch id.
        pub branch: u32,
        /// Why, in words.
        pub reason: String,
    }

    /// Files that nothing needs any more were removed. Not a fact of any branch.
    pub struct GarbageCollected {
        /// What was removed.
        pub removed: Vec<RemovedFile>,
    }

    /// A file or folder that was removed.
    pub struct RemovedFile {
        /// Path in the run folder.
        pub path: String,
        /// Its size, bytes.
        pub bytes: u64,
        /// Why nothing needs it.
        pub reason: String,
    }

    /// An external LLM was asked, and answered or did not. Not a fact: what follows from the answer is.
    pub struct LlmAsked {
        /// BLAKE3 of `body`, hex: requests with the same digest are the same.
        pub request: String,
        /// What it was asked to do: `reflect`, `explore`, `abstract`, `judge`, `solve`, `score`.
        pub role: String,
        /// The context or draft it was asked for.
        pub about: String,
        /// Model name.
        pub model: String,
        /// The request as it was sent, canonical JSON text. It holds no key and no address.
        pub body: String,
        /// The whole message that came back, if one did.
        pub answer: Option<String>,
        /// Why there is no answer, in words; empty when there is one.
        pub failure: String,
        /// Requests sent for it; 0 = the answer is from the recording of another run.
        pub attempts: u32,
        /// Tokens sent in all attempts, as the server counts them.
        pub prompt_tokens: u64,
        /// Tokens received in all attempts, as the server counts them.
        pub completion_tokens: u64,
        /// Tokens of attempts that the server gave no count for but may have worked on, estimated from above.
        pub estimated_tokens: u64,
        /// Cost of the counted tokens, millionths of the currency of `evolve.llm_price_prompt`; 0 for recorded answers.
        pub cost_micros: u64,
    }
}
