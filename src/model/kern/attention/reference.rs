//! Attention in f64, and its gradients. Heads are plain `[row][head][dim]`, queries already scaled; who sees whom is a
//! list of keys per query row.

use super::super::heads::Heads;
use super::plan::Segment;

/// Keys that every row sees: its segment's whole prefix, then its segment up to itself.
pub fn visible(segments: &[Segment]) -> Vec<Vec<usize>> {
    let mut seen = Vec::new();
    for s in segments {
        let before = s.prefix.map_or(0..0, |p| segments[p].start..segments[p].start + segments[p].len);
        seen.extend((s.start..s.start + s.len).map(|i| before.clone().chain(s.start..=i).collect()));
    }
    seen
}

/// Queries, keys and values.
#[derive(Debug, Clone, Default)]
pub struct Inputs {
    pub q: Vec<f64>,
    pub k: Vec<f64>,
    pub v: Vec<f64>,
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// Probabilities of `keys` for query head `head` of row `i`, and the log-sum-exp of their scores.
fn softmax(h: Heads, x: &Inputs, i: usize, head: usize, keys: &[usize]) -> (Vec<f64>, f64) {
    let q = &x.q[(i * h.q() + head) * h.dim..][..h.dim];
    let s: Vec<f64> = keys.iter().map(|t| dot(q, &x.k[(t * h.kv + head / h.group) * h.dim..][..h.dim])).collect();
    let top = s.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let lse = top + s.iter().map(|s| (s - top).exp()).sum::<f64>().ln();
    (s.iter().map(|s| (s - lse).exp()).collect(), lse)
}

/// Outputs `[row][query head][dim]` and log-sum-exps `[row][query head]`.
pub fn attention(h: Heads, seen: &[Vec<usize>], x: &Inputs) -> (Vec<f64>, Vec<f64>) {
    let (mut out, mut lses) = (Vec::new(), Vec::new());
    for (i, keys) in seen.iter().enumerate() {
        for head in 0..h.q() {
            let (p, lse) = softmax(h, x, i, head, keys);
            let value = |t: &usize, j: usize| x.v[(t * h.kv + head / h.group) * h.dim + j];
            out.extend((0..h.dim).map(|j| keys.iter().zip(&p).map(|(t, p)| p * value(t, j)).sum::<f64>()));
            lses.push(lse);
        }
    }
    (out, lses)
}

/// Gradients of the inputs for the gradient `dout` of the outputs.
pub fn attention_backward(h: Heads, seen: &[Vec<usize>], x: &Inputs, dout: &[f64]) -> Inputs {
    let mut d = Inputs { q: vec![0.0; x.q.len()], k: vec![0.0; x.k.len()], v: vec![0.0; x.v.len()] };
    for (i, keys) in seen.iter().enumerate() {
        for head in 0..h.q() {
            let q = (i * h.q() + head) * h.dim;
            let kv = |t: usize| (t * h.kv + head / h.group) * h.dim;
            let dy = &dout[q..q + h.dim];
            let (p, _) = softmax(h, x, i, head, keys);
            let dp: Vec<f64> = keys.iter().map(|t| dot(dy, &x.v[kv(*t)..][..h.dim])).collect();
            let delta = dot(&p, &dp);
            for ((t, p), dp) in keys.iter().zip(&p).zip(&dp) {
                let ds = p * (dp - delta);
                for j in 0..h.dim {
                    d.v[kv(*t) + j] += p * dy[j];
                    d.q[q + j] += ds * x.k[kv(*t) + j];
                    d.k[kv(*t) + j] += ds * x.q[q + j];
                }
            }
        }
    }
    d
}
