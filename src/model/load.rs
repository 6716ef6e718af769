//! Models from disk: a Hugging Face folder, a GGUF file, a PEFT adapter folder.
//!
//! A folder has `config.json` and `model.safetensors` or `model.safetensors.index.json` with its shards, in
//! f32, bf16 or f16. Headers of all files are read and compared with what the configuration asks for
//! before memory for the weights is taken; then tensors are read one by one. Tensors that carry no
//! weights of this decoder are skipped, see [`is_ignored`]; any other extra tensor is an error, because a
//! model that silently lost a part would train on.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use serde_json::Value;

use super::config::ModelConfig;
use super::error::ModelError;
use super::files::ModelFiles;
use super::lora::{LoraConfig, LoraLayout, LoraParams, LoraTarget};
use super::params::{Params, TensorTable};
use super::tokenizer::{Tokenizer, TokenizerError};

/// Largest safetensors header accepted, bytes (the format's own limit).
const MAX_HEADER_BYTES: u64 = 100_000_000;
/// Largest JSON file accepted, bytes.
const MAX_JSON_BYTES: u64 = 64 << 20;
/// Most shards of one model.
const MAX_SHARDS: usize = 1024;
/// Most layers: bounds what a made-up configuration can make us allocate before its tensors are checked.
pub(super) const MAX_LAYERS: usize = 1024;
/// Most experts of all layers together, for the same reason.
const MAX_EXPERTS: usize = 1 << 16;
/// Tensors named in an error; the rest is counted.
const NAMED: usize = 5;

/// What can go wrong when a model is read or written.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum LoadError {
    /// A file can't be read or written.
    #[error("{}: {detail}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What the system says.
        detail: String,
    },
    /// A file is not what it should be (truncated, not this format, contradictory).
    #[error("{}: {detail}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        detail: String,
    },
    /// Tensors that the configuration asks for are not there.
    #[error("{}: {count} tensors are missing: {names}", path.display())]
    Missing {
        /// Folder or file.
        path: PathBuf,
        /// How many.
        count: usize,
        /// The first of them.
        names: String,
    },
    /// Tensors that do not belong to such a model.
    #[error("{}: {count} tensors do not belong to this model: {names}; does config.json fit the weights?", path.display())]
    Extra {
        /// Folder or file.
        path: PathBuf,
        /// How many.
        count: usize,
        /// The first of them.
        names: String,
    },
    /// A tensor has another shape than the configuration says.
    #[error("{}: {name} has shape {found:?}, the configuration asks for {expected:?}", path.display())]
    Shape {
        /// The file.
        path: PathBuf,
        /// Tensor.
        name: String,
        /// In the file.
        found: Vec<usize>,
        /// In the configuration.
        expected: Vec<usize>,
    },
    /// A tensor's type is none that is read.
    #[error("{}: {name} is {found}; read are F32, BF16 and F16", path.display())]
    Type {
        /// The file.
        path: PathBuf,
        /// Tensor.
        name: String,
        /// Its type.
        found: String,
    },
    /// The configuration.
    #[error("{}: {source}", path.display())]
    Model {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: ModelError,
    },
    /// The tokenizer.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
}

pub(super) fn io(path: &Path) -> impl Fn(std::io::Error) -> LoadError + '_ {
    move |e| LoadError::Io { path: path.into(), detail: e.to_string() }
}

pub(super) fn malformed(path: &Path, detail: impl ToString) -> LoadError {
    LoadError::Malformed { path: path.into(), detail: detail.to_string() }
}

pub(super) fn model(path: &Path) -> impl Fn(ModelError) -> LoadError + '_ {
    move |source| LoadError::Model { path: path.into(), source }
}

/// A model ready to sample and train: weights, tokenizer, chat template (in the tokenizer).
#[derive(Debug, Clone)]
pub struct LoadedModel {
    /// Shape.
    pub config: ModelConfig,
    /// Weights.
    pub params: Params,
    /// Tokenizer, special tokens, chat template source.
    pub tokenizer: Tokenizer,
}

impl LoadedModel {
    /// BLAKE3 of configuration, weights, tokenizer and chat template, hex: what a run calls its initial
    /// policy.
    pub fn digest(&self) -> String {
        let mut hasher = blake3::Hasher::new();
        let mut part = |bytes: &[u8]| {
            hasher.update(&(bytes.len() as u64).to_le_bytes());
            hasher.update(bytes);
        };
        part(crate::event::json::canonical_json(&self.config.to_json()).as_bytes());
        part(self.tokenizer.json());
        part(self.tokenizer.chat_template().unwrap_or_default().as_bytes());
        hasher.update(weights_hash(self.params.data()).as_bytes());
        hasher.finalize().to_hex().to_string()
    }
}

/// BLAKE3 of a flat vector, little-endian, hex: the `weights_hash` of events.
pub fn weights_hash(flat: &[f32]) -> String {
    let mut hasher = blake3::Hasher::new();
    let mut bytes = Vec::with_capacity(4 << 14);
    for chunk in flat.chunks(1 << 14) {
        bytes.clear();
        bytes.extend(chunk.iter().flat_map(|x| x.to_le_bytes()));
        hasher.update(&bytes);
    }
    hasher.finalize().to_hex().to_string()
}

/// Loads a model folder, or a GGUF file.
///
/// # Errors
/// [`LoadError`] for whatever is not as it should be; the tokenizer's ids must fit the embedding.
pub fn load_model(path: &Path) -> Result<LoadedModel, LoadError> {
    let meta = std::fs::metadata(path).map_err(io(path))?;
    if meta.is_dir() {
        return load_files(&ModelFiles::Folder(path));
    }
    let loaded = super::gguf::load_gguf(path)?;
    loaded.tokenizer.check_vocab(loaded.config.vocab_size)?;
    Ok(loaded)
}

/// A tokenizer alone: from a model folder, a `tokenizer.json` or a GGUF file.
///
/// # Errors
/// As [`load_model`].
pub fn load_tokenizer(path: &Path) -> Result<Tokenizer, LoadError> {
    let mut magic = [0u8; 4];
    let gguf = path.is_file() && std::fs::File::open(path).and_then(|mut f| f.read_exact(&mut magic)).is_ok();
    match gguf && &magic == b"GGUF" {
        true => super::gguf::load_gguf_tokenizer(path),
        false => Ok(Tokenizer::from_path(path)?),
    }
}

/// Loads a model from a folder or from bytes inside the program.
///
/// # Errors
/// As [`load_model`].
pub fn load_files(files: &ModelFiles) -> Result<LoadedModel, LoadError> {
    let (config, params) = load_weights(files)?;
    let tokenizer = Tokenizer::from_files(files)?;
    tokenizer.check_vocab(config.vocab_size)?;
    Ok(LoadedModel { config, params, tokenizer })
}

/// Configuration and weights of a Hugging Face folder, without its tokenizer.
///
/// # Errors
/// As [`load_model`].
pub fn load_folder(folder: &Path) -> Result<(ModelConfig, Params), LoadError> {
    load_weights(&ModelFiles::Folder(folder))
}

/// Configuration and weights alone.
///
/// # Errors
/// As [`load_model`].
pub fn load_weights(files: &ModelFiles) -> Result<(ModelConfig, Params), LoadError> {
    let config_path = files.path("config.json");
    let text = String::from_utf8(need(files, "config.json")?.into_owned());
    let text = text.map_err(|e| malformed(&config_path, e))?;
    let config = ModelConfig::from_json(&text).map_err(model(&config_path))?;
    check_layers(&config).map_err(model(&config_path))?;
    let layout = super::params::Layout::new(&config);
    let shards = weight_files(files)?;
    let tied = config.tie_word_embeddings;
    let plan = Plan::check(files, &shards, layout.table(), |name| is_ignored(name, tied))?;
    let mut params = Params::zeros(&config);
    plan.read_into(files, layout.table(), params.data_mut())?;
    Ok((config, params))
}

pub(super) fn check_layers(config: &ModelConfig) -> Result<(), ModelError> {
    match config.num_hidden_layers {
        0..=MAX_LAYERS => Ok(()),
        n => Err(ModelError::Config(format!("num_hidden_layers = {n}; at most {MAX_LAYERS} are loaded"))),
    }?;
    let experts = config.moe.as_ref().map_or(0, |m| m.num_experts);
    match experts.saturating_mul(config.num_hidden_layers) {
        0..=MAX_EXPERTS => Ok(()),
        n => Err(ModelError::Config(format!(
            "num_experts = {experts}: {n} in all layers, at most {MAX_EXPERTS} are loaded"
        ))),
    }
}

/// Tensors that old exports contain and that are no weights: rotary frequencies (recomputed), causal masks,
/// and a second copy of the embedding as `lm_head.weight` when the two are tied.
pub fn is_ignored(name: &str, tied: bool) -> bool {
    name.ends_with("rotary_emb.inv_freq")
        || name.ends_with("attn.masked_bias")
        || name.ends_with("attn.bias")
        || tied && name == "lm_head.weight"
}

/// Loads a PEFT LoRA folder: `adapter_config.json` and `adapter_model.safetensors`.
///
/// # Errors
/// [`LoadError`]; also when the adapter is of another kind (DoRA, per-module ranks, biases, embeddings) or
/// does not fit `config`. rsLoRA is read as plain LoRA with `sqrt(rank)` times the alpha.
pub fn load_adapter(folder: &Path, config: &ModelConfig) -> Result<LoraParams, LoadError> {
    let files = ModelFiles::Folder(folder);
    let path = files.path("adapter_config.json");
    let value: Value =
        serde_json::from_slice(&need(&files, "adapter_config.json")?).map_err(|e| malformed(&path, e))?;
    let lora = adapter_config(&value, config).map_err(model(&path))?;
    let layout = LoraLayout::new(config, &lora).map_err(model(&path))?;
    let plan = Plan::check(&files, &["adapter_model.safetensors".to_owned()], layout.table(), |_| false)?;
    let mut data = vec![0.0; layout.total()];
    plan.read_into(&files, layout.table(), &mut data)?;
    LoraParams::from_flat(config, &lora, data).map_err(model(&path))
}

/// Fields of an adapter_config.json that do not change what the adapter computes once its weights are read, or
/// that are looked at one by one.
const ADAPTER_FIELDS: [&str; 24] = [
    "auto_mapping",
    "base_model_name_or_path",
    "bias",
    "corda_config",
    "ensure_weight_tying",
    "eva_config",
    "inference_mode",
    "init_lora_weights",
    "lora_alpha",
    "lora_dropout",
    "lora_ga_config",
    "loftq_config",
    "megatron_config",
    "megatron_core",
    "peft_type",
    "peft_version",
    "qalora_group_size",
    "r",
    "revision",
    "runtime_config",
    "target_modules",
    "task_type",
    "use_rslora",
    "velora_config",
];

/// What an adapter_config.json says, where this decoder computes it.
fn adapter_config(value: &Value, config: &ModelConfig) -> Result<LoraConfig, ModelError> {
    let unsupported = |what: &'static str, v: &Value, supported: &'static str| {
        Err(ModelError::Unsupported { what, value: v.to_string(), supported })
    };
    let get = |key: &str| value.get(key).unwrap_or(&Value::Null);
    let fields = value.as_object().ok_or_else(|| ModelError::Lora("adapter_config.json is no object".into()))?;
    if get("peft_type").as_str() != Some("LORA") {
        return unsupported("peft_type", get("peft_type"), "LORA");
    }
    let unused = |v: &Value| match v {
        Value::Null | Value::Bool(false) => true,
        Value::Array(list) => list.is_empty(),
        Value::Object(map) => map.is_empty(),
        _ => false,
    };
    // DoRA, ranks by module, trained embeddings, and whatever comes later: refused, whatever it is called.
    if let Some((key, _)) = fields.iter().find(|(k, v)| !ADAPTER_FIELDS.contains(&k.as_str()) && !unused(v)) {
        return unsupported("adapter option", &Value::from(key.as_str()), "one rank and alpha for every layer");
    }
    if !matches!(get("bias"), Value::Null) && get("bias").as_str() != Some("none") {
        return unsupported("bias", get("bias"), "none");
    }
    // Others (pissa, olora, corda, loftq, ...) change the base weights as well.
    match get("init_lora_weights") {
        Value::Null | Value::Bool(_) => {}
        Value::String(kind) if ["gaussian", "eva", "orthogonal"].contains(&kind.as_str()) => {}
        other => return unsupported("init_lora_weights", other, "true, false, gaussian, eva, orthogonal"),
    }
    let rank = get("r").as_u64().filter(|r| (1..=4096).contains(r));
    let rank = rank.ok_or_else(|| ModelError::Lora(format!("r = {} is no rank", get("r"))))? as usize;
    let alpha = get("lora_alpha").as_f64();
    let alpha = alpha.ok_or_else(|| ModelError::Lora(format!("lora_alpha = {} is no number", get("lora_alpha"))))?;
    // rsLoRA counts alpha / sqrt(rank): the same as plain LoRA with sqrt(rank) times the alpha.
    let alpha = if get("use_rslora").as_bool() == Some(true) { alpha * (rank as f64).sqrt() } else { alpha };
    let targets = match get("target_modules") {
        Value::String(all) if all == "all-linear" => LoraTarget::all(config),
        Value::Array(names) => {
            let target = |n: &Value| {
                // PEFT matches the end of the module's path.
                let name = n.as_str().unwrap_or_default();
                LoraTarget::from_module(name.rsplit('.').next().unwrap_or(name))
            };
            let mut targets = names.iter().map(target).collect::<Result<Vec<_>, _>>()?;
            targets.sort();
            targets.dedup();
            targets
        }
        other => return unsupported("target_modules", other, "a list of module names, or all-linear"),
    };
    Ok(LoraConfig { rank, alpha: alpha as f32, targets })
}

/// Names of the safetensors files, in order.
fn weight_files(files: &ModelFiles) -> Result<Vec<String>, LoadError> {
    const SINGLE: &str = "model.safetensors";
    const INDEX: &str = "model.safetensors.index.json";
    if files.has(SINGLE) {
        return Ok(vec![SINGLE.to_owned()]);
    }
    if !files.has(INDEX) {
        return Err(LoadError::Io { path: files.place(), detail: format!("neither {SINGLE} nor {INDEX} is there") });
    }
    let index = files.path(INDEX);
    let value: Value = serde_json::from_slice(&need(files, INDEX)?).map_err(|e| malformed(&index, e))?;
    let map = value.get("weight_map").and_then(Value::as_object);
    let map = map.ok_or_else(|| malformed(&index, "has no `weight_map` object"))?;
    let mut names = BTreeSet::new();
    for file in map.values() {
        // A file name, not a path: an index must not reach out of its folder.
        let name = file.as_str().filter(|n| !n.is_empty() && !n.contains(['/', '\\']) && *n != "..");
        names.insert(name.ok_or_else(|| malformed(&index, format!("{file} is no file name")))?);
    }
    if names.is_empty() || names.len() > MAX_SHARDS {
        return Err(malformed(&index, format!("names {} files; 1 to {MAX_SHARDS} are read", names.len())));
    }
    Ok(names.into_iter().map(str::to_owned).collect())
}

fn need<'a>(files: &ModelFiles<'a>, name: &str) -> Result<Cow<'a, [u8]>, LoadError> {
    let path = files.path(name);
    let missing = || LoadError::Io { path: path.clone(), detail: "there is no such file".into() };
    files.read(name, MAX_JSON_BYTES).map_err(io(&path))?.ok_or_else(missing)
}

/// A file, where its data begins, and the tensors wanted from it in file order.
type Shard = (String, u64, Vec<(String, TensorInfo)>);

/// Which tensor is read from where, checked against the layout.
struct Plan {
    /// (file name, offset of its data, tensors in file order).
    shards: Vec<Shard>,
}

impl Plan {
    fn check(
        files: &ModelFiles,
        shards: &[String],
        table: &TensorTable,
        ignored: impl Fn(&str) -> bool,
    ) -> Result<Plan, LoadError> {
        let mut seen = BTreeSet::new();
        let mut extra = Vec::new();
        let mut plan = Plan { shards: Vec::with_capacity(shards.len()) };
        for shard in shards {
            let path = &files.path(shard);
            let (data_start, metadata) = read_header(files, shard)?;
            let infos: BTreeMap<String, TensorInfo> =
                metadata.tensors().into_iter().map(|(name, info)| (name, info.clone())).collect();
            let mut wanted = Vec::new();
            for (name, info) in infos {
                let Some(spec) = table.get(&name) else {
                    if !ignored(&name) {
                        extra.push(name);
                    }
                    continue;
                };
                if info.shape != spec.shape {
                    let (found, expected) = (info.shape.clone(), spec.shape.clone());
                    return Err(LoadError::Shape { path: path.clone(), name, found, expected });
                }
                if !matches!(info.dtype, Dtype::F32 | Dtype::BF16 | Dtype::F16) {
                    let found = format!("{:?}", info.dtype);
                    return Err(LoadError::Type { path: path.clone(), name, found });
                }
                if !seen.insert(name.clone()) {
                    return Err(malformed(path, format!("{name} stands in two files")));
                }
                wanted.push((name, info));
            }
            wanted.sort_by_key(|(_, info)| info.data_offsets);
            plan.shards.push((shard.clone(), data_start, wanted));
        }
        let missing: Vec<&str> =
            table.tensors().iter().map(|t| t.name.as_str()).filter(|n| !seen.contains(*n)).collect();
        if !missing.is_empty() {
            let names = first_names(&missing);
            return Err(LoadError::Missing { path: files.place(), count: missing.len(), names });
        }
        if !extra.is_empty() {
            let names = first_names(&extra.iter().map(String::as_str).collect::<Vec<_>>());
            return Err(LoadError::Extra { path: files.place(), count: extra.len(), names });
        }
        Ok(plan)
    }

    fn read_into(&self, files: &ModelFiles, table: &TensorTable, flat: &mut [f32]) -> Result<(), LoadError> {
        let mut bytes = Vec::new();
        for (shard, data_start, wanted) in &self.shards {
            let path = &files.path(shard);
            let (mut file, _) = files.open(shard).map_err(io(path))?;
            for (name, info) in wanted {
                let Some(spec) = table.get(name) else { continue };
                let (begin, end) = info.data_offsets;
                file.seek(SeekFrom::Start(data_start + begin as u64)).map_err(io(path))?;
                bytes.resize(end - begin, 0);
                file.read_exact(&mut bytes).map_err(|e| malformed(path, format!("{name}: {e}")))?;
                decode(info.dtype, &bytes, &mut flat[spec.range()]);
            }
        }
        Ok(())
    }
}

fn first_names(names: &[&str]) -> String {
    let mut text = names.iter().take(NAMED).copied().collect::<Vec<_>>().join(", ");
    if names.len() > NAMED {
        text.push_str(", ...");
    }
    text
}

/// Reads and checks the header of a safetensors file: offset of the data, and the tensors.
fn read_header(files: &ModelFiles, shard: &str) -> Result<(u64, Metadata), LoadError> {
    let path = &files.path(shard);
    let (mut file, size) = files.open(shard).map_err(io(path))?;
    let mut length = [0u8; 8];
    file.read_exact(&mut length).map_err(|_| malformed(path, format!("{size} bytes are no safetensors file")))?;
    let length = u64::from_le_bytes(length);
    if length > MAX_HEADER_BYTES || length > size - 8 {
        return Err(malformed(path, format!("no safetensors file: a header of {length} bytes in a file of {size}")));
    }
    let mut header = vec![0u8; length as usize];
    file.read_exact(&mut header).map_err(io(path))?;
    let metadata: Metadata = serde_json::from_slice(&header).map_err(|e| malformed(path, format!("header: {e}")))?;
    let expected = 8 + length + metadata.data_len() as u64;
    if expected != size {
        let detail =
            format!("the header describes a file of {expected} bytes, but it has {size} (cut off while copying?)");
        return Err(malformed(path, detail));
    }
    Ok((8 + length, metadata))
}

/// Little-endian values to f32, exactly.
fn decode(dtype: Dtype, bytes: &[u8], out: &mut [f32]) {
    match dtype {
        Dtype::F32 => {
            for (b, x) in bytes.chunks_exact(4).zip(out) {
                *x = f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
            }
        }
        Dtype::BF16 => {
            for (b, x) in bytes.chunks_exact(2).zip(out) {
                *x = half::bf16::from_le_bytes([b[0], b[1]]).to_f32();
            }
        }
        // Plan::check lets nothing else through.
        _ => {
            for (b, x) in bytes.chunks_exact(2).zip(out) {
                *x = half::f16::from_le_bytes([b[0], b[1]]).to_f32();
            }
        }
    }
}

#[cfg(test)]
#[path = "tests/load.rs"]
mod tests;
