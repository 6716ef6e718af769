//! RMS norm of rows in f64, and its gradients.

/// (h, r) of rows `x` of `w.len()` values.
pub fn rms_norm(x: &[f64], w: &[f64], eps: f64) -> (Vec<f64>, Vec<f64>) {
    let d = w.len();
    let (mut h, mut r) = (Vec::new(), Vec::new());
    for row in x.chunks_exact(d) {
        let mean = row.iter().map(|x| x * x).sum::<f64>() / d as f64;
        let s = 1.0 / (mean + eps).sqrt();
        h.extend(row.iter().zip(w).map(|(x, w)| x * s * w));
        r.push(s);
    }
    (h, r)
}

/// (dx, dw) for the gradient `dh` of h.
pub fn rms_norm_backward(x: &[f64], w: &[f64], eps: f64, dh: &[f64]) -> (Vec<f64>, Vec<f64>) {
    let d = w.len();
    let (_, r) = rms_norm(x, w, eps);
    let (mut dx, mut dw) = (vec![0.0; x.len()], vec![0.0; d]);
    for (i, r) in r.iter().enumerate() {
        let at = i * d;
        let mean = (0..d).map(|j| dh[at + j] * w[j] * x[at + j]).sum::<f64>() / d as f64;
        for j in 0..d {
            dx[at + j] = r * dh[at + j] * w[j] - x[at + j] * r.powi(3) * mean;
            dw[j] += dh[at + j] * x[at + j] * r;
        }
    }
    (dx, dw)
}
