//! Bias of rows in f64, and its gradient.

/// y plus the bias, row by row.
pub fn add_bias(bias: &[f64], y: &[f64]) -> Vec<f64> {
    y.iter().enumerate().map(|(i, y)| y + bias[i % bias.len()]).collect()
}

/// Sums of the columns of rows of `w`: the gradient of the bias.
pub fn column_sums(w: usize, x: &[f64]) -> Vec<f64> {
    (0..w).map(|j| x.chunks_exact(w).map(|row| row[j]).sum()).collect()
}
