//! Sampling-time inference: packed weights, a paged KV cache, mixed prefill and decode.
//!
//! A sequence's logits are the same bits whatever else is in the call, however its tokens were split over
//! calls, and whether it was forked or computed afresh: every product row, every attention row and every
//! reduction is the same sequence of operations per token (see [`super::kern`]).

mod cache;
#[cfg(test)]
mod tests;

pub use cache::{Cache, SeqId};

use std::collections::BTreeSet;

use super::config::ModelConfig;
use super::error::ModelError;
use super::experts::{self, ExpertActs, ExpertScratch};
use super::kern::{
    Exec, KEYS, Level, MAX_HEAD, Mat, PackedBuf, PagedRun, QkNorm, add_bias, attend_pages, gemm, rms_norm, split_heads,
    swiglu,
};
use super::lora::LoraParams;
use super::params::{Layout, Params, check_len};
use super::weights::{FoldBuffers, Linear, Weights};

/// Tokens computed together; bounds the workspace. Results do not depend on it.
const CHUNK: usize = 512;

#[derive(Debug)]
struct LayerWeights {
    input_norm: Vec<f32>,
    qkv: PackedBuf,
    qkv_bias: Option<Vec<f32>>,
    qk_norm: Option<(Vec<f32>, Vec<f32>)>,
    o: PackedBuf,
    post_norm: Vec<f32>,
    mlp: Mlp,
}

#[derive(Debug)]
enum Mlp {
    Dense(Gated),
    Experts { router: PackedBuf, experts: Vec<Gated> },
}

/// Gate and up, and down.
#[derive(Debug)]
struct Gated {
    gate_up: PackedBuf,
    down: PackedBuf,
}

/// Weights packed for inference; immutable, shared by all engines.
#[derive(Debug)]
pub struct Decoder {
    config: ModelConfig,
    exec: Exec,
    /// Only when the head is not tied: else a row of the embedding is a column of `head`.
    embed: Option<Vec<f32>>,
    layers: Vec<LayerWeights>,
    final_norm: Vec<f32>,
    head: PackedBuf,
}

/// Buffers of one call.
#[derive(Default)]
struct Work {
    x: Vec<f32>,
    h: Vec<f32>,
    r: Vec<f32>,
    qkv: Vec<f32>,
    rqk: Vec<f32>,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    o: Vec<f32>,
    gu: Vec<f32>,
    act: Vec<f32>,
    state: super::kern::PagedState,
    experts: (ExpertActs, ExpertScratch),
}

/// Tokens of one item in one chunk: `rows` of the chunk from row `first`, at sequence positions from `pos`.
struct Run {
    pages: Vec<u32>,
    first: usize,
    rows: usize,
    pos: usize,
}

impl Decoder {
    /// Packs the weights, with the adapters folded in.
    ///
    /// # Errors
    /// [`ModelError::Length`] or [`ModelError::Lora`] when params or adapters are of another model.
    pub fn new(config: &ModelConfig, params: &Params, lora: Option<&LoraParams>) -> Result<Self, ModelError> {
        Self::on(config, params, lora, Level::detect())
    }

    fn on(config: &ModelConfig, params: &Params, lora: Option<&LoraParams>, level: Level) -> Result<Self, ModelError> {
        config.check()?;
        if config.head_dim > MAX_HEAD {
            return Err(ModelError::Config(format!("head_dim = {} is above {MAX_HEAD}", config.head_dim)));
        }
        let (c, layout) = (config, Layout::new(config));
        check_len("parameters", layout.total(), params.data().len())?;
        if let Some(l) = lora {
            l.check_model(config)?;
        }
        let exec = Exec::serial(level);
        let adapters = lora.map(|l| (&**l.layout(), l.data()));
        let w = Weights { config: c, layout: &layout, base: params.data(), lora: adapters };
        let mut fold = FoldBuffers::default();
        let mut pack = |layer, linear: Linear| {
            let (rows, cols) = linear.shape(c);
            let mut packed = PackedBuf::default();
            packed.pack(exec, cols, rows, Mat::transposed(w.effective(exec, layer, linear, &mut fold), cols));
            packed
        };
        let (d, v) = (c.hidden_size, c.vocab_size);
        let copy = |at: usize, n: usize| w.slice(at, n).to_vec();
        let layers = layout.layers.iter().enumerate().map(|(l, o)| LayerWeights {
            input_norm: copy(o.input_norm, d),
            qkv: pack(l, Linear::Qkv),
            qkv_bias: o.qkv_bias.map(|at| copy(at, c.qkv_dim())),
            qk_norm: o.qk_norm.map(|(q, k)| (copy(q, c.head_dim), copy(k, c.head_dim))),
            o: pack(l, Linear::O),
            post_norm: copy(o.post_norm, d),
            mlp: match c.experts(l) {
                None => Mlp::Dense(Gated { gate_up: pack(l, Linear::GateUp), down: pack(l, Linear::Down) }),
                Some(moe) => Mlp::Experts {
                    router: pack(l, Linear::Router),
                    experts: (0..moe.num_experts)
                        .map(|e| Gated {
                            gate_up: pack(l, Linear::ExpertGateUp(e)),
                            down: pack(l, Linear::ExpertDown(e)),
                        })
                        .collect(),
                },
            },
        });
        let layers = layers.collect();
        let mut head = PackedBuf::default();
        head.pack(exec, d, v, Mat::transposed(w.slice(layout.head, v * d), d));
        let embed = (!c.tie_word_embeddings).then(|| copy(layout.embed, v * d));
        Ok(Decoder { config: c.clone(), exec, embed, layers, final_norm: copy(layout.final_norm, d), head })
    }

    /// The model's shape.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Appends each item's tokens to its sequence and returns the logits after its last token, row-major
    /// `[items, vocab_size]` in the order of `work`. Prefill and decode may be mixed. An item's logits are
    /// the same bits whatever else is in the call, however its tokens were split over calls, and whether
    /// its beginning was forked.
    ///
    /// # Errors
    /// [`ModelError::Work`] for an empty item, a sequence named twice or a cache of another shape,
    /// [`ModelError::NoSequence`], [`ModelError::Token`], [`ModelError::TooLong`]; the cache is unchanged then.
    pub fn forward(&self, cache: &mut Cache, work: &[(SeqId, &[u32])]) -> Result<Vec<f32>, ModelError> {
        self.check(cache, work)?;
        let c = &self.config;
        let (d, v) = (c.hidden_size, c.vocab_size);
        let mut runs = Vec::with_capacity(work.len());
        let mut longest = 0;
        for (i, (seq, ids)) in work.iter().enumerate() {
            let pos = cache.len(*seq)?;
            cache.extend(*seq, ids.len())?;
            longest = longest.max(pos + ids.len());
            runs.push((cache.pages_of(*seq)?.to_vec(), i, pos));
        }
        cache.rope.cover(longest);
        // Sequences that share pages stand side by side, so that a shared page is read once for all of them.
        runs.sort();
        let mut last = vec![0.0; work.len() * d];
        let mut buffers = Work::default();
        let (mut chunk, mut ends, mut rows) = (Vec::new(), Vec::new(), 0);
        let mut tokens = Vec::with_capacity(CHUNK);
        for (at, (pages, item, pos)) in runs.iter().enumerate() {
            let ids = work[*item].1;
            let mut done = 0;
            while done < ids.len() {
                let n = (ids.len() - done).min(CHUNK - rows);
                chunk.push(Run { pages: pages.clone(), first: rows, rows: n, pos: pos + done });
                tokens.extend_from_slice(&ids[done..done + n]);
                rows += n;
                done += n;
                if done == ids.len() {
                    ends.push((rows - 1, *item));
                }
                if rows == CHUNK || (at + 1 == runs.len() && done == ids.len()) {
                    self.chunk(cache, &chunk, &tokens, &mut buffers);
                    for (row, item) in ends.drain(..) {
                        last[item * d..(item + 1) * d].copy_from_slice(&buffers.x[row * d..(row + 1) * d]);
                    }
                    chunk.clear();
                    tokens.clear();
                    rows = 0;
                }
            }
        }
        let mut h = vec![0.0; last.len()];
        let mut r = vec![0.0; work.len()];
        rms_norm(self.exec, &last, &self.final_norm, c.rms_norm_eps as f32, &mut h, &mut r);
        let mut logits = vec![0.0; work.len() * v];
        gemm(self.exec, work.len(), Mat::rows(&h, d), self.head.view(), &mut logits, v, false);
        Ok(logits)
    }

    fn check(&self, cache: &Cache, work: &[(SeqId, &[u32])]) -> Result<(), ModelError> {
        let c = &self.config;
        if !cache.fits(c) {
            return Err(ModelError::Work("the cache was made for a model of another shape".into()));
        }
        let mut seen = BTreeSet::new();
        for (i, (seq, ids)) in work.iter().enumerate() {
            let place = || format!("decode item {i}");
            let len = cache.len(*seq)? + ids.len();
            if ids.is_empty() {
                return Err(ModelError::Work(format!("item {i} has no tokens")));
            }
            if !seen.insert(*seq) {
                return Err(ModelError::Work(format!("item {i} names a sequence for the second time")));
            }
            if let Some(id) = ids.iter().find(|id| **id as usize >= c.vocab_size) {
                return Err(ModelError::Token { place: place(), id: *id, vocab: c.vocab_size });
            }
            if len > c.max_position_embeddings {
                return Err(ModelError::TooLong { place: place(), len, max: c.max_position_embeddings });
            }
        }
        Ok(())
    }

    /// All layers for the tokens of some runs; leaves the residual stream in `b.x`.
    fn chunk(&self, cache: &mut Cache, runs: &[Run], tokens: &[u32], b: &mut Work) {
        let (c, exec, n) = (&self.config, self.exec, tokens.len());
        let (d, f, h) = (c.hidden_size, c.intermediate_size, cache.heads);
        let eps = c.rms_norm_eps as f32;
        let pos: Vec<u32> = runs.iter().flat_map(|r| (r.pos..r.pos + r.rows).map(|p| p as u32)).collect();
        for (v, len) in [
            (&mut b.x, n * d),
            (&mut b.h, n * d),
            (&mut b.r, n),
            (&mut b.qkv, n * h.row()),
            (&mut b.rqk, n * (h.q() + h.kv)),
            (&mut b.q, h.q_len(n)),
            (&mut b.k, h.kv_len(n)),
            (&mut b.v, h.kv_len(n)),
            (&mut b.o, n * c.q_dim()),
            (&mut b.gu, n * 2 * f),
            (&mut b.act, n * f),
        ] {
            v.resize(len, 0.0);
        }
        for (row, id) in b.x.chunks_exact_mut(d).zip(tokens) {
            match &self.embed {
                Some(e) => row.copy_from_slice(&e[*id as usize * d..][..d]),
                None => self.head.column(*id as usize, row),
            }
        }
        for (l, w) in self.layers.iter().enumerate() {
            rms_norm(exec, &b.x, &w.input_norm, eps, &mut b.h, &mut b.r);
            gemm(exec, n, Mat::rows(&b.h, d), w.qkv.view(), &mut b.qkv, h.row(), false);
            if let Some(bias) = &w.qkv_bias {
                add_bias(exec, n, bias, &mut b.qkv);
            }
            let norm = w.qk_norm.as_ref().map(|(q, k)| QkNorm { q, k, eps });
            split_heads(exec, h, &b.qkv, &pos, &cache.rope, norm, (&mut b.q, &mut b.k, &mut b.v), &mut b.rqk);
            for run in runs {
                for i in 0..run.rows {
                    let (page, at) = (run.pages[(run.pos + i) / KEYS], (run.pos + i) % KEYS);
                    for g in 0..h.kv {
                        let kv = (g * n + run.first + i) * h.width;
                        cache.write(page, l, g, at, &b.k[kv..kv + h.width], &b.v[kv..kv + h.width]);
                    }
                }
            }
            self.attend(cache, l, runs, &pos, b);
            gemm(exec, n, Mat::rows(&b.o, c.q_dim()), w.o.view(), &mut b.x, d, true);
            rms_norm(exec, &b.x, &w.post_norm, eps, &mut b.h, &mut b.r);
            match &w.mlp {
                Mlp::Dense(mlp) => {
                    gemm(exec, n, Mat::rows(&b.h, d), mlp.gate_up.view(), &mut b.gu, 2 * f, false);
                    swiglu(exec, n, f, &b.gu, &mut b.act);
                    gemm(exec, n, Mat::rows(&b.act, f), mlp.down.view(), &mut b.x, d, true);
                }
                Mlp::Experts { router, experts } => {
                    let Some(moe) = c.experts(l) else { continue };
                    let (acts, scratch) = &mut b.experts;
                    experts::forward(exec, moe, (n, &b.h), &mut b.x, acts, scratch, |linear, (m, x), y| {
                        let weight = match linear {
                            Linear::ExpertGateUp(e) => &experts[e].gate_up,
                            Linear::ExpertDown(e) => &experts[e].down,
                            _ => router,
                        };
                        let (rows, cols) = linear.shape(c);
                        gemm(exec, m, Mat::rows(x, cols), weight.view(), y, rows, false);
                    });
                }
            }
        }
    }

    /// Attention of one layer: pages in rising order, rows of neighbouring runs together where they share one.
    fn attend(&self, cache: &Cache, layer: usize, runs: &[Run], pos: &[u32], b: &mut Work) {
        let h = cache.heads;
        let deepest = runs.iter().map(|r| r.pages.len()).max().unwrap_or(0);
        let mut blocks = Vec::new();
        for depth in 0..deepest {
            let mut i = 0;
            while i < runs.len() {
                let page = runs[i].pages.get(depth).copied();
                let mut rows = runs[i].rows;
                let first = runs[i].first;
                i += 1;
                while i < runs.len() && page.is_some() && runs[i].pages.get(depth).copied() == page {
                    rows += runs[i].rows;
                    i += 1;
                }
                if let Some(page) = page {
                    blocks.push((page, PagedRun { first, rows, from: depth * KEYS }));
                }
            }
        }
        for g in 0..h.kv {
            let of_head = blocks.iter().map(|(page, run)| (*run, cache.block(*page, layer, g)));
            attend_pages(self.exec.level(), h, g, pos, &b.q, of_head, &mut b.state, &mut b.o);
        }
    }
}
