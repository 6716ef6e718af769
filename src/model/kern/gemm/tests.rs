//! Products against f64 for odd shapes and layouts; bits over batches, instruction sets and threads.

use super::super::testing::{close, everywhere, slopes, weighted, wide};
use super::super::{Exec, Level};
use super::*;
use crate::world::draw;

fn random(seed: u64, n: usize) -> Vec<f32> {
    let mut d = draw(seed, "gemm test", &[]);
    (0..n).map(|_| (d.unit() * 2.0 - 1.0) as f32).collect()
}

const SHAPES: [(usize, usize, usize); 8] =
    [(1, 1, 1), (1, 300, 17), (5, 16, 16), (7, 13, 40), (12, 256, 32), (50, 256, 24), (70, 512, 48), (200, 300, 530)];

#[test]
fn product_is_that_of_f64_for_any_shape_and_layout() {
    for (m, k, n) in SHAPES {
        let (a, b) = (random(1, m * k), random(2, k * n));
        let bt: Vec<f32> = (0..n * k).map(|i| b[i % k * n + i / k]).collect();
        let start = random(3, m * n);
        let mut want: Vec<f64> = start.iter().map(|v| f64::from(*v)).collect();
        let (a64, b64) = (wide(&a), wide(&b));
        reference::product((m, k, n), |i, p| a64[i * k + p], |p, j| b64[p * n + j], &mut want);
        let mut bits: Option<Vec<f32>> = None;
        for level in Level::available() {
            let exec = Exec::serial(level);
            for b in [Mat::rows(&b, n), Mat::transposed(&bt, k)] {
                let mut packed = PackedBuf::default();
                packed.pack(exec, k, n, b);
                let mut c = start.clone();
                gemm(exec, m, Mat::rows(&a, k), packed.view(), &mut c, n, true);
                for (x, w) in c.iter().zip(&want) {
                    assert!((f64::from(*x) - w).abs() < 3e-6 * (k as f64).sqrt().max(4.0), "{m} {k} {n}: {x} {w}");
                }
                assert_eq!(bits.get_or_insert_with(|| c.clone()), &c, "{m} {k} {n} {level:?}");
            }
        }
    }
}

#[test]
fn a_row_has_the_same_bits_in_any_batch() {
    let (m, k, n) = (64, 512, 40);
    let (a, b) = (random(4, m * k), random(5, k * n));
    for level in Level::available() {
        let exec = Exec::serial(level);
        let mut packed = PackedBuf::default();
        packed.pack(exec, k, n, Mat::rows(&b, n));
        let mut all = vec![0.0; m * n];
        gemm(exec, m, Mat::rows(&a, k), packed.view(), &mut all, n, false);
        for rows in [1, 2, 7, 32, 49] {
            let from = m - rows;
            let mut some = vec![9.0; rows * n];
            gemm(exec, rows, Mat::rows(&a[from * k..], k), packed.view(), &mut some, n, false);
            assert_eq!(some, all[from * n..], "{level:?} {rows}");
        }
        let mut row = vec![0.0; k];
        packed.column(37, &mut row);
        assert!((0..k).all(|p| row[p] == b[p * n + 37]));
    }
}

#[test]
fn weight_gradient_is_that_of_f64_and_equal_on_any_number_of_threads() {
    for (m, tokens, n) in SHAPES {
        let (a, b) = (random(6, tokens * m), random(7, tokens * n));
        let start = random(8, m * n);
        let mut want: Vec<f64> = start.iter().map(|v| f64::from(*v)).collect();
        let (a64, b64) = (wide(&a), wide(&b));
        reference::product((m, tokens, n), |i, p| a64[p * m + i], |p, j| b64[p * n + j], &mut want);
        let mut bits: Option<Vec<f32>> = None;
        for level in Level::available() {
            for threads in [1, 2, 4] {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                let mut c = start.clone();
                pool.install(|| gemm_outer(Exec::new(level, threads), tokens, (m, &a, m), (n, &b, n), &mut c));
                for (x, w) in c.iter().zip(&want) {
                    let bound = 3e-6 * (tokens as f64).sqrt().max(4.0);
                    assert!((f64::from(*x) - w).abs() < bound, "{m} {tokens} {n}: {x} {w}");
                }
                assert_eq!(bits.get_or_insert_with(|| c.clone()), &c, "{level:?} {threads}");
            }
        }
    }
}

#[test]
fn the_reference_gradient_is_the_slope_of_the_reference() {
    let shape @ (m, k, n) = (3, 4, 2);
    let (a, b, dc) = (wide(&random(9, m * k)), wide(&random(10, k * n)), wide(&random(11, m * n)));
    let (da, db) = reference::product_backward(shape, &a, &b, &dc);
    let value = |a: &[f64], b: &[f64]| {
        let mut c = vec![0.0; m * n];
        reference::product(shape, |i, p| a[i * k + p], |p, j| b[p * n + j], &mut c);
        weighted(&c, &dc)
    };
    slopes("a", &a, &da, |a| value(a, &b));
    slopes("b", &b, &db, |b| value(&a, b));
}

#[test]
fn backward_of_both_sides_is_that_of_f64() {
    for shape @ (m, k, n) in SHAPES {
        let (a, b, dc) = (random(12, m * k), random(13, k * n), random(14, m * n));
        let out = everywhere("backward", |exec| {
            let mut packed = PackedBuf::default();
            packed.pack(exec, n, k, Mat::transposed(&b, n));
            let (mut da, mut db) = (vec![f32::NAN; m * k], vec![0.0; k * n]);
            gemm(exec, m, Mat::rows(&dc, n), packed.view(), &mut da, k, false);
            gemm_outer(exec, m, (k, &a, k), (n, &dc, n), &mut db);
            vec![da, db]
        });
        let (da, db) = reference::product_backward(shape, &wide(&a), &wide(&b), &wide(&dc));
        close("da", &out[0], &da, 3e-6 * (n as f64).sqrt().max(4.0));
        close("db", &out[1], &db, 3e-6 * (m as f64).sqrt().max(4.0));
    }
}

#[test]
fn rows_apart_leave_the_gaps_alone_and_a_reused_buffer_forgets() {
    let (m, k, n, gap) = (37, 21, 50, 5);
    let (a, b) = (random(15, m * (k + gap)), random(16, k * n));
    let out = everywhere("rows apart", |exec| {
        let mut packed = PackedBuf::default();
        packed.pack(exec, 40, 90, Mat::rows(&random(17, 40 * 90), 90));
        packed.pack(exec, k, n, Mat::rows(&b, n));
        let mut c = vec![7.0; m * (n + gap)];
        gemm(exec, m, Mat::strided(&a, k + gap), packed.view(), &mut c, n + gap, false);
        vec![c]
    });
    let mut want = vec![0.0; m * n];
    let (a, b) = (wide(&a), wide(&b));
    reference::product((m, k, n), |i, p| a[i * (k + gap) + p], |p, j| b[p * n + j], &mut want);
    for (row, want) in out[0].chunks_exact(n + gap).zip(want.chunks_exact(n)) {
        close("row", &row[..n], want, 1.2e-5);
        assert!(row[n..].iter().all(|x| *x == 7.0));
    }
}
