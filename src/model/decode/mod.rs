//! Sampling-time inference: packed weights, a paged KV cache, mixed prefill and decode.

use super::config::ModelConfig;
use super::error::ModelError;
use super::lora::LoraParams;
use super::params::Params;

/// A sequence in a [`Cache`]. Never reused within a cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SeqId(pub(super) u64);

/// Keys and values of the sequences of one engine.
#[derive(Debug)]
pub struct Cache {
    next: u64,
}

impl Cache {
    /// An empty cache for models of this shape.
    pub fn new(config: &ModelConfig) -> Self {
        let _ = config;
        Cache { next: 0 }
    }

    /// A new empty sequence.
    pub fn create(&mut self) -> SeqId {
        self.next += 1;
        SeqId(self.next)
    }

    /// A copy of a sequence that shares its keys and values so far.
    ///
    /// # Errors
    /// [`ModelError::NoSequence`].
    pub fn fork(&mut self, seq: SeqId) -> Result<SeqId, ModelError> {
        Err(ModelError::NoSequence(seq.0))
    }

    /// Forgets a sequence; pages that no other sequence shares are reused.
    ///
    /// # Errors
    /// [`ModelError::NoSequence`].
    pub fn free(&mut self, seq: SeqId) -> Result<(), ModelError> {
        Err(ModelError::NoSequence(seq.0))
    }

    /// Shortens a sequence to its first `len` tokens (longer stays as it is).
    ///
    /// # Errors
    /// [`ModelError::NoSequence`].
    pub fn truncate(&mut self, seq: SeqId, len: usize) -> Result<(), ModelError> {
        let _ = len;
        Err(ModelError::NoSequence(seq.0))
    }

    /// Tokens a sequence holds.
    ///
    /// # Errors
    /// [`ModelError::NoSequence`].
    pub fn len(&self, seq: SeqId) -> Result<usize, ModelError> {
        Err(ModelError::NoSequence(seq.0))
    }

    /// Bytes of keys and values in use.
    pub fn bytes(&self) -> usize {
        0
    }
}

/// Weights packed for inference; immutable, shared by all engines.
#[derive(Debug)]
pub struct Decoder {
    config: ModelConfig,
}

impl Decoder {
    /// Packs the weights, with the adapters folded in.
    ///
    /// # Errors
    /// [`ModelError::Length`] when params or adapters are of another model.
    pub fn new(config: &ModelConfig, params: &Params, lora: Option<&LoraParams>) -> Result<Self, ModelError> {
        let _ = (params, lora);
        config.check()?;
        Ok(Decoder { config: config.clone() })
    }

    /// The model's shape.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Appends each item's tokens to its sequence and returns the logits after its last token, row-major
    /// `[items, vocab_size]`. Prefill and decode may be mixed. An item's logits are the same bits whatever
    /// else is in the call, however its tokens were split over calls, and whether its beginning was forked.
    ///
    /// # Errors
    /// [`ModelError::Work`] for an empty item or a sequence named twice, [`ModelError::NoSequence`],
    /// [`ModelError::Token`], [`ModelError::TooLong`]; the cache is unchanged then.
    pub fn forward(&self, cache: &mut Cache, work: &[(SeqId, &[u32])]) -> Result<Vec<f32>, ModelError> {
        let _ = cache;
        Err(ModelError::Work(format!("decoding of {} items is not built yet", work.len())))
    }
}
