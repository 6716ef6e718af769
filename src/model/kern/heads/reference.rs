//! Split of `[q | k | v]` rows into heads in f64, and its gradients. Heads here are plain `[row][head][dim]`;
//! [`q_at`] and [`kv_at`] say where the op puts them.

use super::super::norm::reference::{rms_norm, rms_norm_backward};
use super::{Heads, RopeTable};

/// Where the vector of query head `head` of row `i` of `n` starts.
pub fn q_at(h: Heads, n: usize, i: usize, head: usize) -> usize {
    (head / h.group * n * h.group + i * h.group + head % h.group) * h.width
}

/// Where the vector of key or value head `g` of row `i` of `n` starts.
pub fn kv_at(h: Heads, n: usize, i: usize, g: usize) -> usize {
    (g * n + i) * h.width
}

/// Weights of the q and k norms, and epsilon.
pub type Norm<'a> = Option<(&'a [f64], &'a [f64], f64)>;

/// Heads of q, k and v, or their gradients.
#[derive(Debug, Default)]
pub struct Split {
    pub q: Vec<f64>,
    pub k: Vec<f64>,
    pub v: Vec<f64>,
    /// 1 / rms of the q and k heads `[row][heads]`, with a norm.
    pub r: Vec<f64>,
}

/// One head rotated by the angles of a position (`sign` 1) or back (-1).
fn rotate(rope: &RopeTable, position: u32, sign: f64, x: &[f64]) -> Vec<f64> {
    let half = x.len() / 2;
    let turn = |j: usize| {
        let angle = f64::from(position) / rope.periods[j % half];
        let (c, s) = (rope.factor * angle.cos(), rope.factor * sign * angle.sin());
        if j < half { c * x[j] - s * x[j + half] } else { c * x[j] + s * x[j - half] }
    };
    (0..x.len()).map(turn).collect()
}

fn scale(h: Heads, is_q: bool) -> f64 {
    if is_q { 1.0 / (h.dim as f64).sqrt() } else { 1.0 }
}

/// The heads of rows `x` at positions `pos`.
pub fn split_heads(h: Heads, x: &[f64], pos: &[u32], rope: &RopeTable, norm: Norm<'_>) -> Split {
    let mut out = Split::default();
    for (row, p) in x.chunks_exact(h.row()).zip(pos) {
        for (head, x) in row.chunks_exact(h.dim).enumerate() {
            let is_q = head < h.q();
            if head >= h.q() + h.kv {
                out.v.extend(x);
                continue;
            }
            let mut y = x.to_vec();
            if let Some((qw, kw, eps)) = norm {
                let (normed, r) = rms_norm(x, if is_q { qw } else { kw }, eps);
                y = normed;
                out.r.extend(r);
            }
            let z = rotate(rope, *p, 1.0, &y).into_iter().map(|z| z * scale(h, is_q));
            if is_q { &mut out.q } else { &mut out.k }.extend(z);
        }
    }
    out
}

/// Gradients of x and of the q and k norms' weights (zero without norms), for those of the heads.
pub fn split_heads_backward(
    h: Heads,
    x: &[f64],
    pos: &[u32],
    rope: &RopeTable,
    norm: Norm<'_>,
    d: &Split,
) -> (Vec<f64>, Vec<f64>, Vec<f64>) {
    let (mut dx, mut dqw, mut dkw) = (Vec::new(), vec![0.0; h.dim], vec![0.0; h.dim]);
    for (i, row) in x.chunks_exact(h.row()).enumerate() {
        for (head, x) in row.chunks_exact(h.dim).enumerate() {
            let is_q = head < h.q();
            if head >= h.q() + h.kv {
                dx.extend(&d.v[(i * h.kv + head - h.q() - h.kv) * h.dim..][..h.dim]);
                continue;
            }
            let from =
                if is_q { &d.q[(i * h.q() + head) * h.dim..] } else { &d.k[(i * h.kv + head - h.q()) * h.dim..] };
            let dz: Vec<f64> = from[..h.dim].iter().map(|d| d * scale(h, is_q)).collect();
            let dy = rotate(rope, pos[i], -1.0, &dz);
            match norm {
                None => dx.extend(dy),
                Some((qw, kw, eps)) => {
                    let (weights, sum) = if is_q { (qw, &mut dqw) } else { (kw, &mut dkw) };
                    let (d, dw) = rms_norm_backward(x, weights, eps, &dy);
                    dx.extend(d);
                    sum.iter_mut().zip(dw).for_each(|(s, d)| *s += d);
                }
            }
        }
    }
    (dx, dqw, dkw)
}
