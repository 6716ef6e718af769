//! Which rows attend to which: segments with shared prefixes, cut into blocks of query tokens.

use super::super::gemm::NR;
use super::super::heads::Heads;

/// Query tokens of a forward task.
pub const QUERIES: usize = 32;

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
    pub(super) segments: Vec<Segment>,
    /// First key of each segment when lengths are rounded up to 16.
    pub(super) padded: Vec<usize>,
    pub(super) rows: usize,
    pub(super) padded_rows: usize,
    /// (segment, first query token), longest work first would not change results; kept in order.
    pub(super) blocks: Vec<(usize, usize)>,
    /// First of each segment's blocks.
    pub(super) first_block: Vec<usize>,
}

/// The query blocks of a plan that hold a row whose output somebody needs.
#[derive(Debug, Clone, Default)]
pub struct Needed(pub(super) Vec<bool>);

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
    pub(super) fn panel_len(&self, h: Heads) -> usize {
        self.padded_rows * h.kv * h.width
    }

    pub(super) fn check(&self, h: Heads, q: &[f32], k: &[f32], v: &[f32]) {
        let n = self.rows;
        assert!(q.len() >= h.q_len(n) && k.len() >= h.kv_len(n) && v.len() >= h.kv_len(n), "invariant: heads");
        for (i, s) in self.segments.iter().enumerate() {
            assert!(s.prefix.is_none_or(|p| p < i && self.segments[p].prefix.is_none()), "invariant: prefixes");
        }
    }
}
