//! SwiGLU of rows, eight values at a time.

use super::super::simd::{Isa, V8, dispatch};
use super::super::{Exec, Shared};

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
