//! Numeric kernels: the only place with unsafe code. Safe functions check their slices once and then run
//! kernels generic over the instruction set.
//!
//! Measured figures stand in `benches/model.rs`.

// Kernels take their extents, strides and pointers one by one, and index register arrays by constants.
#![allow(clippy::too_many_arguments, clippy::needless_range_loop)]

mod attn;
mod gemm;
mod heads;
mod paged;
mod rows;
mod score;
mod simd;

pub use attn::{AttnBuffers, AttnState, KEYS, Needed, Plan, attention, attention_backward};
pub use gemm::{Mat, PackedBuf, gemm, gemm_outer};
pub use heads::{Heads, MAX_HEAD, QkNorm, RopeTable, split_heads, split_heads_backward};
pub use paged::{PagedRun, PagedState, attend_pages};
pub use rows::{
    Partials, add_bias, add_column_sums, rms_norm, rms_norm_again, rms_norm_backward, swiglu, swiglu_backward,
};
pub use score::{Scored, score, score_backward};
pub use simd::Level;

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
