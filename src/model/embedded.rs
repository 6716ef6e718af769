//! The policy that comes with the program: a small Qwen3 model folder, made by `pretrain` in tools/.
//!
//! It is an ordinary model folder (`src/model/embedded/`), compiled into the binary so that the default run
//! needs no file beside it; [`export`] writes it out for other programs.

use super::files::ModelFiles;
use super::load::{LoadError, LoadedModel, load_files};
use std::path::Path;

const FILES: &[(&str, &[u8])] = &[
    ("config.json", include_bytes!("embedded/config.json")),
    ("tokenizer.json", include_bytes!("embedded/tokenizer.json")),
    ("tokenizer_config.json", include_bytes!("embedded/tokenizer_config.json")),
    ("generation_config.json", include_bytes!("embedded/generation_config.json")),
    ("model.safetensors", include_bytes!("embedded/model.safetensors")),
];

/// Loads the embedded policy.
///
/// # Errors
/// When the files that were compiled in are damaged.
pub fn load() -> Result<LoadedModel, LoadError> {
    load_files(&ModelFiles::Memory(FILES))
}

/// Writes the folder to disk, for programs that want a model folder.
///
/// # Errors
/// I/O.
pub fn export(folder: &Path) -> std::io::Result<()> {
    std::fs::create_dir_all(folder)?;
    FILES.iter().try_for_each(|(name, bytes)| std::fs::write(folder.join(name), bytes))
}
