//! Scores against f64 on every instruction set and number of threads.

use super::super::testing::{close, everywhere, random, slopes, wide};
use super::*;
use crate::world::draw;

/// (rows, logits of a row).
const SHAPES: [(usize, usize); 6] = [(1, 1), (3, 2), (5, 8), (7, 9), (70, 331), (3, 5003)];

fn logits(n: usize, v: usize) -> Vec<f32> {
    random("logits", n * v).iter().map(|x| 6.0 * x).collect()
}

fn targets(n: usize, v: usize) -> Vec<u32> {
    let mut d = draw(17, "targets", &[]);
    (0..n).map(|_| d.below(v) as u32).collect()
}

fn columns(scored: &[Scored]) -> Vec<Vec<f32>> {
    let all = |f: fn(&Scored) -> f32| scored.iter().map(f).collect();
    vec![all(|s| s.lse), all(|s| s.logp), all(|s| s.entropy)]
}

#[test]
fn the_reference_gradient_is_the_slope_of_the_reference() {
    let x = wide(&logits(1, 7));
    let d = reference::score_backward(&x, 0.8, 3, 1.3, -0.6);
    slopes("logits", &x, &d, |x| {
        let (_, logp, entropy) = reference::score(x, 0.8, 3);
        1.3 * logp - 0.6 * entropy
    });
}

#[test]
fn scores_are_those_of_f64() {
    for (n, v) in SHAPES {
        for t in [1.0f32, 0.5, 2.0] {
            let (x, y) = (logits(n, v), targets(n, v));
            let out = everywhere("scores", |exec| {
                let mut scored = vec![Scored::default(); n];
                score(exec, v, &x, 1.0 / t, &y, &mut scored);
                columns(&scored)
            });
            let x = wide(&x);
            let row = |i: usize| reference::score(&x[i * v..(i + 1) * v], f64::from(t), y[i] as usize);
            close("lse", &out[0], &(0..n).map(|i| row(i).0).collect::<Vec<_>>(), 2e-6);
            close("logp", &out[1], &(0..n).map(|i| row(i).1).collect::<Vec<_>>(), 2e-6);
            close("entropy", &out[2], &(0..n).map(|i| row(i).2).collect::<Vec<_>>(), 4e-6);
        }
    }
}

#[test]
fn gradients_are_those_of_f64() {
    for (n, v) in SHAPES {
        for t in [1.0f32, 0.5] {
            let (x, y) = (logits(n, v), targets(n, v));
            let (dlogp, dentropy) = (random("dlogp", n), random("dentropy", n));
            for dentropy in [None, Some(&dentropy[..])] {
                let out = everywhere("gradient", |exec| {
                    let (mut scored, mut d) = (vec![Scored::default(); n], x.clone());
                    score(exec, v, &x, 1.0 / t, &y, &mut scored);
                    score_backward(exec, v, &mut d, 1.0 / t, &y, &scored, &dlogp, dentropy);
                    vec![d]
                });
                let x = wide(&x);
                let row = |i: usize| {
                    let dh = dentropy.map_or(0.0, |d| f64::from(d[i]));
                    let logits = &x[i * v..(i + 1) * v];
                    reference::score_backward(logits, f64::from(t), y[i] as usize, f64::from(dlogp[i]), dh)
                };
                close("gradient", &out[0], &(0..n).flat_map(row).collect::<Vec<_>>(), 4e-6);
            }
        }
    }
}

#[test]
fn impossible_tokens_count_for_nothing() {
    // Two tokens at 1/2 each, all others impossible, below, in and behind a vector of 8.
    for v in [3, 8, 21] {
        let mut x = vec![f32::NEG_INFINITY; v];
        (x[0], x[v - 1]) = (2.0, 2.0);
        let out = everywhere("impossible", |exec| {
            let (mut scored, mut d) = (vec![Scored::default()], x.clone());
            score(exec, v, &x, 1.0, &[0], &mut scored);
            score_backward(exec, v, &mut d, 1.0, &[0], &scored, &[2.0], Some(&[0.5]));
            [columns(&scored), vec![d]].concat()
        });
        close("lse", &out[0], &[2.0 + 2f64.ln()], 1e-6);
        close("logp and entropy", &[out[1][0], out[2][0]], &[-(2f64.ln()), 2f64.ln()], 1e-6);
        // d logp / dl is 1 - p and -p; the entropy of equals is at its top.
        let mut want = vec![0.0; v];
        (want[0], want[v - 1]) = (1.0, -1.0);
        close("gradient", &out[3], &want, 1e-6);
        assert_eq!(reference::score_backward(&wide(&x), 1.0, 0, 2.0, 0.5)[1], 0.0);
    }
}

#[test]
fn equal_logits_by_hand_and_nan_is_not_hidden() {
    let exec = super::super::Exec::serial(super::super::Level::detect());
    let mut out = [Scored::default()];
    score(exec, 10, &[4.0; 10], 1.0, &[7], &mut out);
    close("by hand", &[out[0].logp, out[0].entropy], &[-(10f64.ln()), 10f64.ln()], 1e-6);
    for at in 0..19 {
        let mut x = logits(1, 19);
        x[at] = f32::NAN;
        score(exec, 19, &x, 1.0, &[3], &mut out);
        assert!(out[0].lse.is_nan() && out[0].logp.is_nan() && out[0].entropy.is_nan(), "{at}");
    }
}
