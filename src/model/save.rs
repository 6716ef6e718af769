//! Models to disk: a Hugging Face folder or a PEFT adapter folder, whole or not at all.
//!
//! Everything is written into a hidden sibling folder, every file and the folder are fsynced, then one
//! rename puts it in place and the parent is fsynced. A kill leaves the old folder or the new one, and at
//! worst a `.NAME.tmp` that the next save removes.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use serde_json::json;

use super::config::ModelConfig;
use super::load::{LoadError, io, malformed};
use super::lora::LoraParams;
use super::params::{Params, TensorSpec};
use super::tokenizer::Tokenizer;

/// How weights are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SaveType {
    /// Two bytes a value, rounded to nearest even: for models that others use.
    #[default]
    Bf16,
    /// Exact: for checkpoints that training goes on from.
    F32,
}

/// Writes `config.json`, `model.safetensors` (Hugging Face names) and, if given, the tokenizer's files into
/// `folder`, replacing what was there.
///
/// # Errors
/// [`LoadError::Io`] names the file; `folder` is then as it was before.
pub fn save_folder(
    folder: &Path,
    config: &ModelConfig,
    params: &Params,
    tokenizer: Option<&Tokenizer>,
    dtype: SaveType,
) -> Result<(), LoadError> {
    let mut value = config.to_json();
    if dtype == SaveType::F32 {
        value["torch_dtype"] = "float32".into();
    }
    replace_folder(folder, |temporary| {
        write_file(&temporary.join("config.json"), format!("{value:#}\n").as_bytes())?;
        for (name, bytes) in tokenizer.map(Tokenizer::files).unwrap_or_default() {
            write_file(&temporary.join(name), &bytes)?;
        }
        write_safetensors(&temporary.join("model.safetensors"), params.tensors(), dtype)
    })
}

/// Writes an adapter as PEFT does: `adapter_config.json` and `adapter_model.safetensors`, in f32. `base`
/// names the model it belongs to.
///
/// # Errors
/// As [`save_folder`].
pub fn save_adapter(folder: &Path, lora: &LoraParams, base: &str) -> Result<(), LoadError> {
    let config = lora.layout().config();
    let mut targets: Vec<&str> = config.targets.iter().map(|t| t.module()).collect();
    targets.sort_unstable();
    targets.dedup();
    let value = json!({
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": 0.0,
        "target_modules": targets,
        "bias": "none",
        "fan_in_fan_out": false,
        "use_dora": false,
        "use_rslora": false,
        "inference_mode": true,
    });
    replace_folder(folder, |temporary| {
        write_file(&temporary.join("adapter_config.json"), format!("{value:#}\n").as_bytes())?;
        write_safetensors(&temporary.join("adapter_model.safetensors"), lora.tensors(), SaveType::F32)
    })
}

/// Fills a hidden sibling of `folder` through `fill`, then puts it in its place.
fn replace_folder(folder: &Path, fill: impl FnOnce(&Path) -> Result<(), LoadError>) -> Result<(), LoadError> {
    let name = folder.file_name().and_then(|n| n.to_str());
    let name = name.ok_or_else(|| malformed(folder, "is no name for a folder"))?;
    let parent = match folder.parent() {
        Some(p) if !p.as_os_str().is_empty() => p.to_path_buf(),
        _ => PathBuf::from("."),
    };
    std::fs::create_dir_all(&parent).map_err(io(&parent))?;
    let temporary = parent.join(format!(".{name}.tmp"));
    let old = parent.join(format!(".{name}.old"));
    remove(&temporary)?;
    std::fs::create_dir(&temporary).map_err(io(&temporary))?;
    let filled = fill(&temporary).and_then(|()| sync_folder(&temporary));
    if let Err(e) = filled {
        // The error that matters is the first one.
        let _ = remove(&temporary);
        return Err(e);
    }
    if folder.exists() {
        remove(&old)?;
        std::fs::rename(folder, &old).map_err(io(folder))?;
    }
    std::fs::rename(&temporary, folder).map_err(io(folder))?;
    sync_folder(&parent)?;
    remove(&old)
}

fn remove(folder: &Path) -> Result<(), LoadError> {
    match std::fs::remove_dir_all(folder) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(io(folder)(e)),
        _ => Ok(()),
    }
}

fn sync_folder(folder: &Path) -> Result<(), LoadError> {
    File::open(folder).and_then(|f| f.sync_all()).map_err(io(folder))
}

fn write_file(path: &Path, bytes: &[u8]) -> Result<(), LoadError> {
    let mut file = File::create(path).map_err(io(path))?;
    file.write_all(bytes).and_then(|()| file.sync_all()).map_err(io(path))
}

/// A safetensors file with the tensors in the order given.
fn write_safetensors<'a>(
    path: &Path,
    tensors: impl Iterator<Item = (&'a TensorSpec, &'a [f32])>,
    dtype: SaveType,
) -> Result<(), LoadError> {
    let (kind, width) = match dtype {
        SaveType::Bf16 => (Dtype::BF16, 2),
        SaveType::F32 => (Dtype::F32, 4),
    };
    let tensors: Vec<_> = tensors.collect();
    let mut offset = 0;
    let infos = tensors.iter().map(|(spec, _)| {
        let begin = offset;
        offset += spec.len() * width;
        let info = TensorInfo { dtype: kind, shape: spec.shape.clone(), data_offsets: (begin, offset) };
        (spec.name.clone(), info)
    });
    let infos: Vec<_> = infos.collect();
    // transformers refuses files without this entry.
    let format = Some([("format".to_owned(), "pt".to_owned())].into());
    let metadata = Metadata::new(format, infos).map_err(|e| malformed(path, e))?;
    let mut header = serde_json::to_vec(&metadata).map_err(|e| malformed(path, e))?;
    header.resize(header.len().next_multiple_of(8), b' ');
    let write = || -> std::io::Result<()> {
        let mut out = BufWriter::with_capacity(1 << 20, File::create(path)?);
        out.write_all(&(header.len() as u64).to_le_bytes())?;
        out.write_all(&header)?;
        for (_, values) in &tensors {
            match dtype {
                SaveType::Bf16 => {
                    values.iter().try_for_each(|x| out.write_all(&half::bf16::from_f32(*x).to_le_bytes()))?;
                }
                SaveType::F32 => values.iter().try_for_each(|x| out.write_all(&x.to_le_bytes()))?,
            }
        }
        let file = out.into_inner().map_err(|e| e.into_error())?;
        file.sync_all()
    };
    write().map_err(io(path))
}
