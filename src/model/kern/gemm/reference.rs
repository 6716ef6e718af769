//! A product in f64, and the gradients of both sides. Matrices on the right are functions of (row, column).

/// `c[m, n] += a[m, k] b[k, n]`.
pub fn product(
    (m, k, n): (usize, usize, usize),
    a: impl Fn(usize, usize) -> f64,
    b: impl Fn(usize, usize) -> f64,
    c: &mut [f64],
) {
    for i in 0..m {
        for j in 0..n {
            c[i * n + j] += (0..k).map(|p| a(i, p) * b(p, j)).sum::<f64>();
        }
    }
}

/// (da, db) of `c = a b` for the gradient `dc` of c.
pub fn product_backward((m, k, n): (usize, usize, usize), a: &[f64], b: &[f64], dc: &[f64]) -> (Vec<f64>, Vec<f64>) {
    let (mut da, mut db) = (vec![0.0; m * k], vec![0.0; k * n]);
    for i in 0..m {
        for p in 0..k {
            for j in 0..n {
                da[i * k + p] += dc[i * n + j] * b[p * n + j];
                db[p * n + j] += dc[i * n + j] * a[i * k + p];
            }
        }
    }
    (da, db)
}
