//! From logits to a token and its log-prob, with the same bits on every machine.
//!
//! Everything is additions, multiplications and comparisons in f64 in id order (own exp and ln, since
//! those of the C library differ between versions), so a token depends on logits and draw alone.

/// How to choose.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Choice {
    /// Chosen id.
    pub id: u32,
    /// Natural log of its probability in the full distribution at the sampling temperature (at
    /// temperature 1 when the temperature is 0).
    pub logprob: f32,
}

/// The logits hold NaN or no finite maximum.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the logits are not finite")]
pub struct NotFinite;

/// Chooses tokens; keeps its buffers between calls.
#[derive(Debug, Default)]
pub struct Chooser {
    weights: Vec<f64>,
    order: Vec<u32>,
    keep: Vec<u32>,
}

impl Chooser {
    /// Chooses one id from `logits` (one per id, natural-log odds). `temperature` 0 takes the most
    /// probable, lowest id on ties. Otherwise `unit` in [0, 1) is the draw: the smallest id whose
    /// cumulative probability, in id order over the nucleus of mass `top_p`, exceeds it. The nucleus is
    /// the shortest prefix of ids by falling probability (rising id on ties) with mass >= `top_p`.
    pub fn choose(&mut self, logits: &[f32], temperature: f32, top_p: f32, unit: f64) -> Result<Choice, NotFinite> {
        let mut best = 0;
        let mut max = f32::NEG_INFINITY;
        let mut nan = logits.is_empty();
        for (id, &logit) in logits.iter().enumerate() {
            nan |= logit.is_nan();
            if logit > max {
                max = logit;
                best = id;
            }
        }
        if nan || !max.is_finite() {
            return Err(NotFinite);
        }
        let greedy = temperature <= 0.0;
        let scale = if greedy { 1.0 } else { 1.0 / f64::from(temperature) };
        let max = f64::from(max);
        self.weights.clear();
        self.weights.extend(logits.iter().map(|&logit| exp((f64::from(logit) - max) * scale)));
        let total: f64 = self.weights.iter().sum();
        let id = if greedy {
            best
        } else if top_p >= 1.0 {
            pick(self.weights.iter().copied().enumerate(), unit * total)
        } else {
            self.nucleus(f64::from(top_p.max(0.0)), total);
            let mass: f64 = self.keep.iter().map(|&i| self.weights[i as usize]).sum();
            pick(self.keep.iter().map(|&i| (i as usize, self.weights[i as usize])), unit * mass)
        };
        let logprob = (f64::from(logits[id]) - max) * scale - ln(total);
        Ok(Choice { id: id as u32, logprob: logprob as f32 })
    }

    /// Fills `keep` with the nucleus, in id order.
    fn nucleus(&mut self, top_p: f64, total: f64) {
        // Ids below this share sum to less than 1 - top_p, so none of them is in the nucleus.
        let least = total * (1.0 - top_p) / self.weights.len() as f64;
        self.order.clear();
        let weights = &self.weights;
        self.order.extend((0..weights.len() as u32).filter(|&i| weights[i as usize] >= least));
        self.order.sort_unstable_by(|&a, &b| weights[b as usize].total_cmp(&weights[a as usize]).then(a.cmp(&b)));
        self.keep.clear();
        let mut mass = 0.0;
        for &i in &self.order {
            self.keep.push(i);
            mass += weights[i as usize];
            if mass >= top_p * total {
                break;
            }
        }
        self.keep.sort_unstable();
    }
}

/// First id whose running sum exceeds `target`; the last id with weight if rounding leaves none.
fn pick(weights: impl Iterator<Item = (usize, f64)>, target: f64) -> usize {
    let mut sum = 0.0;
    let mut last = 0;
    for (id, weight) in weights {
        if weight > 0.0 {
            last = id;
            sum += weight;
            if sum > target {
                return id;
            }
        }
    }
    last
}

const LN2_HIGH: f64 = f64::from_bits(0x3fe6_2e42_fee0_0000);
const LN2_LOW: f64 = f64::from_bits(0x3dea_39ef_3579_3c76);

/// e^x for x <= 0, relative error below 1e-14; 0 below -700.
fn exp(x: f64) -> f64 {
    // 1.5 * 2^52: adding it leaves the nearest integer in the low bits.
    const ROUND: f64 = 6_755_399_441_055_744.0;
    let clamped = x.max(-708.0);
    let shifted = clamped * std::f64::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = (clamped - n * LN2_HIGH) - n * LN2_LOW;
    // Taylor to degree 13 on |r| <= ln(2)/2: the first left-out term is below 4e-18.
    const C: [f64; 14] = [
        1.0,
        1.0,
        1.0 / 2.0,
        1.0 / 6.0,
        1.0 / 24.0,
        1.0 / 120.0,
        1.0 / 720.0,
        1.0 / 5040.0,
        1.0 / 40320.0,
        1.0 / 362_880.0,
        1.0 / 3_628_800.0,
        1.0 / 39_916_800.0,
        1.0 / 479_001_600.0,
        1.0 / 6_227_020_800.0,
    ];
    let mut p = C[13];
    for c in C[..13].iter().rev() {
        p = p * r + c;
    }
    // The integer n sits in the low bits of `shifted`; move it into the exponent field.
    let power = f64::from_bits((shifted.to_bits().wrapping_add(1023) & 0x7ff) << 52);
    if x < -700.0 { 0.0 } else { p * power }
}

/// Natural logarithm of a positive normal number, absolute error below 1e-14 near 1.
fn ln(x: f64) -> f64 {
    let bits = x.to_bits();
    let mut exponent = ((bits >> 52) & 0x7ff) as i64 - 1023;
    let mut mantissa = f64::from_bits((bits & 0x000f_ffff_ffff_ffff) | (1023 << 52));
    if mantissa > std::f64::consts::SQRT_2 {
        mantissa *= 0.5;
        exponent += 1;
    }
    // ln m = 2 atanh(s), |s| <= 0.1716: eleven terms leave 1e-18.
    let s = (mantissa - 1.0) / (mantissa + 1.0);
    let z = s * s;
    let mut p = 0.0;
    for k in (0..11).rev() {
        p = p * z + 1.0 / (2 * k + 1) as f64;
    }
    let n = exponent as f64;
    n * LN2_HIGH + (n * LN2_LOW + 2.0 * s * p)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Logits of the distribution 0.1, 0.4, 0.2, 0.3.
    fn hand_made() -> Vec<f32> {
        [0.1f64, 0.4, 0.2, 0.3].iter().map(|p| p.ln() as f32).collect()
    }

    #[test]
    fn inverse_cdf_in_id_order() {
        let mut chooser = Chooser::default();
        // Cumulative 0.1, 0.5, 0.7, 1.0; draws just inside each interval.
        for (unit, id, p) in
            [(0.0, 0, 0.1), (0.0999, 0, 0.1), (0.1001, 1, 0.4), (0.4999, 1, 0.4), (0.5001, 2, 0.2), (0.6999, 2, 0.2)]
                .into_iter()
                .chain([(0.7001, 3, 0.3), (0.999_999, 3, 0.3)])
        {
            let choice = chooser.choose(&hand_made(), 1.0, 1.0, unit).unwrap();
            assert_eq!(choice.id, id, "{unit}");
            assert!((f64::from(choice.logprob) - f64::ln(p)).abs() < 1e-6);
        }
    }

    #[test]
    fn temperature_reshapes_and_logprob_follows() {
        // T = 0.5 squares: 0.01, 0.16, 0.04, 0.09 of 0.30.
        let mut chooser = Chooser::default();
        for (unit, id, p) in [(0.033, 0, 1.0 / 30.0), (0.034, 1, 16.0 / 30.0), (0.566, 1, 16.0 / 30.0)]
            .into_iter()
            .chain([(0.567, 2, 4.0 / 30.0), (0.701, 3, 0.3)])
        {
            let choice = chooser.choose(&hand_made(), 0.5, 1.0, unit).unwrap();
            assert_eq!(choice.id, id, "{unit}");
            assert!((f64::from(choice.logprob) - f64::ln(p)).abs() < 1e-6);
        }
    }

    #[test]
    fn nucleus_keeps_the_crossing_id_and_the_full_logprob() {
        let mut chooser = Chooser::default();
        // By probability: id 1 (0.4), id 3 (0.3), id 2 (0.2), id 0. Mass 0.5 needs ids 1 and 3; in id
        // order their renormalised cumulative is 4/7, 1.
        for (unit, id, p) in [(0.0, 1, 0.4), (0.571, 1, 0.4), (0.572, 3, 0.3), (0.999, 3, 0.3)] {
            let choice = chooser.choose(&hand_made(), 1.0, 0.5, unit).unwrap();
            assert_eq!(choice.id, id, "{unit}");
            assert!((f64::from(choice.logprob) - f64::ln(p)).abs() < 1e-6);
        }
        // A mass below the largest probability leaves one id; ties go to the lowest.
        assert_eq!(chooser.choose(&hand_made(), 1.0, 0.3, 0.999).unwrap().id, 1);
        assert_eq!(chooser.choose(&[1.0, 2.0, 2.0], 1.0, 0.1, 0.999).unwrap().id, 1);
    }

    #[test]
    fn greedy_takes_the_lowest_of_equals() {
        let mut chooser = Chooser::default();
        let choice = chooser.choose(&[0.0, 3.0, 3.0, -1.0], 0.0, 1.0, 0.9).unwrap();
        assert_eq!(choice.id, 1);
        let total = 1.0 + 2.0 * 3f64.exp() + (-1f64).exp();
        assert!((f64::from(choice.logprob) - (3.0 - total.ln())).abs() < 1e-6);
    }

    #[test]
    fn broken_logits_are_refused() {
        let mut chooser = Chooser::default();
        for logits in [vec![], vec![0.0, f32::NAN], vec![f32::INFINITY, 0.0], vec![f32::NEG_INFINITY; 3]] {
            assert_eq!(chooser.choose(&logits, 1.0, 1.0, 0.5), Err(NotFinite));
        }
        // Masked ids are fine and never chosen.
        let masked = [f32::NEG_INFINITY, 0.0, f32::NEG_INFINITY];
        for unit in [0.0, 0.5, 0.999_999_999] {
            assert_eq!(chooser.choose(&masked, 1.0, 1.0, unit).unwrap(), Choice { id: 1, logprob: 0.0 });
        }
    }

    proptest! {
        #[test]
        fn own_exp_and_ln_equal_the_library(x in -699.0f64..0.0, y in 1e-300f64..1e300) {
            prop_assert!((exp(x) / x.exp() - 1.0).abs() < 1e-14);
            prop_assert!((ln(y) - y.ln()).abs() <= 1e-15 * y.ln().abs().max(1.0));
            let near_one = 1.0 + x.abs() / 700.0;
            prop_assert!((ln(near_one) - near_one.ln()).abs() < 1e-15);
        }

        #[test]
        fn the_choice_is_the_inverse_cdf(
            logits in prop::collection::vec(-12f32..12.0, 1..80), t in 0.1f32..3.0, unit in 0f64..1.0,
        ) {
            let choice = Chooser::default().choose(&logits, t, 1.0, unit).unwrap();
            let p: Vec<f64> = logits.iter().map(|&l| (f64::from(l) / f64::from(t)).exp()).collect();
            let total: f64 = p.iter().sum();
            let below: f64 = p[..choice.id as usize].iter().sum::<f64>() / total;
            let up_to = below + p[choice.id as usize] / total;
            prop_assert!(below <= unit + 1e-12 && unit < up_to + 1e-12);
            let logprob = (p[choice.id as usize] / total).ln();
            prop_assert!((f64::from(choice.logprob) - logprob).abs() < 1e-5);
        }
    }
}
