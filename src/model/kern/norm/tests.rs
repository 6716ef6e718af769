//! RMS norm against f64 on every instruction set and number of threads.

use super::super::testing::{close, everywhere, random, slopes, weighted, wide};
use super::super::{Exec, Partials};
use super::*;

const EPS: f32 = 1e-5;

/// (rows, width): below, at and above vectors of 8 and blocks of 64 rows.
const SHAPES: [(usize, usize); 6] = [(1, 1), (3, 7), (5, 16), (64, 33), (65, 96), (200, 200)];

#[test]
fn the_reference_gradient_is_the_slope_of_the_reference() {
    let (n, d) = (3, 5);
    let (x, w, dh) = (wide(&random("x", n * d)), wide(&random("w", d)), wide(&random("dh", n * d)));
    let (dx, dw) = reference::rms_norm_backward(&x, &w, 1e-2, &dh);
    slopes("dx", &x, &dx, |x| weighted(&reference::rms_norm(x, &w, 1e-2).0, &dh));
    slopes("dw", &w, &dw, |w| weighted(&reference::rms_norm(&x, w, 1e-2).0, &dh));
}

#[test]
fn forward_and_again_are_those_of_f64() {
    for (n, d) in SHAPES {
        let (x, w) = (random("x", n * d), random("w", d));
        let out = everywhere("norm", |exec| {
            let (mut h, mut r, mut again) = (vec![f32::NAN; n * d], vec![f32::NAN; n], vec![f32::NAN; n * d]);
            rms_norm(exec, &x, &w, EPS, &mut h, &mut r);
            rms_norm_again(exec, &x, &w, &r, &mut again);
            vec![h, r, again]
        });
        let (h, r) = reference::rms_norm(&wide(&x), &wide(&w), f64::from(EPS));
        close("h", &out[0], &h, 1e-6);
        close("r", &out[1], &r, 1e-6);
        assert_eq!(out[0], out[2], "again gives the same bits");
    }
}

#[test]
fn backward_is_that_of_f64_and_adds_where_asked() {
    for (n, d) in SHAPES {
        let (x, w, dh) = (random("x", n * d), random("w", d), random("dh", n * d));
        let (old_x, old_w) = (random("old dx", n * d), random("old dw", d));
        let mut r = vec![0.0; n];
        rms_norm(Exec::serial(crate::model::kern::Level::PORTABLE), &x, &w, EPS, &mut vec![0.0; n * d], &mut r);
        let (dx, dw) = reference::rms_norm_backward(&wide(&x), &wide(&w), f64::from(EPS), &wide(&dh));
        for add in [false, true] {
            let out = everywhere("norm backward", |exec| {
                let (mut gx, mut gw, mut partials) = (old_x.clone(), old_w.clone(), Partials::default());
                rms_norm_backward(exec, (&x, &w, &r), &dh, &mut gx, add, Some((&mut gw, &mut partials)));
                let mut frozen = old_x.clone();
                rms_norm_backward(exec, (&x, &w, &r), &dh, &mut frozen, add, None);
                assert_eq!(gx, frozen, "dx does not depend on dw");
                vec![gx, gw]
            });
            let plus = |old: &[f32], new: &[f64], add: bool| -> Vec<f64> {
                new.iter().zip(old).map(|(new, old)| new + if add { f64::from(*old) } else { 0.0 }).collect()
            };
            // A row of one value is nearly all sign: its gradient is a difference of equals, of size r.
            let bound = if d == 1 { 1e-5 } else { 2e-6 };
            close("dx", &out[0], &plus(&old_x, &dx, add), bound);
            close("dw", &out[1], &plus(&old_w, &dw, true), 4e-6);
        }
    }
}

#[test]
fn by_hand() {
    // mean(3^2, 4^2) = 12.5; without epsilon r = 1 / sqrt 12.5.
    let (mut h, mut r) = ([0.0; 2], [0.0; 1]);
    rms_norm(Exec::serial(crate::model::kern::Level::PORTABLE), &[3.0, 4.0], &[1.0, 2.0], 0.0, &mut h, &mut r);
    close("h", &h, &[3.0 / 12.5f64.sqrt(), 8.0 / 12.5f64.sqrt()], 1e-7);
}
