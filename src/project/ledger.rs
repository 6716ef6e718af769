//! Policy versions and the weights behind them.

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::series::Series;
use crate::event::digest::Digest;
use crate::event::{ArchivedGradientStepTaken, ArchivedPolicyPublished};

/// A hash of weights as the log holds it: hex, or whatever else a learner calls its weights. Printed and in JSON it is
/// that text; a digest is kept as its 32 bytes, so that a version needs no allocation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WeightsHash {
    /// 64 lower-case hex digits.
    Digest(Digest),
    /// Any other text.
    Text(Box<str>),
}

impl WeightsHash {
    /// Of a text.
    pub fn new(text: &str) -> WeightsHash {
        let canonical = text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
        match Digest::from_hex(text).filter(|_| canonical) {
            Some(digest) => WeightsHash::Digest(digest),
            None => WeightsHash::Text(text.into()),
        }
    }
}

impl Default for WeightsHash {
    fn default() -> Self {
        WeightsHash::Text("".into())
    }
}

impl fmt::Display for WeightsHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            WeightsHash::Digest(digest) => digest.fmt(f),
            WeightsHash::Text(text) => f.write_str(text),
        }
    }
}

impl Serialize for WeightsHash {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for WeightsHash {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        Ok(WeightsHash::new(&String::deserialize(from)?))
    }
}

/// A policy version.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Version {
    /// Training step that made it; 0 = the initial policy.
    pub step: u32,
    /// BLAKE3 of the trainable weights, hex.
    pub weights_hash: WeightsHash,
    /// Optimiser update within the step that made it; `None` for the initial policy.
    pub update: Option<u32>,
    /// Whether samplers were given it.
    pub published: bool,
}

/// All versions by number.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct PolicyLedger {
    /// The versions.
    pub versions: Series<u32, Version>,
}

impl PolicyLedger {
    /// An optimiser update made a version.
    pub fn update(&mut self, event: &ArchivedGradientStepTaken) {
        let version = self.versions.get_or_default(event.version_after.to_native());
        version.step = event.step.to_native();
        version.update = Some(event.update.to_native());
        version.weights_hash = WeightsHash::new(&event.weights_hash);
    }

    /// A version was published.
    pub fn publish(&mut self, event: &ArchivedPolicyPublished) {
        let version = self.versions.get_or_default(event.version.to_native());
        version.step = event.step.to_native();
        version.weights_hash = WeightsHash::new(&event.weights_hash);
        version.published = true;
    }

    /// The version that samplers use now.
    pub fn current(&self) -> Option<(u32, &Version)> {
        self.versions.iter().rev().find(|(_, v)| v.published).map(|(n, v)| (*n, v))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hash_prints_as_the_text_it_was() {
        let hex = "00ff".repeat(16);
        for (text, is_digest) in [(hex.as_str(), true), (&hex.to_uppercase(), false), ("w1", false), ("", false)] {
            let hash = WeightsHash::new(text);
            assert_eq!((hash.to_string(), matches!(hash, WeightsHash::Digest(_))), (text.to_owned(), is_digest));
            let json = serde_json::to_string(&hash).unwrap();
            assert_eq!(json, serde_json::to_string(text).unwrap());
            assert_eq!(serde_json::from_str::<WeightsHash>(&json).unwrap(), hash);
        }
        assert_eq!(WeightsHash::default(), WeightsHash::new(""));
    }
}
