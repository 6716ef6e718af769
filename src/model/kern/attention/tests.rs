//! Attention against f64: segments with shared prefixes, needed rows, cache pages; every instruction set and number of
//! threads.

use super::super::heads::Heads;
use super::super::heads::reference::{kv_at, q_at};
use super::super::testing::{close, everywhere, random, slopes, weighted, wide};
use super::super::{Exec, Level};
use super::reference::{Inputs, visible};
use super::*;

/// (query heads, key/value heads, dim): padded and whole widths, odd groups.
const SHAPES: [(usize, usize, usize); 5] = [(1, 1, 4), (4, 2, 16), (6, 2, 20), (5, 1, 33), (3, 3, 64)];

/// (rows, prefix) of segments around the edges of query blocks (32), key blocks (64) and panels (16).
const PLANS: [&[(usize, Option<usize>)]; 4] = [
    &[(1, None)],
    &[(5, None), (37, Some(0)), (70, Some(0)), (3, None)],
    &[(130, None), (1, Some(0)), (17, None), (66, Some(0)), (33, Some(2))],
    &[(64, None), (32, Some(0)), (96, None)],
];

/// Inputs in the layouts of the op, zeros behind each head, and the same values for the reference.
struct Case {
    h: Heads,
    plan: Plan,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    dout: Vec<f32>,
    plain: Inputs,
}

fn case((q_heads, kv, dim): (usize, usize, usize), lengths: &[(usize, Option<usize>)]) -> Case {
    let (h, plan) = (Heads::new(q_heads, kv, dim), Plan::new(lengths));
    let n = plan.rows();
    let far: Vec<f32> = random("q", n * q_heads * dim).iter().map(|x| 3.0 * x).collect();
    let (pk, pv) = (random("k", n * kv * dim), random("v", n * kv * dim));
    let (mut q, mut k, mut v) = (vec![0.0; h.q_len(n)], vec![0.0; h.kv_len(n)], vec![0.0; h.kv_len(n)]);
    for i in 0..n {
        for head in 0..q_heads {
            q[q_at(h, n, i, head)..][..dim].copy_from_slice(&far[(i * q_heads + head) * dim..][..dim]);
        }
        for g in 0..kv {
            k[kv_at(h, n, i, g)..][..dim].copy_from_slice(&pk[(i * kv + g) * dim..][..dim]);
            v[kv_at(h, n, i, g)..][..dim].copy_from_slice(&pv[(i * kv + g) * dim..][..dim]);
        }
    }
    let plain = Inputs { q: wide(&far), k: wide(&pk), v: wide(&pv) };
    Case { h, plan, q, k, v, dout: random("dout", n * q_heads * dim), plain }
}

impl Case {
    fn forward(&self, exec: Exec, needed: Option<&Needed>) -> (Vec<f32>, Vec<f32>) {
        let n = self.plan.rows();
        let (mut out, mut lse) = (vec![9.0; n * self.h.q() * self.h.dim], vec![9.0; n * self.h.q()]);
        let mut buffers = AttnBuffers::default();
        let inputs = (&self.q[..], &self.k[..], &self.v[..]);
        attention(exec, self.h, (&self.plan, needed), inputs, &mut buffers, &mut out, &mut lse);
        (out, lse)
    }

    fn backward(&self, exec: Exec, needed: Option<&Needed>, (out, lse): (&[f32], &[f32])) -> Vec<Vec<f32>> {
        let d = |x: &[f32]| vec![f32::NAN; x.len()];
        let (mut dq, mut dk, mut dv, mut buffers) = (d(&self.q), d(&self.k), d(&self.v), AttnBuffers::default());
        let state = AttnState { q: &self.q, k: &self.k, v: &self.v, out, lse };
        let to = (&mut dq[..], &mut dk[..], &mut dv[..]);
        attention_backward(exec, self.h, (&self.plan, needed), state, &self.dout, &mut buffers, to);
        vec![dq, dk, dv]
    }

    /// Asserts that gradients in the op's layouts are `want`, with zeros behind each head.
    fn check_gradient(&self, got: &[Vec<f32>], want: &Inputs) {
        let (h, n) = (self.h, self.plan.rows());
        for (what, got, heads, want) in
            [("dq", &got[0], h.q(), &want.q), ("dk", &got[1], h.kv, &want.k), ("dv", &got[2], h.kv, &want.v)]
        {
            for i in 0..n {
                for head in 0..heads {
                    let at = if what == "dq" { q_at(h, n, i, head) } else { kv_at(h, n, i, head) };
                    // Up to 229 terms p (do . v - delta) in f32, each a difference of sums of size 1 to 5 (rounded at
                    // 2e-7 to 5e-7) times a query up to 3: 1e-5 is seen where roundings do not cancel.
                    close(what, &got[at..at + h.dim], &want[(i * heads + head) * h.dim..][..h.dim], 5e-5);
                    assert!(got[at + h.dim..at + h.width].iter().all(|x| *x == 0.0), "{what}: padding");
                }
            }
        }
    }

    /// Keys in panels of 16 and values of the page at `from`, filled up with `rest`: what the cache holds.
    fn page(&self, g: usize, rows: std::ops::Range<usize>, from: usize, rest: f32) -> (Vec<f32>, Vec<f32>) {
        let (w, n) = (self.h.width, self.plan.rows());
        let (mut kt, mut v) = (vec![rest; KEYS * w], vec![rest; KEYS * w]);
        for (t, i) in rows.skip(from).take(KEYS).enumerate() {
            let at = kv_at(self.h, n, i, g);
            for j in 0..w {
                kt[t / 16 * 16 * w + j * 16 + t % 16] = self.k[at + j];
                v[t * w + j] = self.v[at + j];
            }
        }
        (kt, v)
    }
}

#[test]
fn the_reference_gradient_is_the_slope_of_the_reference() {
    let c = case((4, 2, 3), &[(2, None), (3, Some(0))]);
    let (seen, dout) = (visible(c.plan.segments()), wide(&c.dout));
    assert_eq!(seen, [vec![0], vec![0, 1], vec![0, 1, 2], vec![0, 1, 2, 3], vec![0, 1, 2, 3, 4]]);
    let d = reference::attention_backward(c.h, &seen, &c.plain, &dout);
    let value = |x: Inputs| weighted(&reference::attention(c.h, &seen, &x).0, &dout);
    let all = || c.plain.clone();
    slopes("q", &c.plain.q, &d.q, |q| value(Inputs { q: q.to_vec(), ..all() }));
    slopes("k", &c.plain.k, &d.k, |k| value(Inputs { k: k.to_vec(), ..all() }));
    slopes("v", &c.plain.v, &d.v, |v| value(Inputs { v: v.to_vec(), ..all() }));
}

#[test]
fn forward_and_backward_are_those_of_f64() {
    for shape in SHAPES {
        for lengths in PLANS {
            let c = case(shape, lengths);
            let (h, n, seen) = (c.h, c.plan.rows(), visible(c.plan.segments()));
            let out = everywhere("forward", |exec| {
                let (out, lse) = c.forward(exec, None);
                vec![out, lse]
            });
            let (want, lse) = reference::attention(h, &seen, &c.plain);
            close("out", &out[0], &want, 4e-6);
            for i in 0..n {
                for head in 0..h.q() {
                    // Log-sum-exps lie as the queries do, one value for a vector.
                    let at = q_at(h, n, i, head) / h.width;
                    close("lse", &out[1][at..=at], &lse[i * h.q() + head..][..1], 4e-6);
                }
            }
            let d = everywhere("backward", |exec| c.backward(exec, None, (&out[0], &out[1])));
            c.check_gradient(&d, &reference::attention_backward(h, &seen, &c.plain, &wide(&c.dout)));
        }
    }
}

#[test]
fn rows_nobody_needs_are_left_alone_and_count_as_zero() {
    let c = case((6, 2, 20), PLANS[2]);
    let (n, row) = (c.plan.rows(), c.h.q() * c.h.dim);
    // Row 40 is in the second block of the first segment, 130 is the second segment, the last is in the last.
    let needed = c.plan.needed(&[40, 130, n as u32 - 1]);
    let live: Vec<usize> = (32..64).chain(130..131).chain(n - 1..n).collect();
    let (whole, whole_lse) = c.forward(Exec::serial(Level::detect()), None);
    let out = everywhere("forward", |exec| {
        let (out, lse) = c.forward(exec, Some(&needed));
        vec![out, lse]
    });
    for i in 0..n {
        let (got, want) = (&out[0][i * row..][..row], &whole[i * row..][..row]);
        assert!(if live.contains(&i) { got == want } else { got.iter().all(|x| *x == 9.0) }, "row {i}");
    }
    let mut dout = wide(&c.dout);
    for i in (0..n).filter(|i| !live.contains(i)) {
        dout[i * row..][..row].fill(0.0);
    }
    let mut blind = case((6, 2, 20), PLANS[2]);
    for i in (0..n).filter(|i| !live.contains(i)) {
        blind.dout[i * row..][..row].fill(f32::NAN);
    }
    let d = everywhere("backward", |exec| blind.backward(exec, Some(&needed), (&out[0], &out[1])));
    c.check_gradient(&d, &reference::attention_backward(c.h, &visible(c.plan.segments()), &c.plain, &dout));
    // A call without `needed` is one with every row needed.
    let exec = Exec::serial(Level::detect());
    let every: Vec<u32> = (0..n as u32).collect();
    let all = c.plan.needed(&every);
    assert_eq!(c.forward(exec, Some(&all)), (whole.clone(), whole_lse.clone()));
    let pair = (&whole[..], &whole_lse[..]);
    assert_eq!(c.backward(exec, Some(&all), pair), c.backward(exec, None, pair));
}

#[test]
fn pages_give_the_bits_of_the_whole_sequence() {
    for shape in SHAPES {
        let c = case(shape, &[(150, None)]);
        let (h, n) = (c.h, 150);
        // Decoded rows in any order, at the edges of pages.
        let pos = [149u32, 0, 63, 64, 65, 127, 128, 7];
        let mut q = vec![0.0; h.q_len(pos.len())];
        for (r, p) in pos.iter().enumerate() {
            for head in 0..h.q() {
                let from = q_at(h, n, *p as usize, head);
                q[q_at(h, pos.len(), r, head)..][..h.width].copy_from_slice(&c.q[from..][..h.width]);
            }
        }
        let row = h.q() * h.dim;
        for level in Level::available() {
            let (whole, _) = c.forward(Exec::serial(level), None);
            let (mut out, mut state) = (vec![f32::NAN; pos.len() * row], PagedState::default());
            for g in 0..h.kv {
                let runs: Vec<_> = (0..n)
                    .step_by(KEYS)
                    .map(|from| (PagedRun { first: 0, rows: pos.len(), from }, c.page(g, 0..n, from, 0.0)))
                    .collect();
                let pages = runs.iter().map(|(run, (kt, v))| (*run, (&kt[..], &v[..])));
                attend_pages(level, h, g, &pos, &q, pages, &mut state, &mut out);
            }
            for (r, p) in pos.iter().enumerate() {
                assert_eq!(out[r * row..][..row], whole[*p as usize * row..][..row], "{level:?} {p}");
            }
        }
    }
}

#[test]
fn sequences_share_pages_and_see_nothing_behind_their_position() {
    // Two sequences of 64 shared tokens each go on by their own: 6 and 20 tokens.
    for shape in SHAPES {
        let c = case(shape, &[(64, None), (6, Some(0)), (20, Some(0))]);
        let (h, n) = (c.h, c.plan.rows());
        let rows = [69usize, 68, 89, 75];
        let pos = [69u32, 68, 83, 69];
        let mut q = vec![0.0; h.q_len(rows.len())];
        for (r, i) in rows.iter().enumerate() {
            for head in 0..h.q() {
                let from = q_at(h, n, *i, head);
                q[q_at(h, rows.len(), r, head)..][..h.width].copy_from_slice(&c.q[from..][..h.width]);
            }
        }
        let row = h.q() * h.dim;
        let (want, _) = reference::attention(h, &visible(c.plan.segments()), &c.plain);
        let mut bits: Option<Vec<f32>> = None;
        for level in Level::available() {
            let (mut out, mut state) = (vec![f32::NAN; rows.len() * row], PagedState::default());
            for g in 0..h.kv {
                // What an earlier sequence left in a page behind the position: large, but no key of ours.
                let shared = c.page(g, 0..64, 0, 0.0);
                let (one, two) = (c.page(g, 64..70, 0, 1e4), c.page(g, 70..90, 0, 1e4));
                let run = |first, rows, from| PagedRun { first, rows, from };
                let runs = [(run(0, 4, 0), &shared), (run(0, 2, 64), &one), (run(2, 2, 64), &two)];
                let pages = runs.iter().map(|(run, (kt, v))| (*run, (&kt[..], &v[..])));
                attend_pages(level, h, g, &pos, &q, pages, &mut state, &mut out);
            }
            for (r, i) in rows.iter().enumerate() {
                close("row", &out[r * row..][..row], &want[i * row..][..row], 4e-6);
            }
            assert_eq!(bits.get_or_insert_with(|| out.clone()), &out, "{level:?}");
        }
    }
}
