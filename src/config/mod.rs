//! Settings: every key in one place, with its default, unit and meaning.
//!
//! A run's settings are layered: defaults < preset < file (`--config`) < `--set key=value`. The result is
//! stored whole in the run's first event, so a run never depends on a file that has changed since.
//! `coevolve settings` prints the catalogue below as a commented TOML file.

mod layers;

pub use layers::{
    EXECUTION, Layer, SettingsError, from_recorded, load, preset_names, to_recorded, to_toml, with_execution,
};

/// One documented key.
#[derive(Debug, Clone, Copy)]
pub struct Key {
    /// Dotted name.
    pub name: &'static str,
    /// Unit, or the accepted words.
    pub unit: &'static str,
    /// Meaning.
    pub doc: &'static str,
}

macro_rules! settings {
    ($( $(#[$sdoc:meta])* $section:ident : $Struct:ident { $( $key:ident : $ty:ty = $default:expr, $unit:literal, $doc:literal; )* } )*) => {
        /// All settings of a run.
        #[derive(Debug, Clone, PartialEq, Default, serde::Serialize, serde::Deserialize)]
        #[serde(default, deny_unknown_fields)]
        pub struct Settings { $( $(#[$sdoc])* pub $section: $Struct, )* }

        $(
            $(#[$sdoc])*
            #[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
            #[serde(default, deny_unknown_fields)]
            pub struct $Struct { $( #[doc = $doc] #[doc = concat!("\n\nUnit or values: ", $unit, ".")] pub $key: $ty, )* }

            impl Default for $Struct {
                fn default() -> Self { $Struct { $( $key: $default, )* } }
            }
        )*

        /// Every key, in file order.
        pub const CATALOGUE: &[Key] = &[ $( $( Key { name: concat!(stringify!($section), ".", stringify!($key)), unit: $unit, doc: $doc }, )* )* ];
    };
}

settings! {
    /// The run as a whole.
    run: Run {
        seed: u64 = 7, "integer", "Master seed of every random choice.";
        steps: u32 = 120, "steps", "Training steps.";
        threads: u32 = 0, "threads; 0 = all cores", "Threads of sampling and of the learner. Results do not depend on it.";
        checkpoint_every: u32 = 10, "steps", "Write weights and optimiser state every so many steps, and at the end. A cache: resume recomputes what lies between.";
        keep_checkpoints: u32 = 0, "checkpoints; 0 = all", "Remove older checkpoints as newer ones are written; weights in between are recomputed from the log. Folders with forks keep theirs until `coevolve gc`.";
    }
    /// Where the agent acts.
    env: Env {
        name: String = "desk".into(), "desk | bfcl | appworld | textworld | service", "Environment. service = any AgentEvolver env_service over HTTP.";
        split: String = "train".into(), "split name", "Split that the first tasks come from.";
        seed_tasks: u32 = 100, "tasks", "Size of D_0.";
        workers: u32 = 1, "threads; 0 = in the sampler's thread", "Environment worker threads.";
        max_steps: u32 = 30, "environment steps", "Steps an episode may take; running over is a failure.";
        partial_credit: bool = false, "true | false", "A score between 0 and 1 where the environment has one: BFCL's turns passed, AppWorld's checks passed, TextWorld's points, an env_service's dense score.";
        sessions: u32 = 0, "episodes; 0 = the environment's own bound", "Episodes that are in the environment at once, where each needs a process or a server's instance: AppWorld 8 (400 MB each), other workers 16, an env_service unbounded.";
        data: String = "".into(), "folder; empty = what the set-up made", "AppWorld: the folder that holds the official `data`.";
        url: String = "http://127.0.0.1:8080".into(), "URL", "Address of the env_service.";
        judge: String = "none".into(), "none | llm", "Who scores tasks that the environment has no evaluation for (synthesised tasks of AppWorld and of an env_service): nobody, which leaves them unscored, or the endpoint of evolve.llm_url with evolve.llm_model.";
        service: String = "".into(), "env_type", "The env_service's own name of the environment, e.g. webshop.";
        bfcl_version: String = "v3".into(), "v3 | v4", "BFCL: which release of the multi-turn categories is played.";
        games: String = String::new(), "folder; empty = games made with a seed", "TextWorld: game files (.z8, .z5, .ulx) to play; its folders are the splits.";
        admissible: bool = false, "true | false", "TextWorld: only commands that the game lists as possible are let through; another one is an error that names them.";
        deadline_ms: u64 = 20000, "milliseconds", "An environment worker that has not answered by then is killed and its episode is unscored.";
    }
    /// The policy to train.
    policy: Policy {
        model: String = "embedded".into(), "embedded | smollm2 | scripted | a model folder | a .gguf file", "Initial policy, which is also the fixed reference.";
        lora_rank: u32 = 0, "rank; 0 = train all weights", "Rank of the LoRA adapter.";
        lora_alpha: f64 = 32.0, "scale numerator", "LoRA alpha: the adapter is scaled by alpha / rank.";
        lora_targets: Vec<String> = vec!["q_proj".into(), "k_proj".into(), "v_proj".into(), "o_proj".into(), "gate_proj".into(), "up_proj".into(), "down_proj".into()], "linear names", "Linears that get an adapter.";
        tool_docs: String = "auto".into(), "auto | compact | full", "How tools are shown: one-line signatures or JSON schemas through the chat template. auto = the template of the embedded policy decides; compact for models below 1 B.";
        calls: String = "hermes".into(), "hermes | llama | bfcl | python | text", "How the policy writes tool calls: JSON in <tool_call> tags, bare JSON, [f(a=1), g(b='x')], a fenced Python block, or words: the message itself is the action.";
        few_shot: u32 = 0, "examples", "Worked examples put before the first user message: first turns of training tasks outside D_0 that call the episode's tools, the most similar questions.";
    }
    /// A training batch.
    batch: Batch {
        tasks: u32 = 32, "groups", "Tasks drawn for a step.";
        group: u32 = 8, "rollouts", "Rollouts of a group, K.";
        temperature: f64 = 0.9, "temperature", "Sampling temperature in training; the trainer's log-probs use it too.";
        top_p: f64 = 1.0, "probability mass", "Nucleus sampling; 1 = off. With top_p, top_k or min_p the sampler's distribution is not the one the trainer's log-probs are of; rollouts hold the log-probs of both.";
        top_k: u32 = 0, "tokens", "Sample from so many of the most probable tokens; 0 = off.";
        min_p: f64 = 0.0, "share of the most probable token's probability", "Sample from tokens with at least this share; 0 = off.";
        refill: u32 = 0, "rounds; 0 = off", "Dynamic sampling (DAPO; verl: filter_groups, whose max_num_gen_batches is this + 1): a group whose scores are all equal (range <= 1e-9, or fewer than two scored) teaches nothing. It is left out of the update and a newly drawn group is sampled in its place, in at most so many further rounds a step; what is lacking then makes the update smaller. All rollouts count for signals and metrics.";
        fresh_share: f64 = 0.5, "share of the batch", "At most this share is kept for tasks admitted since they were last drawn.";
    }
    /// Bounds of an episode.
    sampling: Sampling {
        max_turn_tokens: u32 = 96, "tokens", "Tokens the policy may write in one message.";
        max_context_tokens: u32 = 768, "tokens", "Tokens of a whole episode.";
        max_concurrent: u32 = 256, "episodes", "Episodes that one sampling engine holds at a time.";
        max_calls_per_message: u32 = 16, "calls", "Tool calls accepted in one message.";
        max_invalid_calls: u32 = 3, "messages", "Consecutive messages with malformed calls before the episode ends.";
        max_observation_chars: u32 = 8000, "characters", "Longer observations are cut, with a marker.";
    }
    /// Advantages, loss, optimiser.
    learner: Learner {
        loss: String = "dapo".into(), "grpo | dapo | dr_grpo | bnpo | gspo | cispo | gpg", "Loss, by the names of TRL and verl.";
        advantage: String = "auto".into(), "auto | grpo | rloo | gpg", "Advantage estimator; auto = gpg for the loss gpg, else grpo.";
        scale: String = "auto".into(), "auto | group | batch | none", "What grpo advantages are divided by; auto = none for the loss dr_grpo, else the group's standard deviation.";
        advantage_eps: f64 = 1e-4, "score", "Added to the standard deviation.";
        epsilon_low: f64 = 0.0, "ratio; 0 = the loss's own", "Clip below: .2; gspo 3e-4.";
        epsilon_high: f64 = 0.0, "ratio; 0 = the loss's own", "Clip above: .28; gspo 4e-4; cispo 5, where it is the bound of the ratio itself.";
        delta: f64 = 0.0, "ratio; 0 = off", "Two-sided clipping: cap of the unclipped ratio.";
        dual_clip: f64 = 3.0, "ratio; 0 = off", "Bound of the loss for negative advantages.";
        beta: f64 = 1e-3, "weight", "Weight of the KL term to the reference policy; 0 = no reference is computed.";
        kl: String = "k3".into(), "k1 | k2 | k3", "KL estimator.";
        entropy_bonus: f64 = 0.0, "weight", "Weight of the entropy bonus.";
        correction: String = "none".into(), "none | tis | mis", "Weight for a sampler whose log-probs are not the trainer's (top-p, another engine): truncated importance sampling, or 0 outside the bounds.";
        correction_level: String = "token".into(), "token | sequence", "Whether a token or its whole sequence is weighted.";
        correction_max: f64 = 2.0, "weight", "Upper bound of the correction.";
        correction_min: f64 = 0.0, "weight; 0 = none", "Lower bound of the correction.";
        overlong_ramp: u32 = 0, "tokens; 0 = off", "Soft overlong punishment (DAPO): scores fall over so many tokens before overlong_max.";
        overlong_max: u32 = 0, "tokens; 0 = sampling.max_context_tokens", "Completion length at which the whole penalty is reached.";
        overlong_penalty: f64 = 1.0, "score", "The whole penalty.";
        updates_per_step: u32 = 1, "updates", "Optimiser updates a step (mini-batches of groups).";
        learning_rate: f64 = 1e-6, "per update", "Peak learning rate.";
        schedule: String = "constant".into(), "constant | linear | cosine", "Learning-rate schedule over run.steps.";
        warmup_steps: u32 = 0, "steps", "Linear warm-up.";
        final_lr_share: f64 = 0.1, "share of the peak", "Learning rate that linear and cosine end at.";
        weight_decay: f64 = 0.01, "per update, times lr", "Decoupled weight decay.";
        beta1: f64 = 0.9, "decay", "AdamW first moment.";
        beta2: f64 = 0.999, "decay", "AdamW second moment.";
        adam_eps: f64 = 1e-8, "gradient", "Added to the root of AdamW's second moment.";
        max_grad_norm: f64 = 1.0, "norm; 0 = off", "Global gradient-norm clipping.";
        micro_batch_tokens: u32 = 8192, "tokens", "Tokens of a micro-batch; bounds memory, never changes the loss.";
        recompute_activations: bool = false, "true | false", "Keep only each layer's input and run its forward again in the backward: the same bits, less memory, more time.";
        precision: String = "f32".into(), "f32 | bf16", "Weights that the policy computes with; trained weights, moments and gradient stay f32.";
        skip_zero_advantage: bool = false, "true | false", "Leave rollouts out of the update whose advantage is exactly 0 (all-equal groups): they would only pull towards the reference.";
        max_skipped: u32 = 5, "updates", "Stop after so many skipped updates in a row.";
        random_rewards: bool = false, "true | false", "Control: replace every score by a fair coin of the draw. Held-out success must not improve.";
    }
    /// The three weakness signals.
    signals: Signals {
        forgetting: bool = true, "true | false", "Raise forgetting.";
        boundary: bool = true, "true | false", "Raise boundary.";
        rare: bool = true, "true | false", "Raise rare.";
        window: u32 = 16, "attempts", "Scores of a task that count as its past.";
        include_group: bool = false, "true | false", "Let the rollout's own group count as its past.";
        theta: f64 = 5.0, "percent", "A pattern below this share of rollouts is rare.";
        n_min: u32 = 200, "rollouts", "Rollouts to have counted before anything is rare.";
        min_recurrence: u32 = 2, "rollouts", "Rollouts that must have shown a pattern.";
        pattern_length: u32 = 4, "tool names", "Length of the action pattern.";
    }
    /// Signal-guided exploration and synthesis.
    evolve: Evolve {
        mode: String = "feedback".into(), "feedback | random | off", "feedback follows the signals, random explores unguided at the same budget, off never adds a task.";
        initial: String = "split".into(), "split | explore", "D_0 from env.split, or by unguided exploration.";
        every: u32 = 10, "steps", "F: an evolution round every so many steps. The round at the last step is skipped.";
        explorer: String = "procedural".into(), "procedural | policy | llm", "Who reflects, explores and writes drafts.";
        max_contexts: u32 = 32, "contexts", "Contexts of a round, one per (task, signal), hardest first.";
        rounds: u32 = 2, "rounds", "Exploration rounds of a context.";
        steps: u32 = 8, "steps", "Exploration steps of a round.";
        max_drafts: u32 = 2, "drafts", "Drafts taken from one context.";
        validate: bool = true, "true | false", "Validate drafts; off is the paper's ablation: every draft that parses is admitted.";
        min_solution: u32 = 3, "calls", "Shortest solution of a draft, over all its turns.";
        similarity: f64 = 0.9, "0..1", "Drafts whose query and solution are this close to a task or an evaluation task are near-duplicates.";
        llm_url: String = "http://127.0.0.1:8000/v1".into(), "URL", "OpenAI-compatible endpoint of the llm explorer.";
        llm_model: String = "".into(), "model name", "Model of the llm explorer.";
        llm_key_env: String = "OPENAI_API_KEY".into(), "variable name", "Environment variable that holds the key; the key itself is never a setting and never logged.";
        llm_timeout_ms: u64 = 60000, "milliseconds", "Deadline of one request.";
        llm_retries: u32 = 3, "attempts", "Retries after a refused or broken request.";
        llm_validator: bool = true, "true | false", "With the llm explorer: an LLM agent that is shown query and solution carries each draft out in a fresh environment; kept if it earns a positive reward.";
        llm_reasks: u32 = 2, "askings", "How often an answer that lacks the JSON it was asked for is asked for again, with the fault named.";
        llm_budget_tokens: u64 = 0, "tokens; 0 = no bound", "Tokens that external LLMs may take in the whole run, sent and received, earlier processes of it included. A request goes out only if what is spent, a third of its bytes and llm_max_tokens fit; else the round ends, and training goes on.";
        llm_price_prompt: f64 = 0.0, "currency per million tokens", "Price of tokens sent to external LLMs; only for the cost that is recorded.";
        llm_price_completion: f64 = 0.0, "currency per million tokens", "Price of tokens received from external LLMs.";
        llm_replay: String = "".into(), "run folder; empty = ask the endpoint", "Take the answers of external LLMs from the log of this run; a request that it does not hold fails, and nothing goes over the network.";
        llm_max_tokens: u32 = 1024, "tokens", "Bound of one answer.";
    }
    /// Held-out evaluation at temperature 0.
    eval: Eval {
        every: u32 = 10, "steps; 0 = only before and after", "Evaluate every so many steps.";
        splits: Vec<String> = vec!["test-normal".into(), "test-challenge".into()], "split names", "Splits to evaluate; the first is the headline.";
        tasks: u32 = 200, "tasks", "At most so many tasks of a split.";
    }
    /// The event log.
    log: Log {
        group_commit_events: u32 = 256, "events", "A commit is written when so many events wait,";
        group_commit_bytes: u32 = 1048576, "bytes", "or so many bytes,";
        group_commit_us: u64 = 5000, "microseconds", "or when the oldest waited so long.";
        segment_mib: u32 = 64, "MiB", "Size at which a journal segment is closed.";
        compress: bool = true, "true | false", "Compress closed segments and the sled copy, in the background.";
        blob_copies: u32 = 1, "files", "Copies of every payload over 64 KiB, 1 or 2; with 2, `verify --repair` mends one from the other.";
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn catalogue_and_struct_agree() {
        let value = toml::Value::try_from(Settings::default()).expect("settings serialise");
        let mut names = Vec::new();
        for (section, keys) in value.as_table().expect("table") {
            names.extend(keys.as_table().expect("section").keys().map(|k| format!("{section}.{k}")));
        }
        let mut listed: Vec<String> = CATALOGUE.iter().map(|k| k.name.to_string()).collect();
        names.sort();
        listed.sort();
        assert_eq!(names, listed);
    }
}
