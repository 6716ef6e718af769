//! Matrix products in f32 on packed weights, and the gradients of both sides.
//!
//! ```text
//! gemm:        C[m, n] (+)= A[m, k] B[k, n]         with packed B
//! backward:    dA = dC B^T                          gemm again, with B packed from its transpose
//! gemm_outer:  dB[m, n] += A[t, m]^T G[t, n]        sum over t tokens: the gradient of a weight
//! ```
//!
//! `B` is packed once per use of a weight ([`PackedBuf::pack`]) into panels of 16 columns, padded with zeros, `k` in
//! blocks of 256. `A`, `C` and the gradients are rows in memory ([`Mat`], or rows some stride apart). Nothing is kept
//! between forward and backward but what the caller holds: the inputs.
//!
//! Every element of `C` is the same sequence of fused multiply-adds over `k` whatever the number of rows, the tile it
//! falls in, the instruction set or the thread that computes it: so a row's result depends on that row only (batch
//! invariance), and any number of threads gives the same bits. Work is split over rows and columns, never over `k`; a
//! block of 256 is summed from zero and added to `C`, blocks in rising order.
//!
//! Blocking and packing: Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication" (2008), as in BLIS.
//! Measured figures stand in `benches/model.rs` (pack weights; train and prefill, which are mostly products).
//!
//! `cpu.rs` holds the blocks and tasks, `cpu_pack.rs` the memory layouts, `cpu_tile.rs` the register tiles (attention
//! uses them, too).

mod cpu;
mod cpu_pack;
mod cpu_tile;
#[cfg(test)]
mod reference;
#[cfg(test)]
mod tests;

pub use cpu::{gemm, gemm_outer};
pub use cpu_pack::PackedBuf;
pub(super) use cpu_tile::{NR, Tile, pair_rows, tile_rows};

/// A matrix in memory: element (row, column) at `row * rs + column * cs`.
#[derive(Debug, Clone, Copy)]
pub struct Mat<'a> {
    data: &'a [f32],
    rs: usize,
    cs: usize,
}

impl<'a> Mat<'a> {
    /// Row-major with `cols` columns.
    pub fn rows(data: &'a [f32], cols: usize) -> Self {
        Mat { data, rs: cols, cs: 1 }
    }

    /// The transpose of a row-major matrix with `cols` columns.
    pub fn transposed(data: &'a [f32], cols: usize) -> Self {
        Mat { data, rs: 1, cs: cols }
    }

    /// Row-major rows that start `stride` apart.
    pub fn strided(data: &'a [f32], stride: usize) -> Self {
        Mat { data, rs: stride, cs: 1 }
    }

    fn check(&self, rows: usize, cols: usize) {
        if rows > 0 && cols > 0 {
            assert!(
                (rows - 1) * self.rs + (cols - 1) * self.cs < self.data.len(),
                "invariant: matrix inside its slice"
            );
        }
    }
}
