//! Passes over rows: RMS norm, SwiGLU, bias, and their gradients.
//!
//! Gradients of shared weights (norms, biases) are summed per block of [`super::ROWS`] rows and the blocks
//! added in order, so that threads do not change a bit.

use super::simd::{Isa, V8, dispatch};
use super::{Exec, ROWS, Shared};

/// Sum of products of two rows, over 2 x 8 lanes in a fixed order.
///
/// # Safety
/// Both pointers valid for `n` floats.
#[inline(always)]
pub(super) unsafe fn dot<I: Isa>(a: *const f32, b: *const f32, n: usize) -> f32 {
    unsafe {
        let (mut s0, mut s1) = (I::V::splat(0.0), I::V::splat(0.0));
        let mut j = 0;
        while j + 16 <= n {
            s0 = I::V::load(a.add(j)).fma(I::V::load(b.add(j)), s0);
            s1 = I::V::load(a.add(j + 8)).fma(I::V::load(b.add(j + 8)), s1);
            j += 16;
        }
        while j < n {
            let w = (n - j).min(8);
            s0 = I::V::load_n(a.add(j), w, 0.0).fma(I::V::load_n(b.add(j), w, 0.0), s0);
            j += 8;
        }
        s0.add(s1).sum()
    }
}

/// `h = x / rms(x) * w` of one row; returns 1 / rms.
#[inline(always)]
pub(super) unsafe fn norm_row<I: Isa>(x: *const f32, w: *const f32, h: *mut f32, d: usize, eps: f32) -> f32 {
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
pub(super) unsafe fn norm_row_backward<I: Isa>(
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

/// Partial sums per block of rows, reused between calls.
#[derive(Debug, Default)]
pub struct Partials(Vec<f32>);

impl Partials {
    /// Zeroed room for `blocks` partial sums of `width`.
    pub(super) fn start(&mut self, blocks: usize, width: usize) -> Shared {
        self.0.clear();
        self.0.resize(blocks * width, 0.0);
        Shared::new(&mut self.0)
    }

    /// Adds the partial sums of one column range, block by block, to `out`.
    pub(super) fn add_to(&self, width: usize, from: usize, out: &mut [f32]) {
        for block in self.0.chunks_exact(width) {
            for (o, x) in out.iter_mut().zip(&block[from..]) {
                *o += x;
            }
        }
    }
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

#[inline(always)]
unsafe fn swiglu_k<I: Isa>(n: usize, f: usize, gu: *const f32, act: *mut f32) {
    unsafe {
        let (one, zero) = (I::V::splat(1.0), I::V::splat(0.0));
        for i in 0..n {
            let (g, o) = (gu.add(i * 2 * f), act.add(i * f));
            for j in (0..f).step_by(8) {
                let w = (f - j).min(8);
                let x = I::V::load_n(g.add(j), w, 0.0);
                let silu = x.div(one.add(zero.sub(x).exp()));
                silu.mul(I::V::load_n(g.add(f + j), w, 0.0)).store_n(o.add(j), w);
            }
        }
    }
}
dispatch! { unsafe fn swiglu_rows(n: usize, f: usize, gu: *const f32, act: *mut f32) = swiglu_k }

#[inline(always)]
unsafe fn swiglu_backward_k<I: Isa>(n: usize, f: usize, gu: *const f32, d: *mut f32, dgu: *mut f32) {
    unsafe {
        let (one, zero) = (I::V::splat(1.0), I::V::splat(0.0));
        for i in 0..n {
            let (g, d, o) = (gu.add(i * 2 * f), d.add(i * f), dgu.add(i * 2 * f));
            for j in (0..f).step_by(8) {
                let w = (f - j).min(8);
                let x = I::V::load_n(g.add(j), w, 0.0);
                let u = I::V::load_n(g.add(f + j), w, 0.0);
                let dy = I::V::load_n(d.add(j), w, 0.0);
                let s = one.div(one.add(zero.sub(x).exp()));
                let silu = x.mul(s);
                dy.mul(silu).store_n(o.add(f + j), w);
                // silu' = s + x s (1 - s)
                dy.mul(u).mul(silu.fma(one.sub(s), s)).store_n(o.add(j), w);
                silu.mul(u).store_n(d.add(j), w);
            }
        }
    }
}
dispatch! { unsafe fn swiglu_rows_backward(n: usize, f: usize, gu: *const f32, d: *mut f32, dgu: *mut f32) = swiglu_backward_k }

/// `act = silu(gate) * up` for `n` rows of `[gate f | up f]`.
pub fn swiglu(exec: Exec, n: usize, f: usize, gate_up: &[f32], act: &mut [f32]) {
    assert!(gate_up.len() >= n * 2 * f && act.len() >= n * f, "invariant: rows inside their slices");
    let act = Shared::new(act);
    exec.rows(n, |i, m| {
        // SAFETY: extents checked above; blocks of rows are disjoint.
        unsafe { swiglu_rows(exec.level(), m, f, gate_up.as_ptr().add(i * 2 * f), act.at(i * f)) }
    });
}

/// Backward of [`swiglu`]: `d` holds the gradient of `act` and receives `act` itself (recomputed for the
/// gradient of the next weight); `dgate_up` receives the gradient of `gate_up`.
pub fn swiglu_backward(exec: Exec, n: usize, f: usize, gate_up: &[f32], d: &mut [f32], dgate_up: &mut [f32]) {
    let all = gate_up.len() >= n * 2 * f && d.len() >= n * f && dgate_up.len() >= n * 2 * f;
    assert!(all, "invariant: rows inside their slices");
    let (d, o) = (Shared::new(d), Shared::new(dgate_up));
    exec.rows(n, |i, m| {
        let at = i * 2 * f;
        // SAFETY: extents checked above; blocks of rows are disjoint.
        unsafe { swiglu_rows_backward(exec.level(), m, f, gate_up.as_ptr().add(at), d.at(i * f), o.at(at)) }
    });
}

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
