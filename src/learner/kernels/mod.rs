//! Ops with a CPU reference and, with feature `cuda`, a CUDA version beside it.
//!
//! One folder per op with the same file names: `mod.rs` (the op as candle sees it), `cpu.rs` (the reference
//! and the default), `cuda.rs` (launcher) and the `.cu` source, compiled by NVRTC when it is first used.

pub mod grpo;
#[cfg(any(feature = "cuda", feature = "nvrtc"))]
pub mod nvrtc;

use candle_core::{CpuStorage, Layout, Result};

/// The values of a contiguous f32 tensor; an error that names `what` otherwise.
pub(crate) fn f32_slice<'a>(storage: &'a CpuStorage, layout: &Layout, what: &str) -> Result<&'a [f32]> {
    let CpuStorage::F32(values) = storage else {
        candle_core::bail!("{what}: must be f32");
    };
    match layout.contiguous_offsets() {
        Some((from, to)) => Ok(&values[from..to]),
        None => candle_core::bail!("{what}: must be contiguous, layout is {layout:?}"),
    }
}
