//! Forward and backward of the transformer blocks over a reused workspace.
//!
//! Per token and layer only what is expensive to make again is kept: the residual stream before attention
//! and before the MLP, q, k, v, the attention output, gate and up (and the raw q, k, v where q and k are
//! normalised). Normalised inputs and activations are computed again in the backward.

use super::super::experts::{self, ExpertActs, ExpertScratch};
use super::super::kern::{
    AttnBuffers, AttnState, Exec, Heads, Mat, PackedBuf, Partials, Plan, QkNorm, RopeTable, add_bias, add_column_sums,
    attention, attention_backward, gemm, rms_norm, rms_norm_again, rms_norm_backward, split_heads,
    split_heads_backward, swiglu, swiglu_backward,
};
use super::super::weights::{FoldBuffers, Linear, Weights};
use super::experts as experts_back;

/// What a layer's forward leaves for its backward.
#[derive(Debug, Default)]
struct LayerActs {
    x: Vec<f32>,
    r1: Vec<f32>,
    qkv: Vec<f32>,
    rqk: Vec<f32>,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    o: Vec<f32>,
    lse: Vec<f32>,
    xm: Vec<f32>,
    r2: Vec<f32>,
    gu: Vec<f32>,
    experts: ExpertActs,
}

/// Buffers that all layers share.
#[derive(Debug, Default)]
struct Scratch {
    h: Vec<f32>,
    qkv: Vec<f32>,
    act: Vec<f32>,
    dgu: Vec<f32>,
    dh: Vec<f32>,
    dq: Vec<f32>,
    dk: Vec<f32>,
    dv: Vec<f32>,
    dout: Vec<f32>,
    packed: PackedBuf,
    fold: FoldBuffers,
    attn: AttnBuffers,
    partials: Partials,
    experts: ExpertScratch,
}

/// Activations of one forward and scratch of both passes.
#[derive(Debug, Default)]
pub(super) struct Blocks {
    layers: Vec<LayerActs>,
    scratch: Scratch,
    /// Residual stream after the last layer, `[rows, hidden]`.
    pub(super) x: Vec<f32>,
    /// Its gradient.
    pub(super) dx: Vec<f32>,
}

/// The rows of a batch.
#[derive(Debug, Default)]
pub(super) struct Rows {
    pub plan: Plan,
    pub ids: Vec<u32>,
    pub pos: Vec<u32>,
}

/// The first `n` floats of a buffer that only grows.
pub(in super::super) fn room(v: &mut Vec<f32>, n: usize) -> &mut [f32] {
    if v.len() < n {
        v.clear();
        v.resize(n, 0.0);
    }
    &mut v[..n]
}

fn copied(v: &mut Vec<f32>, from: &[f32]) {
    room(v, from.len()).copy_from_slice(from);
}

fn heads(w: &Weights<'_>) -> Heads {
    Heads::new(w.config.num_attention_heads, w.config.num_key_value_heads, w.config.head_dim)
}

fn qk_norm<'a>(w: &Weights<'a>, layer: usize) -> Option<QkNorm<'a>> {
    let dim = w.config.head_dim;
    let eps = w.config.rms_norm_eps as f32;
    w.layout.layers[layer].qk_norm.map(|(q, k)| QkNorm { q: w.slice(q, dim), k: w.slice(k, dim), eps })
}

/// `y (+)= x W^T`.
#[allow(clippy::too_many_arguments)]
fn project(
    exec: Exec,
    w: &Weights<'_>,
    (layer, linear): (usize, Linear),
    (n, x): (usize, &[f32]),
    y: &mut [f32],
    add: bool,
    fold: &mut FoldBuffers,
    packed: &mut PackedBuf,
) {
    let (rows, cols) = linear.shape(w.config);
    let weight = w.effective(exec, layer, linear, fold);
    packed.pack(exec, cols, rows, Mat::transposed(weight, cols));
    gemm(exec, n, Mat::rows(x, cols), packed.view(), y, rows, add);
}

/// `dx = dy W`.
pub(super) fn project_back(
    exec: Exec,
    w: &Weights<'_>,
    (layer, linear): (usize, Linear),
    (n, dy): (usize, &[f32]),
    dx: &mut [f32],
    fold: &mut FoldBuffers,
    packed: &mut PackedBuf,
) {
    let (rows, cols) = linear.shape(w.config);
    let weight = w.effective(exec, layer, linear, fold);
    packed.pack(exec, rows, cols, Mat::rows(weight, cols));
    gemm(exec, n, Mat::rows(dy, rows), packed.view(), dx, cols, false);
}

impl Blocks {
    /// All layers; leaves the residual stream in `x`.
    pub(super) fn forward(&mut self, exec: Exec, w: &Weights<'_>, rows: &Rows, rope: &RopeTable) {
        let c = w.config;
        let (n, d, f, h) = (rows.plan.rows(), c.hidden_size, c.intermediate_size, heads(w));
        let eps = c.rms_norm_eps as f32;
        self.layers.resize_with(c.num_hidden_layers, LayerActs::default);
        let x = room(&mut self.x, n * d);
        for (row, id) in x.chunks_exact_mut(d).zip(&rows.ids) {
            row.copy_from_slice(w.slice(w.layout.embed + *id as usize * d, d));
        }
        for (l, la) in self.layers.iter_mut().enumerate() {
            let o = &w.layout.layers[l];
            let Scratch { h: hid, qkv, act, packed, fold, attn, experts: shared, .. } = &mut self.scratch;
            copied(&mut la.x, x);
            let hid = room(hid, n * d);
            rms_norm(exec, x, w.slice(o.input_norm, d), eps, hid, room(&mut la.r1, n));
            let norm = qk_norm(w, l);
            // Only the backward of the q and k norms needs the raw rows.
            let qkv = room(if norm.is_some() { &mut la.qkv } else { qkv }, n * h.row());
            project(exec, w, (l, Linear::Qkv), (n, hid), qkv, false, fold, packed);
            if let Some(at) = o.qkv_bias {
                add_bias(exec, n, w.slice(at, h.row()), qkv);
            }
            let (q, k, v) = (room(&mut la.q, h.q_len(n)), room(&mut la.k, h.kv_len(n)), room(&mut la.v, h.kv_len(n)));
            let rqk = room(&mut la.rqk, if norm.is_some() { n * (h.q() + h.kv) } else { 0 });
            split_heads(exec, h, qkv, &rows.pos, rope, norm, (q, k, v), rqk);
            let out = room(&mut la.o, n * c.q_dim());
            attention(exec, h, &rows.plan, (q, k, v), attn, out, room(&mut la.lse, n * h.q()));
            project(exec, w, (l, Linear::O), (n, out), x, true, fold, packed);
            copied(&mut la.xm, x);
            rms_norm(exec, x, w.slice(o.post_norm, d), eps, hid, room(&mut la.r2, n));
            if let Some(moe) = c.experts(l) {
                experts::forward(exec, moe, (n, hid), x, &mut la.experts, shared, |linear, x, y| {
                    project(exec, w, (l, linear), x, y, false, fold, packed);
                });
                continue;
            }
            let gu = room(&mut la.gu, n * 2 * f);
            project(exec, w, (l, Linear::GateUp), (n, hid), gu, false, fold, packed);
            let act = room(act, n * f);
            swiglu(exec, n, f, gu, act);
            project(exec, w, (l, Linear::Down), (n, act), x, true, fold, packed);
        }
    }

    /// All layers backwards from the gradient in `dx`; adds to `grad` (of the adapters when there are any,
    /// else of all parameters) and, without adapters, to the embedding's rows.
    pub(super) fn backward(&mut self, exec: Exec, w: &Weights<'_>, rows: &Rows, rope: &RopeTable, grad: &mut [f32]) {
        let c = w.config;
        let (n, d, f, h) = (rows.plan.rows(), c.hidden_size, c.intermediate_size, heads(w));
        let base = w.lora.is_none();
        let dx = &mut self.dx[..n * d];
        for (l, la) in self.layers.iter().enumerate().rev() {
            let o = &w.layout.layers[l];
            let s = &mut self.scratch;
            let (fold, packed, hid) = (&mut s.fold, &mut s.packed, room(&mut s.h, n * d));
            let dh = room(&mut s.dh, n * d);

            let (norm2, xm) = (w.slice(o.post_norm, d), &la.xm[..n * d]);
            rms_norm_again(exec, xm, norm2, &la.r2[..n], hid);
            if let Some(moe) = c.experts(l) {
                let (acts, buffers) = (&la.experts, &mut s.experts);
                experts_back::backward(exec, w, (l, moe), (n, hid, dx), dh, acts, buffers, grad, (fold, packed));
            } else {
                let act = room(&mut s.act, n * f);
                let dgu = room(&mut s.dgu, n * 2 * f);
                project_back(exec, w, (l, Linear::Down), (n, dx), act, fold, packed);
                swiglu_backward(exec, n, f, &la.gu, act, dgu);
                w.add_gradient(exec, l, Linear::Down, (n, act, dx), grad, fold);
                w.add_gradient(exec, l, Linear::GateUp, (n, hid, dgu), grad, fold);
                project_back(exec, w, (l, Linear::GateUp), (n, dgu), dh, fold, packed);
            }
            let dw = base.then(|| (&mut grad[o.post_norm..o.post_norm + d], &mut s.partials));
            rms_norm_backward(exec, (xm, norm2, &la.r2[..n]), dh, dx, true, dw);

            let (dout, out) = (room(&mut s.dout, n * c.q_dim()), &la.o[..n * c.q_dim()]);
            project_back(exec, w, (l, Linear::O), (n, dx), dout, fold, packed);
            w.add_gradient(exec, l, Linear::O, (n, out, dx), grad, fold);
            let state = AttnState { q: &la.q, k: &la.k, v: &la.v, out, lse: &la.lse };
            let (dq, dk, dv) =
                (room(&mut s.dq, h.q_len(n)), room(&mut s.dk, h.kv_len(n)), room(&mut s.dv, h.kv_len(n)));
            attention_backward(exec, h, &rows.plan, state, dout, &mut s.attn, (dq, dk, dv));
            let dqkv = room(&mut s.qkv, n * h.row());
            let norm = qk_norm(w, l);
            let dnorm = match o.qk_norm.filter(|_| base) {
                None => None,
                Some((q, _)) => {
                    let (a, b) = grad[q..q + 2 * c.head_dim].split_at_mut(c.head_dim);
                    Some((a, b, &mut s.partials))
                }
            };
            split_heads_backward(exec, h, (&la.qkv, &la.rqk), &rows.pos, rope, norm, (dq, dk, dv), dqkv, dnorm);
            if let Some(at) = o.qkv_bias.filter(|_| base) {
                add_column_sums(exec, n, dqkv, &mut s.partials, &mut grad[at..at + h.row()]);
            }
            let (norm1, x) = (w.slice(o.input_norm, d), &la.x[..n * d]);
            rms_norm_again(exec, x, norm1, &la.r1[..n], hid);
            w.add_gradient(exec, l, Linear::Qkv, (n, hid, dqkv), grad, fold);
            if l == 0 && !base {
                return;
            }
            project_back(exec, w, (l, Linear::Qkv), (n, dqkv), dh, fold, packed);
            let dw = base.then(|| (&mut grad[o.input_norm..o.input_norm + d], &mut s.partials));
            rms_norm_backward(exec, (x, norm1, &la.r1[..n]), dh, dx, true, dw);
        }
        // One thread, in row order: many rows add to the same embedding.
        for (row, id) in dx.chunks_exact(d).zip(&rows.ids) {
            let at = w.layout.embed + *id as usize * d;
            for (g, x) in grad[at..at + d].iter_mut().zip(row) {
                *g += x;
            }
        }
    }
}
