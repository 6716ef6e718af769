//! The policy that comes with the program: a small Qwen3 model folder, made by `pretrain` in tools/.
//!
//! It is an ordinary model folder (`src/model/embedded/`), compiled into the binary so that the default run
//! needs no file beside it. `coevolve checkpoint` and [`export`] write it out for other programs.

use super::config::ModelConfig;
use super::load::{LoadError, LoadedModel, decode, malformed, model};
use super::params::Params;
use super::tokenizer::{Tokenizer, TokenizerNotes};
use safetensors::SafeTensors;
use std::path::Path;

const CONFIG: &[u8] = include_bytes!("embedded/config.json");
const TOKENIZER: &[u8] = include_bytes!("embedded/tokenizer.json");
const TOKENIZER_CONFIG: &[u8] = include_bytes!("embedded/tokenizer_config.json");
const WEIGHTS: &[u8] = include_bytes!("embedded/model.safetensors");

/// Loads the embedded policy.
///
/// # Errors
/// When the files that were compiled in are damaged.
pub fn load() -> Result<LoadedModel, LoadError> {
    let place = Path::new("(embedded)/model.safetensors");
    let text = std::str::from_utf8(CONFIG).map_err(|e| malformed(place, e))?;
    let config = ModelConfig::from_json(text).map_err(model(place))?;
    let file = SafeTensors::deserialize(WEIGHTS).map_err(|e| malformed(place, e))?;
    let mut params = Params::zeros(&config);
    let layout = params.layout().clone();
    for spec in layout.table().tensors() {
        let tensor = file.tensor(&spec.name).map_err(|e| malformed(place, e))?;
        if tensor.shape() != spec.shape {
            return Err(malformed(place, format!("{} has shape {:?}", spec.name, tensor.shape())));
        }
        decode(tensor.dtype(), tensor.data(), &mut params.data_mut()[spec.range()]);
    }
    let notes: serde_json::Value = serde_json::from_slice(TOKENIZER_CONFIG).map_err(|e| malformed(place, e))?;
    let text = |key: &str| notes.get(key).and_then(|v| v.as_str()).map(str::to_string);
    let notes =
        TokenizerNotes { eos: text("eos_token"), chat_template: text("chat_template"), ..TokenizerNotes::default() };
    let tokenizer = Tokenizer::from_bytes(TOKENIZER, notes)?;
    tokenizer.check_vocab(config.vocab_size)?;
    Ok(LoadedModel { config, params, tokenizer })
}

/// Writes the folder to disk, for programs that want a model folder.
///
/// # Errors
/// I/O.
pub fn export(folder: &Path) -> std::io::Result<()> {
    std::fs::create_dir_all(folder)?;
    let files = [
        ("config.json", CONFIG),
        ("tokenizer.json", TOKENIZER),
        ("tokenizer_config.json", TOKENIZER_CONFIG),
        ("model.safetensors", WEIGHTS),
    ];
    files.into_iter().try_for_each(|(name, bytes)| std::fs::write(folder.join(name), bytes))
}
