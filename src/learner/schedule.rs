//! Learning rate over the updates.

/// Shape of the learning rate after the warm-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Schedule {
    /// Stays at the peak.
    #[default]
    Constant,
    /// Falls in a straight line to the floor.
    Linear,
    /// Falls along half a cosine to the floor.
    Cosine,
}

impl Schedule {
    /// Share of the peak for `update` (from 0). Warm-up: `(update + 1) / warmup`, so that the first update
    /// already moves. Falling shapes reach `floor` at update `total` and stay there; `total` 0 = constant.
    pub fn factor(self, update: u64, warmup: u64, total: u64, floor: f64) -> f64 {
        if update < warmup {
            return (update + 1) as f64 / warmup as f64;
        }
        if self == Schedule::Constant || total == 0 {
            return 1.0;
        }
        let span = total.saturating_sub(warmup).max(1) as f64;
        let progress = ((update - warmup) as f64 / span).min(1.0);
        let shape = match self {
            Schedule::Constant => 1.0,
            Schedule::Linear => 1.0 - progress,
            Schedule::Cosine => 0.5 * (1.0 + (std::f64::consts::PI * progress).cos()),
        };
        floor + (1.0 - floor) * shape
    }
}

#[cfg(test)]
mod tests {
    use super::Schedule::*;

    #[test]
    fn shapes_by_hand() {
        assert_eq!(Constant.factor(7, 0, 10, 0.0), 1.0);
        assert_eq!(Constant.factor(0, 4, 0, 0.0), 0.25);
        assert_eq!(Constant.factor(3, 4, 0, 0.0), 1.0);
        // Half way from update 2 to update 12.
        assert_eq!(Linear.factor(7, 2, 12, 0.0), 0.5);
        assert!((Linear.factor(7, 2, 12, 0.2) - 0.6).abs() < 1e-15);
        assert_eq!(Linear.factor(99, 2, 12, 0.2), 0.2);
        assert!((Cosine.factor(7, 2, 12, 0.0) - 0.5).abs() < 1e-15);
        // cos(pi/4) = sqrt(1/2), a quarter of the way.
        assert!((Cosine.factor(25, 0, 100, 0.0) - 0.5 * (1.0 + 0.5f64.sqrt())).abs() < 1e-15);
        assert_eq!(Linear.factor(5, 0, 0, 0.0), 1.0);
    }
}
