//! Attention without score matrices: softmax over key blocks of [`KEYS`] with running maximum and sum.
//!
//! A row's result is the same sequence of operations whatever rows are computed beside it: keys come in
//! blocks at fixed places, and keys a row may not see enter as exact zeros.

use std::cell::RefCell;

use super::gemm::{NR, Tile};
use super::heads::Heads;
use super::rows::dot;
use super::simd::{Isa, V8, dispatch};
use super::{Exec, Shared};

/// Keys of a block, and of a cache page.
pub const KEYS: usize = 64;
/// Query tokens of a forward task.
const QUERIES: usize = 32;
/// Most rows a tile has on any instruction set.
const MAX_MR: usize = 12;

/// Query rows with their running softmax state.
#[derive(Clone, Copy)]
pub(super) struct Queries {
    pub rows: usize,
    /// `[rows][width]`, scaled and rotated.
    pub q: *const f32,
    /// Keys of the whole range that each row sees.
    pub seen: *const u32,
    pub max: *mut f32,
    pub sum: *mut f32,
    /// `[rows][width]`, unnormalised.
    pub out: *mut f32,
    pub width: usize,
}

/// One block of keys and values.
#[derive(Clone, Copy)]
pub(super) struct KeyBlock {
    /// Position of its first key in the range that `seen` counts.
    pub from: usize,
    /// Keys in it, at most [`KEYS`].
    pub len: usize,
    /// Keys transposed: `[len / 16][width][16]`.
    pub kt: *const f32,
    /// Values `[len][width]`.
    pub v: *const f32,
}

/// Keys of block `b` that a row seeing `seen` keys attends to.
#[inline(always)]
fn visible(seen: u32, b: &KeyBlock) -> usize {
    (seen as usize).saturating_sub(b.from).min(b.len)
}

/// Lets every row attend to one block.
///
/// # Safety
/// Pointers valid for the extents their fields describe; `kt` readable up to a multiple of 16 keys.
#[inline(always)]
pub(super) unsafe fn attend<I: Isa>(a: &Queries, b: &KeyBlock) {
    unsafe {
        let mut scores = [0.0f32; MAX_MR * KEYS];
        let s = scores.as_mut_ptr();
        let hidden = I::V::splat(-1e30);
        let mut i = 0;
        while i < a.rows {
            let mr = (a.rows - i).min(I::MR);
            let mut most = 0;
            for r in i..i + mr {
                most = most.max(visible(*a.seen.add(r), b));
            }
            if most == 0 {
                i += I::MR;
                continue;
            }
            let base = Tile {
                mr,
                k: a.width,
                a: a.q.add(i * a.width),
                ars: a.width,
                acs: 1,
                b: b.kt,
                brs: NR,
                c: s,
                ldc: KEYS,
                n: NR,
                acc: false,
                next: std::ptr::null(),
            };
            for j in (0..most).step_by(NR) {
                I::tile(&Tile { b: b.kt.add(j * a.width), c: s.add(j), ..base });
            }
            let padded = most.div_ceil(8) * 8;
            for r in i..i + mr {
                let row = s.add((r - i) * KEYS);
                let n = visible(*a.seen.add(r), b);
                if n == 0 {
                    row.write_bytes(0, padded);
                    continue;
                }
                for j in n..padded {
                    *row.add(j) = f32::NEG_INFINITY;
                }
                let mut m = I::V::load(row);
                for j in (8..padded).step_by(8) {
                    m = m.max(I::V::load(row.add(j)));
                }
                let (m, old) = (m.largest(), *a.max.add(r));
                if m > old {
                    *a.max.add(r) = m;
                    if old > f32::NEG_INFINITY {
                        let f = I::V::splat(old - m).exp();
                        *a.sum.add(r) *= f.array()[0];
                        for j in (0..a.width).step_by(8) {
                            let p = a.out.add(r * a.width + j);
                            I::V::load(p).mul(f).store(p);
                        }
                    }
                }
                let m = I::V::splat(*a.max.add(r));
                let mut sum = I::V::splat(0.0);
                for j in (0..padded).step_by(8) {
                    let x = I::V::load(row.add(j));
                    let e = x.sub(m).exp().keep_above(x, hidden);
                    sum = sum.add(e);
                    e.store(row.add(j));
                }
                *a.sum.add(r) += sum.sum();
            }
            for j in (0..a.width).step_by(NR) {
                I::tile(&Tile {
                    k: most,
                    a: s,
                    ars: KEYS,
                    b: b.v.add(j),
                    brs: a.width,
                    c: a.out.add(i * a.width + j),
                    ldc: a.width,
                    acc: true,
                    ..base
                });
            }
            i += I::MR;
        }
    }
}

/// A run of rows that attend to each other causally, and before that to all of a prefix segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    /// First row.
    pub start: usize,
    /// Rows.
    pub len: usize,
    /// Index of an earlier segment without a prefix of its own.
    pub prefix: Option<usize>,
}

/// Segments with the grid of tasks over them.
#[derive(Debug, Clone, Default)]
pub struct Plan {
    segments: Vec<Segment>,
    /// First key of each segment when lengths are rounded up to 16.
    padded: Vec<usize>,
    rows: usize,
    padded_rows: usize,
    /// (segment, first query token), longest work first would not change results; kept in order.
    blocks: Vec<(usize, usize)>,
    /// First of each segment's blocks.
    first_block: Vec<usize>,
}

/// The query blocks of a plan that hold a row whose output somebody needs.
#[derive(Debug, Clone, Default)]
pub struct Needed(Vec<bool>);

impl Plan {
    /// Segments follow each other; `lengths[i] = (rows, prefix)`.
    pub fn new(lengths: &[(usize, Option<usize>)]) -> Self {
        let mut p = Plan::default();
        for (i, &(len, prefix)) in lengths.iter().enumerate() {
            p.segments.push(Segment { start: p.rows, len, prefix });
            p.padded.push(p.padded_rows);
            p.first_block.push(p.blocks.len());
            p.blocks.extend((0..len).step_by(QUERIES).map(|q| (i, q)));
            p.rows += len;
            p.padded_rows += len.div_ceil(NR) * NR;
        }
        p
    }

    /// Rows of all segments.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// The segments.
    pub fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// The query blocks that hold one of these rows (rising).
    pub fn needed(&self, rows: &[u32]) -> Needed {
        let holds = |&(si, q0): &(usize, usize)| {
            let s = self.segments[si];
            let (from, to) = (s.start + q0, s.start + (q0 + QUERIES).min(s.len));
            let at = rows.partition_point(|r| (*r as usize) < from);
            rows.get(at).is_some_and(|r| (*r as usize) < to)
        };
        Needed(self.blocks.iter().map(holds).collect())
    }

    /// Floats of a panel buffer for `h`.
    fn panel_len(&self, h: Heads) -> usize {
        self.padded_rows * h.kv * h.width
    }

    fn check(&self, h: Heads, q: &[f32], k: &[f32], v: &[f32]) {
        let n = self.rows;
        assert!(q.len() >= h.q_len(n) && k.len() >= h.kv_len(n) && v.len() >= h.kv_len(n), "invariant: heads");
        for (i, s) in self.segments.iter().enumerate() {
            assert!(s.prefix.is_none_or(|p| p < i && self.segments[p].prefix.is_none()), "invariant: prefixes");
        }
    }
}

#[inline(always)]
unsafe fn to_panels_k<I: Isa>(src: *const f32, len: usize, width: usize, dst: *mut f32) {
    unsafe {
        for t in (0..len).step_by(8) {
            let out = dst.add(t / NR * width * NR + t % NR);
            if t + 8 <= len {
                for j in (0..width).step_by(8) {
                    I::transpose8(src.add(t * width + j), width, out.add(j * NR), NR);
                }
            } else {
                for j in 0..width {
                    for i in 0..8 {
                        *out.add(j * NR + i) = if t + i < len { *src.add((t + i) * width + j) } else { 0.0 };
                    }
                }
            }
        }
        // The second half of the last panel, when no key reaches it.
        if !len.is_multiple_of(NR) && len % NR <= 8 {
            let out = dst.add(len / NR * width * NR + 8);
            for j in 0..width {
                out.add(j * NR).write_bytes(0, 8);
            }
        }
    }
}
dispatch! {
    /// `[len][width]` to `[len / 16][width][16]`, zero-padded.
    unsafe fn to_panels(src: *const f32, len: usize, width: usize, dst: *mut f32) = to_panels_k
}

fn panels(exec: Exec, h: Heads, plan: &Plan, src: &[f32], dst: &mut Vec<f32>) {
    dst.resize(plan.panel_len(h).max(dst.len()), 0.0);
    let dst = Shared::new(dst);
    exec.each(plan.segments.len() * h.kv, |t| {
        let (i, g) = (t / h.kv, t % h.kv);
        let s = plan.segments[i];
        // SAFETY: `src` holds kv_len(rows) floats (checked by the caller), `dst` panel_len; tasks disjoint.
        unsafe {
            let from = src.as_ptr().add((g * plan.rows + s.start) * h.width);
            to_panels(exec.level(), from, s.len, h.width, dst.at((g * plan.padded_rows + plan.padded[i]) * h.width));
        }
    });
}

/// Scratch of a thread.
#[derive(Default)]
struct Scratch {
    seen: Vec<u32>,
    max: Vec<f32>,
    sum: Vec<f32>,
    out: Vec<f32>,
    s: Vec<f32>,
    ds: Vec<f32>,
    delta: Vec<f32>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::new(Scratch::default());
}

fn grow(v: &mut Vec<f32>, n: usize) -> *mut f32 {
    if v.len() < n {
        v.resize(n, 0.0);
    }
    v.as_mut_ptr()
}

#[inline(always)]
unsafe fn attend_all_k<I: Isa>(a: Queries, len: usize, kt: *const f32, v: *const f32) {
    unsafe {
        for from in (0..len).step_by(KEYS) {
            let block =
                KeyBlock { from, len: (len - from).min(KEYS), kt: kt.add(from * a.width), v: v.add(from * a.width) };
            attend::<I>(&a, &block);
        }
    }
}
dispatch! { unsafe fn attend_all(a: Queries, len: usize, kt: *const f32, v: *const f32) = attend_all_k }

/// Buffers that attention reuses between layers.
#[derive(Debug, Default)]
pub struct AttnBuffers {
    kt: Vec<f32>,
    vt: Vec<f32>,
    prefix: Vec<f32>,
}

/// Causal attention of all segments: `out [rows][q heads * dim]`, and `lse` (log-sum-exp of every row's
/// scores, `[kv head][row][group]`) for the backward. With `needed`, only of its query blocks; other rows are left as
/// they are.
pub fn attention(
    exec: Exec,
    h: Heads,
    (plan, needed): (&Plan, Option<&Needed>),
    (q, k, v): (&[f32], &[f32], &[f32]),
    buffers: &mut AttnBuffers,
    out: &mut [f32],
    lse: &mut [f32],
) {
    plan.check(h, q, k, v);
    let n = plan.rows;
    assert!(out.len() >= n * h.q() * h.dim && lse.len() >= n * h.q(), "invariant: outputs");
    assert!(needed.is_none_or(|n| n.0.len() == plan.blocks.len()), "invariant: blocks");
    panels(exec, h, plan, k, &mut buffers.kt);
    let kt = &buffers.kt;
    let (out, lse) = (Shared::new(out), Shared::new(lse));
    exec.each(plan.blocks.len() * h.kv, |t| {
        let ((si, q0), g) = (plan.blocks[t / h.kv], t % h.kv);
        if needed.is_some_and(|n| !n.0[t / h.kv]) {
            return;
        }
        let seg = plan.segments[si];
        let tokens = (seg.len - q0).min(QUERIES);
        let rows = tokens * h.group;
        SCRATCH.with_borrow_mut(|b| {
            b.max.clear();
            b.max.resize(rows, f32::NEG_INFINITY);
            b.sum.clear();
            b.sum.resize(rows, 0.0);
            b.out.clear();
            b.out.resize(rows * h.width, 0.0);
            let first = (g * n + seg.start + q0) * h.group;
            let mut attend_to = |segment: usize, len: usize, causal: bool| {
                b.seen.clear();
                b.seen.extend((0..rows).map(|r| if causal { q0 + r / h.group + 1 } else { len } as u32));
                let a = Queries {
                    rows,
                    q: q[first * h.width..].as_ptr(),
                    seen: b.seen.as_ptr(),
                    max: b.max.as_mut_ptr(),
                    sum: b.sum.as_mut_ptr(),
                    out: b.out.as_mut_ptr(),
                    width: h.width,
                };
                let keys = g * plan.padded_rows + plan.padded[segment];
                let values = g * n + plan.segments[segment].start;
                // SAFETY: `plan.check` and `panels` cover the extents; scratch has `rows` rows.
                unsafe {
                    attend_all(exec.level(), a, len, kt[keys * h.width..].as_ptr(), v[values * h.width..].as_ptr());
                }
            };
            if let Some(p) = seg.prefix {
                attend_to(p, plan.segments[p].len, false);
            }
            attend_to(si, q0 + tokens, true);
            for r in 0..rows {
                let row = (seg.start + q0 + r / h.group) * h.q() * h.dim + (g * h.group + r % h.group) * h.dim;
                let f = 1.0 / b.sum[r];
                // SAFETY: `out` and `lse` were checked; tasks own disjoint (row, head) pairs.
                unsafe {
                    *lse.at(first + r) = b.max[r] + b.sum[r].ln();
                    for (j, x) in b.out[r * h.width..r * h.width + h.dim].iter().enumerate() {
                        *out.at(row + j) = x * f;
                    }
                }
            }
        });
    });
}

/// Inputs of the backward of one (segment, kv head).
#[derive(Clone, Copy)]
struct Back<'a> {
    h: Heads,
    plan: &'a Plan,
    needed: Option<&'a Needed>,
    g: usize,
    si: usize,
    q: *const f32,
    k: *const f32,
    kt: *const f32,
    vt: *const f32,
    out: *const f32,
    dout: *const f32,
    lse: *const f32,
    dq: *mut f32,
    dk: *mut f32,
    dv: *mut f32,
    /// `[prefix rows][width]` twice: this segment's share of the prefix's dk and dv.
    pk: *mut f32,
    pv: *mut f32,
    /// `[QUERIES * group][KEYS]` each.
    s: *mut f32,
    ds: *mut f32,
    /// `[QUERIES * group][width]`
    dy: *mut f32,
    /// `[QUERIES * group]`
    delta: *mut f32,
}

/// Keys of a block from `k0` on that row `r` of a query block starting at token `q0` sees.
#[inline(always)]
fn in_block(causal: bool, q0: usize, r: usize, group: usize, k0: usize, keys: usize) -> usize {
    if causal { (q0 + r / group + 1).saturating_sub(k0).min(keys) } else { keys }
}

#[inline(always)]
unsafe fn backward_k<I: Isa>(a: &Back<'_>) {
    unsafe {
        let (h, plan, w) = (a.h, a.plan, a.h.width);
        let (seg, n) = (plan.segments[a.si], plan.rows);
        let ld = h.q() * h.dim;
        let tile = Tile {
            mr: 0,
            k: w,
            a: a.s,
            ars: w,
            acs: 1,
            b: a.kt,
            brs: NR,
            c: a.s,
            ldc: KEYS,
            n: NR,
            acc: false,
            next: std::ptr::null(),
        };
        for q0 in (0..seg.len).step_by(QUERIES) {
            let rows = (seg.len - q0).min(QUERIES) * h.group;
            let first = (a.g * n + seg.start + q0) * h.group;
            let (q, dq) = (a.q.add(first * w), a.dq.add(first * w));
            dq.write_bytes(0, rows * w);
            if let Some(n) = a.needed
                && !n.0[plan.first_block[a.si] + q0 / QUERIES]
            {
                continue;
            }
            for r in 0..rows {
                let at = (seg.start + q0 + r / h.group) * ld + (a.g * h.group + r % h.group) * h.dim;
                std::ptr::copy_nonoverlapping(a.dout.add(at), a.dy.add(r * w), h.dim);
                a.dy.add(r * w + h.dim).write_bytes(0, w - h.dim);
                *a.delta.add(r) = dot::<I>(a.dout.add(at), a.out.add(at), h.dim);
            }
            let own = (a.g * n + seg.start) * w;
            // A loop, not a closure: closures would not be compiled for the instruction set.
            for part in 0..2 {
                let causal = part == 1;
                let (ks, dk, dv) = match (causal, seg.prefix) {
                    (true, _) => (a.si, a.dk.add(own), a.dv.add(own)),
                    (false, Some(p)) => (p, a.pk, a.pv),
                    (false, None) => continue,
                };
                let kseg = plan.segments[ks];
                let len = if causal { q0 + rows / h.group } else { kseg.len };
                for k0 in (0..len).step_by(KEYS) {
                    let keys = (len - k0).min(KEYS);
                    let panel = (a.g * plan.padded_rows + plan.padded[ks] + k0) * w;
                    let (kt, vt) = (a.kt.add(panel), a.vt.add(panel));
                    let k = a.k.add((a.g * n + kseg.start + k0) * w);
                    let mut live = rows;
                    let mut i = 0;
                    while i < rows {
                        let mr = (rows - i).min(I::MR);
                        let most = in_block(causal, q0, i + mr - 1, h.group, k0, keys);
                        if most == 0 {
                            i += I::MR;
                            continue;
                        }
                        live = live.min(i);
                        let (s, ds) = (a.s.add(i * KEYS), a.ds.add(i * KEYS));
                        for j in (0..most).step_by(NR) {
                            I::tile(&Tile { mr, a: q.add(i * w), b: kt.add(j * w), c: s.add(j), ..tile });
                            I::tile(&Tile { mr, a: a.dy.add(i * w), b: vt.add(j * w), c: ds.add(j), ..tile });
                        }
                        for r in i..i + mr {
                            let seen = in_block(causal, q0, r, h.group, k0, keys);
                            let (p, d) = (a.s.add(r * KEYS), a.ds.add(r * KEYS));
                            let (l, delta) = (I::V::splat(*a.lse.add(first + r)), I::V::splat(*a.delta.add(r)));
                            for j in (0..seen).step_by(8) {
                                let e = I::V::load(p.add(j)).sub(l).exp();
                                e.store(p.add(j));
                                e.mul(I::V::load(d.add(j)).sub(delta)).store(d.add(j));
                            }
                            p.add(seen).write_bytes(0, KEYS - seen);
                            d.add(seen).write_bytes(0, KEYS - seen);
                        }
                        for j in (0..w).step_by(NR) {
                            let c = dq.add(i * w + j);
                            I::tile(&Tile {
                                mr,
                                k: most,
                                a: ds,
                                ars: KEYS,
                                b: k.add(j),
                                brs: w,
                                c,
                                ldc: w,
                                acc: true,
                                ..tile
                            });
                        }
                        i += I::MR;
                    }
                    let mut i = 0;
                    while live < rows && i < keys {
                        let mr = (keys - i).min(I::MR);
                        // Rows before the token of the first key of this strip see none of it.
                        let r0 = if causal { ((k0 + i).saturating_sub(q0) * h.group).max(live) } else { live };
                        if r0 < rows {
                            for j in (0..w).step_by(NR) {
                                let at = (k0 + i) * w + j;
                                let t = Tile { mr, k: rows - r0, ars: 1, acs: KEYS, brs: w, ldc: w, acc: true, ..tile };
                                let (s, ds) = (a.s.add(r0 * KEYS + i), a.ds.add(r0 * KEYS + i));
                                I::tile(&Tile { a: s, b: a.dy.add(r0 * w + j), c: dv.add(at), ..t });
                                I::tile(&Tile { a: ds, b: q.add(r0 * w + j), c: dk.add(at), ..t });
                            }
                        }
                        i += I::MR;
                    }
                }
            }
        }
    }
}
dispatch! { unsafe fn backward_segment(a: &Back<'_>) = backward_k }

/// What the forward left for the backward.
#[derive(Debug, Clone, Copy)]
pub struct AttnState<'a> {
    /// Queries as given to [`attention`].
    pub q: &'a [f32],
    /// Keys.
    pub k: &'a [f32],
    /// Values.
    pub v: &'a [f32],
    /// Its output.
    pub out: &'a [f32],
    /// Its log-sum-exps.
    pub lse: &'a [f32],
}

/// Backward of [`attention`]: gradients of q, k, v in their layouts (overwritten). With `needed`, as the forward was given it,
/// the other query blocks' rows of `dout` count as zero and are not read.
pub fn attention_backward(
    exec: Exec,
    h: Heads,
    (plan, needed): (&Plan, Option<&Needed>),
    state: AttnState<'_>,
    dout: &[f32],
    buffers: &mut AttnBuffers,
    (dq, dk, dv): (&mut [f32], &mut [f32], &mut [f32]),
) {
    plan.check(h, state.q, state.k, state.v);
    plan.check(h, dq, dk, dv);
    assert!(needed.is_none_or(|n| n.0.len() == plan.blocks.len()), "invariant: blocks");
    let (n, w) = (plan.rows, h.width);
    let flat = n * h.q() * h.dim;
    assert!(state.out.len() >= flat && dout.len() >= flat && state.lse.len() >= n * h.q(), "invariant: rows");
    panels(exec, h, plan, state.k, &mut buffers.kt);
    panels(exec, h, plan, state.v, &mut buffers.vt);
    dk[..h.kv_len(n)].fill(0.0);
    dv[..h.kv_len(n)].fill(0.0);
    // Each segment keeps its share of its prefix's gradient apart; the shares are added in order below.
    let mut offsets = Vec::with_capacity(plan.segments.len());
    let mut total = 0;
    for s in &plan.segments {
        offsets.push(total);
        total += s.prefix.map_or(0, |p| plan.segments[p].len * h.kv * w * 2);
    }
    buffers.prefix.clear();
    buffers.prefix.resize(total, 0.0);
    let (kt, vt) = (&buffers.kt, &buffers.vt);
    let shares = Shared::new(&mut buffers.prefix);
    let (dq, dk, dv) = (Shared::new(dq), Shared::new(dk), Shared::new(dv));
    exec.each(plan.segments.len() * h.kv, |t| {
        let (si, g) = (t / h.kv, t % h.kv);
        let before = plan.segments[si].prefix.map_or(0, |p| plan.segments[p].len);
        SCRATCH.with_borrow_mut(|b| {
            let rows = QUERIES * h.group;
            let share = offsets[si] + g * before * w * 2;
            let back = Back {
                h,
                plan,
                needed,
                g,
                si,
                q: state.q.as_ptr(),
                k: state.k.as_ptr(),
                kt: kt.as_ptr(),
                vt: vt.as_ptr(),
                out: state.out.as_ptr(),
                dout: dout.as_ptr(),
                lse: state.lse.as_ptr(),
                dq: dq.at(0),
                dk: dk.at(0),
                dv: dv.at(0),
                pk: shares.at(share),
                pv: shares.at(share + before * w),
                s: grow(&mut b.s, rows * KEYS),
                ds: grow(&mut b.ds, rows * KEYS),
                dy: grow(&mut b.out, rows * w),
                delta: grow(&mut b.delta, rows),
            };
            // SAFETY: extents checked above; a task writes the rows of its segment and head, and its share.
            unsafe { backward_segment(exec.level(), &back) }
        });
    });
    let prefix = &buffers.prefix;
    exec.each(h.kv, |g| {
        for (si, s) in plan.segments.iter().enumerate() {
            let Some(p) = s.prefix else { continue };
            let len = plan.segments[p].len * w;
            let (share, at) = (offsets[si] + g * len * 2, (g * n + plan.segments[p].start) * w);
            for i in 0..len {
                // SAFETY: each head owns its part of dk and dv.
                unsafe {
                    *dk.at(at + i) += prefix[share + i];
                    *dv.at(at + i) += prefix[share + len + i];
                }
            }
        }
    });
}
