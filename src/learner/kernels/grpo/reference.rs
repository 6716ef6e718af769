//! One row of the fused loss, forward and backward, in f32 or f64. The loss between them is
//! [`crate::learner::loss::loss`].

use crate::learner::loss::Real;

/// (log-prob of the target, entropy, lse) of one row of logits; sums in f64.
pub(super) fn row<F: Real>(logits: &[F], target: usize, inverse_temperature: F) -> (F, F, F) {
    let top = logits.iter().copied().fold(logits[target], |m, x| if x > m { x } else { m });
    let (mut sum, mut weighted) = (0f64, 0f64);
    for x in logits {
        let d = (*x - top) * inverse_temperature;
        let e = d.exp();
        sum += e.get();
        // An impossible token (logit -inf) has e = 0 and d = -inf: no share in the entropy.
        if e != F::ZERO {
            weighted += (e * d).get();
        }
    }
    let log_sum = sum.ln();
    let logp = (logits[target] - top) * inverse_temperature - F::of(log_sum);
    (logp, F::of(log_sum - weighted / sum), top * inverse_temperature + F::of(log_sum))
}

/// Turns a row of logits into dL/dlogits.
pub(super) fn row_gradient<F: Real>(
    logits: &mut [F],
    target: usize,
    inverse_temperature: F,
    (entropy, lse): (F, F),
    (dlogp, dentropy): (F, F),
) {
    for x in logits.iter_mut() {
        let log_p = *x * inverse_temperature - lse;
        let p = log_p.exp();
        let through_entropy = if p == F::ZERO { F::ZERO } else { dentropy * p * (log_p + entropy) };
        *x = -inverse_temperature * (dlogp * p + through_entropy);
    }
    logits[target] = logits[target] + inverse_temperature * dlogp;
}
