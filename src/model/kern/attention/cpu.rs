//! Forward: one task per block of query tokens and key/value head, on scores that never leave the cache.

use std::cell::RefCell;

use super::super::gemm::{NR, Tile};
use super::super::heads::Heads;
use super::super::simd::{Isa, V8, dispatch};
use super::super::{Exec, Shared};
use super::KEYS;
use super::plan::{Needed, Plan, QUERIES};

/// Most rows a tile has on any instruction set.
const MAX_MR: usize = 12;

/// Query rows with their running softmax state.
#[derive(Clone, Copy)]
pub struct Queries {
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
pub struct KeyBlock {
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
pub unsafe fn attend<I: Isa>(a: &Queries, b: &KeyBlock) {
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

pub fn panels(exec: Exec, h: Heads, plan: &Plan, src: &[f32], dst: &mut Vec<f32>) {
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
pub struct Scratch {
    pub(super) seen: Vec<u32>,
    pub(super) max: Vec<f32>,
    pub(super) sum: Vec<f32>,
    pub(super) out: Vec<f32>,
    pub(super) s: Vec<f32>,
    pub(super) ds: Vec<f32>,
    pub(super) delta: Vec<f32>,
}

thread_local! {
    pub static SCRATCH: RefCell<Scratch> = RefCell::new(Scratch::default());
}

pub fn grow(v: &mut Vec<f32>, n: usize) -> *mut f32 {
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
    pub(super) kt: Vec<f32>,
    pub(super) vt: Vec<f32>,
    pub(super) prefix: Vec<f32>,
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
