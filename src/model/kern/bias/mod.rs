//! Bias of a linear layer (the q, k, v of Qwen2), and its gradient.
//!
//! ```text
//! y_ij += b_j      db_j += sum over rows i of x_ij
//! ```
//!
//! Rows `[rows][w]`, bias `[w]`. Nothing is kept. Columns are summed per block of [`super::ROWS`] rows and the blocks
//! added in order, so that threads do not change a bit.
//!
//! Measured figures stand in `benches/model.rs`, as part of train and decode.

mod cpu;
#[cfg(test)]
mod reference;
#[cfg(test)]
mod tests;

pub use cpu::{add_bias, add_column_sums};
