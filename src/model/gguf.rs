//! Models from a GGUF file: quantised weights, tokenizer and chat template in one.
//!
//! Read are the architectures `llama`, `qwen2`, `qwen3` and `qwen3moe`, any quantisation that candle
//! dequantises, and byte-level BPE tokenizers. Everything becomes what the Hugging Face folder of the same model would
//! give: f32 weights under HF names, a `tokenizer.json`.
//!
//! In `llama` files the rows of the q and k projections are permuted: llama.cpp rotates neighbouring
//! pairs, Hugging Face the two halves of a head. Row 2i + j of a head (j = 0, 1) is row j * head_dim / 2 + i
//! there. Qwen files are not permuted. The experts of a layer are one tensor each for gate, up and down; the
//! weights of the chosen experts always sum to one, as llama.cpp computes it for `qwen3moe`.
//!
//! Linear and yarn scaling stand in the metadata. That of Llama 3.1 is a tensor `rope_freqs.weight` of
//! factors by which periods grow; it is compared with the published scaling, and others are refused.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::BufReader;
use std::panic::AssertUnwindSafe;
use std::path::Path;

use candle_core::Device;
use candle_core::quantized::gguf_file::{Content, Value};
use serde_json::json;

use super::config::{Family, ModelConfig};
use super::error::ModelError;
use super::load::{LoadError, LoadedModel, check_layers, io, malformed, model};
use super::params::{Layout, Params};
use super::rope::RopeScaling;
use super::tokenizer::{Tokenizer, TokenizerNotes};

/// Growth of the rotary periods in files of Llama 3.1 and later.
const ROPE_FACTORS: &str = "rope_freqs.weight";

/// Loads a GGUF file.
///
/// # Errors
/// [`LoadError`] for files that are cut off, garbage, or of an architecture or tokenizer that is not read.
pub fn load_gguf(path: &Path) -> Result<LoadedModel, LoadError> {
    let (mut reader, content) = open(path)?;
    let dequantise = |reader: &mut BufReader<File>, name: &str| {
        let read = AssertUnwindSafe(|| -> candle_core::Result<Vec<f32>> {
            let tensor = content.tensor(reader, name, &Device::Cpu)?;
            tensor.dequantize(&Device::Cpu)?.flatten_all()?.to_vec1::<f32>()
        });
        std::panic::catch_unwind(read)
            .map_err(|_| malformed(path, format!("{name} can't be dequantised")))?
            .map_err(|e| malformed(path, format!("{name}: {e}")))
    };
    let factors = match content.tensor_infos.get(ROPE_FACTORS) {
        // Before anything is allocated by its size: no head is longer than this.
        Some(info) if info.shape.elem_count() <= 1 << 16 => Some(dequantise(&mut reader, ROPE_FACTORS)?),
        Some(info) => return Err(malformed(path, format!("{ROPE_FACTORS} has {} values", info.shape.elem_count()))),
        None => None,
    };
    let config = config(&content, factors.as_deref()).map_err(model(path))?;
    check_layers(&config).map_err(model(path))?;
    let layout = Layout::new(&config);
    let sources = plan(path, &content, &config, &layout)?;
    let tokenizer = tokenizer(path, &content)?;
    let mut params = Params::zeros(&config);
    for (gguf_name, hf_names) in &sources {
        let values = dequantise(&mut reader, gguf_name)?;
        let part = values.len() / hf_names.len().max(1);
        for (hf_name, values) in hf_names.iter().zip(values.chunks(part.max(1))) {
            let target = params.tensor_mut(hf_name).map_err(model(path))?;
            if values.len() != target.len() {
                let detail = format!("{gguf_name} has {} values for {hf_name}, not {}", values.len(), target.len());
                return Err(malformed(path, detail));
            }
            let permuted = config.family == Family::Llama
                && (hf_name.ends_with("q_proj.weight") || hf_name.ends_with("k_proj.weight"));
            match permuted {
                true => unpermute(values, config.head_dim, config.hidden_size, target),
                false => target.copy_from_slice(values),
            }
        }
    }
    Ok(LoadedModel { config, params, tokenizer })
}

/// The tokenizer and chat template of a GGUF file; its weights are not read.
///
/// # Errors
/// As [`load_gguf`].
pub fn load_gguf_tokenizer(path: &Path) -> Result<Tokenizer, LoadError> {
    let (_, content) = open(path)?;
    tokenizer(path, &content)
}

fn open(path: &Path) -> Result<(BufReader<File>, Content), LoadError> {
    let mut reader = BufReader::with_capacity(1 << 20, File::open(path).map_err(io(path))?);
    // candle divides by the file's alignment: a made-up 0 there panics.
    let content = std::panic::catch_unwind(AssertUnwindSafe(|| Content::read(&mut reader)));
    let content = content
        .map_err(|_| malformed(path, "not a GGUF file that can be read"))?
        .map_err(|e| malformed(path, format!("not a GGUF file that can be read: {e}")))?;
    Ok((reader, content))
}

/// Rows from llama.cpp's order to Hugging Face's; `values` is `[heads * head_dim, columns]`.
fn unpermute(values: &[f32], head_dim: usize, columns: usize, out: &mut [f32]) {
    let half = head_dim / 2;
    let rows = out.chunks_exact_mut(columns);
    for (row, target) in rows.enumerate() {
        let (head, within) = (row / head_dim, row % head_dim);
        let (j, i) = (within / half, within % half);
        let source = (head * head_dim + 2 * i + j) * columns;
        target.copy_from_slice(&values[source..source + columns]);
    }
}

/// Which GGUF tensor fills which HF tensors (those of all experts of a layer, or one); shapes are compared before
/// anything is read.
fn plan(
    path: &Path,
    content: &Content,
    config: &ModelConfig,
    layout: &Layout,
) -> Result<BTreeMap<String, Vec<String>>, LoadError> {
    let mut names: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for t in layout.table().tensors() {
        if let Some(gguf) = gguf_name(&t.name) {
            names.entry(gguf).or_default().push(t.name.clone());
        }
    }
    let mut missing = Vec::new();
    for (gguf, hf) in &names {
        let Some(info) = content.tensor_infos.get(gguf) else {
            missing.push(gguf.as_str());
            continue;
        };
        let first = hf.first().and_then(|name| layout.table().get(name));
        let mut expected = first.map(|t| t.shape.clone()).unwrap_or_default();
        if gguf.ends_with("_exps.weight") {
            expected.insert(0, hf.len());
        }
        let found = info.shape.dims().to_vec();
        if found != expected {
            return Err(LoadError::Shape { path: path.into(), name: gguf.clone(), found, expected });
        }
    }
    if !missing.is_empty() {
        let shown = missing.iter().take(5).copied().collect::<Vec<_>>().join(", ");
        return Err(LoadError::Missing { path: path.into(), count: missing.len(), names: shown });
    }
    let mut extra: Vec<&str> = content
        .tensor_infos
        .keys()
        .map(String::as_str)
        .filter(|n| !names.contains_key(*n))
        .filter(|n| !(config.tie_word_embeddings && *n == "output.weight") && *n != ROPE_FACTORS)
        .collect();
    extra.sort_unstable();
    if !extra.is_empty() {
        let shown = extra.iter().take(5).copied().collect::<Vec<_>>().join(", ");
        return Err(LoadError::Extra { path: path.into(), count: extra.len(), names: shown });
    }
    Ok(names)
}

/// GGUF's name of a Hugging Face tensor.
fn gguf_name(hf: &str) -> Option<String> {
    match hf {
        "model.embed_tokens.weight" => return Some("token_embd.weight".into()),
        "model.norm.weight" => return Some("output_norm.weight".into()),
        "lm_head.weight" => return Some("output.weight".into()),
        _ => {}
    }
    let (layer, rest) = hf.strip_prefix("model.layers.")?.split_once('.')?;
    let (module, kind) = rest.rsplit_once('.')?;
    if let Some((_, part)) = module.strip_prefix("mlp.experts.").and_then(|m| m.split_once('.')) {
        let name = part.strip_suffix("_proj")?;
        return Some(format!("blk.{layer}.ffn_{name}_exps.{kind}"));
    }
    let name = match module {
        "input_layernorm" => "attn_norm",
        "post_attention_layernorm" => "ffn_norm",
        "self_attn.q_proj" => "attn_q",
        "self_attn.k_proj" => "attn_k",
        "self_attn.v_proj" => "attn_v",
        "self_attn.o_proj" => "attn_output",
        "self_attn.q_norm" => "attn_q_norm",
        "self_attn.k_norm" => "attn_k_norm",
        "mlp.gate_proj" => "ffn_gate",
        "mlp.up_proj" => "ffn_up",
        "mlp.down_proj" => "ffn_down",
        "mlp.gate" => "ffn_gate_inp",
        _ => return None,
    };
    Some(format!("blk.{layer}.{name}.{kind}"))
}

fn integer(value: &Value) -> Option<u64> {
    match value {
        Value::U8(x) => Some(u64::from(*x)),
        Value::U16(x) => Some(u64::from(*x)),
        Value::U32(x) => Some(u64::from(*x)),
        Value::U64(x) => Some(*x),
        Value::I8(x) => u64::try_from(*x).ok(),
        Value::I16(x) => u64::try_from(*x).ok(),
        Value::I32(x) => u64::try_from(*x).ok(),
        Value::I64(x) => u64::try_from(*x).ok(),
        _ => None,
    }
}

fn string(value: &Value) -> Option<&str> {
    match value {
        Value::String(s) => Some(s),
        _ => None,
    }
}

fn id(content: &Content, key: &str) -> Option<u32> {
    content.metadata.get(key).and_then(integer).and_then(|i| u32::try_from(i).ok())
}

/// Ids that end a completion: eos and, where given, end-of-turn.
fn eos_ids(content: &Content) -> Vec<u32> {
    let mut ids: Vec<u32> = ["tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id"]
        .iter()
        .filter_map(|key| id(content, key))
        .collect();
    ids.dedup();
    ids
}

/// The configuration, through the same checks as a `config.json`.
fn config(content: &Content, factors: Option<&[f32]>) -> Result<ModelConfig, ModelError> {
    let arch = content.metadata.get("general.architecture").and_then(string);
    let arch = arch.ok_or_else(|| ModelError::Config("the GGUF file has no general.architecture".into()))?;
    let family = Family::from_model_type(if arch == "qwen3moe" { "qwen3_moe" } else { arch })?;
    let get = |key: &str| content.metadata.get(&format!("{arch}.{key}"));
    let size = |key: &str| get(key).and_then(integer);
    let need =
        |key: &str| size(key).ok_or_else(|| ModelError::Config(format!("the GGUF file has no integer {arch}.{key}")));
    let float = |key: &str| match get(key) {
        // The shortest decimal of the f32 that was meant: 1e-5, not 9.999999747378752e-6.
        Some(Value::F32(x)) => x.to_string().parse::<f64>().ok(),
        Some(Value::F64(x)) => Some(*x),
        _ => None,
    };
    let unsupported = |what, value: String, supported| Err(ModelError::Unsupported { what, value, supported });
    let scaling = match get("rope.scaling.type").and_then(string) {
        None | Some("none") => json!(null),
        Some("linear") => json!({"rope_type": "linear", "factor": float("rope.scaling.factor")}),
        Some("yarn") => {
            let factor = |key: &str| float(&format!("rope.scaling.{key}"));
            for key in ["attn_factor", "yarn_attn_factor", "yarn_log_multiplier"] {
                if let Some(x) = factor(key).filter(|x| *x != 1.0) {
                    return unsupported(
                        "rope.scaling",
                        format!("{key} {x}"),
                        "yarn with the attention factor of its paper",
                    );
                }
            }
            json!({"rope_type": "yarn", "factor": factor("factor"),
                "original_max_position_embeddings": size("rope.scaling.original_context_length"),
                "beta_fast": factor("yarn_beta_fast"), "beta_slow": factor("yarn_beta_slow")})
        }
        Some(kind) => return unsupported("rope.scaling.type", kind.to_owned(), "none, linear, yarn"),
    };
    let (hidden, heads) = (need("embedding_length")?, need("attention.head_count")?);
    let head_dim = size("attention.key_length").or_else(|| size("rope.dimension_count"));
    let vocab = content.tensor_infos.get("token_embd.weight").and_then(|t| t.shape.dims().first().copied());
    let head_dim = head_dim.unwrap_or(hidden / heads.max(1));
    let theta = float("rope.freq_base");
    let scaling = match factors {
        None => scaling,
        Some(factors) if scaling.is_null() => llama3(factors, head_dim, theta.unwrap_or(10_000.0))?.to_json(),
        Some(_) => return unsupported(ROPE_FACTORS, "beside rope.scaling.type".into(), "one of the two"),
    };
    let value = json!({
        "model_type": family.model_type(),
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": need("feed_forward_length")?,
        "num_hidden_layers": need("block_count")?,
        "num_attention_heads": heads,
        "num_key_value_heads": size("attention.head_count_kv").unwrap_or(heads),
        "head_dim": head_dim,
        "rms_norm_eps": float("attention.layer_norm_rms_epsilon"),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "max_position_embeddings": need("context_length")?,
        "tie_word_embeddings": !content.tensor_infos.contains_key("output.weight"),
        "bos_token_id": id(content, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": eos_ids(content),
        "num_experts": size("expert_count"),
        "num_experts_per_tok": size("expert_used_count"),
        "moe_intermediate_size": size("expert_feed_forward_length"),
        "norm_topk_prob": true,
    });
    ModelConfig::from_json(&value.to_string())
}

/// The scaling of Llama 3.1 and later whose factors these are: only the largest one differs between models.
fn llama3(factors: &[f32], head_dim: u64, theta: f64) -> Result<RopeScaling, ModelError> {
    let factor = factors.iter().copied().fold(1.0, f32::max);
    let dim = head_dim as usize;
    let scaling = RopeScaling::Llama3 {
        factor: f64::from(factor),
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_position_embeddings: 8192,
    };
    let plain = RopeScaling::None.periods(dim.min(1 << 16), theta);
    let expected = scaling.periods(dim.min(1 << 16), theta);
    let same = |((e, p), f): ((&f64, &f64), &f32)| (e / p / f64::from(*f) - 1.0).abs() < 1e-4;
    if factors.len() == plain.len() && expected.iter().zip(&plain).zip(factors).all(same) {
        return Ok(scaling);
    }
    let (value, supported) = ("other factors".to_owned(), "those of Llama 3.1 and later (8,192 positions first)");
    Err(ModelError::Unsupported { what: ROPE_FACTORS, value, supported })
}

/// A `tokenizer.json` out of the metadata.
fn tokenizer(path: &Path, content: &Content) -> Result<Tokenizer, LoadError> {
    let text = |key: &str| content.metadata.get(key).and_then(string);
    let strings = |key: &str| -> Result<Vec<&str>, LoadError> {
        match content.metadata.get(key) {
            Some(Value::Array(items)) => items
                .iter()
                .map(|v| string(v).ok_or_else(|| malformed(path, format!("{key} holds something that is no text"))))
                .collect(),
            _ => Err(malformed(path, format!("has no list {key}"))),
        }
    };
    let kind = text("tokenizer.ggml.model").unwrap_or("(none)");
    if kind != "gpt2" {
        return Err(malformed(path, format!("tokenizer `{kind}`; only byte-level BPE (`gpt2`) is read from GGUF")));
    }
    let tokens = strings("tokenizer.ggml.tokens")?;
    let merges = strings("tokenizer.ggml.merges")?;
    let types: Vec<u64> = match content.metadata.get("tokenizer.ggml.token_type") {
        Some(Value::Array(items)) => items.iter().map(|v| integer(v).unwrap_or(1)).collect(),
        _ => Vec::new(),
    };
    let pre = text("tokenizer.ggml.pre").unwrap_or("(none)");
    let Some(Split { normalizer, pre_tokenizer, ignore_merges }) = split(pre) else {
        let known = "default, gpt-2, smollm, qwen2, llama-bpe";
        return Err(malformed(path, format!("pre-tokenizer `{pre}` is unknown; known are {known}")));
    };
    // llama.cpp's token types: 3 control, 4 user-defined; the rest are ordinary or unused.
    let added = types.iter().zip(&tokens).enumerate().filter(|(_, (t, _))| matches!(**t, 3 | 4));
    let added: Vec<_> = added
        .map(|(id, (t, content))| {
            json!({"id": id, "content": content, "special": *t == 3, "single_word": false, "lstrip": false,
                "rstrip": false, "normalized": false})
        })
        .collect();
    let vocab: serde_json::Map<String, serde_json::Value> =
        tokens.iter().enumerate().map(|(id, t)| ((*t).to_owned(), json!(id))).collect();
    if vocab.len() != tokens.len() {
        return Err(malformed(path, "a token stands twice in tokenizer.ggml.tokens"));
    }
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    let value = json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added,
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": null,
        "decoder": byte_level,
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": ignore_merges,
            "vocab": vocab, "merges": merges},
    });
    let token = |key: &str| id(content, key).and_then(|i| tokens.get(i as usize)).map(|t| (*t).to_owned());
    let notes = TokenizerNotes {
        bos: token("tokenizer.ggml.bos_token_id"),
        eos: token("tokenizer.ggml.eos_token_id"),
        eos_ids: eos_ids(content),
        chat_template: text("tokenizer.chat_template").map(str::to_owned),
    };
    Ok(Tokenizer::from_bytes(value.to_string().as_bytes(), notes)?)
}

/// How text is cut into words before the merges.
struct Split {
    normalizer: serde_json::Value,
    pre_tokenizer: serde_json::Value,
    ignore_merges: bool,
}

/// By the name in `tokenizer.ggml.pre`; what each stands for is in the `tokenizer.json` of the models.
fn split(pre: &str) -> Option<Split> {
    let byte_level =
        |regex: bool| json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": regex});
    let sequence = |first: serde_json::Value, regex: bool| json!({"type": "Sequence", "pretokenizers": [first, byte_level(regex)]});
    let by_regex = |digits: &str| {
        let pattern = format!(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        );
        json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false})
    };
    let plain = |pre_tokenizer| Split { normalizer: json!(null), pre_tokenizer, ignore_merges: false };
    match pre {
        "default" | "gpt-2" | "gpt2" => Some(plain(byte_level(true))),
        "smollm" => Some(plain(sequence(json!({"type": "Digits", "individual_digits": true}), true))),
        "qwen2" => Some(Split { normalizer: json!({"type": "NFC"}), ..plain(sequence(by_regex(r"\p{N}"), false)) }),
        "llama-bpe" | "llama3" | "llama-v3" => {
            Some(Split { ignore_merges: true, ..plain(sequence(by_regex(r"\p{N}{1,3}"), false)) })
        }
        _ => None,
    }
}

#[cfg(test)]
#[path = "tests/gguf.rs"]
mod tests;
