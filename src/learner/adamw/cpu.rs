//! AdamW and the gradient norm on the CPU: f32, blocks in parallel, same bits for any number of threads.

use super::AdamWConfig;
use rayon::prelude::*;

/// Elements per task; part of the definition of [`grad_norm`]'s rounding, so it must not change.
pub(super) const BLOCK: usize = 1 << 15;

/// One update of (parameters, first moments, second moments); `step` counts from 1.
pub(super) fn update(
    (parameters, m, v): (&mut [f32], &mut [f32], &mut [f32]),
    gradient: &[f32],
    scale: f64,
    learning_rate: f64,
    step: u64,
    config: &AdamWConfig,
) {
    let t = step as f64;
    let (b1, b2) = (config.beta1 as f32, config.beta2 as f32);
    let (a1, a2) = ((1.0 - config.beta1) as f32, (1.0 - config.beta2) as f32);
    let rate = (learning_rate / (1.0 - config.beta1.powf(t))) as f32;
    let root = (1.0 / (1.0 - config.beta2.powf(t)).sqrt()) as f32;
    let keep = (1.0 - learning_rate * config.weight_decay) as f32;
    let (eps, scale) = (config.eps as f32, scale as f32);
    (parameters.par_chunks_mut(BLOCK), gradient.par_chunks(BLOCK))
        .into_par_iter()
        .zip((m.par_chunks_mut(BLOCK), v.par_chunks_mut(BLOCK)))
        .for_each(|((p, g), (m, v))| {
            for (((p, g), m), v) in p.iter_mut().zip(g).zip(m).zip(v) {
                let g = g * scale;
                *m = b1 * *m + a1 * g;
                *v = b2 * *v + a2 * (g * g);
                *p = *p * keep - rate * (*m / (v.sqrt() * root + eps));
            }
        });
}

/// Euclidean norm of a gradient, the same for any number of threads.
pub fn grad_norm(gradient: &[f32]) -> f64 {
    let partial: Vec<f64> =
        gradient.par_chunks(BLOCK).map(|block| block.iter().map(|g| f64::from(*g) * f64::from(*g)).sum()).collect();
    partial.iter().sum::<f64>().sqrt()
}
