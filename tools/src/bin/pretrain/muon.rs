//! Muon: momentum, then the nearest orthogonal matrix of the update (five Newton-Schulz steps with the
//! coefficients of Jordan et al., 2024), scaled by sqrt(rows / columns) where there are more rows.

use candle_core::{Device, Result, Tensor};

/// State of one matrix.
pub struct Muon {
    rows: usize,
    cols: usize,
    momentum: Vec<f32>,
}

impl Muon {
    /// For a `rows x cols` matrix.
    pub fn new(rows: usize, cols: usize) -> Muon {
        Muon { rows, cols, momentum: vec![0.0; rows * cols] }
    }

    /// One update in place.
    pub fn step(&mut self, weights: &mut [f32], gradient: &[f32], rate: f32) -> Result<()> {
        const MOMENTUM: f32 = 0.95;
        let mut update = Vec::with_capacity(gradient.len());
        for (m, g) in self.momentum.iter_mut().zip(gradient) {
            *m = MOMENTUM * *m + g;
            update.push(g + MOMENTUM * *m);
        }
        let norm = update.iter().map(|x| f64::from(*x) * f64::from(*x)).sum::<f64>().sqrt() as f32 + 1e-7;
        update.iter_mut().for_each(|x| *x /= norm);
        let mut x = Tensor::from_vec(update, (self.rows, self.cols), &Device::Cpu)?;
        let tall = self.rows > self.cols;
        if tall {
            x = x.t()?.contiguous()?;
        }
        for _ in 0..5 {
            let a = x.matmul(&x.t()?)?;
            let b = ((&a * -4.775)? + (a.matmul(&a)? * 2.0315)?)?;
            x = ((&x * 3.4445)? + b.matmul(&x)?)?;
        }
        if tall {
            x = x.t()?.contiguous()?;
        }
        let scale = rate * (self.rows as f32 / self.cols as f32).max(1.0).sqrt();
        for (w, u) in weights.iter_mut().zip(x.flatten_all()?.to_vec1::<f32>()?) {
            *w -= scale * u;
        }
        Ok(())
    }
}
