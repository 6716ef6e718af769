//! Rows of logits, one per task.

use super::super::simd::{Isa, V8, dispatch};
use super::super::{Exec, Shared};
use super::Scored;

/// Below this, `z - lse` of an impossible token (logit -inf) is held, so that a probability of zero times it is zero.
const FLOOR: f32 = -1e4;

#[inline(always)]
unsafe fn score_k<I: Isa>(l: *const f32, v: usize, inv_t: f32, target: usize, out: *mut Scored) {
    unsafe {
        let k = I::V::splat(inv_t);
        let mut m = I::V::splat(f32::NEG_INFINITY);
        for j in (0..v).step_by(8) {
            // max keeps a NaN on its right side; the next one may hide it, the sum below will not.
            m = I::V::load_n(l.add(j), (v - j).min(8), f32::NEG_INFINITY).max(m);
        }
        let max = m.largest() * inv_t;
        let mv = I::V::splat(max);
        let (mut s, mut w, floor) = (I::V::splat(0.0), I::V::splat(0.0), I::V::splat(FLOOR));
        for j in (0..v).step_by(8) {
            let n = (v - j).min(8);
            // A NaN on the right side of max stays one.
            let x = floor.max(I::V::load_n(l.add(j), n, 0.0).mul(k).sub(mv));
            let mut e = x.exp();
            if n < 8 {
                let mut a = e.array();
                a[n..].fill(0.0);
                e = I::V::load(a.as_ptr());
            }
            s = s.add(e);
            w = e.fma(x, w);
        }
        let (s, w) = (s.sum(), w.sum());
        let ln = s.ln();
        *out = Scored { lse: max + ln, logp: (*l.add(target) * inv_t - max) - ln, entropy: ln - w / s };
    }
}
dispatch! { unsafe fn score_row(l: *const f32, v: usize, inv_t: f32, target: usize, out: *mut Scored) = score_k }

/// Scores `targets.len()` rows of `v` logits: row i for token `targets[i]`.
pub fn score(exec: Exec, v: usize, logits: &[f32], inv_t: f32, targets: &[u32], out: &mut [Scored]) {
    let n = targets.len();
    assert!(logits.len() >= n * v && out.len() >= n && targets.iter().all(|t| (*t as usize) < v), "invariant: rows");
    let out = Rows(out.as_mut_ptr());
    exec.each(n, |i| {
        // SAFETY: extents checked above; each task writes its own row.
        unsafe { score_row(exec.level(), logits.as_ptr().add(i * v), v, inv_t, targets[i] as usize, out.at(i)) }
    });
}

struct Rows(*mut Scored);
// SAFETY: made from an exclusive borrow; tasks write distinct rows.
unsafe impl Sync for Rows {}
impl Rows {
    fn at(&self, i: usize) -> *mut Scored {
        self.0.wrapping_add(i)
    }
}

#[inline(always)]
unsafe fn unscore_k<I: Isa>(l: *mut f32, v: usize, inv_t: f32, target: usize, s: Scored, dlogp: f32, dh: f32) {
    unsafe {
        // With p_j = softmax: d logp / dz_j = [j = target] - p_j, d H / dz_j = -p_j (ln p_j + H).
        let (k, lse, floor) = (I::V::splat(inv_t), I::V::splat(s.lse), I::V::splat(FLOOR));
        let (a, b) = (I::V::splat(-inv_t * (dlogp + dh * s.entropy)), I::V::splat(-inv_t * dh));
        for j in (0..v).step_by(8) {
            let n = (v - j).min(8);
            let lp = floor.max(I::V::load_n(l.add(j), n, 0.0).mul(k).sub(lse));
            lp.exp().mul(lp.fma(b, a)).store_n(l.add(j), n);
        }
        *l.add(target) += dlogp * inv_t;
    }
}
dispatch! {
    unsafe fn unscore_row(l: *mut f32, v: usize, inv_t: f32, target: usize, s: Scored, dlogp: f32, dh: f32) = unscore_k
}

/// Backward of [`score`]: logits become the gradient of `sum dlogp logp + dentropy entropy`, in place.
pub fn score_backward(
    exec: Exec,
    v: usize,
    logits: &mut [f32],
    inv_t: f32,
    targets: &[u32],
    scored: &[Scored],
    dlogp: &[f32],
    dentropy: Option<&[f32]>,
) {
    let n = targets.len();
    assert!(logits.len() >= n * v && targets.iter().all(|t| (*t as usize) < v), "invariant: rows");
    let logits = Shared::new(logits);
    exec.each(n, |i| {
        let dh = dentropy.map_or(0.0, |d| d[i]);
        // SAFETY: extents checked above; each task writes its own row.
        unsafe {
            let (row, target) = (logits.at(i * v), targets[i] as usize);
            unscore_row(exec.level(), row, v, inv_t, target, scored[i], dlogp[i], dh);
        }
    });
}
