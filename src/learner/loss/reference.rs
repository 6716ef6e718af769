//! The loss of one sequence: per-token surrogate, KL, entropy and their derivatives.

use super::{
    CorrectionKind, CorrectionLevel, KlKind, LOG_RATIO_LIMIT, LossConfig, LossKind, Real, Summary, TokenBatch,
};

/// The configuration in the number type of the computation.
pub(super) struct Constants<'a, F> {
    config: &'a LossConfig,
    low: F,
    high: F,
    cispo_bound: F,
    delta: Option<F>,
    dual_clip: Option<F>,
    beta: F,
    limit: F,
}

impl<'a, F: Real> Constants<'a, F> {
    pub(super) fn new(config: &'a LossConfig) -> Self {
        Constants {
            config,
            low: F::of(1.0 - config.epsilon_low),
            high: F::of(1.0 + config.epsilon_high),
            cispo_bound: F::of(config.epsilon_high),
            delta: config.delta.map(F::of),
            dual_clip: config.dual_clip.map(F::of),
            beta: F::of(config.beta),
            limit: F::of(LOG_RATIO_LIMIT),
        }
    }

    /// exp of a clamped log-ratio and whether the clamp let the gradient through.
    fn ratio(&self, log_ratio: F) -> (F, bool) {
        // Comparisons are false for NaN, so a NaN passes on and is seen as non-finite later.
        if log_ratio > self.limit {
            (self.limit.exp(), false)
        } else if log_ratio < -self.limit {
            ((-self.limit).exp(), false)
        } else {
            (log_ratio.exp(), true)
        }
    }
}

/// Value and derivative of a surrogate with respect to the log-ratio.
struct Surrogate<F> {
    value: F,
    slope: F,
    clipped: bool,
    capped: bool,
}

/// `-min(min(r, delta) A, clip(r) A)`, held at `c |A|` for negative advantages.
fn clipped_surrogate<F: Real>(c: &Constants<'_, F>, log_ratio: F, advantage: F) -> Surrogate<F> {
    let (ratio, free) = c.ratio(log_ratio);
    let (bounded, over_delta) = match c.delta {
        Some(delta) if ratio > delta => (delta, true),
        _ => (ratio, false),
    };
    let inside = ratio >= c.low && ratio <= c.high;
    let clipped_ratio = if ratio < c.low {
        c.low
    } else if ratio > c.high {
        c.high
    } else {
        ratio
    };
    let (plain, clip) = (bounded * advantage, clipped_ratio * advantage);
    let passes = |on: bool| if on && free { -(ratio * advantage) } else { F::ZERO };
    let (mut value, mut slope) = if clip < plain { (-clip, passes(inside)) } else { (-plain, passes(!over_delta)) };
    let mut capped = over_delta && advantage < F::ZERO;
    if let Some(bound) = c.dual_clip
        && advantage < F::ZERO
        && value > -(bound * advantage)
    {
        (value, slope, capped) = (-(bound * advantage), F::ZERO, true);
    }
    let clipped = (ratio < c.low && advantage < F::ZERO) || (ratio > c.high && advantage > F::ZERO);
    Surrogate { value, slope, clipped, capped }
}

/// `-sg(min(r, bound)) A logp`; the slope is with respect to logp.
fn cispo<F: Real>(c: &Constants<'_, F>, log_ratio: F, advantage: F, logp: F) -> Surrogate<F> {
    let (ratio, _) = c.ratio(log_ratio);
    let over = ratio > c.cispo_bound;
    let slope = -(if over { c.cispo_bound } else { ratio } * advantage);
    let clipped = over && advantage != F::ZERO;
    Surrogate { value: slope * logp, slope, clipped, capped: false }
}

/// KL estimate and its derivative with respect to logp.
fn kl<F: Real>(c: &Constants<'_, F>, logp: F, logp_ref: F) -> (F, F) {
    let d = logp_ref - logp;
    match c.config.kl {
        KlKind::K1 => (-d, F::ONE),
        KlKind::K2 => (F::of(0.5) * d * d, -d),
        KlKind::K3 => {
            let (held, free) = if d > c.limit {
                (c.limit, false)
            } else if d < -c.limit {
                (-c.limit, false)
            } else {
                (d, true)
            };
            // e^d - 1 without the cancellation that plain exp has near 0.
            let rise = held.exp_m1();
            (rise - held, if free { -rise } else { F::ZERO })
        }
    }
}

/// The off-policy weight of a log-ratio.
fn correction_weight<F: Real>(c: &Constants<'_, F>, log_ratio: F) -> F {
    let Some(correction) = &c.config.correction else { return F::ONE };
    let (w, _) = c.ratio(log_ratio);
    let (max, min) = (F::of(correction.max), correction.min.map(F::of));
    match correction.kind {
        CorrectionKind::Tis if w > max => max,
        CorrectionKind::Tis => min.filter(|min| w < *min).unwrap_or(w),
        CorrectionKind::Mis if w > max || min.is_some_and(|min| w < min) => F::ZERO,
        CorrectionKind::Mis => w,
    }
}

/// Adds sequence `s` to the gradients and returns its summary.
pub(super) fn sequence<F: Real>(
    c: &Constants<'_, F>,
    batch: &TokenBatch<'_, F>,
    s: usize,
    dlogp: &mut [F],
    dentropy: &mut [F],
) -> Summary {
    let tokens = batch.offsets[s]..batch.offsets[s + 1];
    let trained = || tokens.clone().filter(|&t| batch.mask[t]);
    let old = |t: usize| batch.logp_old.map_or(batch.logp[t], |old| old[t]);
    let advantage = batch.advantages[s];
    let weight = F::of(batch.weights[s]);
    let count = trained().count();
    let mut summary = Summary { trained_tokens: count as u64, ..Summary::default() };
    if count == 0 {
        return summary;
    }

    let sequence_weight = match &c.config.correction {
        Some(correction) if correction.level == CorrectionLevel::Sequence => {
            let sum: f64 = trained().map(|t| batch.logp_sampler.map_or(0.0, |q| (old(t) - q[t]).get())).sum();
            Some(correction_weight(c, F::of(sum)))
        }
        _ => None,
    };
    let off_policy = |t: usize| match (sequence_weight, batch.logp_sampler) {
        (Some(w), _) => w,
        (None, Some(sampler)) => correction_weight(c, old(t) - sampler[t]),
        (None, None) => F::ONE,
    };
    let whole = (c.config.kind == LossKind::Gspo).then(|| {
        let mean = trained().map(|t| (batch.logp[t] - old(t)).get()).sum::<f64>() / count as f64;
        let surrogate = clipped_surrogate(c, F::of(mean), advantage);
        // d(mean log-ratio)/dlogp is 1/count for each of the tokens, whose weights add up.
        let weights: f64 = trained().map(|t| off_policy(t).get()).sum();
        let slope = surrogate.slope * F::of(weights / count as f64);
        (surrogate, slope)
    });
    // Without a reference there is nothing to stay close to; gpg has neither ratio nor reference.
    let reference = batch.logp_ref.filter(|_| c.config.kind != LossKind::Gpg);

    let (mut policy, mut kl_sum, mut entropy_sum) = (0.0, 0.0, 0.0);
    for t in trained() {
        let logp = batch.logp[t];
        let w = off_policy(t);
        let (value, mut slope, clipped, capped) = match (&whole, c.config.kind) {
            (Some((s, slope)), _) => (w * s.value, *slope, s.clipped, s.capped),
            (None, kind) => {
                let s = match kind {
                    LossKind::Cispo => cispo(c, logp - old(t), advantage, logp),
                    LossKind::Gpg => {
                        Surrogate { value: -(advantage * logp), slope: -advantage, clipped: false, capped: false }
                    }
                    _ => clipped_surrogate(c, logp - old(t), advantage),
                };
                (w * s.value, w * s.slope, s.clipped, s.capped)
            }
        };
        policy += value.get();
        summary.clipped += u64::from(clipped);
        summary.capped += u64::from(capped);
        if let Some(reference) = reference {
            let (value, kl_slope) = kl(c, logp, reference[t]);
            kl_sum += value.get();
            if c.config.beta != 0.0 {
                slope = slope + c.beta * kl_slope;
            }
        }
        dlogp[t] = weight * slope;
        summary.non_finite |= !dlogp[t].is_finite();
        if let Some(entropy) = batch.entropy {
            entropy_sum += entropy[t].get();
            if c.config.entropy_coef != 0.0 {
                dentropy[t] = F::of(-c.config.entropy_coef * batch.weights[s]);
            }
        }
    }
    summary.policy_loss = batch.weights[s] * policy;
    summary.loss = summary.policy_loss;
    if c.config.beta != 0.0 {
        summary.loss += batch.weights[s] * c.config.beta * kl_sum;
    }
    if c.config.entropy_coef != 0.0 {
        summary.loss -= batch.weights[s] * c.config.entropy_coef * entropy_sum;
    }
    summary.kl_sum = kl_sum;
    summary.entropy_sum = entropy_sum;
    summary
}
