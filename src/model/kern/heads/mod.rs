//! From rows of `[q | k | v]` to heads and back: q/k norm (Qwen3), rotary embedding, layout for attention.
//!
//! Attention wants each head's vectors together, padded with zeros to a multiple of 16 ([`Heads::width`]):
//! `q [kv head][row][query head of the group][width]` scaled by 1/sqrt(head_dim), `k`, `v`
//! `[kv head][row][width]`. Per head x of q or k, with j < dim/2 and a = position / period_j (radians):
//!
//! ```text
//! y = norm(x)  (only with QkNorm; see super::norm)      c = factor cos a      s = factor sin a
//! z_j = c y_j - s y_{j + dim/2}                         z_{j + dim/2} = c y_{j + dim/2} + s y_j
//! q = z / sqrt(dim)      k = z                          v is copied
//! ```
//!
//! The backward rotates the other way (sin negated, the same factor), then takes the norm's backward; the gradients of
//! the norm's weights are added to the caller's. Kept for it, and only where there is a norm: the raw rows and 1 / rms of
//! every q and k head (`[row][query heads + kv heads]`).
//!
//! Rotary embedding: Su et al., arXiv:2104.09864, halves paired as transformers does it; periods and factor of the
//! scalings come from `model/rope.rs`. Norm of q and k: Henry et al., arXiv:2010.04245, per head as in Qwen3,
//! arXiv:2505.09388. Measured figures stand in `benches/model.rs`, as part of train and decode.

mod cpu;
#[cfg(test)]
pub(super) mod reference;
#[cfg(test)]
mod tests;

pub use cpu::{split_heads, split_heads_backward};

/// Longest head; bounds a stack buffer.
pub const MAX_HEAD: usize = 512;

/// Head counts and widths.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Heads {
    /// Key/value heads.
    pub kv: usize,
    /// Query heads per key/value head.
    pub group: usize,
    /// Floats of a head.
    pub dim: usize,
    /// `dim` rounded up to a multiple of 16.
    pub width: usize,
}

impl Heads {
    /// From a model's counts.
    pub fn new(q_heads: usize, kv: usize, dim: usize) -> Self {
        Heads { kv, group: q_heads / kv, dim, width: dim.div_ceil(16) * 16 }
    }

    /// Query heads.
    pub fn q(&self) -> usize {
        self.kv * self.group
    }

    /// Floats of a `[q | k | v]` row.
    pub fn row(&self) -> usize {
        (self.q() + 2 * self.kv) * self.dim
    }

    /// Floats of the query buffer for `n` rows.
    pub fn q_len(&self, n: usize) -> usize {
        n * self.q() * self.width
    }

    /// Floats of the key (or value) buffer for `n` rows.
    pub fn kv_len(&self, n: usize) -> usize {
        n * self.kv * self.width
    }
}

/// cos and sin of every position: `[position][cos dim/2 | sin dim/2]`, computed in f64.
#[derive(Debug, Clone)]
pub struct RopeTable {
    dim: usize,
    /// Positions per radian of each pair.
    periods: Vec<f64>,
    /// Multiplies every cosine and sine.
    factor: f64,
    data: Vec<f32>,
}

impl RopeTable {
    /// An empty table for heads of `2 * periods.len()` values.
    pub fn new(periods: Vec<f64>, factor: f64) -> Self {
        RopeTable { dim: 2 * periods.len(), periods, factor, data: Vec::new() }
    }

    /// Whether it is the table of such heads.
    pub fn fits(&self, periods: &[f64], factor: f64) -> bool {
        self.periods == periods && self.factor == factor
    }

    /// Cosines and sines of one covered position.
    #[cfg(test)]
    pub fn at(&self, position: usize) -> &[f32] {
        &self.data[position * self.dim..][..self.dim]
    }

    /// Makes the table cover positions `0..n`.
    pub fn cover(&mut self, n: usize) {
        for p in self.data.len() / self.dim..n {
            let angles = || self.periods.iter().map(|period| p as f64 / period);
            self.data.extend(angles().map(|a| (self.factor * a.cos()) as f32));
            self.data.extend(angles().map(|a| (self.factor * a.sin()) as f32));
        }
    }
}

/// Weights of the q and k norms, and epsilon.
#[derive(Debug, Clone, Copy)]
pub struct QkNorm<'a> {
    /// `[dim]`
    pub q: &'a [f32],
    /// `[dim]`
    pub k: &'a [f32],
    /// Epsilon.
    pub eps: f32,
}
