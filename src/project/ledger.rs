//! Policy versions and the weights behind them.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::event::{GradientStepTaken, PolicyPublished};

/// A policy version.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Version {
    /// Training step that made it; 0 = the initial policy.
    pub step: u32,
    /// BLAKE3 of the trainable weights, hex.
    pub weights_hash: String,
    /// Optimiser update within the step that made it; `None` for the initial policy.
    pub update: Option<u32>,
    /// Whether samplers were given it.
    pub published: bool,
}

/// All versions by number.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct PolicyLedger {
    /// The versions.
    pub versions: BTreeMap<u32, Version>,
}

impl PolicyLedger {
    /// An optimiser update made a version.
    pub fn update(&mut self, event: &GradientStepTaken) {
        let version = self.versions.entry(event.version_after).or_default();
        version.step = event.step;
        version.update = Some(event.update);
        version.weights_hash.clone_from(&event.weights_hash);
    }

    /// A version was published.
    pub fn publish(&mut self, event: &PolicyPublished) {
        let version = self.versions.entry(event.version).or_default();
        version.step = event.step;
        version.weights_hash.clone_from(&event.weights_hash);
        version.published = true;
    }

    /// The version that samplers use now.
    pub fn current(&self) -> Option<(u32, &Version)> {
        self.versions.iter().rev().find(|(_, v)| v.published).map(|(n, v)| (*n, v))
    }
}
