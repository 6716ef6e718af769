//! What can go wrong in the compute core.

/// Errors of configuration, parameters, training and decoding.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ModelError {
    /// `config.json` is no valid JSON or lacks a required field.
    #[error("model config: {0}; expected a Hugging Face config.json of a Llama, Qwen2, Qwen3 or Qwen3-MoE model")]
    Config(String),
    /// The model uses something this decoder does not compute.
    #[error("unsupported model: {what} = {value}; supported are {supported}")]
    Unsupported {
        /// The configuration field.
        what: &'static str,
        /// Its value in the file.
        value: String,
        /// What would be accepted.
        supported: &'static str,
    },
    /// A flat vector or a tensor has another length than the layout says.
    #[error("{what}: {found} values, expected {expected}")]
    Length {
        /// Which vector.
        what: String,
        /// Values the layout asks for.
        expected: usize,
        /// Values given.
        found: usize,
    },
    /// No tensor of that name belongs to the model.
    #[error("no tensor named {0} in this model's layout")]
    NoTensor(String),
    /// A LoRA setting is out of range.
    #[error("LoRA: {0}")]
    Lora(String),
    /// A token id is outside the vocabulary.
    #[error("{place}: token id {id} is outside the vocabulary of {vocab}")]
    Token {
        /// Where it was found.
        place: String,
        /// The id.
        id: u32,
        /// Vocabulary size.
        vocab: usize,
    },
    /// A sequence is longer than the model's positions.
    #[error("{place}: {len} tokens, the model has {max} positions; shorten the sequence")]
    TooLong {
        /// Which sequence.
        place: String,
        /// Its length.
        len: usize,
        /// `max_position_embeddings`.
        max: usize,
    },
    /// A training batch is malformed.
    #[error("training batch: {0}")]
    Batch(String),
    /// A backward was asked for a forward that the workspace no longer holds.
    #[error("backward of forward {asked}, but the workspace holds {held}; call backward before the next forward")]
    Generation {
        /// Generation the caller passed.
        asked: u64,
        /// Generation in the workspace (0: none).
        held: u64,
    },
    /// Unknown or freed sequence.
    #[error("sequence {0} is not in this cache (freed, or of another cache)")]
    NoSequence(u64),
    /// A decode call is malformed.
    #[error("decode: {0}")]
    Work(String),
    /// The thread pool could not be started.
    #[error("cannot start {threads} training threads: {reason}")]
    Threads {
        /// Threads asked for.
        threads: usize,
        /// What the system said.
        reason: String,
    },
}
