//! Makes the embedded policy: a small Qwen3 that stands in for an instruct model.
//!
//! ```text
//! cargo run --release -p coevolve-tools --bin pretrain -- --out src/model/embedded
//! ```
//!
//! Supervised on procedural demonstrations in `desk` (all training families, never a reserved one), in a
//! curriculum: copy drills and faultless single turns first, then whole episodes with the demonstrator's
//! *habits* (see `coevolve::env::desk::habits`): lapses that are concentrated on about a third of the
//! components of clauses. The habits decide the zero-shot success; what is left is what GRPO has to mend.
//! Muon on the matrices, AdamW on embedding and norms. Same seed, same weights.
//!
//! The weights in the repository are those of the default settings (seed 1, 60,000 sequences, about 8 million
//! tokens, 17 minutes on a busy 2-core machine): zero-shot 43.5 % of test-normal and 8.5 % of test-challenge
//! (200 tasks each, temperature 0). With habits at 0.8 and fewer weak components the same recipe gave 59 %.

mod data;
mod muon;

use clap::Parser;
use coevolve::agent::{Agent, ModelPolicy, PolicyAgent};
use coevolve::config::Settings;
use coevolve::env::Environment;
use coevolve::env::desk::{Desk, Limits as DeskLimits};
use coevolve::learner::adamw::{AdamW, AdamWConfig, clip_scale, grad_norm};
use coevolve::model::load::LoadedModel;
use coevolve::model::save::{SaveType, save_folder};
use coevolve::model::train::{Sequence, TrainBatch, Trainer};
use coevolve::model::{Decoder, Family, ModelConfig, Params, RopeScaling};
use coevolve::run::{evaluate_split, play_plan, policy};
use coevolve::world::Stopwatch;
use data::{Demos, Example};
use muon::Muon;
use std::error::Error;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::{Receiver, sync_channel};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Updates whose examples are made ahead.
const AHEAD: usize = 4;

#[derive(Parser, Debug, Clone)]
#[command(about = "Pretrains the embedded policy on desk demonstrations")]
struct Args {
    /// Folder to write (config.json, tokenizer.json, tokenizer_config.json, model.safetensors in bf16).
    #[arg(long)]
    out: PathBuf,
    /// Seed of weights and demonstrations.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Training sequences.
    #[arg(long, default_value_t = 60_000)]
    sequences: usize,
    /// Sequences of an update.
    #[arg(long, default_value_t = 48)]
    batch: usize,
    /// Width.
    #[arg(long, default_value_t = 128)]
    hidden: usize,
    /// Blocks.
    #[arg(long, default_value_t = 4)]
    layers: usize,
    /// Query heads of 32.
    #[arg(long, default_value_t = 4)]
    heads: usize,
    /// SwiGLU width.
    #[arg(long, default_value_t = 384)]
    ffn: usize,
    /// Muon learning rate.
    #[arg(long, default_value_t = 0.02)]
    muon_lr: f64,
    /// AdamW learning rate.
    #[arg(long, default_value_t = 3e-3)]
    adam_lr: f64,
    /// Scale of the habit rates, 0 = faultless.
    #[arg(long, default_value_t = 1.0)]
    habits: f64,
    /// Sequences between evaluations (test-normal and test-challenge, 100 tasks each).
    #[arg(long, default_value_t = 6_000)]
    eval_every: usize,
    /// Threads.
    #[arg(long, default_value_t = 2)]
    threads: usize,
    /// Continue from this folder's weights (skips the drills).
    #[arg(long)]
    init: Option<PathBuf>,
}

fn main() -> Result<(), Box<dyn Error>> {
    let args = Args::parse();
    // SAFETY: no other thread runs yet. Unset, candle reads /proc/cpuinfo on every matmul.
    unsafe { std::env::set_var("RAYON_NUM_THREADS", args.threads.to_string()) };
    let tokenizer = data::tokenizer()?;
    let config = ModelConfig {
        family: Family::Qwen3,
        vocab_size: tokenizer.vocab_size().next_multiple_of(16),
        hidden_size: args.hidden,
        intermediate_size: args.ffn,
        num_hidden_layers: args.layers,
        num_attention_heads: args.heads,
        num_key_value_heads: (args.heads / 2).max(1),
        head_dim: 32,
        rms_norm_eps: 1e-6,
        rope_theta: 10_000.0,
        rope_scaling: RopeScaling::None,
        max_position_embeddings: 2048,
        tie_word_embeddings: true,
        qkv_bias: false,
        qk_norm: true,
        moe: None,
        bos_token_id: None,
        eos_token_ids: tokenizer.eos_ids().to_vec(),
    };
    let params = match &args.init {
        Some(folder) => coevolve::model::load::load_folder(folder)?.1,
        None => initial(&config, args.seed),
    };
    eprintln!("{} parameters, vocabulary {}", params.data().len(), tokenizer.vocab_size());
    let mut model = LoadedModel { config: config.clone(), params, tokenizer };
    let updates = args.sequences / args.batch;
    let examples = produce(Demos::new(&model, args.seed, args.habits)?, &args, updates);
    let mut trainer = Trainer::new(&config, args.threads)?;
    let mut optimizer = Optimizer::new(&model.params, args.threads);
    let mut gradient = vec![0f32; model.params.data().len()];
    let (watch, mut tokens, mut since_eval) = (Stopwatch::start(), 0usize, 0usize);
    let (mut loss_sum, mut loss_count) = (0f64, 0usize);
    for update in 0..updates {
        let fraction = update as f64 / updates as f64;
        let examples = examples.recv()??;
        let mut batch = TrainBatch::default();
        for e in &examples {
            batch.push_group(&[Sequence { ids: &e.ids, targets: &e.targets }]);
        }
        tokens += batch.tokens();
        let forward = trainer.forward(&model.params, None, &batch, 1.0)?;
        let n = forward.logp.len() as f32;
        loss_sum -= forward.logp.iter().map(|x| f64::from(*x)).sum::<f64>();
        loss_count += forward.logp.len();
        gradient.fill(0.0);
        let dlogp = vec![-1.0 / n; forward.logp.len()];
        trainer.backward(forward.generation, &model.params, None, &dlogp, None, &mut gradient)?;
        let rate = ((update + 1) as f64 / 50.0).min(1.0) * ((1.0 - fraction) * 1.5).clamp(0.03, 1.0);
        optimizer.step(&mut model.params, &gradient, args.muon_lr * rate, args.adam_lr * rate)?;
        since_eval += args.batch;
        if update % 50 == 49 {
            let seconds = watch.micros() as f64 / 1e6;
            eprintln!(
                "update {}/{updates} loss {:.4} {:.0} tokens/s {:.0} s",
                update + 1,
                loss_sum / loss_count as f64,
                tokens as f64 / seconds,
                seconds
            );
            (loss_sum, loss_count) = (0.0, 0);
        }
        if since_eval >= args.eval_every || update + 1 == updates {
            since_eval = 0;
            let normal = evaluate(&model, "test-normal", args.threads)?;
            let challenge = evaluate(&model, "test-challenge", args.threads)?;
            eprintln!(
                "  evaluation after {} sequences: normal {normal:.3} challenge {challenge:.3}",
                (update + 1) * args.batch
            );
            save_folder(&args.out, &config, &model.params, Some(&model.tokenizer), SaveType::Bf16)?;
        }
    }
    Ok(())
}

/// Makes the examples of every update on a thread of its own, in order.
fn produce(demos: Demos, args: &Args, updates: usize) -> Receiver<Result<Vec<Example>, String>> {
    let (sender, receiver) = sync_channel(AHEAD);
    let (batch, start) = (args.batch, if args.init.is_some() { 0.5 } else { 0.0 });
    std::thread::spawn(move || {
        for update in 0..updates {
            let progress = start + (1.0 - start) * update as f64 / updates as f64;
            let examples: Result<Vec<Example>, String> =
                (0..batch).map(|i| demos.example(update * batch + i, progress).map_err(|e| e.to_string())).collect();
            if sender.send(examples).is_err() {
                return;
            }
        }
    });
    receiver
}

/// Normal weights: embedding 0.02, matrices 1/sqrt(inputs), those that write to the residual stream half.
fn initial(config: &ModelConfig, seed: u64) -> Params {
    let mut params = Params::random(config, seed, 1.0);
    let specs: Vec<_> = params.tensors().map(|(s, _)| s.clone()).collect();
    for spec in specs {
        if spec.shape.len() != 2 {
            continue;
        }
        let scale = if spec.name.contains("embed") {
            0.02
        } else {
            let narrow = spec.name.contains("o_proj") || spec.name.contains("down_proj");
            (if narrow { 0.5 } else { 1.0 }) / (spec.shape[1] as f32).sqrt()
        };
        params.data_mut()[spec.range()].iter_mut().for_each(|v| *v *= scale);
    }
    params
}

/// Muon on hidden matrices, AdamW on the rest.
struct Optimizer {
    matrices: Vec<(std::ops::Range<usize>, Muon)>,
    rest: Vec<std::ops::Range<usize>>,
    adam: AdamW,
}

impl Optimizer {
    fn new(params: &Params, _threads: usize) -> Optimizer {
        let (mut matrices, mut rest) = (Vec::new(), Vec::new());
        for (spec, _) in params.tensors() {
            if spec.shape.len() == 2 && !spec.name.contains("embed") {
                matrices.push((spec.range(), Muon::new(spec.shape[0], spec.shape[1])));
            } else {
                rest.push(spec.range());
            }
        }
        let n = rest.iter().map(|r| r.len()).sum();
        Optimizer { matrices, rest, adam: AdamW::new(n) }
    }

    fn step(&mut self, params: &mut Params, gradient: &[f32], muon: f64, adam: f64) -> Result<(), Box<dyn Error>> {
        let norm = grad_norm(gradient);
        let scale = clip_scale(norm, 1.0);
        for (range, state) in &mut self.matrices {
            state.step(&mut params.data_mut()[range.clone()], &gradient[range.clone()], muon as f32)?;
        }
        let gather = |from: &[f32]| -> Vec<f32> { self.rest.iter().flat_map(|r| from[r.clone()].to_vec()).collect() };
        let (mut weights, gradient) = (gather(params.data()), gather(gradient));
        let config = AdamWConfig { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.0 };
        self.adam.update(&mut weights, &gradient, scale, adam, &config)?;
        let mut at = 0;
        for range in &self.rest {
            let n = range.len();
            params.data_mut()[range.clone()].copy_from_slice(&weights[at..at + n]);
            at += n;
        }
        Ok(())
    }
}

fn evaluate(model: &LoadedModel, split: &str, threads: usize) -> Result<f64, Box<dyn Error>> {
    let mut settings = Settings::default();
    settings.run.threads = threads as u32;
    settings.env.workers = 0;
    let env: Arc<dyn Environment> = Arc::new(Desk::new(DeskLimits::default()));
    let tasks = env.tasks(split, 0, 100)?;
    let decoder = Decoder::new(&model.config, &model.params, None)?;
    let dialect = policy::dialect(model, &settings, Vec::new())?;
    let agent: Box<dyn Agent> = Box::new(PolicyAgent::new("policy", Arc::new(ModelPolicy(Arc::new(decoder))), dialect));
    let plan = play_plan(&settings, coevolve::run::limits(&settings), Arc::new(AtomicBool::new(false)));
    let results = evaluate_split(&env, agent.as_ref(), split, &tasks, 0, &plan, &mut |_| {})?;
    let solved = results.iter().filter(|(_, r)| r.score().is_some_and(|s| s >= 0.5)).count();
    Ok(solved as f64 / results.len().max(1) as f64)
}
