//! Numeric kernels of the decoder: the only place of [`crate::model`] with unsafe code. Safe functions check their slices
//! once and then run kernels generic over the instruction set.
//!
//! One folder per op with the same file names, as `learner/kernels` has them, so that another device only adds
//! a file to each:
//!
//! * `mod.rs`: formulas, shapes, what is kept between forward and backward, source; the types; what other modules use.
//! * `reference.rs`: forward and backward as one would write them down, in f64; every device is tested against it.
//! * `cpu.rs` (and `cpu_*.rs` beside it): the kernels for the CPU, f32, the same bits on every instruction set and for any
//!   number of threads. All unsafe code of the op is there.
//! * `tests.rs`: the reference against finite differences, and each device against the reference.
//!
//! | op | what | in a layer |
//! |---|---|---|
//! | `norm` | RMS norm | before attention and MLP, after the last layer |
//! | `gemm` | products with weights, and their gradients | q k v, output, gate and up, down, head, adapters |
//! | `bias` | bias of rows, column sums | q k v of Qwen2 |
//! | `heads` | q/k norm, rotary embedding, layout | between q k v and attention |
//! | `attention` | causal, prefixes shared; over cache pages | attention |
//! | `swiglu` | activation | MLP |
//! | `score` | log-probs and entropies of targets | after the head |
//!
//! Shared by all: `simd.rs` (vectors, instruction sets), [`Exec`] (threads), [`Partials`] (sums over rows).
//!
//! Measured figures stand in `benches/model.rs`.

// Kernels take their extents, strides and pointers one by one, and index register arrays by constants.
#![allow(clippy::too_many_arguments, clippy::needless_range_loop)]

mod attention;
mod bias;
mod gemm;
mod heads;
mod norm;
mod score;
mod simd;
mod swiglu;
#[cfg(test)]
mod testing;

pub use attention::{
    AttnBuffers, AttnState, KEYS, Needed, PagedRun, PagedState, Plan, attend_pages, attention, attention_backward,
};
pub use bias::{add_bias, add_column_sums};
pub use gemm::{Mat, PackedBuf, gemm, gemm_outer};
pub use heads::{Heads, MAX_HEAD, QkNorm, RopeTable, split_heads, split_heads_backward};
pub use norm::{rms_norm, rms_norm_again, rms_norm_backward};
pub use score::{Scored, score, score_backward};
pub use simd::Level;
pub use swiglu::{swiglu, swiglu_backward};

use rayon::prelude::*;

/// How kernels run: instruction set and number of threads. With more than one thread the work goes to the
/// rayon pool the caller is in.
#[derive(Debug, Clone, Copy)]
pub struct Exec {
    level: Level,
    threads: usize,
}

impl Exec {
    /// On the calling thread.
    pub fn serial(level: Level) -> Self {
        Exec { level, threads: 1 }
    }

    /// On `threads` threads of the current rayon pool.
    pub fn new(level: Level, threads: usize) -> Self {
        Exec { level, threads }
    }

    /// The instruction set.
    pub fn level(self) -> Level {
        self.level
    }

    /// The number of threads.
    pub fn threads(self) -> usize {
        self.threads
    }

    /// Runs `f(0..n)`, each index once, in any order. Callers make the indices independent of each other
    /// and of the number of threads, so that the results are, too.
    pub fn each(self, n: usize, f: impl Fn(usize) + Sync + Send) {
        if self.threads > 1 && n > 1 {
            (0..n).into_par_iter().with_max_len(1).for_each(f);
        } else {
            (0..n).for_each(f);
        }
    }

    /// Runs `f(start, count)` over blocks of [`ROWS`] rows.
    fn rows(self, n: usize, f: impl Fn(usize, usize) + Sync + Send) {
        self.each(n.div_ceil(ROWS), |b| f(b * ROWS, (n - b * ROWS).min(ROWS)));
    }
}

/// Rows of one task of an elementwise pass. Partial sums over rows are taken per block and added in order.
const ROWS: usize = 64;

/// A pointer into a buffer whose disjoint parts several tasks write.
#[derive(Clone, Copy)]
struct Shared(*mut f32);

// SAFETY: a `Shared` is only made from a live exclusive borrow, and every task writes its own part.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

impl Shared {
    fn new(data: &mut [f32]) -> Self {
        Shared(data.as_mut_ptr())
    }

    /// The pointer `i` floats in. `i` must lie inside the buffer for the pointer to be used.
    #[inline(always)]
    fn at(self, i: usize) -> *mut f32 {
        self.0.wrapping_add(i)
    }
}

/// Partial sums per block of rows, reused between calls.
#[derive(Debug, Default)]
pub struct Partials(Vec<f32>);

impl Partials {
    /// Zeroed room for `blocks` partial sums of `width`.
    fn start(&mut self, blocks: usize, width: usize) -> Shared {
        self.0.clear();
        self.0.resize(blocks * width, 0.0);
        Shared::new(&mut self.0)
    }

    /// Adds the partial sums of one column range, block by block, to `out`.
    fn add_to(&self, width: usize, from: usize, out: &mut [f32]) {
        for block in self.0.chunks_exact(width) {
            for (o, x) in out.iter_mut().zip(&block[from..]) {
                *o += x;
            }
        }
    }
}
