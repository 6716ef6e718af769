//! From logits to a token and its log-prob, with the same bits on every machine.
//!
//! Everything is plain additions, multiplications and comparisons in a fixed order (own exp and ln,
//! since those of the C library differ between versions), so a token depends on logits and draw alone.
//! Weights are f32, so that the compiler makes four or eight at a time; sums are f64.

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

/// Weights per partial sum.
const BLOCK: usize = 64;

/// Chooses tokens; keeps its buffers between calls.
#[derive(Debug, Default)]
pub struct Chooser {
    /// exp((logit - max) / temperature) per id.
    weights: Vec<f32>,
    /// Sum of each block of [`BLOCK`] weights.
    sums: Vec<f64>,
    order: Vec<u32>,
    keep: Vec<u32>,
}

impl Chooser {
    /// Chooses one id from `logits` (one per id, natural-log odds). `temperature` 0 takes the most
    /// probable, lowest id on ties. Otherwise `unit` in [0, 1) is the draw: the smallest id whose
    /// cumulative probability, in id order over the nucleus of mass `top_p`, exceeds it. The nucleus is
    /// the shortest prefix of ids by falling probability (rising id on ties) with mass >= `top_p`.
    pub fn choose(&mut self, logits: &[f32], temperature: f32, top_p: f32, unit: f64) -> Result<Choice, NotFinite> {
        let max = maximum(logits).ok_or(NotFinite)?;
        let greedy = temperature <= 0.0;
        let scale = if greedy { 1.0 } else { 1.0 / temperature };
        self.weigh(logits, max, scale);
        let total: f64 = self.sums.iter().sum();
        let id = if greedy {
            logits.iter().position(|l| *l == max).unwrap_or_default()
        } else if top_p >= 1.0 {
            self.pick(unit * total)
        } else {
            self.nucleus(f64::from(top_p.max(0.0)), total);
            let mass: f64 = self.keep.iter().map(|&i| f64::from(self.weights[i as usize])).sum();
            first_above(self.keep.iter().map(|&i| (i as usize, self.weights[i as usize])), 0.0, unit * mass)
        };
        let logprob = (f64::from(logits[id]) - f64::from(max)) * f64::from(scale) - ln(total);
        Ok(Choice { id: id as u32, logprob: logprob as f32 })
    }

    /// Fills `weights` and `sums`.
    fn weigh(&mut self, logits: &[f32], max: f32, scale: f32) {
        self.weights.resize(logits.len(), 0.0);
        for (weight, &logit) in self.weights.iter_mut().zip(logits) {
            *weight = exp((logit - max) * scale);
        }
        self.sums.clear();
        self.sums.extend(self.weights.chunks(BLOCK).map(|block| {
            let mut lanes = [0f64; 8];
            for eight in block.chunks(8) {
                for (lane, weight) in lanes.iter_mut().zip(eight) {
                    *lane += f64::from(*weight);
                }
            }
            lanes.iter().sum::<f64>()
        }));
    }

    /// Inverse CDF over all ids: first the block, then the id in it.
    fn pick(&self, target: f64) -> usize {
        let mut below = 0.0;
        let mut found = (0, 0.0);
        for (i, sum) in self.sums.iter().enumerate() {
            if *sum > 0.0 {
                found = (i, below);
                if below + sum > target {
                    break;
                }
                below += sum;
            }
        }
        let (block, below) = found;
        let weights = self.weights.iter().copied().enumerate().skip(block * BLOCK).take(BLOCK);
        first_above(weights, below, target)
    }

    /// Fills `keep` with the nucleus, in id order.
    fn nucleus(&mut self, top_p: f64, total: f64) {
        // Ids below this share sum to less than 1 - top_p, so none of them is in the nucleus.
        let least = total * (1.0 - top_p) / self.weights.len() as f64;
        self.order.clear();
        let weights = &self.weights;
        self.order.extend((0..weights.len() as u32).filter(|&i| f64::from(weights[i as usize]) >= least));
        self.order.sort_unstable_by(|&a, &b| weights[b as usize].total_cmp(&weights[a as usize]).then(a.cmp(&b)));
        self.keep.clear();
        let mut mass = 0.0;
        for &i in &self.order {
            self.keep.push(i);
            mass += f64::from(weights[i as usize]);
            if mass >= top_p * total {
                break;
            }
        }
        self.keep.sort_unstable();
    }
}

/// The largest logit; `None` for NaN anywhere, nothing at all, or no finite maximum.
fn maximum(logits: &[f32]) -> Option<f32> {
    let mut lanes = [f32::NEG_INFINITY; 8];
    let mut nan = [false; 8];
    for eight in logits.chunks(8) {
        for ((lane, nan), &logit) in lanes.iter_mut().zip(&mut nan).zip(eight) {
            *lane = if logit > *lane { logit } else { *lane };
            *nan |= logit.is_nan();
        }
    }
    let max = lanes.into_iter().fold(f32::NEG_INFINITY, |a, b| if b > a { b } else { a });
    (max.is_finite() && nan == [false; 8]).then_some(max)
}

/// First id at which the sum from `below` on exceeds `target`; the last id with weight if rounding
/// leaves none.
fn first_above(weights: impl Iterator<Item = (usize, f32)>, below: f64, target: f64) -> usize {
    let mut sum = below;
    let mut last = None;
    for (id, weight) in weights {
        if weight > 0.0 || last.is_none() {
            last = Some(id);
            sum += f64::from(weight);
            if sum > target {
                return id;
            }
        }
    }
    last.unwrap_or_default()
}

const LN2_HIGH: f64 = f64::from_bits(0x3fe6_2e42_fee0_0000);
const LN2_LOW: f64 = f64::from_bits(0x3dea_39ef_3579_3c76);

/// e^x for x <= 0, relative error below 3e-7; 0 below -86. Cephes' polynomial; branch-free.
fn exp(x: f32) -> f32 {
    // 1.5 * 2^23: adding it leaves the nearest integer in the low bits.
    const ROUND: f32 = 12_582_912.0;
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    let clamped = if x > -87.0 { x } else { -87.0 };
    let shifted = clamped * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = (clamped - n * LN2_HIGH) - n * LN2_LOW;
    let mut p = 1.987_569_1e-4;
    for c in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
        p = p * r + c;
    }
    let p = (p * r * r + r) + 1.0;
    // The integer n sits in the low bits of `shifted`; move it into the exponent field.
    let power = f32::from_bits((shifted.to_bits() << 23).wrapping_add(0x3f80_0000));
    if x < -86.0 { 0.0 } else { p * power }
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

    #[test]
    fn blocks_do_not_show() {
        // 1000 equal weights: the draw i/1000 + a bit falls to id i; the last block is not full.
        let mut chooser = Chooser::default();
        for id in [0, 1, 63, 64, 65, 127, 128, 500, 959, 960, 998, 999] {
            let unit = (f64::from(id) + 0.5) / 1000.0;
            assert_eq!(chooser.choose(&[2.5; 1000], 0.7, 1.0, unit).unwrap().id, id as u32);
        }
        // A draw that rounding puts behind everything still meets an id with weight.
        let mut logits = [f32::NEG_INFINITY; 200];
        logits[70] = 0.0;
        assert_eq!(chooser.choose(&logits, 1.0, 1.0, 1.0).unwrap().id, 70);
    }

    proptest! {
        #[test]
        fn own_exp_and_ln_equal_the_library(x in -700.0f64..0.0, y in 1e-300f64..1e300) {
            let e = x as f32 / 8.2;
            prop_assert!((f64::from(exp(e)) / f64::from(e).exp() - 1.0).abs() < 3e-7);
            prop_assert!((ln(y) - y.ln()).abs() <= 1e-15 * y.ln().abs().max(1.0));
            let near_one = 1.0 + x.abs() / 700.0;
            prop_assert!((ln(near_one) - near_one.ln()).abs() < 1e-15);
        }

        #[test]
        fn the_choice_is_the_inverse_cdf(
            logits in prop::collection::vec(-12f32..12.0, 1..300), t in 0.1f32..3.0, unit in 0f64..1.0,
        ) {
            let choice = Chooser::default().choose(&logits, t, 1.0, unit).unwrap();
            let p: Vec<f64> = logits.iter().map(|&l| (f64::from(l) / f64::from(t)).exp()).collect();
            let total: f64 = p.iter().sum();
            let below: f64 = p[..choice.id as usize].iter().sum::<f64>() / total;
            let up_to = below + p[choice.id as usize] / total;
            prop_assert!(below <= unit + 1e-6 && unit < up_to + 1e-6);
            let logprob = (p[choice.id as usize] / total).ln();
            prop_assert!((f64::from(choice.logprob) - logprob).abs() < 1e-5);
        }
    }
}
