//! Forward and backward of the transformer blocks over a reused workspace.
//!
//! Per token and layer only what is expensive to make again is kept: the residual stream before attention
//! and before the MLP, q, k, v, the attention output, gate and up (and the raw q, k, v where q and k are
//! normalised). Normalised inputs and activations are computed again in the backward. With [`Keep::Inputs`] only the
//! residual stream before each layer is kept, and the backward runs the layer's forward once more: the same
//! operations, hence the same bits.
//!
//! Behind the last layer only the trained rows are read. Its keys and values are computed of all rows, its attention of
//! the query blocks that hold a trained row, and what follows of the trained rows alone.

use super::super::experts::{self, ExpertActs, ExpertScratch, gather};
use super::super::kern::{
    AttnBuffers, AttnState, Exec, Heads, Mat, Needed, PackedBuf, Partials, Plan, QkNorm, RopeTable, add_bias,
    add_column_sums, attention, attention_backward, gemm, rms_norm, rms_norm_again, rms_norm_backward, split_heads,
    split_heads_backward, swiglu, swiglu_backward,
};
use super::super::weights::{FoldBuffers, Linear, Weights};
use super::experts as experts_back;

/// What a forward keeps of each layer for the backward.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Keep {
    /// What is expensive to make again.
    #[default]
    Activations,
    /// The layer's input: less memory for one more forward of each layer.
    Inputs,
}

/// What a layer's forward leaves for its backward.
#[derive(Debug, Default)]
struct LayerActs {
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
    /// Trained rows of the last layer: attention output, and its gradient.
    out: Vec<f32>,
    dtop: Vec<f32>,
    /// Residual stream of a layer that is run again.
    again: Vec<f32>,
    packed: PackedBuf,
    fold: FoldBuffers,
    attn: AttnBuffers,
    partials: Partials,
    experts: ExpertScratch,
}

/// Activations of one forward and scratch of both passes.
#[derive(Debug, Default)]
pub(super) struct Blocks {
    pub(super) keep: Keep,
    /// Residual stream before each layer, `[rows, hidden]`.
    inputs: Vec<Vec<f32>>,
    /// Of every layer; with [`Keep::Inputs`] one, of the layer `alive`.
    acts: Vec<LayerActs>,
    alive: usize,
    scratch: Scratch,
    x: Vec<f32>,
    dx: Vec<f32>,
    /// Residual stream after the last layer, `[trained rows, hidden]`.
    pub(super) top: Vec<f32>,
    /// Its gradient; the backward uses it up.
    pub(super) dtop: Vec<f32>,
}

/// The rows of a batch.
#[derive(Debug, Default)]
pub(super) struct Rows {
    pub plan: Plan,
    pub ids: Vec<u32>,
    pub pos: Vec<u32>,
    /// Rows whose output is read, rising.
    pub trained: Vec<u32>,
    /// Their query blocks.
    pub needed: Needed,
}

/// What the passes of one layer work on.
#[derive(Clone, Copy)]
struct Layer<'a> {
    exec: Exec,
    w: &'a Weights<'a>,
    rows: &'a Rows,
    rope: &'a RopeTable,
    l: usize,
}

impl Layer<'_> {
    /// The query blocks to compute: all but in the last layer.
    fn needed(&self) -> Option<&Needed> {
        (self.l + 1 == self.w.config.num_hidden_layers).then_some(&self.rows.needed)
    }
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

impl Layer<'_> {
    /// Norm, q, k, v and attention of all rows.
    fn attend(&self, x: &[f32], la: &mut LayerActs, s: &mut Scratch) {
        let Layer { exec, w, rows, rope, l } = *self;
        let (c, o) = (w.config, &w.layout.layers[l]);
        let (n, d, h) = (rows.plan.rows(), c.hidden_size, heads(w));
        let hid = room(&mut s.h, n * d);
        rms_norm(exec, x, w.slice(o.input_norm, d), c.rms_norm_eps as f32, hid, room(&mut la.r1, n));
        let norm = qk_norm(w, l);
        // Only the backward of the q and k norms needs the raw rows.
        let qkv = room(if norm.is_some() { &mut la.qkv } else { &mut s.qkv }, n * h.row());
        project(exec, w, (l, Linear::Qkv), (n, hid), qkv, false, &mut s.fold, &mut s.packed);
        if let Some(at) = o.qkv_bias {
            add_bias(exec, n, w.slice(at, h.row()), qkv);
        }
        let (q, k, v) = (room(&mut la.q, h.q_len(n)), room(&mut la.k, h.kv_len(n)), room(&mut la.v, h.kv_len(n)));
        let rqk = room(&mut la.rqk, if norm.is_some() { n * (h.q() + h.kv) } else { 0 });
        split_heads(exec, h, qkv, &rows.pos, rope, norm, (q, k, v), rqk);
        let (out, lse) = (room(&mut la.o, n * c.q_dim()), room(&mut la.lse, n * h.q()));
        attention(exec, h, (&rows.plan, self.needed()), (q, k, v), &mut s.attn, out, lse);
    }

    /// Adds to `x` (`[n, d]`) what the attention's output `out` and the MLP give. Without `down` the MLP is computed as far as
    /// the backward needs it.
    fn add(&self, (n, out): (usize, &[f32]), x: &mut [f32], down: bool, la: &mut LayerActs, s: &mut Scratch) {
        let Layer { exec, w, l, .. } = *self;
        let (c, o) = (w.config, &w.layout.layers[l]);
        let (d, f) = (c.hidden_size, c.intermediate_size);
        let Scratch { h: hid, act, packed, fold, experts: shared, .. } = s;
        project(exec, w, (l, Linear::O), (n, out), x, true, fold, packed);
        copied(&mut la.xm, x);
        let hid = room(hid, n * d);
        rms_norm(exec, x, w.slice(o.post_norm, d), c.rms_norm_eps as f32, hid, room(&mut la.r2, n));
        if let Some(moe) = c.experts(l) {
            experts::forward(exec, moe, (n, hid), x, &mut la.experts, shared, |linear, x, y| {
                project(exec, w, (l, linear), x, y, false, fold, packed);
            });
            return;
        }
        let gu = room(&mut la.gu, n * 2 * f);
        project(exec, w, (l, Linear::GateUp), (n, hid), gu, false, fold, packed);
        if down {
            let act = room(act, n * f);
            swiglu(exec, n, f, gu, act);
            project(exec, w, (l, Linear::Down), (n, act), x, true, fold, packed);
        }
    }

    /// Backward of [`Layer::add`]: `dx` (`[n, d]`) becomes the gradient of its `x`, `dout` that of its `out`.
    fn add_backward(
        &self,
        (n, out, dout): (usize, &[f32], &mut [f32]),
        dx: &mut [f32],
        la: &LayerActs,
        s: &mut Scratch,
        grad: &mut [f32],
    ) {
        let Layer { exec, w, l, .. } = *self;
        let (c, o) = (w.config, &w.layout.layers[l]);
        let (d, f) = (c.hidden_size, c.intermediate_size);
        let (fold, packed) = (&mut s.fold, &mut s.packed);
        let (hid, dh) = (room(&mut s.h, n * d), room(&mut s.dh, n * d));
        let (norm, xm) = (w.slice(o.post_norm, d), &la.xm[..n * d]);
        rms_norm_again(exec, xm, norm, &la.r2[..n], hid);
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
        let base = w.lora.is_none();
        let dw = base.then(|| (&mut grad[o.post_norm..o.post_norm + d], &mut s.partials));
        rms_norm_backward(exec, (xm, norm, &la.r2[..n]), dh, dx, true, dw);
        project_back(exec, w, (l, Linear::O), (n, dx), dout, fold, packed);
        w.add_gradient(exec, l, Linear::O, (n, out, dx), grad, fold);
    }

    /// Backward of [`Layer::attend`]: adds the gradient of its `x` to `dx`, unless this is the end of what is trained.
    fn attend_backward(
        &self,
        (x, dx): (&[f32], &mut [f32]),
        dout: &[f32],
        la: &LayerActs,
        s: &mut Scratch,
        grad: &mut [f32],
    ) {
        let Layer { exec, w, rows, rope, l } = *self;
        let (c, o, base) = (w.config, &w.layout.layers[l], w.lora.is_none());
        let (n, d, h) = (rows.plan.rows(), c.hidden_size, heads(w));
        let state = AttnState { q: &la.q, k: &la.k, v: &la.v, out: &la.o, lse: &la.lse };
        let (dq, dk, dv) = (room(&mut s.dq, h.q_len(n)), room(&mut s.dk, h.kv_len(n)), room(&mut s.dv, h.kv_len(n)));
        attention_backward(exec, h, (&rows.plan, self.needed()), state, dout, &mut s.attn, (dq, dk, dv));
        let dqkv = room(&mut s.qkv, n * h.row());
        let dnorm = match o.qk_norm.filter(|_| base) {
            None => None,
            Some((q, _)) => {
                let (a, b) = grad[q..q + 2 * c.head_dim].split_at_mut(c.head_dim);
                Some((a, b, &mut s.partials))
            }
        };
        split_heads_backward(exec, h, (&la.qkv, &la.rqk), &rows.pos, rope, qk_norm(w, l), (dq, dk, dv), dqkv, dnorm);
        if let Some(at) = o.qkv_bias.filter(|_| base) {
            add_column_sums(exec, n, dqkv, &mut s.partials, &mut grad[at..at + h.row()]);
        }
        let (hid, norm) = (room(&mut s.h, n * d), w.slice(o.input_norm, d));
        rms_norm_again(exec, x, norm, &la.r1[..n], hid);
        w.add_gradient(exec, l, Linear::Qkv, (n, hid, dqkv), grad, &mut s.fold);
        if l == 0 && !base {
            return;
        }
        let dh = room(&mut s.dh, n * d);
        project_back(exec, w, (l, Linear::Qkv), (n, dqkv), dh, &mut s.fold, &mut s.packed);
        let dw = base.then(|| (&mut grad[o.input_norm..o.input_norm + d], &mut s.partials));
        rms_norm_backward(exec, (x, norm, &la.r1[..n]), dh, dx, true, dw);
    }
}

/// Runs `f` with a buffer that is taken out of the scratch.
fn with_buffer(
    s: &mut Scratch,
    buffer: fn(&mut Scratch) -> &mut Vec<f32>,
    n: usize,
    f: impl FnOnce(&mut [f32], &mut Scratch),
) {
    let mut taken = std::mem::take(buffer(s));
    f(room(&mut taken, n), s);
    *buffer(s) = taken;
}

impl Blocks {
    /// All layers; leaves the residual stream of the trained rows in `top`.
    pub(super) fn forward(&mut self, exec: Exec, w: &Weights<'_>, rows: &Rows, rope: &RopeTable) {
        let c = w.config;
        let (n, d, layers) = (rows.plan.rows(), c.hidden_size, c.num_hidden_layers);
        let kept = if self.keep == Keep::Inputs { 1 } else { layers };
        self.acts.resize_with(kept, LayerActs::default);
        self.inputs.resize_with(layers, Vec::new);
        let x = room(&mut self.x, n * d);
        for (row, id) in x.chunks_exact_mut(d).zip(&rows.ids) {
            row.copy_from_slice(w.slice(w.layout.embed + *id as usize * d, d));
        }
        for (l, input) in self.inputs.iter_mut().enumerate() {
            copied(input, x);
            let layer = Layer { exec, w, rows, rope, l };
            let (la, s) = (&mut self.acts[l.min(kept - 1)], &mut self.scratch);
            layer.attend(x, la, s);
            if l + 1 < layers {
                let out = std::mem::take(&mut la.o);
                layer.add((n, &out[..n * c.q_dim()]), x, true, la, s);
                la.o = out;
            } else {
                let m = rows.trained.len();
                let top = room(&mut self.top, m * d);
                gather(x, d, &rows.trained, top);
                with_buffer(
                    s,
                    |s| &mut s.out,
                    m * c.q_dim(),
                    |out, s| {
                        gather(&la.o, c.q_dim(), &rows.trained, out);
                        layer.add((m, out), top, true, la, s);
                    },
                );
            }
            self.alive = l;
        }
    }

    /// Makes the activations of a layer again if they are not there.
    fn revive(&mut self, layer: Layer<'_>) {
        let (c, n) = (layer.w.config, layer.rows.plan.rows());
        if self.keep == Keep::Activations || self.alive == layer.l {
            return;
        }
        let (la, input) = (&mut self.acts[0], &self.inputs[layer.l][..n * c.hidden_size]);
        layer.attend(input, la, &mut self.scratch);
        let out = std::mem::take(&mut la.o);
        if layer.needed().is_none() {
            with_buffer(
                &mut self.scratch,
                |s| &mut s.again,
                input.len(),
                |x, s| {
                    x.copy_from_slice(input);
                    layer.add((n, &out[..n * c.q_dim()]), x, false, la, s);
                },
            );
        } else {
            let (trained, m) = (&layer.rows.trained, layer.rows.trained.len());
            with_buffer(
                &mut self.scratch,
                |s| &mut s.again,
                m * c.hidden_size,
                |x, s| {
                    gather(input, c.hidden_size, trained, x);
                    with_buffer(
                        s,
                        |s| &mut s.out,
                        m * c.q_dim(),
                        |some, s| {
                            gather(&out, c.q_dim(), trained, some);
                            layer.add((m, some), x, false, la, s);
                        },
                    );
                },
            );
        }
        la.o = out;
        self.alive = layer.l;
    }

    /// All layers backwards from the gradient in `dtop`; adds to `grad` (of the adapters when there are any,
    /// else of all parameters) and, without adapters, to the embedding's rows.
    pub(super) fn backward(&mut self, exec: Exec, w: &Weights<'_>, rows: &Rows, rope: &RopeTable, grad: &mut [f32]) {
        let c = w.config;
        let (n, m, d, width) = (rows.plan.rows(), rows.trained.len(), c.hidden_size, c.q_dim());
        if m == 0 {
            return;
        }
        for l in (0..c.num_hidden_layers).rev() {
            let layer = Layer { exec, w, rows, rope, l };
            self.revive(layer);
            let la = &self.acts[l.min(self.acts.len() - 1)];
            let (x, s) = (&self.inputs[l][..n * d], &mut self.scratch);
            let dx = room(&mut self.dx, n * d);
            with_buffer(
                s,
                |s| &mut s.dout,
                n * width,
                |dout, s| {
                    if layer.needed().is_none() {
                        layer.add_backward((n, &la.o[..n * width], dout), dx, la, s, grad);
                    } else {
                        let dtop = &mut self.dtop[..m * d];
                        with_buffer(
                            s,
                            |s| &mut s.out,
                            m * width,
                            |out, s| {
                                gather(&la.o, width, &rows.trained, out);
                                with_buffer(
                                    s,
                                    |s| &mut s.dtop,
                                    m * width,
                                    |some, s| {
                                        layer.add_backward((m, out, some), dtop, la, s, grad);
                                        scatter(some, width, &rows.trained, dout);
                                    },
                                );
                            },
                        );
                        scatter(dtop, d, &rows.trained, dx);
                    }
                    layer.attend_backward((x, dx), dout, la, s, grad);
                },
            );
        }
        if w.lora.is_some() {
            return;
        }
        // One thread, in row order: many rows add to the same embedding.
        for (row, id) in self.dx[..n * d].chunks_exact(d).zip(&rows.ids) {
            let at = w.layout.embed + *id as usize * d;
            for (g, x) in grad[at..at + d].iter_mut().zip(row) {
                *g += x;
            }
        }
    }
}

/// Rows of `width` values to their places in `out`; zero elsewhere.
fn scatter(x: &[f32], width: usize, rows: &[u32], out: &mut [f32]) {
    out.fill(0.0);
    for (from, row) in x.chunks_exact(width).zip(rows) {
        out[*row as usize * width..][..width].copy_from_slice(from);
    }
}
