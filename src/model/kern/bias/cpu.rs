//! Rows of biases added, and columns summed per block of [`ROWS`] rows.

use super::super::simd::{Isa, V8, dispatch};
use super::super::{Exec, Partials, ROWS, Shared};

#[inline(always)]
unsafe fn add_rows_k<I: Isa>(n: usize, w: usize, x: *const f32, xs: usize, y: *mut f32, ys: usize) {
    unsafe {
        for i in 0..n {
            for j in (0..w).step_by(8) {
                let m = (w - j).min(8);
                let p = y.add(i * ys + j);
                I::V::load_n(p, m, 0.0).add(I::V::load_n(x.add(i * xs + j), m, 0.0)).store_n(p, m);
            }
        }
    }
}
dispatch! {
    /// `y += x` for `n` rows of `w` at their strides (a stride of 0 repeats the row).
    unsafe fn add_rows(n: usize, w: usize, x: *const f32, xs: usize, y: *mut f32, ys: usize) = add_rows_k
}

/// Adds `bias` to each of `n` rows.
pub fn add_bias(exec: Exec, n: usize, bias: &[f32], y: &mut [f32]) {
    let w = bias.len();
    assert!(y.len() >= n * w, "invariant: rows inside their slice");
    let y = Shared::new(y);
    // SAFETY: extents checked above; blocks of rows are disjoint.
    exec.rows(n, |i, m| unsafe { add_rows(exec.level(), m, w, bias.as_ptr(), 0, y.at(i * w), w) });
}

/// Adds the sum of `n` rows of `x` (width of `out`) to `out`: the gradient of a bias.
pub fn add_column_sums(exec: Exec, n: usize, x: &[f32], partials: &mut Partials, out: &mut [f32]) {
    let w = out.len();
    assert!(x.len() >= n * w, "invariant: rows inside their slice");
    let part = partials.start(n.div_ceil(ROWS), w);
    exec.rows(n, |i, m| {
        // SAFETY: extents checked above; each block has its own partial sum. Output stride 0: rows add up.
        unsafe { add_rows(exec.level(), m, w, x.as_ptr().add(i * w), w, part.at(i / ROWS * w), 0) }
    });
    partials.add_to(w, 0, out);
}
