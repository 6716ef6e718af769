//! The two number types a loss is computed in.

use std::fmt::Debug;
use std::ops::{Add, Div, Mul, Neg, Sub};

/// f32 (as trained) or f64 (as checked). Sums over tokens are always f64.
pub trait Real:
    Copy
    + PartialOrd
    + Debug
    + Send
    + Sync
    + 'static
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + Neg<Output = Self>
{
    /// 0.
    const ZERO: Self;
    /// 1.
    const ONE: Self;
    /// Rounds to this type.
    fn of(x: f64) -> Self;
    /// Exact widening.
    fn get(self) -> f64;
    /// e^x.
    fn exp(self) -> Self;
    /// e^x - 1, exact near 0.
    fn exp_m1(self) -> Self;
    /// Natural logarithm.
    fn ln(self) -> Self;
    /// Neither infinite nor NaN.
    fn is_finite(self) -> bool;
}

macro_rules! real {
    ($t:ty, $of:expr, $get:expr) => {
        impl Real for $t {
            const ZERO: Self = 0.0;
            const ONE: Self = 1.0;
            fn of(x: f64) -> Self {
                $of(x)
            }
            fn get(self) -> f64 {
                $get(self)
            }
            fn exp(self) -> Self {
                <$t>::exp(self)
            }
            fn exp_m1(self) -> Self {
                <$t>::exp_m1(self)
            }
            fn ln(self) -> Self {
                <$t>::ln(self)
            }
            fn is_finite(self) -> bool {
                <$t>::is_finite(self)
            }
        }
    };
}

real!(f32, |x: f64| x as f32, f64::from);
real!(f64, |x: f64| x, |x: f64| x);
