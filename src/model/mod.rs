//! One decoder for Llama, Qwen2 (2.5), Qwen3 and Qwen3-MoE on the CPU, in f32, and how models come from disk.
//!
//! [`train`] is forward and backward of a batch, [`decode`] sampling over a paged cache. Both are made of the ops of
//! `kern`, one folder each with its formulas, an f64 reference and the CPU's kernels; [`Reference`] is the whole decoder
//! once more, of candle operations.

pub mod config;
pub mod decode;
pub mod embedded;
pub mod error;
mod experts;
pub mod files;
pub mod gguf;
mod kern;
pub mod load;
pub mod lora;
pub mod marked;
pub mod op;
pub mod params;
pub mod precision;
pub mod reference;
pub mod rope;
pub mod save;
pub mod tokenizer;
pub mod train;
mod weights;

pub use config::{Family, ModelConfig, MoeConfig};
pub use decode::{Cache, Decoder, SeqId};
pub use error::ModelError;
pub use files::ModelFiles;
pub use load::{LoadError, LoadedModel, load_adapter, load_model, weights_hash};
pub use lora::{LoraConfig, LoraLayout, LoraParams, LoraTarget};
pub use params::{Layout, Params, TensorSpec, TensorTable};
pub use precision::Precision;
pub use reference::Reference;
pub use rope::RopeScaling;
pub use save::{SaveType, save_adapter, save_folder};
pub use tokenizer::{Tokenizer, TokenizerError};
pub use train::{Forward, Keep, Sequence, TrainBatch, TrainRow, Trainer};
