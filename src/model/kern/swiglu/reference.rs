//! SwiGLU of rows `[gate f | up f]` in f64, and its gradient.

fn sigma(g: f64) -> f64 {
    1.0 / (1.0 + (-g).exp())
}

/// act of rows.
pub fn swiglu(f: usize, gate_up: &[f64]) -> Vec<f64> {
    let row = |row: &[f64]| -> Vec<f64> { (0..f).map(|j| row[j] * sigma(row[j]) * row[f + j]).collect() };
    gate_up.chunks_exact(2 * f).flat_map(row).collect()
}

/// Gradient of the rows for the gradient `dact` of act.
pub fn swiglu_backward(f: usize, gate_up: &[f64], dact: &[f64]) -> Vec<f64> {
    let mut d = Vec::new();
    for (row, dact) in gate_up.chunks_exact(2 * f).zip(dact.chunks_exact(f)) {
        d.extend((0..f).map(|j| {
            let (g, u, s) = (row[j], row[f + j], sigma(row[j]));
            dact[j] * u * (s + g * s * (1.0 - s))
        }));
        d.extend((0..f).map(|j| dact[j] * row[j] * sigma(row[j])));
    }
    d
}
