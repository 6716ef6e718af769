//! Training on the CPU: log-probs and entropies of chosen tokens, and their exact gradient.
//!
//! Equal inputs give equal bits for any number of threads and any instruction set. Memory: about
//! [`Trainer::bytes_per_token`] for each token of a batch ([`Keep::Inputs`] makes it less); give a large batch in parts and
//! let the gradient add up.

mod batch;
mod experts;
mod head;
mod layers;

pub use batch::{Sequence, TrainBatch, TrainRow};

use std::sync::Arc;

use super::config::ModelConfig;
use super::error::ModelError;
use super::kern::{Exec, Level, MAX_HEAD, Plan, RopeTable};
use super::lora::{LoraLayout, LoraParams};
use super::params::{Layout, Params, check_len};
use super::weights::Weights;
use head::Head;
pub use layers::Keep;
pub(super) use layers::room;
use layers::{Blocks, Rows};

/// Result of [`Trainer::forward`].
#[derive(Debug, Clone, PartialEq)]
pub struct Forward {
    /// Identifies this forward; [`Trainer::backward`] wants it back.
    pub generation: u64,
    /// Natural log-probability of each target at the given temperature, rows in order, targets in order.
    pub logp: Vec<f32>,
    /// Entropy in nats of the distribution each target was scored under.
    pub entropy: Vec<f32>,
}

/// Forward and backward of one model over a reused workspace, on a fixed number of threads.
#[derive(Debug)]
pub struct Trainer {
    config: ModelConfig,
    layout: Arc<Layout>,
    exec: Exec,
    pool: Option<rayon::ThreadPool>,
    rope: RopeTable,
    rows: Rows,
    blocks: Blocks,
    head: Head,
    generation: u64,
    /// Generation whose activations the workspace holds, 0 for none.
    held: u64,
    /// Adapter values of the held forward, to know a backward with others.
    held_lora: Option<usize>,
}

impl Trainer {
    /// A trainer for `config` on `threads` threads (at least 1; results have the same bits for any number).
    ///
    /// # Errors
    /// [`ModelError::Config`] or [`ModelError::Threads`].
    pub fn new(config: &ModelConfig, threads: usize) -> Result<Self, ModelError> {
        Self::on(config, threads, Level::detect())
    }

    /// A trainer that uses one instruction set.
    fn on(config: &ModelConfig, threads: usize, level: Level) -> Result<Self, ModelError> {
        config.check()?;
        if config.head_dim > MAX_HEAD {
            return Err(ModelError::Config(format!("head_dim = {} is above {MAX_HEAD}", config.head_dim)));
        }
        let threads = threads.max(1);
        let pool = if threads > 1 {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
            Some(pool.map_err(|e| ModelError::Threads { threads, reason: e.to_string() })?)
        } else {
            None
        };
        Ok(Trainer {
            config: config.clone(),
            layout: Arc::new(Layout::new(config)),
            exec: Exec::new(level, threads),
            pool,
            rope: RopeTable::new(config.rope_periods(), config.rope_scaling.attention_factor()),
            rows: Rows::default(),
            blocks: Blocks::default(),
            head: Head::default(),
            generation: 0,
            held: 0,
            held_lora: None,
        })
    }

    /// What the next forwards keep for their backward.
    pub fn keep(&mut self, keep: Keep) {
        self.held = 0;
        self.blocks.keep = keep;
    }

    /// The model's shape.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Bytes of workspace that one more trained token of a batch costs, logits not counted: the activations that `keep` keeps of
    /// all layers, and what all layers share. A token that is not trained costs a little less.
    pub fn bytes_per_token(config: &ModelConfig, keep: Keep) -> usize {
        let c = config;
        let (d, f, width) = (c.hidden_size, c.intermediate_size, c.head_dim.div_ceil(16) * 16);
        let split = (c.num_attention_heads + 2 * c.num_key_value_heads) * width;
        let raw = if c.qk_norm { c.qkv_dim() + c.num_attention_heads + c.num_key_value_heads } else { 0 };
        let attention = d + 2 + raw + split + c.q_dim() + c.num_attention_heads;
        let mlp = |l| {
            c.experts(l).map_or(2 * f, |m| m.num_experts_per_tok * (2 * m.moe_intermediate_size + 2) + m.num_experts)
        };
        let acts = (0..c.num_hidden_layers).map(|l| attention + mlp(l));
        let kept = match keep {
            Keep::Activations => acts.sum::<usize>(),
            Keep::Inputs => acts.max().unwrap_or(0) + d,
        };
        // A token's share of the experts' scratch, at most one expert at a time.
        let expert = c.moe.as_ref().map_or(0, |m| 3 * d + 4 * m.moe_intermediate_size + 2 * m.num_experts);
        let shared = 8 * d + c.qkv_dim() + 3 * f + 2 * split + 3 * c.q_dim() + expert;
        (c.num_hidden_layers * d + kept + shared) * size_of::<f32>()
    }

    /// Log-probs (of logits / `temperature`) and entropies of all targets of `batch`.
    ///
    /// # Errors
    /// A malformed batch, a temperature that is not positive and finite, or parameters of another model.
    pub fn forward(
        &mut self,
        params: &Params,
        lora: Option<&LoraParams>,
        batch: &TrainBatch,
        temperature: f32,
    ) -> Result<Forward, ModelError> {
        let adapters = lora.map(|l| (&**l.layout(), l.data()));
        self.forward_flat(params.data(), adapters, batch, temperature)
    }

    /// [`Trainer::forward`] over flat vectors.
    pub(crate) fn forward_flat(
        &mut self,
        base: &[f32],
        lora: Option<(&LoraLayout, &[f32])>,
        batch: &TrainBatch,
        temperature: f32,
    ) -> Result<Forward, ModelError> {
        self.held = 0;
        batch.check(&self.config)?;
        if !(temperature.is_finite() && temperature > 0.0) {
            return Err(ModelError::Batch(format!("temperature {temperature} must be positive and finite")));
        }
        self.check_weights(base, lora)?;
        self.lay_out(batch);
        let Trainer { config, layout, exec, pool, rope, rows, blocks, head, .. } = self;
        rope.cover(rows.pos.iter().max().map_or(0, |p| *p as usize + 1));
        let w = Weights { config, layout, base, lora };
        in_pool(pool.as_ref(), || {
            blocks.forward(*exec, &w, rows, rope);
            head.forward(*exec, &w, &blocks.top, 1.0 / temperature);
        });
        self.generation += 1;
        self.held = self.generation;
        self.held_lora = lora.map(|(_, v)| v.len());
        Ok(Forward {
            generation: self.generation,
            logp: self.head.scored.iter().map(|s| s.logp).collect(),
            entropy: self.head.scored.iter().map(|s| s.entropy).collect(),
        })
    }

    /// Adds to `grad` the gradient of `sum_i dlogp[i] logp[i] + dentropy[i] entropy[i]`: over the adapters
    /// when `lora` is given (the base is frozen), else over all parameters. `params` and `lora` must hold
    /// the values of the forward. May be called again for the same forward.
    ///
    /// # Errors
    /// [`ModelError::Generation`] when the workspace holds another forward, [`ModelError::Length`]; `grad`
    /// is untouched then.
    pub fn backward(
        &mut self,
        generation: u64,
        params: &Params,
        lora: Option<&LoraParams>,
        dlogp: &[f32],
        dentropy: Option<&[f32]>,
        grad: &mut [f32],
    ) -> Result<(), ModelError> {
        let adapters = lora.map(|l| (&**l.layout(), l.data()));
        self.backward_flat(generation, params.data(), adapters, dlogp, dentropy, grad)
    }

    /// [`Trainer::backward`] over flat vectors.
    pub(crate) fn backward_flat(
        &mut self,
        generation: u64,
        base: &[f32],
        lora: Option<(&LoraLayout, &[f32])>,
        dlogp: &[f32],
        dentropy: Option<&[f32]>,
        grad: &mut [f32],
    ) -> Result<(), ModelError> {
        if generation == 0 || generation != self.held {
            return Err(ModelError::Generation { asked: generation, held: self.held });
        }
        self.check_weights(base, lora)?;
        if self.held_lora != lora.map(|(_, v)| v.len()) {
            return Err(ModelError::Batch("backward with other adapters than its forward".into()));
        }
        let targets = self.head.tokens.len();
        check_len("gradient of log-probs", targets, dlogp.len())?;
        check_len("gradient of entropies", targets, dentropy.map_or(targets, <[f32]>::len))?;
        check_len("gradient", lora.map_or(self.layout.total(), |(l, _)| l.total()), grad.len())?;
        let Trainer { config, layout, exec, pool, rope, rows, blocks, head, .. } = self;
        let w = Weights { config, layout, base, lora };
        in_pool(pool.as_ref(), || {
            let dtop = room(&mut blocks.dtop, rows.trained.len() * config.hidden_size);
            head.backward(*exec, &w, dlogp, dentropy, (&blocks.top, dtop), grad);
            blocks.backward(*exec, &w, rows, rope, grad);
        });
        Ok(())
    }

    fn check_weights(&self, base: &[f32], lora: Option<(&LoraLayout, &[f32])>) -> Result<(), ModelError> {
        check_len("parameters", self.layout.total(), base.len())?;
        let Some((layout, values)) = lora else { return Ok(()) };
        check_len("LoRA parameters", layout.total(), values.len())?;
        layout.check_model(&self.config)
    }

    /// Rows, positions, segments and targets of a checked batch: prefixes first, then rows.
    fn lay_out(&mut self, batch: &TrainBatch) {
        let Rows { plan, ids, pos, trained, needed } = &mut self.rows;
        let prefixes = batch.prefixes.iter().map(|p| (p, None));
        let all: Vec<_> = prefixes.chain(batch.rows.iter().map(|r| (&r.ids, r.prefix))).collect();
        ids.clear();
        pos.clear();
        let mut lengths = Vec::with_capacity(all.len());
        for (segment, prefix) in all {
            let before = prefix.map_or(0, |p| batch.prefixes[p].len());
            ids.extend_from_slice(segment);
            pos.extend((before..before + segment.len()).map(|p| p as u32));
            lengths.push((segment.len(), prefix));
        }
        *plan = Plan::new(&lengths);
        trained.clear();
        self.head.tokens.clear();
        for (row, segment) in batch.rows.iter().zip(&plan.segments()[batch.prefixes.len()..]) {
            trained.extend(row.targets.iter().map(|t| segment.start as u32 + t.0));
            self.head.tokens.extend(row.targets.iter().map(|t| t.1));
        }
        *needed = plan.needed(trained);
    }
}

#[cfg(test)]
pub(super) mod tests;

fn in_pool(pool: Option<&rayon::ThreadPool>, f: impl FnOnce() + Send) {
    match pool {
        Some(pool) => pool.install(f),
        None => f(),
    }
}
