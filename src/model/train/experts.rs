//! Backward of a layer's mixture of experts.
//!
//! With `y_e` what expert e answers and `g` the gradient of the output: `dw_e = <g, y_e>`, and the expert's
//! own gradient comes from `w_e g`. Which experts are chosen has no gradient. An expert without a row in the
//! batch gets a gradient of exactly zero.

use super::super::config::MoeConfig;
use super::super::experts::{ExpertActs, ExpertScratch, Routes, gather};
use super::super::kern::{Exec, Mat, PackedBuf, gemm, swiglu, swiglu_backward};
use super::super::weights::{FoldBuffers, Linear, Weights};
use super::layers::{project_back, room};

/// Adds the layer's weight gradients to `grad` (none with adapters) and overwrites `dh` with the gradient of
/// the normalised input `h`, from the gradient `dx` of the output; all `[n, d]`.
#[allow(clippy::too_many_arguments)]
pub(super) fn backward(
    exec: Exec,
    w: &Weights<'_>,
    (layer, moe): (usize, &MoeConfig),
    (n, h, dx): (usize, &[f32], &[f32]),
    dh: &mut [f32],
    acts: &ExpertActs,
    s: &mut ExpertScratch,
    grad: &mut [f32],
    (fold, packed): (&mut FoldBuffers, &mut PackedBuf),
) {
    let (d, f, experts) = (w.config.hidden_size, moe.moe_intermediate_size, moe.num_experts);
    dh.fill(0.0);
    let dweights = room(&mut s.dweights, acts.routes.len());
    for (e, answers, rows) in acts.routes.busy() {
        let m = rows.len();
        let (y, hid) = (room(&mut s.y, m * d), room(&mut s.h, m * d));
        let (act, dact, dgu) = (room(&mut s.act, m * f), room(&mut s.dact, m * f), room(&mut s.dgu, m * 2 * f));
        let gu = &acts.gu[answers.start * 2 * f..answers.end * 2 * f];
        // <g, y> = <g, down act> = <g down, act>: no need to compute y again.
        gather(dx, d, rows, y);
        project_back(exec, w, (layer, Linear::ExpertDown(e)), (m, y), dact, fold, packed);
        swiglu(exec, m, f, gu, act);
        for (i, answer) in answers.enumerate() {
            let weight = acts.routes.weights[answer];
            let (act, dact) = (&act[i * f..(i + 1) * f], &mut dact[i * f..(i + 1) * f]);
            let dot: f64 = act.iter().zip(&*dact).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
            dweights[answer] = dot as f32;
            dact.iter_mut().for_each(|v| *v *= weight);
            y[i * d..(i + 1) * d].iter_mut().for_each(|v| *v *= weight);
        }
        w.add_gradient(exec, layer, Linear::ExpertDown(e), (m, act, y), grad, fold);
        swiglu_backward(exec, m, f, gu, dact, dgu);
        gather(h, d, rows, hid);
        w.add_gradient(exec, layer, Linear::ExpertGateUp(e), (m, hid, dgu), grad, fold);
        project_back(exec, w, (layer, Linear::ExpertGateUp(e)), (m, dgu), hid, fold, packed);
        for (from, row) in hid.chunks_exact(d).zip(rows) {
            let to = &mut dh[*row as usize * d..][..d];
            to.iter_mut().zip(from).for_each(|(to, from)| *to += from);
        }
    }
    let dlogits = room(&mut s.logits, n * experts);
    route_back(moe, &acts.routes, dweights, dlogits);
    w.add_gradient(exec, layer, Linear::Router, (n, h, dlogits), grad, fold);
    let weight = w.slice(Linear::Router.offset(w.layout, layer), experts * d);
    packed.pack(exec, experts, d, Mat::rows(weight, d));
    gemm(exec, n, Mat::rows(dlogits, experts), packed.view(), dh, d, true);
}

/// Gradient of the router's logits from that of the answers' weights. With q the gradient of p (zero for
/// experts that were not chosen), `dz_e = p_e (q_e - sum q p)`; with `w = p / sum over S of p`,
/// `q_e = (dw_e - sum dw w) / sum over S of p`.
fn route_back(moe: &MoeConfig, routes: &Routes, dweights: &[f32], dlogits: &mut [f32]) {
    let experts = moe.num_experts;
    dlogits.fill(0.0);
    for ((e, row), dw) in routes.answers().zip(dweights) {
        dlogits[row * experts + e] = *dw;
    }
    let mut chosen = vec![false; dlogits.len()];
    routes.answers().for_each(|(e, row)| chosen[row * experts + e] = true);
    let rows = dlogits.chunks_exact_mut(experts).zip(routes.probs.chunks_exact(experts));
    for ((dz, p), chosen) in rows.zip(chosen.chunks_exact(experts)) {
        let sum = |f: &dyn Fn(usize) -> f64| (0..experts).filter(|e| chosen[*e]).map(f).sum::<f64>();
        let (p, dw) = (|e: usize| f64::from(p[e]), dz.to_vec());
        let dw = |e: usize| f64::from(dw[e]);
        let (whole, mean) = if moe.norm_topk_prob {
            let whole = sum(&p);
            (whole, sum(&|e| dw(e) * p(e)) / whole)
        } else {
            (1.0, 0.0)
        };
        let q = |e: usize| (dw(e) - mean) / whole;
        let drift = sum(&|e| q(e) * p(e));
        for (e, dz) in dz.iter_mut().enumerate() {
            *dz = (p(e) * (if chosen[e] { q(e) } else { 0.0 } - drift)) as f32;
        }
    }
}
