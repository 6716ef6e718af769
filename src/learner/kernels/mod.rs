//! Ops that also run on CUDA with feature `cuda`, their compiler, and how every op of the learner is laid out.
//!
//! One folder per op with the same file names, so that another device only adds files:
//!
//! * `mod.rs`: the op as candle sees it, its shapes, its errors.
//! * `reference.rs`: the arithmetic as one would write it down, in f64 too; every device is tested against it.
//! * `cpu.rs`: the default, f32, in parallel, the same bits for any number of threads.
//! * `cuda.rs` and the `.cu` source, compiled by NVRTC when it is first used.
//! * `tests.rs`: one body of checks for every device.
//!
//! The ops: `learner/loss` (log-probs to loss; the CPU runs the reference), `learner/kernels/grpo` (logits to
//! loss, fused), `learner/adamw` (the update in place), `learner/policy` (parameters to log-probs: the model,
//! whose own ops are in `src/model/kern` in the same form: products, attention, norms and the rest of a layer).

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
