//! Matrix products in f32 on packed weights.

mod cpu;

pub use cpu::{Mat, PackedBuf, gemm, gemm_outer};
pub(super) use cpu::{NR, Tile, pair_rows, tile_rows};
