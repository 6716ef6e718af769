//! Forward of decoding: rows of many sequences over the pages of a cache.

use super::super::heads::Heads;
use super::super::simd::{Isa, Level, dispatch};
use super::cpu::{KeyBlock, Queries, attend};
use super::{KEYS, PagedRun};

/// Running softmax of the rows of a decode call, reused between calls.
#[derive(Debug, Default)]
pub struct PagedState {
    seen: Vec<u32>,
    max: Vec<f32>,
    sum: Vec<f32>,
    out: Vec<f32>,
}

#[inline(always)]
unsafe fn attend_page_k<I: Isa>(a: &Queries, b: &KeyBlock) {
    // SAFETY: the caller's contract.
    unsafe { attend::<I>(a, b) }
}
dispatch! { unsafe fn attend_page(a: &Queries, b: &KeyBlock) = attend_page_k }

/// Attention of kv head `g` for rows at positions `pos`: every row attends to the pages of the runs that
/// hold it, in the order given, up to its own position. `out [rows][q heads * dim]`.
pub fn attend_pages<'a>(
    level: Level,
    h: Heads,
    g: usize,
    pos: &[u32],
    q: &[f32],
    pages: impl Iterator<Item = (PagedRun, (&'a [f32], &'a [f32]))>,
    state: &mut PagedState,
    out: &mut [f32],
) {
    let n = pos.len();
    let rows = n * h.group;
    assert!(q.len() >= h.q_len(n) && out.len() >= n * h.q() * h.dim && g < h.kv, "invariant: rows");
    let PagedState { seen, max, sum, out: acc } = state;
    seen.clear();
    seen.extend(pos.iter().flat_map(|p| std::iter::repeat_n(p + 1, h.group)));
    max.clear();
    max.resize(rows, f32::NEG_INFINITY);
    sum.clear();
    sum.resize(rows, 0.0);
    acc.clear();
    acc.resize(rows * h.width, 0.0);
    for (run, (kt, v)) in pages {
        let size = KEYS * h.width;
        assert!(kt.len() >= size && v.len() >= size && run.first + run.rows <= n, "invariant: pages");
        let at = run.first * h.group;
        let a = Queries {
            rows: run.rows * h.group,
            q: q[(g * rows + at) * h.width..].as_ptr(),
            seen: seen[at..].as_ptr(),
            max: max[at..].as_mut_ptr(),
            sum: sum[at..].as_mut_ptr(),
            out: acc[at * h.width..].as_mut_ptr(),
            width: h.width,
        };
        let block = KeyBlock { from: run.from, len: KEYS, kt: kt.as_ptr(), v: v.as_ptr() };
        // SAFETY: extents checked above; `kt` and `v` hold a whole page.
        unsafe { attend_page(level, &a, &block) };
    }
    for r in 0..rows {
        let to = r / h.group * h.q() * h.dim + (g * h.group + r % h.group) * h.dim;
        let f = 1.0 / sum[r];
        for (o, x) in out[to..to + h.dim].iter_mut().zip(&acc[r * h.width..]) {
            *o = x * f;
        }
    }
}
