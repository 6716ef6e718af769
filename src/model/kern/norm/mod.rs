//! Passes over rows: RMS norm, SwiGLU, bias.

mod cpu;

pub use cpu::{
    Partials, add_bias, add_column_sums, rms_norm, rms_norm_again, rms_norm_backward, swiglu, swiglu_backward,
};
pub(super) use cpu::{dot, norm_row, norm_row_backward};
