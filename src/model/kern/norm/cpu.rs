//! RMS norms of rows. Rows are independent; the gradient of the weight is summed per block of [`ROWS`] rows.

use super::super::simd::{Isa, V8, dispatch, dot};
use super::super::{Exec, Partials, ROWS, Shared};

/// `h = x / rms(x) * w` of one row; returns 1 / rms.
#[inline(always)]
pub unsafe fn norm_row<I: Isa>(x: *const f32, w: *const f32, h: *mut f32, d: usize, eps: f32) -> f32 {
    unsafe {
        let r = 1.0 / (dot::<I>(x, x, d) / d as f32 + eps).sqrt();
        scale_row::<I>(x, w, h, d, r);
        r
    }
}

/// `h = x * r * w` of one row.
#[inline(always)]
unsafe fn scale_row<I: Isa>(x: *const f32, w: *const f32, h: *mut f32, d: usize, r: f32) {
    unsafe {
        let r = I::V::splat(r);
        for j in (0..d).step_by(8) {
            let n = (d - j).min(8);
            let y = I::V::load_n(x.add(j), n, 0.0).mul(r).mul(I::V::load_n(w.add(j), n, 0.0));
            y.store_n(h.add(j), n);
        }
    }
}

/// Backward of [`norm_row`]: `dx (+)= ...`, and `dw += dh * x * r` unless `dw` is null. With g = dh * w:
/// dx = r g - x r^3 mean(g x).
#[inline(always)]
pub unsafe fn norm_row_backward<I: Isa>(
    x: *const f32,
    w: *const f32,
    r: f32,
    dh: *const f32,
    dx: *mut f32,
    dw: *mut f32,
    d: usize,
    add: bool,
) {
    unsafe {
        let rv = I::V::splat(r);
        let mut a = I::V::splat(0.0);
        for j in (0..d).step_by(8) {
            let n = (d - j).min(8);
            let xg = I::V::load_n(x.add(j), n, 0.0).mul(I::V::load_n(dh.add(j), n, 0.0));
            a = xg.fma(I::V::load_n(w.add(j), n, 0.0), a);
            if !dw.is_null() {
                xg.fma(rv, I::V::load_n(dw.add(j), n, 0.0)).store_n(dw.add(j), n);
            }
        }
        let c = I::V::splat(a.sum() * r * r * r / d as f32);
        for j in (0..d).step_by(8) {
            let n = (d - j).min(8);
            let g = I::V::load_n(dh.add(j), n, 0.0).mul(I::V::load_n(w.add(j), n, 0.0)).mul(rv);
            let mut y = I::V::load_n(x.add(j), n, 0.0).fnma(c, g);
            if add {
                y = y.add(I::V::load_n(dx.add(j), n, 0.0));
            }
            y.store_n(dx.add(j), n);
        }
    }
}

#[inline(always)]
unsafe fn norm_k<I: Isa>(n: usize, d: usize, eps: f32, x: *const f32, w: *const f32, h: *mut f32, r: *mut f32) {
    for i in 0..n {
        // SAFETY: the caller gives n rows of d floats.
        unsafe { *r.add(i) = norm_row::<I>(x.add(i * d), w, h.add(i * d), d, eps) };
    }
}
dispatch! { unsafe fn norm(n: usize, d: usize, eps: f32, x: *const f32, w: *const f32, h: *mut f32, r: *mut f32) = norm_k }

#[inline(always)]
unsafe fn renorm_k<I: Isa>(n: usize, d: usize, x: *const f32, w: *const f32, h: *mut f32, r: *const f32) {
    for i in 0..n {
        // SAFETY: the caller gives n rows of d floats.
        unsafe { scale_row::<I>(x.add(i * d), w, h.add(i * d), d, *r.add(i)) };
    }
}
dispatch! { unsafe fn renorm(n: usize, d: usize, x: *const f32, w: *const f32, h: *mut f32, r: *const f32) = renorm_k }

#[inline(always)]
unsafe fn norm_backward_k<I: Isa>(
    n: usize,
    d: usize,
    x: *const f32,
    w: *const f32,
    r: *const f32,
    dh: *const f32,
    dx: *mut f32,
    dw: *mut f32,
    add: bool,
) {
    for i in 0..n {
        let at = i * d;
        // SAFETY: the caller gives n rows of d floats.
        unsafe { norm_row_backward::<I>(x.add(at), w, *r.add(i), dh.add(at), dx.add(at), dw, d, add) };
    }
}
dispatch! {
    unsafe fn norm_backward(n: usize, d: usize, x: *const f32, w: *const f32, r: *const f32, dh: *const f32,
        dx: *mut f32, dw: *mut f32, add: bool) = norm_backward_k
}

/// RMS norm of rows: `h[i] = x[i] * r[i] * w` with `r[i] = 1 / sqrt(mean(x[i]^2) + eps)`; `r.len()` rows.
pub fn rms_norm(exec: Exec, x: &[f32], w: &[f32], eps: f32, h: &mut [f32], r: &mut [f32]) {
    let (n, d) = (r.len(), w.len());
    assert!(x.len() >= n * d && h.len() >= n * d, "invariant: rows inside their slices");
    let (h, r) = (Shared::new(h), Shared::new(r));
    exec.rows(n, |i, m| {
        // SAFETY: extents checked above; blocks of rows are disjoint.
        unsafe { norm(exec.level(), m, d, eps, x.as_ptr().add(i * d), w.as_ptr(), h.at(i * d), r.at(i)) }
    });
}

/// The output of [`rms_norm`] again, from its input and `r`.
pub fn rms_norm_again(exec: Exec, x: &[f32], w: &[f32], r: &[f32], h: &mut [f32]) {
    let (n, d) = (r.len(), w.len());
    assert!(x.len() >= n * d && h.len() >= n * d, "invariant: rows inside their slices");
    let h = Shared::new(h);
    exec.rows(n, |i, m| {
        // SAFETY: extents checked above; blocks of rows are disjoint.
        unsafe { renorm(exec.level(), m, d, x.as_ptr().add(i * d), w.as_ptr(), h.at(i * d), r.as_ptr().add(i)) }
    });
}

/// Backward of [`rms_norm`]: writes (or adds to, with `add`) `dx`; adds to `dw` when given.
pub fn rms_norm_backward(
    exec: Exec,
    (x, w, r): (&[f32], &[f32], &[f32]),
    dh: &[f32],
    dx: &mut [f32],
    add: bool,
    dw: Option<(&mut [f32], &mut Partials)>,
) {
    let (n, d) = (r.len(), w.len());
    assert!(x.len() >= n * d && dh.len() >= n * d && dx.len() >= n * d, "invariant: rows inside their slices");
    let dx = Shared::new(dx);
    let run = |part: Option<Shared>| {
        exec.rows(n, |i, m| {
            let at = i * d;
            let dw = part.map_or(std::ptr::null_mut(), |p| p.at(i / ROWS * d));
            // SAFETY: extents checked above; blocks of rows and their partial sums are disjoint.
            unsafe {
                let (x, dh, r) = (x.as_ptr().add(at), dh.as_ptr().add(at), r.as_ptr().add(i));
                norm_backward(exec.level(), m, d, x, w.as_ptr(), r, dh, dx.at(at), dw, add);
            }
        });
    };
    match dw {
        None => run(None),
        Some((dw, partials)) => {
            run(Some(partials.start(n.div_ceil(ROWS), d)));
            partials.add_to(d, 0, &mut dw[..d]);
        }
    }
}
