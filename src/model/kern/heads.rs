//! From rows of `[q | k | v]` to heads and back: q/k norm (Qwen3), rotary embedding, layout for attention.
//!
//! Attention wants each head's vectors together, padded with zeros to a multiple of 16 ([`Heads::width`]):
//! `q [kv head][row][query head of the group][width]` scaled by 1/sqrt(head_dim), `k`, `v`
//! `[kv head][row][width]`.

use super::rows::{Partials, norm_row, norm_row_backward};
use super::simd::{Isa, V8, dispatch};
use super::{Exec, ROWS, Shared};

/// Longest head; bounds a stack buffer.
pub const MAX_HEAD: usize = 512;

/// Head counts and widths.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Heads {
    /// Key/value heads.
    pub kv: usize,
    /// Query heads per key/value head.
    pub group: usize,
    /// Floats of a head.
    pub dim: usize,
    /// `dim` rounded up to a multiple of 16.
    pub width: usize,
}

impl Heads {
    /// From a model's counts.
    pub fn new(q_heads: usize, kv: usize, dim: usize) -> Self {
        Heads { kv, group: q_heads / kv, dim, width: dim.div_ceil(16) * 16 }
    }

    /// Query heads.
    pub fn q(&self) -> usize {
        self.kv * self.group
    }

    /// Floats of a `[q | k | v]` row.
    pub fn row(&self) -> usize {
        (self.q() + 2 * self.kv) * self.dim
    }

    /// Floats of the query buffer for `n` rows.
    pub fn q_len(&self, n: usize) -> usize {
        n * self.q() * self.width
    }

    /// Floats of the key (or value) buffer for `n` rows.
    pub fn kv_len(&self, n: usize) -> usize {
        n * self.kv * self.width
    }
}

/// cos and sin of every position: `[position][cos dim/2 | sin dim/2]`, computed in f64.
#[derive(Debug, Clone)]
pub struct RopeTable {
    dim: usize,
    /// Positions per radian of each pair.
    periods: Vec<f64>,
    /// Multiplies every cosine and sine.
    factor: f64,
    data: Vec<f32>,
}

impl RopeTable {
    /// An empty table for heads of `2 * periods.len()` values.
    pub fn new(periods: Vec<f64>, factor: f64) -> Self {
        RopeTable { dim: 2 * periods.len(), periods, factor, data: Vec::new() }
    }

    /// Whether it is the table of such heads.
    pub fn fits(&self, periods: &[f64], factor: f64) -> bool {
        self.periods == periods && self.factor == factor
    }

    /// Cosines and sines of one covered position.
    #[cfg(test)]
    pub fn at(&self, position: usize) -> &[f32] {
        &self.data[position * self.dim..][..self.dim]
    }

    /// Makes the table cover positions `0..n`.
    pub fn cover(&mut self, n: usize) {
        for p in self.data.len() / self.dim..n {
            let angles = || self.periods.iter().map(|period| p as f64 / period);
            self.data.extend(angles().map(|a| (self.factor * a.cos()) as f32));
            self.data.extend(angles().map(|a| (self.factor * a.sin()) as f32));
        }
    }
}

/// Rotates one half-split head: `y = scale * R x`, or with the inverse rotation.
#[inline(always)]
unsafe fn rotate<I: Isa>(x: *const f32, y: *mut f32, table: *const f32, dim: usize, scale: f32, inverse: bool) {
    unsafe {
        let half = dim / 2;
        let k = I::V::splat(scale);
        for j in (0..half).step_by(8) {
            let n = (half - j).min(8);
            let (a, b) = (I::V::load_n(x.add(j), n, 0.0), I::V::load_n(x.add(half + j), n, 0.0));
            let (c, mut s) = (I::V::load_n(table.add(j), n, 0.0), I::V::load_n(table.add(half + j), n, 0.0));
            if inverse {
                s = I::V::splat(0.0).sub(s);
            }
            k.mul(s.fnma(b, a.mul(c))).store_n(y.add(j), n);
            k.mul(s.fma(a, b.mul(c))).store_n(y.add(half + j), n);
        }
    }
}

/// Weights of the q and k norms, and epsilon.
#[derive(Debug, Clone, Copy)]
pub struct QkNorm<'a> {
    /// `[dim]`
    pub q: &'a [f32],
    /// `[dim]`
    pub k: &'a [f32],
    /// Epsilon.
    pub eps: f32,
}

#[derive(Clone, Copy)]
struct SplitArgs {
    h: Heads,
    /// All rows, and this task's.
    n: usize,
    from: usize,
    to: usize,
    x: *const f32,
    table: *const f32,
    pos: *const u32,
    qn: *const f32,
    kn: *const f32,
    eps: f32,
    scale: f32,
    q: Shared,
    k: Shared,
    v: Shared,
    r: Shared,
}

#[inline(always)]
unsafe fn split_k<I: Isa>(a: SplitArgs) {
    unsafe {
        let (h, n) = (a.h, a.n);
        let mut tmp = [0.0f32; MAX_HEAD];
        for i in a.from..a.to {
            let row = a.x.add(i * h.row());
            let table = a.table.add(*a.pos.add(i) as usize * h.dim);
            for head in 0..h.q() + h.kv {
                let is_q = head < h.q();
                let mut x = row.add(head * h.dim);
                let w = if is_q { a.qn } else { a.kn };
                if !w.is_null() {
                    *a.r.at(i * (h.q() + h.kv) + head) = norm_row::<I>(x, w, tmp.as_mut_ptr(), h.dim, a.eps);
                    x = tmp.as_ptr();
                }
                let y = if is_q {
                    a.q.at(((head / h.group * n + i) * h.group + head % h.group) * h.width)
                } else {
                    a.k.at(((head - h.q()) * n + i) * h.width)
                };
                rotate::<I>(x, y, table, h.dim, if is_q { a.scale } else { 1.0 }, false);
                y.add(h.dim).write_bytes(0, h.width - h.dim);
            }
            for g in 0..h.kv {
                let y = a.v.at((g * n + i) * h.width);
                std::ptr::copy_nonoverlapping(row.add((h.q() + h.kv + g) * h.dim), y, h.dim);
                y.add(h.dim).write_bytes(0, h.width - h.dim);
            }
        }
    }
}
dispatch! { unsafe fn split(a: SplitArgs) = split_k }

/// Splits `pos.len()` rows `x` of `[q | k | v]` into heads. `r` receives 1 / rms of every q and k head
/// (`[row][q heads + kv heads]`) when `norm` is given, else it is untouched.
pub fn split_heads(
    exec: Exec,
    h: Heads,
    x: &[f32],
    pos: &[u32],
    rope: &RopeTable,
    norm: Option<QkNorm<'_>>,
    (q, k, v): (&mut [f32], &mut [f32], &mut [f32]),
    r: &mut [f32],
) {
    let n = pos.len();
    let last = pos.iter().copied().max().map_or(0, |p| p as usize + 1);
    assert!(x.len() >= n * h.row() && rope.data.len() >= last * h.dim && h.dim <= MAX_HEAD, "invariant: rows");
    assert!(q.len() >= h.q_len(n) && k.len() >= h.kv_len(n) && v.len() >= h.kv_len(n), "invariant: heads");
    if let Some(w) = norm {
        let rows = w.q.len() == h.dim && w.k.len() == h.dim && r.len() >= n * (h.q() + h.kv);
        assert!(rows, "invariant: norm weights");
    }
    let null = std::ptr::null();
    let args = SplitArgs {
        h,
        n,
        from: 0,
        to: 0,
        x: x.as_ptr(),
        table: rope.data.as_ptr(),
        pos: pos.as_ptr(),
        qn: norm.map_or(null, |w| w.q.as_ptr()),
        kn: norm.map_or(null, |w| w.k.as_ptr()),
        eps: norm.map_or(0.0, |w| w.eps),
        scale: 1.0 / (h.dim as f32).sqrt(),
        q: Shared::new(q),
        k: Shared::new(k),
        v: Shared::new(v),
        r: Shared::new(r),
    };
    let args = Sendable(args);
    exec.rows(n, |i, m| {
        let args = &args;
        // SAFETY: extents checked above; rows are disjoint in every output.
        unsafe { split(exec.level(), SplitArgs { from: i, to: i + m, ..args.0 }) }
    });
}

/// Kernel arguments shared by tasks that write disjoint rows.
struct Sendable<T>(T);
// SAFETY: the pointers come from borrows that outlive the parallel section; tasks write disjoint rows.
unsafe impl<T> Sync for Sendable<T> {}

#[derive(Clone, Copy)]
struct JoinArgs {
    h: Heads,
    n: usize,
    from: usize,
    to: usize,
    x: *const f32,
    table: *const f32,
    pos: *const u32,
    qn: *const f32,
    kn: *const f32,
    scale: f32,
    r: *const f32,
    dq: *const f32,
    dk: *const f32,
    dv: *const f32,
    dx: Shared,
    /// `[q norm dim | k norm dim]` of this block, or null.
    dw: *mut f32,
}

#[inline(always)]
unsafe fn join_k<I: Isa>(a: JoinArgs) {
    unsafe {
        let (h, n) = (a.h, a.n);
        let mut tmp = [0.0f32; MAX_HEAD];
        for i in a.from..a.to {
            let (row, drow) = (a.x.wrapping_add(i * h.row()), a.dx.at(i * h.row()));
            let table = a.table.add(*a.pos.add(i) as usize * h.dim);
            for head in 0..h.q() + h.kv {
                let is_q = head < h.q();
                let dy = if is_q {
                    a.dq.add(((head / h.group * n + i) * h.group + head % h.group) * h.width)
                } else {
                    a.dk.add(((head - h.q()) * n + i) * h.width)
                };
                let scale = if is_q { a.scale } else { 1.0 };
                let w = if is_q { a.qn } else { a.kn };
                let dx = drow.add(head * h.dim);
                if w.is_null() {
                    rotate::<I>(dy, dx, table, h.dim, scale, true);
                    continue;
                }
                rotate::<I>(dy, tmp.as_mut_ptr(), table, h.dim, scale, true);
                let dw = if a.dw.is_null() || is_q { a.dw } else { a.dw.add(h.dim) };
                let r = *a.r.add(i * (h.q() + h.kv) + head);
                norm_row_backward::<I>(row.add(head * h.dim), w, r, tmp.as_ptr(), dx, dw, h.dim, false);
            }
            for g in 0..h.kv {
                let dx = drow.add((h.q() + h.kv + g) * h.dim);
                std::ptr::copy_nonoverlapping(a.dv.add((g * n + i) * h.width), dx, h.dim);
            }
        }
    }
}
dispatch! { unsafe fn join(a: JoinArgs) = join_k }

/// Backward of [`split_heads`]: `dx` receives the gradient of `x`; the norms' gradients are added to the
/// slices in `dnorm` when given. `x` and `r` are only read with `norm`.
pub fn split_heads_backward(
    exec: Exec,
    h: Heads,
    (x, r): (&[f32], &[f32]),
    pos: &[u32],
    rope: &RopeTable,
    norm: Option<QkNorm<'_>>,
    (dq, dk, dv): (&[f32], &[f32], &[f32]),
    dx: &mut [f32],
    dnorm: Option<(&mut [f32], &mut [f32], &mut Partials)>,
) {
    let n = pos.len();
    let last = pos.iter().copied().max().map_or(0, |p| p as usize + 1);
    assert!(dx.len() >= n * h.row() && rope.data.len() >= last * h.dim && h.dim <= MAX_HEAD, "invariant: rows");
    assert!(dq.len() >= h.q_len(n) && dk.len() >= h.kv_len(n) && dv.len() >= h.kv_len(n), "invariant: heads");
    if let Some(w) = norm {
        let rows = w.q.len() == h.dim && w.k.len() == h.dim && r.len() >= n * (h.q() + h.kv);
        assert!(rows && x.len() >= n * h.row(), "invariant: norm weights");
    }
    let null = std::ptr::null();
    let dx_ptr = Shared::new(dx);
    let run = |part: Option<Shared>| {
        let base = Sendable(JoinArgs {
            h,
            n,
            from: 0,
            to: 0,
            x: x.as_ptr(),
            table: rope.data.as_ptr(),
            pos: pos.as_ptr(),
            qn: norm.map_or(null, |w| w.q.as_ptr()),
            kn: norm.map_or(null, |w| w.k.as_ptr()),
            scale: 1.0 / (h.dim as f32).sqrt(),
            r: r.as_ptr(),
            dq: dq.as_ptr(),
            dk: dk.as_ptr(),
            dv: dv.as_ptr(),
            dx: dx_ptr,
            dw: std::ptr::null_mut(),
        });
        exec.rows(n, |i, m| {
            let base = &base;
            let dw = part.map_or(std::ptr::null_mut(), |p| p.at(i / ROWS * 2 * h.dim));
            // SAFETY: extents checked above; rows and partial sums are disjoint.
            unsafe { join(exec.level(), JoinArgs { from: i, to: i + m, dw, ..base.0 }) }
        });
    };
    match dnorm.filter(|_| norm.is_some()) {
        None => run(None),
        Some((dqn, dkn, partials)) => {
            run(Some(partials.start(n.div_ceil(ROWS), 2 * h.dim)));
            partials.add_to(2 * h.dim, 0, &mut dqn[..h.dim]);
            partials.add_to(2 * h.dim, h.dim, &mut dkn[..h.dim]);
        }
    }
}
