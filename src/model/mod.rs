//! One decoder for Llama, Qwen2 (2.5) and Qwen3 dense on the CPU, in f32.

pub mod config;
pub mod decode;
pub mod embedded;
pub mod error;
pub mod gguf;
pub mod load;
mod kern;
pub mod lora;
pub mod marked;
pub mod op;
pub mod params;
pub mod save;
pub mod tokenizer;
pub mod reference;
pub mod train;
mod weights;

pub use config::{Family, ModelConfig};
pub use decode::{Cache, Decoder, SeqId};
pub use error::ModelError;
pub use lora::{LoraConfig, LoraLayout, LoraParams, LoraTarget};
pub use params::{Layout, Params, TensorSpec, TensorTable};
pub use reference::Reference;
pub use train::{Forward, Sequence, TrainBatch, TrainRow, Trainer};
