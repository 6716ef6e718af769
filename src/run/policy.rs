//! What is trained: a real model with its learner, or the scripted stand-in for tests of the loop.

use super::RunError;
use super::setup::{installed, learner_config, threads};
use crate::agent::chat::Example;
use crate::agent::parse::CallFormat;
use crate::agent::template::{ChatMessage, ChatTemplate};
use crate::agent::tools::ToolStyle;
use crate::agent::write::write_calls;
use crate::agent::{Agent, ChatDialect, ChatOptions, Dialect, ModelPolicy, PolicyAgent, ScriptedAgent};
use crate::config::Settings;
use crate::decide::advantage::{AdvantageConfig, Member, advantages};
use crate::env::{Environment, Role};
use crate::event::{GradientStepTaken, Reward, RolloutFinished, StepSkipped};
use crate::evolve::Explorer;
use crate::evolve::asking::{Asker, Book, Terms};
use crate::evolve::client::Endpoint;
use crate::evolve::judged::Judged;
use crate::evolve::llm::Llm;
use crate::evolve::procedural::Procedural;
use crate::evolve::score::LlmJudge;
use crate::learner::{Learner, LearnerError, UpdateOutcome, checkpoint, group_rollouts};
use crate::model::load::{LoadedModel, load_model};
use crate::model::{Decoder, LoraConfig, LoraParams, LoraTarget, ModelConfig, Params};
use crate::world::draw;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Tasks looked through for worked examples.
const MAX_EXAMPLE_TASKS: usize = 200;

/// One optimiser update.
#[derive(Debug, Clone, PartialEq)]
pub enum Update {
    /// Applied.
    Taken(GradientStepTaken),
    /// Not applied.
    Skipped(StepSkipped),
}

/// Something that samples and learns. Deterministic: equal rollouts in the same order give equal weights.
pub trait Trainee: Send {
    /// The agent at the present version.
    fn agent(&self) -> Result<Arc<dyn Agent>, RunError>;
    /// The present policy version: how many updates were applied.
    fn version(&self) -> u32;
    /// BLAKE3 of the trainable weights, hex.
    fn weights_hash(&self) -> Result<String, RunError>;
    /// BLAKE3 of the initial policy, hex.
    fn policy_digest(&self) -> String;
    /// Applies the updates of a step.
    fn learn(&mut self, step: u32, rollouts: Vec<RolloutFinished>) -> Result<Vec<Update>, RunError>;
    /// Writes a checkpoint; returns the hashes of weights and optimiser state.
    fn save(&self, dir: &Path) -> Result<(String, String), RunError>;
    /// Takes a checkpoint over if it holds the weights with this hash; on an error nothing has changed.
    fn load(&mut self, dir: &Path, weights_hash: &str) -> Result<(), RunError>;
}

/// The policy named by `policy.model`.
pub fn open(settings: &Settings, env: &dyn Environment) -> Result<Box<dyn Trainee>, RunError> {
    Ok(match settings.policy.model.as_str() {
        "scripted" => Box::new(Scripted { version: 0, seed: settings.run.seed }),
        _ => Box::new(Model::open(settings, env)?),
    })
}

/// Whoever asks the endpoint of `evolve.llm_*`.
pub fn asker(settings: &Settings, stop: &Arc<AtomicBool>, book: Book) -> Result<Asker, RunError> {
    let e = &settings.evolve;
    let endpoint = Endpoint {
        url: e.llm_url.clone(),
        model: e.llm_model.clone(),
        key_env: e.llm_key_env.clone(),
        timeout_ms: e.llm_timeout_ms,
        retries: e.llm_retries,
        max_tokens: e.llm_max_tokens,
    };
    let terms = Terms {
        reasks: e.llm_reasks,
        budget_tokens: e.llm_budget_tokens,
        price_prompt: e.llm_price_prompt,
        price_completion: e.llm_price_completion,
    };
    Ok(Asker::new(endpoint, terms, book, stop.clone())?)
}

/// The environment with the judge that `env.judge` asks for, and the judge, who cannot be asked before a run lends it the
/// means.
pub fn judged(settings: &Settings, env: Arc<dyn Environment>) -> (Arc<dyn Environment>, Option<Arc<LlmJudge>>) {
    if settings.env.judge != "llm" {
        return (env, None);
    }
    let judge = Arc::new(LlmJudge::new(&settings.evolve.llm_model));
    (Arc::new(Judged::new(env, judge.clone())), Some(judge))
}

/// The explorer named by `evolve.explorer`.
pub fn explorer(
    settings: &Settings,
    env: &Arc<dyn Environment>,
    trainee: &dyn Trainee,
    stop: &Arc<AtomicBool>,
    book: Book,
) -> Result<Box<dyn Explorer>, RunError> {
    let e = &settings.evolve;
    Ok(match e.explorer.as_str() {
        "llm" => Box::new(Llm::new(asker(settings, stop, book)?)),
        "policy" => Box::new(crate::evolve::policy::PolicyExplorer::new(
            env.clone(),
            trainee.agent()?,
            super::setup::limits(settings),
        )?),
        _ => Box::new(Procedural::new(env.clone())?),
    })
}

/// The control of `learner.random_rewards`: a fair coin per rollout, a function of its coordinates.
fn random_rewards(seed: u64, rollouts: &mut [RolloutFinished]) {
    for r in rollouts {
        let k = &r.key;
        let ids = [k.step.to_string(), k.task.clone(), k.draw.to_string(), k.k.to_string()];
        let ids: Vec<&str> = ids.iter().map(String::as_str).collect();
        if r.reward.score().is_some() {
            r.reward = Reward::Scored(f64::from(u8::from(draw(seed, "random reward", &ids).chance(0.5))));
        }
    }
}

/// A stand-in without a model: its "weights" are the number of updates it has taken.
struct Scripted {
    version: u32,
    seed: u64,
}

impl Trainee for Scripted {
    fn agent(&self) -> Result<Arc<dyn Agent>, RunError> {
        Ok(Arc::new(ScriptedAgent::new(self.version)))
    }

    fn version(&self) -> u32 {
        self.version
    }

    fn weights_hash(&self) -> Result<String, RunError> {
        Ok(blake3::hash(format!("scripted policy {} version {}", self.seed, self.version).as_bytes())
            .to_hex()
            .to_string())
    }

    fn policy_digest(&self) -> String {
        blake3::hash(b"scripted policy").to_hex().to_string()
    }

    fn learn(&mut self, step: u32, rollouts: Vec<RolloutFinished>) -> Result<Vec<Update>, RunError> {
        let mut trained = Vec::new();
        for group in group_rollouts(rollouts) {
            let members: Vec<Member> =
                group.rollouts.iter().map(|r| Member { group: 0, reward: r.reward.score() }).collect();
            let values = advantages(&members, &AdvantageConfig::default());
            for (rollout, advantage) in group.rollouts.iter().zip(&values) {
                if *advantage != 0.0 {
                    let tokens: u64 = rollout.sampled.iter().map(|(_, n)| u64::from(*n)).sum();
                    trained.push((rollout.key.clone(), *advantage as f32, tokens));
                }
            }
        }
        if trained.is_empty() {
            return Ok(vec![Update::Skipped(StepSkipped { step, update: 0, reason: "no trained tokens".into() })]);
        }
        self.version += 1;
        Ok(vec![Update::Taken(GradientStepTaken {
            step,
            update: 0,
            version_before: self.version - 1,
            version_after: self.version,
            trained_tokens: trained.iter().map(|t| t.2).sum(),
            rollouts: trained.into_iter().map(|(key, a, _)| (key, a)).collect(),
            loss: 0.0,
            policy_loss: 0.0,
            kl: 0.0,
            entropy: 0.0,
            clip_fraction: 0.0,
            grad_norm: 0.0,
            learning_rate: 0.0,
            weights_hash: self.weights_hash()?,
        })])
    }

    fn save(&self, dir: &Path) -> Result<(String, String), RunError> {
        checkpoint::write(dir, &[("version", self.version.to_string().as_bytes())])?;
        Ok((self.weights_hash()?, String::new()))
    }

    fn load(&mut self, dir: &Path, weights_hash: &str) -> Result<(), RunError> {
        let bad = |message: String| RunError::Policy { model: "scripted".into(), message };
        let text = std::fs::read_to_string(dir.join("version")).map_err(|e| bad(e.to_string()))?;
        let version = text.trim().parse().map_err(|_| bad(format!("{} is damaged", dir.display())))?;
        let loaded = Scripted { version, seed: self.seed };
        if loaded.weights_hash()? != weights_hash {
            return Err(bad(format!("{} holds other weights than the log names", dir.display())));
        }
        *self = loaded;
        Ok(())
    }
}

/// A real model.
struct Model {
    config: ModelConfig,
    /// Frozen weights under an adapter; `None` when all weights are trained.
    base: Option<(Params, LoraConfig)>,
    dialect: Arc<dyn Dialect>,
    learner: Learner,
    digest: String,
    temperature: f32,
    random_rewards: Option<u64>,
}

impl Model {
    fn open(settings: &Settings, env: &dyn Environment) -> Result<Model, RunError> {
        let loaded = load(&settings.policy.model)?;
        let bad = |message: String| RunError::Policy { model: settings.policy.model.clone(), message };
        let digest = loaded.digest();
        let learner_settings = learner_config(settings)?;
        let threads = threads(settings);
        let p = &settings.policy;
        let (base, learner) = if p.lora_rank == 0 {
            (None, Learner::full(&loaded.config, loaded.params.clone(), threads, learner_settings)?)
        } else {
            let targets = p.lora_targets.iter().map(|t| LoraTarget::from_module(t)).collect::<Result<_, _>>()?;
            let lora = LoraConfig { rank: p.lora_rank as usize, alpha: p.lora_alpha as f32, targets };
            let adapters = LoraParams::new(&loaded.config, &lora, settings.run.seed)?;
            let mut base = loaded.params.clone();
            learner_settings.precision.round(base.data_mut());
            let learner = Learner::lora(&loaded.config, base.clone(), adapters, threads, learner_settings)?;
            (Some((base, lora)), learner)
        };
        let dialect = dialect(&loaded, settings, examples(settings, env)?).map_err(bad)?;
        Ok(Model {
            config: loaded.config,
            base,
            dialect,
            learner,
            digest,
            temperature: settings.batch.temperature as f32,
            random_rewards: settings.learner.random_rewards.then_some(settings.run.seed),
        })
    }
}

/// The file of `tools/setup-smollm2.sh` among what is installed.
const SMOLLM2: &str = "models/SmolLM2-135M-Instruct.Q4_1.gguf";

/// Loads `embedded`, `smollm2`, a folder or a GGUF file.
pub fn load(model: &str) -> Result<LoadedModel, RunError> {
    let bad = |message: String| RunError::Policy { model: model.into(), message };
    match model {
        "embedded" => crate::model::embedded::load().map_err(|e| bad(e.to_string())),
        "smollm2" => {
            let path = installed(SMOLLM2);
            if !path.exists() {
                let hint =
                    "run `bash tools/setup-smollm2.sh` in the project, or set COEVOLVE_HOME to its .coevolve folder";
                return Err(bad(format!("{} is not there; {hint}", path.display())));
            }
            load_model(&path).map_err(|e| bad(e.to_string()))
        }
        path => load_model(Path::new(path)).map_err(|e| bad(e.to_string())),
    }
}

/// The model's way of writing conversations.
pub fn dialect(loaded: &LoadedModel, settings: &Settings, examples: Vec<Example>) -> Result<Arc<dyn Dialect>, String> {
    let source = loaded
        .tokenizer
        .chat_template()
        .ok_or("the model has no chat template (tokenizer_config.json: chat_template); an instruct model is needed")?;
    let template = ChatTemplate::new(source, loaded.tokenizer.specials().clone()).map_err(|e| e.to_string())?;
    let small = loaded.params.data().len() < 1_000_000_000;
    let tools = match settings.policy.tool_docs.as_str() {
        "full" => ToolStyle::Full,
        "compact" => ToolStyle::Compact,
        _ if small && !template.shows_tools() => ToolStyle::Compact,
        _ => ToolStyle::Full,
    };
    let options = ChatOptions {
        tools,
        calls: call_format(settings),
        examples,
        few_shot: settings.policy.few_shot as usize,
        ..ChatOptions::default()
    };
    let dialect = ChatDialect::new(template, loaded.tokenizer.clone(), options).map_err(|e| e.to_string())?;
    Ok(Arc::new(dialect))
}

/// How the policy writes calls.
fn call_format(settings: &Settings) -> CallFormat {
    match settings.policy.calls.as_str() {
        "llama" => CallFormat::Llama,
        "bfcl" => CallFormat::Bfcl,
        "python" => CallFormat::Python,
        "text" => CallFormat::Text,
        _ => CallFormat::Hermes,
    }
}

/// Worked examples: first turns of training tasks that are not in D_0, with the environment's real results,
/// the shortest first.
fn examples(settings: &Settings, env: &dyn Environment) -> Result<Vec<Example>, RunError> {
    let mut examples = Vec::new();
    if settings.policy.few_shot == 0 {
        return Ok(examples);
    }
    let (split, seed) = (&settings.env.split, settings.run.seed);
    let drawn = env.tasks(split, seed, settings.env.seed_tasks as usize)?;
    let mut others = env.tasks(split, seed, MAX_EXAMPLE_TASKS)?;
    others.retain(|t| drawn.iter().all(|d| d.id != t.id));
    let mut session = env.open()?;
    for task in &others {
        let Some(turn) = task.turns.first().filter(|t| t.missing.is_none() && (1..=2).contains(&t.solution.len()))
        else {
            continue;
        };
        let opening = session.reset(task, "example", seed)?;
        let Some(query) = opening.messages.iter().rfind(|m| m.role == Role::User) else { continue };
        let mut messages = vec![ChatMessage::new(Role::User, query.content.clone())];
        for call in &turn.solution {
            let text = write_calls(call_format(settings), "", std::slice::from_ref(call))
                .map_err(|e| RunError::internal("an example's call", e))?;
            messages.push(ChatMessage::new(Role::Assistant, text));
            let reply = session.step(std::slice::from_ref(call))?;
            messages.extend(reply.results.into_iter().map(|r| ChatMessage::result(&call.name, r.content)));
        }
        messages.push(ChatMessage::new(Role::Assistant, turn.answer.clone().unwrap_or_else(|| "Done.".into())));
        let tools = turn.solution.iter().map(|c| c.name.clone()).collect();
        examples.push(Example { messages, tools });
    }
    examples.sort_by_key(|e| e.messages.iter().map(|m| m.content.len()).sum::<usize>());
    Ok(examples)
}

impl Trainee for Model {
    fn agent(&self) -> Result<Arc<dyn Agent>, RunError> {
        let weights = self.learner.policy_weights()?;
        let decoder = match &self.base {
            None => Decoder::new(&self.config, &Params::from_flat(&self.config, weights)?, None)?,
            Some((base, lora)) => {
                let adapters = LoraParams::from_flat(&self.config, lora, weights)?;
                Decoder::new(&self.config, base, Some(&adapters))?
            }
        };
        Ok(Arc::new(PolicyAgent::new("policy", Arc::new(ModelPolicy(Arc::new(decoder))), self.dialect.clone())))
    }

    fn version(&self) -> u32 {
        self.learner.version()
    }

    fn weights_hash(&self) -> Result<String, RunError> {
        Ok(self.learner.weights_hash()?)
    }

    fn policy_digest(&self) -> String {
        self.digest.clone()
    }

    fn learn(&mut self, step: u32, mut rollouts: Vec<RolloutFinished>) -> Result<Vec<Update>, RunError> {
        if let Some(seed) = self.random_rewards {
            random_rewards(seed, &mut rollouts);
        }
        let outcome = self.learner.step(step, self.temperature, &group_rollouts(rollouts))?;
        Ok(outcome
            .updates
            .into_iter()
            .map(|u| match u {
                UpdateOutcome::Taken(e) => Update::Taken(e),
                UpdateOutcome::Skipped(e) => Update::Skipped(e),
            })
            .collect())
    }

    fn save(&self, dir: &Path) -> Result<(String, String), RunError> {
        let info = self.learner.save(dir)?;
        Ok((info.weights_hash, info.optimizer_hash))
    }

    fn load(&mut self, dir: &Path, weights_hash: &str) -> Result<(), RunError> {
        let found = checkpoint::info(dir)?.weights_hash;
        if found != weights_hash {
            return Err(LearnerError::checkpoint(dir, "holds other weights than the log names").into());
        }
        self.learner.load(dir)?;
        Ok(())
    }
}
