//! Split into heads and back against f64 on every instruction set and number of threads.

use super::super::Partials;
use super::super::testing::{close, everywhere, random, slopes, weighted, wide};
use super::reference::{Split, kv_at, q_at};
use super::*;

/// (query heads, key/value heads, dim, rows): odd groups, padded and whole widths, more than one block of 64 rows.
const SHAPES: [(usize, usize, usize, usize); 6] =
    [(1, 1, 2, 1), (4, 2, 6, 3), (6, 2, 32, 70), (3, 3, 20, 65), (5, 1, 64, 4), (1, 1, MAX_HEAD, 2)];

const EPS: f32 = 1e-5;

/// A table that stretches cosines and sines, as YaRN does.
fn table(dim: usize, n: usize) -> RopeTable {
    let periods = (0..dim / 2).map(|j| 100f64.powf(2.0 * j as f64 / dim as f64)).collect();
    let mut table = RopeTable::new(periods, 1.2);
    table.cover(n);
    table
}

/// Positions that neither rise nor are all different.
fn positions(n: usize) -> Vec<u32> {
    (0..n as u32).map(|i| i * 7 % 23).collect()
}

/// `[row][head][dim]` values in the op's layout, the padding filled with `pad`.
fn placed(h: Heads, n: usize, heads: usize, x: &[f64], pad: f32) -> Vec<f32> {
    let mut out = vec![pad; n * heads * h.width];
    for i in 0..n {
        for head in 0..heads {
            let at = if heads == h.kv { kv_at(h, n, i, head) } else { q_at(h, n, i, head) };
            for j in 0..h.dim {
                out[at + j] = x[(i * heads + head) * h.dim + j] as f32;
            }
        }
    }
    out
}

#[test]
fn the_reference_gradient_is_the_slope_of_the_reference() {
    let (h, n) = (Heads::new(4, 2, 6), 2);
    let (x, pos, rope) = (wide(&random("x", n * h.row())), positions(n), table(6, 23));
    let (qw, kw) = (wide(&random("q norm", 6)), wide(&random("k norm", 6)));
    let d = Split {
        q: wide(&random("dq", n * h.q() * 6)),
        k: wide(&random("dk", n * h.kv * 6)),
        v: wide(&random("dv", n * h.kv * 6)),
        r: vec![],
    };
    let value = |x: &[f64], norm: reference::Norm<'_>| {
        let s = reference::split_heads(h, x, &pos, &rope, norm);
        weighted(&s.q, &d.q) + weighted(&s.k, &d.k) + weighted(&s.v, &d.v)
    };
    let (dx, ..) = reference::split_heads_backward(h, &x, &pos, &rope, None, &d);
    slopes("x without norm", &x, &dx, |x| value(x, None));
    let (dx, dqw, dkw) = reference::split_heads_backward(h, &x, &pos, &rope, Some((&qw, &kw, 1e-2)), &d);
    slopes("x", &x, &dx, |x| value(x, Some((&qw, &kw, 1e-2))));
    slopes("q norm", &qw, &dqw, |qw| value(&x, Some((qw, &kw, 1e-2))));
    slopes("k norm", &kw, &dkw, |kw| value(&x, Some((&qw, kw, 1e-2))));
}

#[test]
fn heads_are_those_of_f64_in_their_places_with_zeros_behind() {
    for (q_heads, kv, dim, n) in SHAPES {
        let (h, pos, rope) = (Heads::new(q_heads, kv, dim), positions(n), table(dim, 23));
        let (x, qw, kw) = (random("x", n * h.row()), random("q norm", dim), random("k norm", dim));
        let (wide_q, wide_k) = (wide(&qw), wide(&kw));
        for with in [false, true] {
            let norm = with.then_some(QkNorm { q: &qw, k: &kw, eps: EPS });
            let out = everywhere("split", |exec| {
                let (mut q, mut k) = (vec![f32::NAN; h.q_len(n)], vec![f32::NAN; h.kv_len(n)]);
                let (mut v, mut r) = (k.clone(), vec![9.0; n * (h.q() + h.kv)]);
                split_heads(exec, h, &x, &pos, &rope, norm, (&mut q, &mut k, &mut v), &mut r);
                vec![q, k, v, r]
            });
            let norm = with.then_some((&wide_q[..], &wide_k[..], f64::from(EPS)));
            let want = reference::split_heads(h, &wide(&x), &pos, &rope, norm);
            for (what, got, heads, want) in
                [("q", &out[0], h.q(), &want.q), ("k", &out[1], kv, &want.k), ("v", &out[2], kv, &want.v)]
            {
                for i in 0..n {
                    for head in 0..heads {
                        let at = if what == "q" { q_at(h, n, i, head) } else { kv_at(h, n, i, head) };
                        close(what, &got[at..at + dim], &want[(i * heads + head) * dim..][..dim], 1e-6);
                        assert!(got[at + dim..at + h.width].iter().all(|x| *x == 0.0), "{what}: padding");
                    }
                }
            }
            if with {
                close("1 / rms", &out[3], &want.r, 1e-6);
            } else {
                assert!(out[3].iter().all(|x| *x == 9.0), "r is untouched");
            }
        }
    }
}

#[test]
fn backward_is_that_of_f64_and_adds_to_the_norms() {
    for (q_heads, kv, dim, n) in SHAPES {
        let (h, pos, rope) = (Heads::new(q_heads, kv, dim), positions(n), table(dim, 23));
        let (x, qw, kw) = (random("x", n * h.row()), random("q norm", dim), random("k norm", dim));
        let (wide_q, wide_k) = (wide(&qw), wide(&kw));
        let d = Split {
            q: wide(&random("dq", n * h.q() * dim)),
            k: wide(&random("dk", n * kv * dim)),
            v: wide(&random("dv", n * kv * dim)),
            r: vec![],
        };
        // What lies behind a head is not read.
        let dq = placed(h, n, h.q(), &d.q, f32::NAN);
        let (dk, dv) = (placed(h, n, kv, &d.k, f32::NAN), placed(h, n, kv, &d.v, f32::NAN));
        let (old_q, old_k) = (random("old q", dim), random("old k", dim));
        for with in [false, true] {
            let norm = with.then_some((&wide_q[..], &wide_k[..], f64::from(EPS)));
            let r: Vec<f32> =
                reference::split_heads(h, &wide(&x), &pos, &rope, norm).r.iter().map(|r| *r as f32).collect();
            let (dx, dqw, dkw) = reference::split_heads_backward(h, &wide(&x), &pos, &rope, norm, &d);
            let norm = with.then_some(QkNorm { q: &qw, k: &kw, eps: EPS });
            let out = everywhere("join", |exec| {
                let (mut gx, mut gq, mut gk) = (vec![f32::NAN; n * h.row()], old_q.clone(), old_k.clone());
                let (mut frozen, mut partials) = (gx.clone(), Partials::default());
                let weights = Some((&mut gq[..], &mut gk[..], &mut partials));
                split_heads_backward(exec, h, (&x, &r), &pos, &rope, norm, (&dq, &dk, &dv), &mut gx, weights);
                split_heads_backward(exec, h, (&x, &r), &pos, &rope, norm, (&dq, &dk, &dv), &mut frozen, None);
                assert_eq!(gx, frozen, "dx does not depend on the norms' gradients");
                vec![gx, gq, gk]
            });
            let plus =
                |old: &[f32], d: &[f64]| -> Vec<f64> { old.iter().zip(d).map(|(o, d)| f64::from(*o) + d).collect() };
            close("dx", &out[0], &dx, 4e-6);
            close("q norm", &out[1], &plus(&old_q, &dqw), 4e-6);
            close("k norm", &out[2], &plus(&old_k, &dkw), 4e-6);
        }
    }
}
