//! The precision of the weights that a policy computes with.

use serde::{Deserialize, Serialize};

/// What the weights are rounded to before they are used. Products and sums are f32 in either case.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// As the optimiser holds them.
    #[default]
    F32,
    /// To the nearest bf16, ties to even. The optimiser's f32 weights are the masters: an update too small for bf16 is
    /// not lost but adds up there, and the policy that is trained is the one that a bf16 folder holds.
    Bf16,
}

impl Precision {
    /// Rounds values in place; NaN and infinities stay what they are.
    pub fn round(self, values: &mut [f32]) {
        if self == Precision::Bf16 {
            values.iter_mut().for_each(|v| *v = half::bf16::from_f32(*v).to_f32());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_go_to_the_nearest_bf16_and_ties_to_even() {
        // bf16 has 7 bits of fraction: neighbours of 1 are 1 - 2^-8 and 1 + 2^-7.
        let step = 2f32.powi(-7);
        let mut x = [1.0 + step * 0.49, 1.0 + step * 0.5, 1.0 + step * 1.5, -(1.0 + step * 0.51), f32::INFINITY, 3e38];
        Precision::F32.round(&mut x);
        assert_eq!(x[0], 1.0 + step * 0.49);
        Precision::Bf16.round(&mut x);
        assert_eq!(x, [1.0, 1.0, 1.0 + step * 2.0, -(1.0 + step), f32::INFINITY, 2f32.powi(120) * 226.0]);
        let mut nan = [f32::NAN];
        Precision::Bf16.round(&mut nan);
        assert!(nan[0].is_nan());
    }
}
