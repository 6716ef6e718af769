//! From logits to a token and its log-prob, with the same bits on every machine.
//!
//! Everything is plain additions, multiplications and comparisons in a fixed order (own exp and ln,
//! since those of the C library differ between versions), so a token depends on logits and draw alone.
//! Weights are f32, so that the compiler makes four or eight at a time; sums are f64.

/// From which distribution tokens are sampled. The filters count one after the other, as in transformers: temperature,
/// top-k, top-p, min-p.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sampling {
    /// Divisor of the logits; 0 = the most probable token, lowest id on ties.
    pub temperature: f32,
    /// Only so many of the most probable tokens (rising id on ties); 0 = all.
    pub top_k: u32,
    /// Of those, the shortest prefix by falling probability (rising id on ties) with at least this share of their mass; in
    /// (0, 1], 1 = all.
    pub top_p: f32,
    /// Of those, the tokens with at least this share of the most probable one's probability; in [0, 1), 0 = all.
    pub min_p: f32,
}

impl Sampling {
    /// The full distribution at a temperature.
    pub fn at(temperature: f32) -> Sampling {
        Sampling { temperature, top_k: 0, top_p: 1.0, min_p: 0.0 }
    }

    /// Whether some tokens are left out.
    pub fn truncates(&self) -> bool {
        self.temperature > 0.0 && (self.top_k > 0 || self.top_p < 1.0 || self.min_p > 0.0)
    }

    /// Why this makes no sense, if so.
    pub fn fault(&self) -> Option<String> {
        let Sampling { temperature, top_p, min_p, .. } = *self;
        if temperature != 0.0 && !(MIN_TEMPERATURE..=MAX_TEMPERATURE).contains(&temperature) {
            return Some(format!(
                "temperature {temperature} is neither 0 nor in [{MIN_TEMPERATURE}, {MAX_TEMPERATURE}]"
            ));
        }
        if !(top_p > 0.0 && top_p <= 1.0) {
            return Some(format!("top_p {top_p} is not in (0, 1]"));
        }
        (!(0.0..1.0).contains(&min_p)).then(|| format!("min_p {min_p} is not in [0, 1)"))
    }
}

/// Temperatures in which f32 arithmetic is safe.
const MIN_TEMPERATURE: f32 = 1e-3;
const MAX_TEMPERATURE: f32 = 1e3;

/// A chosen token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Choice {
    /// Chosen id.
    pub id: u32,
    /// Natural log of its probability in the full distribution at the sampling temperature (at
    /// temperature 1 when the temperature is 0).
    pub logprob: f32,
    /// The same in the distribution that was sampled from, after top-k, top-p and min-p; `logprob` when nothing is left
    /// out (and at temperature 0).
    pub sampling_logprob: f32,
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
    /// Chooses one id from `logits` (one per id, natural-log odds). `unit` in [0, 1) is the draw: the smallest id whose
    /// cumulative probability, in id order over the tokens that the filters keep, exceeds it.
    pub fn choose(&mut self, logits: &[f32], sampling: &Sampling, unit: f64) -> Result<Choice, NotFinite> {
        let max = maximum(logits).ok_or(NotFinite)?;
        let greedy = sampling.temperature <= 0.0;
        let scale = if greedy { 1.0 } else { 1.0 / sampling.temperature };
        self.weigh(logits, max, scale);
        let total: f64 = self.sums.iter().sum();
        let mut mass = total;
        let id = if greedy {
            logits.iter().position(|l| *l == max).unwrap_or_default()
        } else if !sampling.truncates() {
            self.pick(unit * total)
        } else {
            self.filter(sampling, total);
            mass = self.keep.iter().map(|&i| f64::from(self.weights[i as usize])).sum();
            first_above(self.keep.iter().map(|&i| (i as usize, self.weights[i as usize])), 0.0, unit * mass)
        };
        let weight = (f64::from(logits[id]) - f64::from(max)) * f64::from(scale);
        let logprob = (weight - ln(total)) as f32;
        let sampling_logprob = if mass == total { logprob } else { (weight - ln(mass)) as f32 };
        Ok(Choice { id: id as u32, logprob, sampling_logprob })
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

    /// Fills `keep` with the tokens that the filters leave, in id order: each keeps a prefix by falling probability.
    fn filter(&mut self, sampling: &Sampling, total: f64) {
        let Chooser { weights, order, keep, .. } = self;
        let (k, top_p) = (sampling.top_k as usize, f64::from(sampling.top_p));
        order.clear();
        order.extend(0..weights.len() as u32);
        if k == 0 {
            // Ids below this share sum to less than 1 - top_p, so none of them is in the nucleus; the most probable one
            // has weight 1.
            let least = (total * (1.0 - top_p) / weights.len() as f64).max(f64::from(sampling.min_p));
            order.retain(|&i| f64::from(weights[i as usize]) >= least);
        }
        let falling = |a: &u32, b: &u32| weights[*b as usize].total_cmp(&weights[*a as usize]).then(a.cmp(b));
        if k > 0 && order.len() > k {
            order.select_nth_unstable_by(k - 1, falling);
            order.truncate(k);
        }
        order.sort_unstable_by(falling);
        let mass = if k == 0 { total } else { order.iter().map(|&i| f64::from(weights[i as usize])).sum() };
        keep.clear();
        let mut sum = 0.0;
        for &i in order.iter().take_while(|&&i| weights[i as usize] >= sampling.min_p) {
            keep.push(i);
            sum += f64::from(weights[i as usize]);
            if sum >= top_p * mass {
                break;
            }
        }
        keep.sort_unstable();
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

    fn nucleus(top_p: f32) -> Sampling {
        Sampling { top_p, ..Sampling::at(1.0) }
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
            let choice = chooser.choose(&hand_made(), &Sampling::at(1.0), unit).unwrap();
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
            let choice = chooser.choose(&hand_made(), &Sampling::at(0.5), unit).unwrap();
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
            let choice = chooser.choose(&hand_made(), &nucleus(0.5), unit).unwrap();
            assert_eq!(choice.id, id, "{unit}");
            assert!((f64::from(choice.logprob) - f64::ln(p)).abs() < 1e-6);
        }
        // A mass below the largest probability leaves one id; ties go to the lowest.
        assert_eq!(chooser.choose(&hand_made(), &nucleus(0.3), 0.999).unwrap().id, 1);
        assert_eq!(chooser.choose(&[1.0, 2.0, 2.0], &nucleus(0.1), 0.999).unwrap().id, 1);
    }

    #[test]
    fn filters_keep_prefixes_by_probability_one_after_the_other() {
        // By probability: id 1 (0.4), id 3 (0.3), id 2 (0.2), id 0 (0.1).
        let full = Sampling::at(1.0);
        for (sampling, kept) in [
            (Sampling { top_k: 2, ..full }, &[1, 3][..]),
            (Sampling { top_k: 9, ..full }, &[0, 1, 2, 3]),
            // A mass of 0.5 of the three most probable ones' 0.9 is 0.45; of 0.44, 0.396.
            (Sampling { top_k: 3, top_p: 0.5, ..full }, &[1, 3]),
            (Sampling { top_k: 3, top_p: 0.44, ..full }, &[1]),
            // 0.6 of 0.4 is 0.24; 0.5 of it 0.2, but rounding decides there.
            (Sampling { min_p: 0.6, ..full }, &[1, 3]),
            (Sampling { min_p: 0.49, ..full }, &[1, 2, 3]),
            (Sampling { top_k: 3, min_p: 0.6, ..full }, &[1, 3]),
            // Top-p counts before min-p takes away: 0.8 needs three, min-p leaves two.
            (Sampling { top_p: 0.8, min_p: 0.6, ..full }, &[1, 3]),
            // At temperature 0.5 the odds are squared: 0.36 is 0.6 of the largest before.
            (Sampling { min_p: 0.37, ..Sampling::at(0.5) }, &[1, 3]),
        ] {
            let mut chooser = Chooser::default();
            let odds: Vec<f64> =
                [0.1f64, 0.4, 0.2, 0.3].iter().map(|p| p.powf(1.0 / f64::from(sampling.temperature))).collect();
            let (total, mass) = (odds.iter().sum::<f64>(), kept.iter().map(|&i| odds[i as usize]).sum::<f64>());
            let mut below = 0.0;
            for &id in kept {
                let p = odds[id as usize] / mass;
                for unit in [below + 1e-6, below + p - 1e-6] {
                    let choice = chooser.choose(&hand_made(), &sampling, unit).unwrap();
                    assert_eq!(choice.id, id, "{sampling:?} at {unit}");
                    assert!((f64::from(choice.logprob) - (odds[id as usize] / total).ln()).abs() < 1e-6);
                    assert!((f64::from(choice.sampling_logprob) - p.ln()).abs() < 1e-6);
                }
                below += p;
            }
            assert!((below - 1.0).abs() < 1e-9);
        }
        // Ties: the lowest ids are the most probable ones.
        let two = Sampling { top_k: 2, ..full };
        assert_eq!(Chooser::default().choose(&[1.0, 2.0, 2.0, 2.0], &two, 0.999).unwrap().id, 2);
    }

    #[test]
    fn greedy_takes_the_lowest_of_equals() {
        let mut chooser = Chooser::default();
        let choice = chooser.choose(&[0.0, 3.0, 3.0, -1.0], &Sampling::at(0.0), 0.9).unwrap();
        assert_eq!(choice.id, 1);
        let total = 1.0 + 2.0 * 3f64.exp() + (-1f64).exp();
        assert!((f64::from(choice.logprob) - (3.0 - total.ln())).abs() < 1e-6);
    }

    #[test]
    fn broken_logits_are_refused() {
        let mut chooser = Chooser::default();
        for logits in [vec![], vec![0.0, f32::NAN], vec![f32::INFINITY, 0.0], vec![f32::NEG_INFINITY; 3]] {
            assert_eq!(chooser.choose(&logits, &Sampling::at(1.0), 0.5), Err(NotFinite));
        }
        // Masked ids are fine and never chosen.
        let masked = [f32::NEG_INFINITY, 0.0, f32::NEG_INFINITY];
        for unit in [0.0, 0.5, 0.999_999_999] {
            assert_eq!(
                chooser.choose(&masked, &Sampling::at(1.0), unit).unwrap(),
                Choice { id: 1, logprob: 0.0, sampling_logprob: 0.0 }
            );
        }
    }

    #[test]
    fn blocks_do_not_show() {
        // 1000 equal weights: the draw i/1000 + a bit falls to id i; the last block is not full.
        let mut chooser = Chooser::default();
        for id in [0, 1, 63, 64, 65, 127, 128, 500, 959, 960, 998, 999] {
            let unit = (f64::from(id) + 0.5) / 1000.0;
            assert_eq!(chooser.choose(&[2.5; 1000], &Sampling::at(0.7), unit).unwrap().id, id as u32);
        }
        // A draw that rounding puts behind everything still meets an id with weight.
        let mut logits = [f32::NEG_INFINITY; 200];
        logits[70] = 0.0;
        assert_eq!(chooser.choose(&logits, &Sampling::at(1.0), 1.0).unwrap().id, 70);
    }

    fn order_max(odds: &[f64]) -> usize {
        (0..odds.len()).max_by(|a, b| odds[*a].total_cmp(&odds[*b])).unwrap()
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
            let choice = Chooser::default().choose(&logits, &Sampling::at(t), unit).unwrap();
            let p: Vec<f64> = logits.iter().map(|&l| (f64::from(l) / f64::from(t)).exp()).collect();
            let total: f64 = p.iter().sum();
            let below: f64 = p[..choice.id as usize].iter().sum::<f64>() / total;
            let up_to = below + p[choice.id as usize] / total;
            prop_assert!(below <= unit + 1e-6 && unit < up_to + 1e-6);
            let logprob = (p[choice.id as usize] / total).ln();
            prop_assert!((f64::from(choice.logprob) - logprob).abs() < 1e-5);
            prop_assert_eq!(choice.logprob, choice.sampling_logprob);
        }

        /// Against the filters written down plainly; draws near a boundary may fall to either side.
        #[test]
        fn filtered_choices_are_those_of_plain_filters(
            logits in prop::collection::vec(-6f32..6.0, 1..80), t in 0.3f32..2.0, top_k in 0u32..90,
            top_p in 0.05f32..1.0, min_p in 0f32..0.9, unit in 0f64..1.0,
        ) {
            let sampling = Sampling { temperature: t, top_k, top_p, min_p };
            let choice = Chooser::default().choose(&logits, &sampling, unit).unwrap();
            let odds: Vec<f64> = logits.iter().map(|&l| (f64::from(l) / f64::from(t)).exp()).collect();
            let mut order: Vec<usize> = (0..odds.len()).collect();
            order.sort_by(|a, b| odds[*b].total_cmp(&odds[*a]).then(a.cmp(b)));
            order.truncate(if top_k == 0 { usize::MAX } else { top_k as usize });
            let mass: f64 = order.iter().map(|&i| odds[i]).sum();
            let nucleus = 1 + order
                .iter()
                .scan(0.0, |sum, &i| {
                    *sum += odds[i];
                    Some(*sum)
                })
                .take_while(|sum| *sum < f64::from(top_p) * mass)
                .count();
            order.truncate(nucleus);
            order.retain(|&i| odds[i] >= f64::from(min_p) * odds[order_max(&odds)]);
            let mass: f64 = order.iter().map(|&i| odds[i]).sum();
            order.sort_unstable();
            let at = order.iter().position(|&i| i == choice.id as usize);
            // A token on the edge of a filter may be kept by one side only.
            if let Some(at) = at {
                let below: f64 = order[..at].iter().map(|&i| odds[i]).sum::<f64>() / mass;
                let p = odds[order[at]] / mass;
                if (f64::from(choice.sampling_logprob) - p.ln()).abs() < 1e-4 {
                    prop_assert!(below <= unit + 1e-5 && unit < below + p + 1e-5);
                    return Ok(());
                }
            }
            // Then a filter's threshold must be that close to a token's odds.
            let full: f64 = odds.iter().sum();
            let close = |a: f64, b: f64| (a - b).abs() < 1e-4 * a.max(b);
            let max = odds[order_max(&odds)];
            let mut sums: Vec<f64> = odds.clone();
            sums.sort_by(|a, b| b.total_cmp(a));
            let all: f64 = sums.iter().take(if top_k == 0 { usize::MAX } else { top_k as usize }).sum();
            let mut sum = 0.0;
            let near = sums.iter().any(|o| {
                sum += o;
                close(sum, f64::from(top_p) * all) || close(*o, f64::from(min_p) * max)
            });
            prop_assert!(near, "{choice:?} of {full}");
        }
    }
}
