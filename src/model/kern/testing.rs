//! What the tests of all ops share: inputs, every way to run a kernel, comparison with f64, finite differences.

use super::{Exec, Level};
use crate::world::draw;

/// Numbers of threads that every kernel is run on.
const THREADS: [usize; 3] = [1, 2, 4];

/// Values in -1..1, the same for the same purpose.
pub fn random(purpose: &str, n: usize) -> Vec<f32> {
    let mut d = draw(17, purpose, &[]);
    (0..n).map(|_| (d.unit() * 2.0 - 1.0) as f32).collect()
}

/// The same values in f64, exactly.
pub fn wide(x: &[f32]) -> Vec<f64> {
    x.iter().map(|x| f64::from(*x)).collect()
}

/// Runs a kernel on every instruction set and number of threads, asserts that all give the same bits, and returns
/// the buffers.
pub fn everywhere(what: &str, run: impl Fn(Exec) -> Vec<Vec<f32>> + Send + Sync) -> Vec<Vec<f32>> {
    let bits =
        |x: &[Vec<f32>]| -> Vec<Vec<u32>> { x.iter().map(|x| x.iter().map(|x| x.to_bits()).collect()).collect() };
    let first = run(Exec::serial(Level::PORTABLE));
    for threads in THREADS {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        for level in Level::available() {
            let other = pool.install(|| run(Exec::new(level, threads)));
            assert!(bits(&other) == bits(&first), "{what}: other bits on {level:?} with {threads} threads");
        }
    }
    first
}

/// Asserts that every value is that of the reference, within `tolerance` of 1 + its size.
pub fn close(what: &str, got: &[f32], want: &[f64], tolerance: f64) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        let apart = (f64::from(*got) - want).abs();
        assert!(apart <= tolerance * (1.0 + want.abs()), "{what}, value {i}: {got}, reference {want}");
    }
}

/// Sum of products: a scalar of an output whose gradient with respect to that output is `by`.
pub fn weighted(x: &[f64], by: &[f64]) -> f64 {
    assert_eq!(x.len(), by.len());
    x.iter().zip(by).map(|(x, by)| x * by).sum()
}

/// Asserts that `gradient` is that of `f` at `x` by central differences.
pub fn slopes(what: &str, x: &[f64], gradient: &[f64], f: impl Fn(&[f64]) -> f64) {
    const H: f64 = 1e-5;
    assert_eq!(x.len(), gradient.len(), "{what}");
    let mut at = x.to_vec();
    for i in 0..x.len() {
        at[i] = x[i] + H;
        let above = f(&at);
        at[i] = x[i] - H;
        let slope = (above - f(&at)) / (2.0 * H);
        at[i] = x[i];
        assert!((slope - gradient[i]).abs() < 1e-7 * (1.0 + slope.abs()), "{what}, value {i}: {} {slope}", gradient[i]);
    }
}
