//! Latency histograms per stage (HDR: 3 significant digits, microseconds).

use hdrhistogram::Histogram;
use std::collections::BTreeMap;

/// Histograms by name.
#[derive(Debug, Clone, Default)]
pub struct Latencies(BTreeMap<&'static str, Histogram<u64>>);

/// One line of the summary; microseconds.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct LatencyRow {
    /// Stage.
    pub stage: String,
    /// Values recorded.
    pub count: u64,
    /// Median.
    pub p50_us: u64,
    /// 90th percentile.
    pub p90_us: u64,
    /// 99th percentile.
    pub p99_us: u64,
    /// Largest.
    pub max_us: u64,
}

impl Latencies {
    /// Records one value.
    pub fn record(&mut self, stage: &'static str, micros: u64) {
        self.histogram(stage).saturating_record(micros);
    }

    /// Adds another set.
    pub fn merge(&mut self, other: &Latencies) {
        for (stage, theirs) in &other.0 {
            // Both have the same bounds, so adding cannot fail.
            let _ = self.histogram(stage).add(theirs);
        }
    }

    fn histogram(&mut self, stage: &'static str) -> &mut Histogram<u64> {
        self.0.entry(stage).or_insert_with(|| {
            // 1 us to 1 hour.
            Histogram::new_with_bounds(1, 3_600_000_000, 3).expect("invariant: constant bounds are valid")
        })
    }

    /// The summary, by stage name.
    pub fn rows(&self) -> Vec<LatencyRow> {
        self.0
            .iter()
            .map(|(stage, h)| LatencyRow {
                stage: stage.to_string(),
                count: h.len(),
                p50_us: h.value_at_quantile(0.5),
                p90_us: h.value_at_quantile(0.9),
                p99_us: h.value_at_quantile(0.99),
                max_us: h.max(),
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_of_a_known_set() {
        let (mut a, mut b) = (Latencies::default(), Latencies::default());
        for v in 1..=50 {
            a.record("x", v);
        }
        for v in 51..=100 {
            b.record("x", v);
        }
        b.record("y", 7);
        a.merge(&b);
        let rows = a.rows();
        assert_eq!(rows.len(), 2);
        assert_eq!((rows[0].count, rows[0].p50_us, rows[0].p90_us, rows[0].max_us), (100, 50, 90, 100));
        assert_eq!((rows[1].stage.as_str(), rows[1].p99_us), ("y", 7));
    }
}
