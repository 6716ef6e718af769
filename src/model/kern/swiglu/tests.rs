//! SwiGLU against f64 on every instruction set and number of threads.

use super::super::testing::{close, everywhere, random, slopes, weighted, wide};
use super::*;

/// (rows, width): below, at and above vectors of 8 and blocks of 64 rows.
const SHAPES: [(usize, usize); 5] = [(1, 1), (3, 7), (64, 16), (65, 33), (130, 200)];

/// Gates and ups in -8..8.
fn rows(n: usize, f: usize) -> Vec<f32> {
    random("gate and up", n * 2 * f).iter().map(|x| 8.0 * x).collect()
}

#[test]
fn the_reference_gradient_is_the_slope_of_the_reference() {
    let (n, f) = (2, 5);
    let (x, d) = (wide(&rows(n, f)), wide(&random("d", n * f)));
    slopes("gate and up", &x, &reference::swiglu_backward(f, &x, &d), |x| weighted(&reference::swiglu(f, x), &d));
}

#[test]
fn forward_and_backward_are_those_of_f64() {
    for (n, f) in SHAPES {
        let (x, d) = (rows(n, f), random("d", n * f));
        let out = everywhere("swiglu", |exec| {
            let (mut act, mut again, mut dx) = (vec![f32::NAN; n * f], d.clone(), vec![f32::NAN; n * 2 * f]);
            swiglu(exec, n, f, &x, &mut act);
            swiglu_backward(exec, n, f, &x, &mut again, &mut dx);
            vec![act, again, dx]
        });
        let act = reference::swiglu(f, &wide(&x));
        close("act", &out[0], &act, 1e-6);
        close("act of the backward", &out[1], &act, 1e-6);
        close("gradient", &out[2], &reference::swiglu_backward(f, &wide(&x), &wide(&d)), 2e-6);
    }
}

#[test]
fn far_gates_are_identity_and_zero() {
    let x = [200.0, -200.0, 0.0, 3.0, 3.0, 3.0];
    let out = everywhere("far gates", |exec| {
        let (mut act, mut d, mut dx) = (vec![f32::NAN; 3], vec![1.0; 3], vec![f32::NAN; 6]);
        swiglu(exec, 1, 3, &x, &mut act);
        swiglu_backward(exec, 1, 3, &x, &mut d, &mut dx);
        vec![act, dx]
    });
    // silu(200) = 200 with slope 1, silu(-200) = 0 with slope 0, silu(0) = 0 with slope 1/2.
    close("act", &out[0], &[600.0, 0.0, 0.0], 1e-6);
    close("gradient", &out[1], &[3.0, 0.0, 1.5, 200.0, 0.0, 0.0], 1e-6);
}
