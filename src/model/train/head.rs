//! Final norm, output head and scores, in chunks of rows: never more than one chunk of logits is alive.

use super::super::kern::{
    Exec, Mat, PackedBuf, Partials, Scored, gemm, gemm_outer, rms_norm, rms_norm_backward, score, score_backward,
};
use super::super::weights::Weights;
use super::layers::room;

/// Most logits alive at once (32 MiB).
const CHUNK_LOGITS: usize = 1 << 23;

/// The scored rows of one forward.
#[derive(Debug, Default)]
pub(super) struct Head {
    /// Token of each target.
    pub(super) tokens: Vec<u32>,
    pub(super) scored: Vec<Scored>,
    inv_t: f32,
    hs: Vec<f32>,
    r: Vec<f32>,
    logits: Vec<f32>,
    /// `logits` holds the whole batch's.
    kept: bool,
    dhs: Vec<f32>,
    up: PackedBuf,
    down: PackedBuf,
    partials: Partials,
}

fn chunk_rows(vocab: usize) -> usize {
    (CHUNK_LOGITS / vocab).clamp(64, 4096)
}

impl Head {
    /// Scores every target at logits times `inv_t`, from the residual stream's rows `[targets, hidden]`.
    pub(super) fn forward(&mut self, exec: Exec, w: &Weights<'_>, xs: &[f32], inv_t: f32) {
        let (m, d, v) = (self.tokens.len(), w.config.hidden_size, w.config.vocab_size);
        self.inv_t = inv_t;
        let hs = room(&mut self.hs, m * d);
        let norm = w.slice(w.layout.final_norm, d);
        rms_norm(exec, &xs[..m * d], norm, w.config.rms_norm_eps as f32, hs, room(&mut self.r, m));
        self.up.pack(exec, d, v, Mat::transposed(w.slice(w.layout.head, v * d), d));
        self.scored.clear();
        self.scored.resize(m, Scored::default());
        let rows = chunk_rows(v);
        for from in (0..m).step_by(rows) {
            let k = (m - from).min(rows);
            let logits = room(&mut self.logits, k * v);
            gemm(exec, k, Mat::rows(&self.hs[from * d..], d), self.up.view(), logits, v, false);
            score(exec, v, logits, inv_t, &self.tokens[from..from + k], &mut self.scored[from..]);
        }
        self.kept = m <= rows;
    }

    /// Gradient of the residual stream's rows `xs` into `dxs`; without adapters adds the gradients of the head and the final
    /// norm to `grad`.
    pub(super) fn backward(
        &mut self,
        exec: Exec,
        w: &Weights<'_>,
        dlogp: &[f32],
        dentropy: Option<&[f32]>,
        (xs, dxs): (&[f32], &mut [f32]),
        grad: &mut [f32],
    ) {
        let (m, d, v) = (self.tokens.len(), w.config.hidden_size, w.config.vocab_size);
        let base = w.lora.is_none();
        self.down.pack(exec, v, d, Mat::rows(w.slice(w.layout.head, v * d), d));
        let dhs = room(&mut self.dhs, m * d);
        let rows = chunk_rows(v);
        for from in (0..m).step_by(rows) {
            let k = (m - from).min(rows);
            let part = from..from + k;
            let logits = room(&mut self.logits, k * v);
            let hs = &self.hs[from * d..];
            if !self.kept {
                gemm(exec, k, Mat::rows(hs, d), self.up.view(), logits, v, false);
            }
            let (tokens, scored) = (&self.tokens[part.clone()], &self.scored[part.clone()]);
            let de = dentropy.map(|e| &e[part.clone()]);
            score_backward(exec, v, logits, self.inv_t, tokens, scored, &dlogp[part], de);
            if base {
                let at = w.layout.head;
                gemm_outer(exec, k, (v, logits, v), (d, hs, d), &mut grad[at..at + v * d]);
            }
            gemm(exec, k, Mat::rows(logits, v), self.down.view(), &mut dhs[from * d..], d, false);
        }
        // The logits are gradients now; another backward computes them again.
        self.kept = false;
        let (r, norm) = (&self.r[..m], w.slice(w.layout.final_norm, d));
        let dw = base.then(|| (&mut grad[w.layout.final_norm..w.layout.final_norm + d], &mut self.partials));
        rms_norm_backward(exec, (&xs[..m * d], norm, r), dhs, dxs, false, dw);
    }
}
