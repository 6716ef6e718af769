//! Passes over rows that split them into heads and join the gradients again.

use super::super::norm::{norm_row, norm_row_backward};
use super::super::simd::{Isa, V8, dispatch};
use super::super::{Exec, Partials, ROWS, Shared};
use super::{Heads, MAX_HEAD, QkNorm, RopeTable};

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
