//! The CPU decoder as a [`Policy`].

use std::collections::BTreeMap;
use std::sync::Arc;

use super::AgentError;
use super::engine::{Decode, Policy};
use crate::model::{Cache, Decoder, ModelError, SeqId};

/// Packed weights, shared by all engines; every play opens its own cache.
#[derive(Debug, Clone)]
pub struct ModelPolicy(pub Arc<Decoder>);

impl Policy for ModelPolicy {
    fn open(&self) -> Box<dyn Decode + '_> {
        let cache = Cache::new(self.0.config());
        Box::new(Network { decoder: &self.0, cache, sequences: BTreeMap::new(), next: 0 })
    }

    fn max_context(&self) -> usize {
        self.0.config().max_position_embeddings
    }
}

struct Network<'a> {
    decoder: &'a Decoder,
    cache: Cache,
    sequences: BTreeMap<usize, SeqId>,
    next: usize,
}

impl Network<'_> {
    fn add(&mut self, id: SeqId) -> usize {
        self.next += 1;
        self.sequences.insert(self.next, id);
        self.next
    }

    fn id(&self, sequence: usize) -> Result<SeqId, AgentError> {
        let unknown = || AgentError::Model(format!("sequence {sequence} is not open"));
        self.sequences.get(&sequence).copied().ok_or_else(unknown)
    }
}

fn failed(error: ModelError) -> AgentError {
    AgentError::Model(error.to_string())
}

impl Decode for Network<'_> {
    fn vocab(&self) -> usize {
        self.decoder.config().vocab_size
    }

    fn create(&mut self) -> Result<usize, AgentError> {
        let id = self.cache.create();
        Ok(self.add(id))
    }

    fn fork(&mut self, sequence: usize) -> Result<usize, AgentError> {
        let id = self.cache.fork(self.id(sequence)?).map_err(failed)?;
        Ok(self.add(id))
    }

    fn free(&mut self, sequence: usize) {
        if let Some(id) = self.sequences.remove(&sequence) {
            // It is ours and was open, so freeing it cannot fail.
            let _ = self.cache.free(id);
        }
    }

    fn forward(&mut self, work: &[(usize, &[u32])], logits: &mut Vec<f32>) -> Result<(), AgentError> {
        let work: Result<Vec<_>, _> = work.iter().map(|(s, ids)| Ok((self.id(*s)?, *ids))).collect();
        *logits = self.decoder.forward(&mut self.cache, &work?).map_err(failed)?;
        Ok(())
    }

    fn cache_bytes(&self) -> usize {
        self.cache.bytes()
    }
}

#[cfg(test)]
#[path = "network_tests.rs"]
mod tests;
