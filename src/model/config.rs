//! The shape of a model, read from a Hugging Face `config.json`.
//!
//! | switch | Llama | Qwen2, Qwen2.5 | Qwen3 | Qwen3-MoE |
//! |---|---|---|---|---|
//! | `qkv_bias` | no | yes | no | no |
//! | `qk_norm` (RMS norm of every q and k head before RoPE) | no | no | yes | yes |
//! | `head_dim` when absent | hidden / heads | hidden / heads | 128 | hidden / heads |
//! | `moe` (a router and experts instead of one MLP, in all or some layers) | no | no | no | yes |
//!
//! Everything else is common: RMS norm before attention and MLP, grouped-query attention, RoPE on
//! half-split heads (scaled as [`super::rope`] describes), SwiGLU, tied or separate output head. What is
//! not computed is refused by name.

use serde_json::{Value, json};

use super::error::ModelError;
use super::rope::RopeScaling;

/// Which published architecture the weights belong to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    /// `LlamaForCausalLM` (also SmolLM2).
    Llama,
    /// `Qwen2ForCausalLM` (also Qwen2.5).
    Qwen2,
    /// `Qwen3ForCausalLM`.
    Qwen3,
    /// `Qwen3MoeForCausalLM`.
    Qwen3Moe,
}

impl Family {
    /// `model_type` in config.json.
    pub fn model_type(self) -> &'static str {
        match self {
            Family::Llama => "llama",
            Family::Qwen2 => "qwen2",
            Family::Qwen3 => "qwen3",
            Family::Qwen3Moe => "qwen3_moe",
        }
    }

    fn architecture(self) -> &'static str {
        match self {
            Family::Llama => "LlamaForCausalLM",
            Family::Qwen2 => "Qwen2ForCausalLM",
            Family::Qwen3 => "Qwen3ForCausalLM",
            Family::Qwen3Moe => "Qwen3MoeForCausalLM",
        }
    }

    /// The family of a `model_type` ("llama", "qwen2", "qwen3", "qwen3_moe").
    ///
    /// # Errors
    /// [`ModelError::Unsupported`] for any other.
    pub fn from_model_type(name: &str) -> Result<Self, ModelError> {
        match name {
            "llama" => Ok(Family::Llama),
            "qwen2" => Ok(Family::Qwen2),
            "qwen3" => Ok(Family::Qwen3),
            "qwen3_moe" => Ok(Family::Qwen3Moe),
            other => Err(unsupported("model_type", other, "llama, qwen2, qwen3, qwen3_moe")),
        }
    }
}

/// The mixture of experts of some layers: a router chooses for each token the experts that answer it.
///
/// `p = softmax(router h)` over all experts; the `num_experts_per_tok` largest are chosen and weighted with
/// their p, divided by the sum of the chosen ones with `norm_topk_prob`. The load-balancing loss of
/// pretraining (`router_aux_loss_coef`) is no part of any loss here: gradients reach the router through the
/// weights of the chosen experts only.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MoeConfig {
    /// Experts of a layer.
    pub num_experts: usize,
    /// Experts that answer a token.
    pub num_experts_per_tok: usize,
    /// Width of an expert's SwiGLU inner layer.
    pub moe_intermediate_size: usize,
    /// The weights of the chosen experts sum to one.
    pub norm_topk_prob: bool,
    /// Every how many layers there are experts; the others have one MLP of `intermediate_size`.
    pub decoder_sparse_step: usize,
    /// Layers with one MLP in any case.
    pub mlp_only_layers: Vec<usize>,
}

impl MoeConfig {
    /// Whether a layer has experts.
    pub fn is_sparse(&self, layer: usize) -> bool {
        !self.mlp_only_layers.contains(&layer) && (layer + 1).is_multiple_of(self.decoder_sparse_step)
    }

    fn from_json(v: &Value) -> Result<Self, ModelError> {
        // transformers 5 writes the second name.
        let experts = if v.get("num_experts").is_some() { "num_experts" } else { "num_local_experts" };
        let layers = match v.get("mlp_only_layers") {
            None | Some(Value::Null) => Vec::new(),
            Some(list) => serde_json::from_value(list.clone())
                .map_err(|e| ModelError::Config(format!("field mlp_only_layers: {e}")))?,
        };
        Ok(MoeConfig {
            num_experts: size(v, experts)?,
            num_experts_per_tok: size(v, "num_experts_per_tok")?,
            moe_intermediate_size: size(v, "moe_intermediate_size")?,
            norm_topk_prob: flag(v, "norm_topk_prob"),
            decoder_sparse_step: size_or(v, "decoder_sparse_step", Some(1))?,
            mlp_only_layers: layers,
        })
    }

    fn check(&self) -> Result<(), ModelError> {
        let (experts, chosen) = (self.num_experts, self.num_experts_per_tok);
        if chosen == 0 || chosen > experts {
            return Err(ModelError::Config(format!("{chosen} of {experts} experts answer a token")));
        }
        if self.moe_intermediate_size == 0 || self.decoder_sparse_step == 0 {
            return Err(ModelError::Config("moe_intermediate_size or decoder_sparse_step is zero".into()));
        }
        Ok(())
    }
}

/// Dimensions and switches of one decoder; field names are those of Hugging Face configurations.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    /// Architecture.
    pub family: Family,
    /// Rows of the embedding.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the SwiGLU inner layer.
    pub intermediate_size: usize,
    /// Transformer blocks.
    pub num_hidden_layers: usize,
    /// Query heads.
    pub num_attention_heads: usize,
    /// Key/value heads; divides the query heads.
    pub num_key_value_heads: usize,
    /// Width of one head; even, independent of hidden / heads.
    pub head_dim: usize,
    /// Epsilon inside every RMS norm.
    pub rms_norm_eps: f64,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// How the frequencies are scaled.
    pub rope_scaling: RopeScaling,
    /// Longest sequence.
    pub max_position_embeddings: usize,
    /// The output head is the embedding.
    pub tie_word_embeddings: bool,
    /// q, k and v projections have a bias (Qwen2).
    pub qkv_bias: bool,
    /// q and k heads are RMS-normalised (Qwen3).
    pub qk_norm: bool,
    /// Experts (Qwen3-MoE).
    pub moe: Option<MoeConfig>,
    /// Beginning-of-sequence id, if the file names one.
    pub bos_token_id: Option<u32>,
    /// End-of-sequence ids (the file has one, a list, or none).
    pub eos_token_ids: Vec<u32>,
}

fn unsupported(what: &'static str, value: impl ToString, supported: &'static str) -> ModelError {
    ModelError::Unsupported { what, value: value.to_string(), supported }
}

fn size(v: &Value, key: &str) -> Result<usize, ModelError> {
    size_or(v, key, None)
}

pub(super) fn size_or(v: &Value, key: &str, default: Option<usize>) -> Result<usize, ModelError> {
    match v.get(key) {
        None | Some(Value::Null) => default.ok_or_else(|| ModelError::Config(format!("field {key} is missing"))),
        Some(x) => x
            .as_u64()
            .and_then(|n| usize::try_from(n).ok())
            .filter(|n| *n > 0 && *n <= 1 << 31)
            .ok_or_else(|| ModelError::Config(format!("field {key} = {x} is not a positive integer"))),
    }
}

pub(super) fn float_or(v: &Value, key: &str, default: f64) -> Result<f64, ModelError> {
    match v.get(key) {
        None | Some(Value::Null) => Ok(default),
        Some(x) => x
            .as_f64()
            .filter(|f| f.is_finite() && *f > 0.0)
            .ok_or_else(|| ModelError::Config(format!("field {key} = {x} is not a positive number"))),
    }
}

fn flag(v: &Value, key: &str) -> bool {
    v.get(key).and_then(Value::as_bool).unwrap_or(false)
}

fn token(v: &Value) -> Option<u32> {
    v.as_u64().and_then(|n| u32::try_from(n).ok())
}

impl ModelConfig {
    /// Parses the text of a `config.json`.
    ///
    /// # Errors
    /// [`ModelError::Config`] when a field is missing or malformed, [`ModelError::Unsupported`] for other
    /// architectures, other RoPE scaling, sliding windows in use, MLP or output biases, other activations.
    pub fn from_json(text: &str) -> Result<Self, ModelError> {
        let v: Value = serde_json::from_str(text).map_err(|e| ModelError::Config(format!("no valid JSON ({e})")))?;
        let kind = v.get("model_type").and_then(Value::as_str);
        let kind = kind.ok_or_else(|| ModelError::Config("field model_type is missing".into()))?;
        let family = Family::from_model_type(kind)?;
        refuse_what_is_not_computed(&v, family)?;
        let heads = size(&v, "num_attention_heads")?;
        let hidden = size(&v, "hidden_size")?;
        let head_dim = size_or(&v, "head_dim", Some(if family == Family::Qwen3 { 128 } else { hidden / heads }))?;
        let of = |key: &str| v.get(key).filter(|r| !r.is_null());
        let rope = of("rope_scaling").or_else(|| of("rope_parameters")).unwrap_or(&Value::Null);
        let theta =
            float_or(of("rope_parameters").unwrap_or(rope), "rope_theta", float_or(&v, "rope_theta", 10_000.0)?)?;
        let context = size_or(&v, "max_position_embeddings", Some(2048))?;
        let rope_scaling = RopeScaling::from_json(rope, context)?;
        let config = ModelConfig {
            family,
            vocab_size: size(&v, "vocab_size")?,
            hidden_size: hidden,
            intermediate_size: size(&v, "intermediate_size")?,
            num_hidden_layers: size(&v, "num_hidden_layers")?,
            num_attention_heads: heads,
            num_key_value_heads: size_or(&v, "num_key_value_heads", Some(heads))?,
            head_dim,
            rms_norm_eps: float_or(&v, "rms_norm_eps", 1e-6)?,
            rope_theta: theta,
            max_position_embeddings: rope_scaling.context(context),
            rope_scaling,
            tie_word_embeddings: flag(&v, "tie_word_embeddings"),
            qkv_bias: family == Family::Qwen2,
            qk_norm: matches!(family, Family::Qwen3 | Family::Qwen3Moe),
            moe: (family == Family::Qwen3Moe).then(|| MoeConfig::from_json(&v)).transpose()?,
            bos_token_id: v.get("bos_token_id").and_then(token),
            eos_token_ids: match v.get("eos_token_id") {
                Some(Value::Array(ids)) => ids.iter().filter_map(token).collect(),
                Some(id) => token(id).into_iter().collect(),
                None => Vec::new(),
            },
        };
        config.check()?;
        Ok(config)
    }

    /// Checks that the dimensions fit together (call it on a configuration made by hand).
    ///
    /// # Errors
    /// [`ModelError::Config`] naming the first contradiction.
    pub fn check(&self) -> Result<(), ModelError> {
        let fail = |m: String| Err(ModelError::Config(m));
        let sizes = [
            self.vocab_size,
            self.hidden_size,
            self.intermediate_size,
            self.num_hidden_layers,
            self.num_attention_heads,
            self.num_key_value_heads,
            self.head_dim,
            self.max_position_embeddings,
        ];
        if sizes.contains(&0) {
            return fail("a size is zero".into());
        }
        if !self.num_attention_heads.is_multiple_of(self.num_key_value_heads) {
            let (q, kv) = (self.num_attention_heads, self.num_key_value_heads);
            return fail(format!("{q} attention heads are no multiple of {kv} key/value heads"));
        }
        if !self.head_dim.is_multiple_of(2) {
            return fail(format!("head_dim = {} is odd; RoPE rotates pairs", self.head_dim));
        }
        if self.rope_theta <= 1.0 {
            return fail(format!("rope_theta = {} is not above 1", self.rope_theta));
        }
        self.moe.as_ref().map_or(Ok(()), MoeConfig::check)
    }

    /// The configuration as a Hugging Face `config.json` (dtype bfloat16 unless the writer changes it).
    pub fn to_json(&self) -> Value {
        let eos = match self.eos_token_ids.as_slice() {
            [] => Value::Null,
            [one] => json!(one),
            many => json!(many),
        };
        let mut value = json!({
            "architectures": [self.family.architecture()],
            "attention_bias": false,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": eos,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "max_position_embeddings": self.max_position_embeddings,
            "model_type": self.family.model_type(),
            "num_attention_heads": self.num_attention_heads,
            "num_hidden_layers": self.num_hidden_layers,
            "num_key_value_heads": self.num_key_value_heads,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_scaling": self.rope_scaling.to_json(),
            "rope_theta": self.rope_theta,
            "tie_word_embeddings": self.tie_word_embeddings,
            "torch_dtype": "bfloat16",
            "use_sliding_window": false,
            "vocab_size": self.vocab_size,
        });
        if let Some(moe) = &self.moe {
            value["num_experts"] = json!(moe.num_experts);
            value["num_experts_per_tok"] = json!(moe.num_experts_per_tok);
            value["moe_intermediate_size"] = json!(moe.moe_intermediate_size);
            value["norm_topk_prob"] = json!(moe.norm_topk_prob);
            value["decoder_sparse_step"] = json!(moe.decoder_sparse_step);
            value["mlp_only_layers"] = json!(moe.mlp_only_layers);
        }
        value
    }

    /// The experts of a layer, if it has any.
    pub fn experts(&self, layer: usize) -> Option<&MoeConfig> {
        self.moe.as_ref().filter(|m| m.is_sparse(layer))
    }

    /// Positions per radian of every rotated pair of a head.
    pub fn rope_periods(&self) -> Vec<f64> {
        self.rope_scaling.periods(self.head_dim, self.rope_theta)
    }

    /// Width of all query heads together.
    pub fn q_dim(&self) -> usize {
        self.num_attention_heads * self.head_dim
    }

    /// Width of all key heads together (and of all value heads).
    pub fn kv_dim(&self) -> usize {
        self.num_key_value_heads * self.head_dim
    }

    /// Rows of the fused q, k, v projection.
    pub fn qkv_dim(&self) -> usize {
        self.q_dim() + 2 * self.kv_dim()
    }
}

const ARCHITECTURES: &str = "LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM, Qwen3MoeForCausalLM";

fn refuse_what_is_not_computed(v: &Value, family: Family) -> Result<(), ModelError> {
    if let Some(name) = v.get("architectures").and_then(|a| a.get(0)).and_then(Value::as_str)
        && name != family.architecture()
    {
        return Err(unsupported("architectures", name, ARCHITECTURES));
    }
    if flag(v, "rope_interleaved") {
        return Err(unsupported("rope_interleaved", true, "false (half-split heads)"));
    }
    for place in [Some(v), v.get("rope_parameters"), v.get("rope_scaling")].into_iter().flatten() {
        if let Some(part) = place.get("partial_rotary_factor").and_then(Value::as_f64)
            && part != 1.0
        {
            return Err(unsupported("partial_rotary_factor", part, "1.0"));
        }
    }
    if flag(v, "use_sliding_window") {
        return Err(unsupported("use_sliding_window", true, "false (full attention)"));
    }
    if let Some(kinds) = v.get("layer_types").and_then(Value::as_array)
        && let Some(other) = kinds.iter().filter_map(Value::as_str).find(|k| *k != "full_attention")
    {
        return Err(unsupported("layer_types", other, "full_attention"));
    }
    // Qwen2 has q, k, v biases without this field; elsewhere the field also means an output bias.
    if family != Family::Qwen2 && flag(v, "attention_bias") {
        return Err(unsupported("attention_bias", true, "false for Llama, Qwen3 and Qwen3-MoE"));
    }
    if flag(v, "mlp_bias") {
        return Err(unsupported("mlp_bias", true, "false"));
    }
    match v.get("hidden_act").and_then(Value::as_str) {
        None | Some("silu") => Ok(()),
        Some(other) => Err(unsupported("hidden_act", other, "silu")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const QWEN3: &str = r#"{"architectures":["Qwen3ForCausalLM"],"attention_bias":false,"bos_token_id":151643,
        "eos_token_id":[151645,151643],"head_dim":128,"hidden_act":"silu","hidden_size":1024,"intermediate_size":3072,
        "max_position_embeddings":40960,"max_window_layers":28,"model_type":"qwen3","num_attention_heads":16,
        "num_hidden_layers":28,"num_key_value_heads":8,"rms_norm_eps":1e-06,"rope_scaling":null,"rope_theta":1000000,
        "sliding_window":null,"tie_word_embeddings":true,"use_sliding_window":false,"vocab_size":151936}"#;

    #[test]
    fn qwen3_published_config_parses_and_survives_a_round_trip() {
        let c = ModelConfig::from_json(QWEN3).unwrap();
        assert!(c.qk_norm && !c.qkv_bias && c.tie_word_embeddings);
        // head_dim is not hidden / heads here: 16 * 128 = 2048 against a hidden size of 1024.
        assert_eq!((c.q_dim(), c.kv_dim(), c.qkv_dim()), (2048, 1024, 4096));
        assert_eq!(c.rope_theta, 1e6);
        assert_eq!(c.eos_token_ids, [151_645, 151_643]);
        assert_eq!(ModelConfig::from_json(&c.to_json().to_string()).unwrap(), c);
    }

    #[test]
    fn family_decides_bias_and_default_head_dim() {
        let text = |kind: &str| {
            format!(
                r#"{{"model_type":"{kind}","vocab_size":10,"hidden_size":576,"intermediate_size":8,
                "num_hidden_layers":1,"num_attention_heads":9,"num_key_value_heads":3,"sliding_window":32768,
                "rope_parameters":{{"rope_type":"default","rope_theta":100000.0}}}}"#
            )
        };
        let llama = ModelConfig::from_json(&text("llama")).unwrap();
        assert_eq!((llama.head_dim, llama.qkv_bias, llama.qk_norm, llama.rope_theta), (64, false, false, 1e5));
        assert!(ModelConfig::from_json(&text("qwen2")).unwrap().qkv_bias);
        assert_eq!(ModelConfig::from_json(&text("qwen3")).unwrap().head_dim, 128);
    }

    #[test]
    fn what_is_not_computed_is_refused_by_name() {
        let with = |from: &str, to: &str| ModelConfig::from_json(&QWEN3.replace(from, to));
        for (from, to, name) in [
            ("\"qwen3\"", "\"mistral\"", "model_type"),
            ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "architectures"),
            ("\"rope_scaling\":null", "\"rope_scaling\":{\"rope_type\":\"dynamic\",\"factor\":2.0}", "rope_scaling"),
            ("\"rope_scaling\":null", "\"rope_scaling\":{\"type\":\"longrope\"}", "rope_scaling"),
            ("\"rope_scaling\":null", "\"rope_parameters\":{\"full_attention\":{\"rope_theta\":1e4}}", "rope_scaling"),
            ("\"rope_scaling\":null", "\"rope_parameters\":{\"partial_rotary_factor\":0.5}", "partial_rotary_factor"),
            ("\"use_sliding_window\":false", "\"use_sliding_window\":true", "use_sliding_window"),
            ("\"attention_bias\":false", "\"attention_bias\":true", "attention_bias"),
            ("\"silu\"", "\"gelu\"", "hidden_act"),
        ] {
            match with(from, to) {
                Err(ModelError::Unsupported { what, .. }) => assert_eq!(what, name),
                other => panic!("{name}: {other:?}"),
            }
        }
        assert!(matches!(with("\"vocab_size\":151936", "\"vocab_size\":0"), Err(ModelError::Config(_))));
        assert!(matches!(with("\"num_key_value_heads\":8", "\"num_key_value_heads\":3"), Err(ModelError::Config(_))));
        assert!(matches!(ModelConfig::from_json("{"), Err(ModelError::Config(_))));
    }
}
