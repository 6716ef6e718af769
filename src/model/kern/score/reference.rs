//! Log-probability and entropy of a row in f64, and their gradient.

/// (lse, logp, entropy) of one row of logits.
pub fn score(logits: &[f64], temperature: f64, target: usize) -> (f64, f64, f64) {
    let z: Vec<f64> = logits.iter().map(|l| l / temperature).collect();
    let top = z.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let lse = top + z.iter().map(|z| (z - top).exp()).sum::<f64>().ln();
    let entropy = -z.iter().filter(|z| **z > f64::NEG_INFINITY).map(|z| (z - lse).exp() * (z - lse)).sum::<f64>();
    (lse, z[target] - lse, entropy)
}

/// Gradient of `dlogp logp + dentropy entropy` with respect to the row.
pub fn score_backward(logits: &[f64], temperature: f64, target: usize, dlogp: f64, dentropy: f64) -> Vec<f64> {
    let (lse, _, entropy) = score(logits, temperature, target);
    let slope = |(j, l): (usize, &f64)| {
        if *l == f64::NEG_INFINITY {
            return 0.0;
        }
        let log_p = l / temperature - lse;
        let hit = f64::from(u8::from(j == target));
        (dlogp * (hit - log_p.exp()) - dentropy * log_p.exp() * (log_p + entropy)) / temperature
    };
    logits.iter().enumerate().map(slope).collect()
}
