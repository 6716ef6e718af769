//! A mixture of experts over the rows of a batch: routing, and the forward that training and decoding share.
//!
//! ```text
//! p = softmax(router h)          over all experts, in f64
//! S = the k largest of router h  (equal ones: the lower number first)
//! w_e = p_e                      divided by the sum over S with norm_topk_prob
//! x += sum over e in S, rising, of w_e down_e(silu(gate_e h) * up_e h)
//! ```
//!
//! What a row chooses and the order in which its experts are added depend on that row only, so results do not
//! depend on the batch or on threads.

use super::config::MoeConfig;
use super::kern::{Exec, swiglu};
use super::train::room;
use super::weights::Linear;

/// Which rows each expert answers, with which weight. A (row, expert) pair is called an answer; the answers of
/// an expert stand together, rows rising.
#[derive(Debug, Default)]
pub(super) struct Routes {
    /// First answer of each expert; one more entry for the end.
    starts: Vec<usize>,
    /// Row of each answer.
    rows: Vec<u32>,
    /// Weight of each answer.
    pub(super) weights: Vec<f32>,
    /// Softmax over all experts, `[rows, experts]`.
    pub(super) probs: Vec<f32>,
}

impl Routes {
    /// Chooses for `n` rows of router logits.
    fn fill(&mut self, moe: &MoeConfig, n: usize, logits: &[f32]) {
        let (experts, k) = (moe.num_experts, moe.num_experts_per_tok);
        // (expert, row, weight), later sorted by expert.
        let mut answers = Vec::with_capacity(n * k);
        let mut order: Vec<u32> = Vec::with_capacity(experts);
        let mut p = vec![0f64; experts];
        self.probs.clear();
        for (row, z) in logits.chunks_exact(experts).take(n).enumerate() {
            order.clear();
            order.extend(0..experts as u32);
            // A NaN sorts first: it is chosen and shows in the output.
            order.sort_unstable_by(|a, b| z[*b as usize].total_cmp(&z[*a as usize]).then(a.cmp(b)));
            let max = f64::from(z[order[0] as usize]);
            p.iter_mut().zip(z).for_each(|(p, z)| *p = (f64::from(*z) - max).exp());
            let sum: f64 = p.iter().sum();
            self.probs.extend(p.iter().map(|p| (p / sum) as f32));
            let chosen = &order[..k];
            let whole = if moe.norm_topk_prob { chosen.iter().map(|e| p[*e as usize]).sum() } else { sum };
            answers.extend(chosen.iter().map(|e| (*e, row as u32, (p[*e as usize] / whole) as f32)));
        }
        answers.sort_unstable_by_key(|(e, row, _)| (*e, *row));
        self.starts.clear();
        self.starts.extend((0..=experts as u32).map(|e| answers.partition_point(|a| a.0 < e)));
        self.rows.clear();
        self.rows.extend(answers.iter().map(|a| a.1));
        self.weights.clear();
        self.weights.extend(answers.iter().map(|a| a.2));
    }

    /// Answers of all experts together.
    pub(super) fn len(&self) -> usize {
        self.rows.len()
    }

    /// The experts that answer at least one row, with their range of answers and the rows.
    pub(super) fn busy(&self) -> impl Iterator<Item = (usize, std::ops::Range<usize>, &[u32])> {
        let ranges = self.starts.windows(2).map(|w| w[0]..w[1]).enumerate();
        ranges.filter(|(_, r)| !r.is_empty()).map(|(e, r)| (e, r.clone(), &self.rows[r]))
    }

    /// Expert and row of every answer, in their order.
    pub(super) fn answers(&self) -> impl Iterator<Item = (usize, usize)> {
        self.busy().flat_map(|(e, _, rows)| rows.iter().map(move |row| (e, *row as usize)))
    }
}

/// What the forward of a layer leaves for its backward.
#[derive(Debug, Default)]
pub(super) struct ExpertActs {
    pub(super) routes: Routes,
    /// Gate and up of every answer, `[answers, 2 inner]`.
    pub(super) gu: Vec<f32>,
}

/// Buffers that all layers share.
#[derive(Debug, Default)]
pub(super) struct ExpertScratch {
    /// Router logits, or their gradient.
    pub(super) logits: Vec<f32>,
    /// Rows of one expert.
    pub(super) h: Vec<f32>,
    /// What it answers, or the gradient of that.
    pub(super) y: Vec<f32>,
    pub(super) act: Vec<f32>,
    pub(super) dact: Vec<f32>,
    pub(super) dgu: Vec<f32>,
    /// Gradient of the answers' weights.
    pub(super) dweights: Vec<f32>,
}

/// Copies the named rows of `x` (`width` values each) into `out`, one after the other.
pub(super) fn gather(x: &[f32], width: usize, rows: &[u32], out: &mut [f32]) {
    for (to, row) in out.chunks_exact_mut(width).zip(rows) {
        to.copy_from_slice(&x[*row as usize * width..][..width]);
    }
}

/// Adds what the experts answer to `h` (`[n, d]`, normalised) to `x` (`[n, d]`). `product` computes
/// `y = x W^T` for `m` rows of one of the layer's linears.
pub(super) fn forward(
    exec: Exec,
    moe: &MoeConfig,
    (n, h): (usize, &[f32]),
    x: &mut [f32],
    acts: &mut ExpertActs,
    scratch: &mut ExpertScratch,
    mut product: impl FnMut(Linear, (usize, &[f32]), &mut [f32]),
) {
    if n == 0 {
        return;
    }
    let (d, f) = (h.len() / n, moe.moe_intermediate_size);
    let logits = room(&mut scratch.logits, n * moe.num_experts);
    product(Linear::Router, (n, h), logits);
    acts.routes.fill(moe, n, logits);
    let gu = room(&mut acts.gu, acts.routes.len() * 2 * f);
    for (e, answers, rows) in acts.routes.busy() {
        let m = rows.len();
        let (hid, y, act) = (room(&mut scratch.h, m * d), room(&mut scratch.y, m * d), room(&mut scratch.act, m * f));
        gather(h, d, rows, hid);
        let gu = &mut gu[answers.start * 2 * f..answers.end * 2 * f];
        product(Linear::ExpertGateUp(e), (m, hid), gu);
        swiglu(exec, m, f, gu, act);
        product(Linear::ExpertDown(e), (m, act), y);
        for ((y, row), weight) in y.chunks_exact(d).zip(rows).zip(&acts.routes.weights[answers]) {
            let x = &mut x[*row as usize * d..][..d];
            x.iter_mut().zip(y).for_each(|(x, y)| *x += weight * y);
        }
    }
}

#[cfg(test)]
#[path = "tests/experts.rs"]
mod tests;
