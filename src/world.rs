//! The one home of randomness and time.
//!
//! Every random choice is `draw(seed, purpose, ids)`: a ChaCha8 stream keyed by the BLAKE3 hash of its
//! coordinates. Results therefore do not depend on thread timing, order of work or a resume.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

/// A counter-based random stream.
#[derive(Debug, Clone)]
pub struct Draw(ChaCha8Rng);

/// The stream of one purpose, e.g. `draw(seed, "sample", &[&key.to_string(), "17"])`.
pub fn draw(seed: u64, purpose: &str, ids: &[&str]) -> Draw {
    let mut hasher = blake3::Hasher::new_derive_key("coevolve 2026 draw v1");
    hasher.update(&seed.to_le_bytes());
    for part in std::iter::once(&purpose).chain(ids) {
        // Lengths keep ("ab","c") and ("a","bc") apart.
        hasher.update(&(part.len() as u64).to_le_bytes());
        hasher.update(part.as_bytes());
    }
    Draw(ChaCha8Rng::from_seed(*hasher.finalize().as_bytes()))
}

impl Draw {
    /// Uniform 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.0.next_u64()
    }

    /// Uniform in [0, 1), 53 bits.
    pub fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Uniform in 0..n without modulo bias worth mentioning (128-bit multiply); 0 when n is 0.
    pub fn below(&mut self, n: usize) -> usize {
        ((self.bits() as u128 * n as u128) >> 64) as usize
    }

    /// True with probability `p`.
    pub fn chance(&mut self, p: f64) -> bool {
        self.unit() < p
    }

    /// One element; `None` when empty.
    pub fn pick<'a, T>(&mut self, items: &'a [T]) -> Option<&'a T> {
        items.get(self.below(items.len()))
    }

    /// Fisher-Yates.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            items.swap(i, self.below(i + 1));
        }
    }

    /// Index drawn with probability proportional to `weights`; `None` when they sum to nothing.
    pub fn weighted(&mut self, weights: &[f64]) -> Option<usize> {
        let total: f64 = weights.iter().sum();
        if !total.is_finite() || total <= 0.0 {
            return None;
        }
        let mut left = self.unit() * total;
        for (i, w) in weights.iter().enumerate() {
            left -= w;
            if left < 0.0 {
                return Some(i);
            }
        }
        weights.iter().rposition(|w| *w > 0.0)
    }
}

/// Milliseconds since the Unix epoch. Only for [`crate::event::Meta`], and for the wait until a date that a server names.
pub fn now_ms() -> u64 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |d| d.as_millis() as u64)
}

/// Measures durations. Only for [`crate::event::Meta`] and statistics.
#[derive(Debug, Clone, Copy)]
pub struct Stopwatch(std::time::Instant);

impl Stopwatch {
    /// Starts now.
    pub fn start() -> Stopwatch {
        Stopwatch(std::time::Instant::now())
    }

    /// Microseconds since the start.
    pub fn micros(&self) -> u64 {
        self.0.elapsed().as_micros() as u64
    }
}

/// A random 128-bit id in hex, for naming a run. The one place where chance comes from outside: it is no fact
/// and enters no digest of facts.
pub fn new_run_id() -> String {
    use std::hash::{BuildHasher, Hasher};
    // `RandomState` is keyed from the operating system's random source.
    let word = || std::collections::hash_map::RandomState::new().build_hasher().finish();
    let seed = format!("{} {} {} {}", word(), word(), now_ms(), std::process::id());
    blake3::hash(seed.as_bytes()).to_hex()[..32].to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_depend_on_coordinates_only() {
        let a: Vec<u64> = (0..4).map(|_| draw(1, "x", &["ab", "c"]).bits()).collect();
        assert!(a.iter().all(|v| *v == a[0]));
        assert_ne!(draw(1, "x", &["ab", "c"]).bits(), draw(1, "x", &["a", "bc"]).bits());
        assert_ne!(draw(1, "x", &[]).bits(), draw(2, "x", &[]).bits());
    }

    #[test]
    fn weighted_never_picks_zero() {
        let mut d = draw(3, "w", &[]);
        for _ in 0..1000 {
            assert_eq!(d.weighted(&[0.0, 2.0, 0.0]), Some(1));
        }
        assert_eq!(d.weighted(&[0.0]), None);
    }
}
