//! Backward: one task per segment and key/value head; probabilities are made again from the log-sum-exps.

use super::super::gemm::{NR, Tile};
use super::super::heads::Heads;
use super::super::simd::{Isa, V8, dispatch, dot};
use super::super::{Exec, Shared};
use super::cpu::{AttnBuffers, SCRATCH, grow, panels};
use super::plan::{Needed, Plan, QUERIES};
use super::{AttnState, KEYS};

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
