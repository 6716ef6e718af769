//! Causal attention over segments with shared prefixes (training) and over the pages of a cache (decoding).
//!
//! Row i of a segment sees the whole prefix of its segment, if it has one, and its segment's rows up to itself. Per
//! query head, with the keys and values of its group's head, and q already scaled by 1/sqrt(dim):
//!
//! ```text
//! s_it = q_i . k_t      lse_i = log sum_t exp s_it      p_it = exp(s_it - lse_i)      o_i = sum_t p_it v_t
//!
//! dv_t = sum_i p_it do_i                 delta_i = do_i . o_i
//! ds_it = p_it (do_i . v_t - delta_i)    dq_i = sum_t ds_it k_t       dk_t = sum_i ds_it q_i
//! ```
//!
//! q, k and v (and their gradients) are in the layouts of [`super::heads`]; `o` and `do` are rows
//! `[row][query head][dim]`. The forward keeps `lse` (nats, `[kv head][row][group]`); scores and probabilities are never
//! kept and are made again in the backward.
//!
//! Softmax runs over key blocks of [`KEYS`] with a running maximum and sum. A row's result is the same sequence of
//! operations whatever rows are computed beside it: keys come in blocks at fixed places, and keys a row may not see
//! enter as exact zeros. A cache page is one such block, so decoding gives the bits of a forward over the whole
//! sequence. The share of a prefix's dk and dv that each segment gives is kept apart and added in order of the segments.
//!
//! Running softmax: Milakov and Gimelshein, arXiv:1805.02867; blocks, and a backward from lse and delta: Dao,
//! FlashAttention-2, arXiv:2307.08691; pages: Kwon et al., arXiv:2309.06180. Measured figures stand in
//! `benches/model.rs` (train, shared prompts, decode).
//!
//! `plan.rs` says who sees whom; `cpu.rs` is the forward, `cpu_backward.rs` its backward, `cpu_paged.rs` the forward over
//! pages.

mod cpu;
mod cpu_backward;
mod cpu_paged;
mod plan;
#[cfg(test)]
mod reference;
#[cfg(test)]
mod tests;

pub use cpu::{AttnBuffers, attention};
pub use cpu_backward::attention_backward;
pub use cpu_paged::{PagedState, attend_pages};
pub use plan::{Needed, Plan};

/// Keys of a block, and of a cache page.
pub const KEYS: usize = 64;

/// Rows of a decode call that attend to one cache page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PagedRun {
    /// First row.
    pub first: usize,
    /// Rows.
    pub rows: usize,
    /// Position of the page's first key.
    pub from: usize,
}

/// What the forward left for the backward.
#[derive(Debug, Clone, Copy)]
pub struct AttnState<'a> {
    /// Queries as given to [`attention`].
    pub q: &'a [f32],
    /// Keys.
    pub k: &'a [f32],
    /// Values.
    pub v: &'a [f32],
    /// Its output.
    pub out: &'a [f32],
    /// Its log-sum-exps.
    pub lse: &'a [f32],
}
