//! Bias and column sums against f64 on every instruction set and number of threads.

use super::super::Partials;
use super::super::testing::{close, everywhere, random, slopes, weighted, wide};
use super::*;

/// (rows, width): below, at and above vectors of 8 and blocks of 64 rows.
const SHAPES: [(usize, usize); 6] = [(1, 1), (3, 7), (64, 16), (65, 33), (129, 8), (200, 100)];

#[test]
fn the_reference_gradient_is_the_slope_of_the_reference() {
    let (n, w) = (4, 3);
    let (y, b, d) = (wide(&random("y", n * w)), wide(&random("b", w)), wide(&random("d", n * w)));
    slopes("bias", &b, &reference::column_sums(w, &d), |b| weighted(&reference::add_bias(b, &y), &d));
}

#[test]
fn rows_and_column_sums_are_those_of_f64() {
    for (n, w) in SHAPES {
        let (y, b, old) = (random("y", n * w), random("b", w), random("old", w));
        // The first call leaves partial sums of another shape behind.
        let out = everywhere("bias", |exec| {
            let (mut rows, mut sums, mut partials) = (y.clone(), old.clone(), Partials::default());
            add_bias(exec, n, &b, &mut rows);
            add_column_sums(exec, 2, &[1.0; 6], &mut partials, &mut [0.0; 3]);
            add_column_sums(exec, n, &y, &mut partials, &mut sums);
            vec![rows, sums]
        });
        close("rows", &out[0], &reference::add_bias(&wide(&b), &wide(&y)), 1e-7);
        let sums = reference::column_sums(w, &wide(&y));
        let want: Vec<f64> = sums.iter().zip(&old).map(|(s, old)| s + f64::from(*old)).collect();
        // Up to 200 roundings of partial sums below 16 in f32, 5e-7 each, which mostly cancel.
        close("column sums", &out[1], &want, 1e-5);
    }
}
