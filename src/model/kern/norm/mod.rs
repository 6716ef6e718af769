//! RMS norm of rows: forward, forward again from what it left, backward.
//!
//! ```text
//! r = 1 / sqrt(mean_j x_j^2 + eps)      h_j = x_j r w_j
//!
//! g = dh w      dx_j = r g_j - x_j r^3 mean_l(g_l x_l)      dw_j = sum over rows of dh_j x_j r
//! ```
//!
//! `x`, `h`, `dh`, `dx` are `[rows][d]`, `w` and `dw` `[d]`. Kept for the backward: `x` and `r` (`[rows]`); `h` is made
//! again by [`rms_norm_again`], with the same bits. `dw` is summed per block of [`super::ROWS`] rows and the blocks added
//! in order, so that threads do not change a bit.
//!
//! Zhang and Sennrich, arXiv:1910.07467. Measured figures stand in `benches/model.rs`, as part of train and decode.

mod cpu;
#[cfg(test)]
pub(super) mod reference;
#[cfg(test)]
mod tests;

pub(super) use cpu::{norm_row, norm_row_backward};
pub use cpu::{rms_norm, rms_norm_again, rms_norm_backward};
