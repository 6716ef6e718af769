//! All weights of a model in one flat f32 vector.
//!
//! Order (row-major, `[out, in]` as Hugging Face stores linears): embedding; per layer the input norm,
//! q, k, v weights (adjacent, so that one GEMM computes all three), q, k, v biases (Qwen2), q and k norms
//! (Qwen3), output projection, post-attention norm, gate and up (adjacent), down, or gate, up and down
//! of each expert and then the router (Qwen3-MoE); final norm; output head when it is not tied. The optimiser sees one vector, a checkpoint sees views under Hugging Face names.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use super::config::ModelConfig;
use super::error::ModelError;
use crate::world::{Draw, draw};

/// One named tensor inside a flat vector.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorSpec {
    /// Hugging Face (or PEFT) name.
    pub name: String,
    /// First value in the flat vector.
    pub offset: usize,
    /// Dimensions, row-major.
    pub shape: Vec<usize>,
}

impl TensorSpec {
    /// Number of values.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether it holds no value.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Where it lies in the flat vector.
    pub fn range(&self) -> Range<usize> {
        self.offset..self.offset + self.len()
    }
}

/// Names and places of the tensors of a flat vector, without gaps.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct TensorTable {
    tensors: Vec<TensorSpec>,
    by_name: BTreeMap<String, usize>,
    total: usize,
}

impl TensorTable {
    /// Appends a tensor and returns its offset.
    pub(super) fn push(&mut self, name: String, shape: &[usize]) -> usize {
        let spec = TensorSpec { name, offset: self.total, shape: shape.to_vec() };
        self.total += spec.len();
        self.by_name.insert(spec.name.clone(), self.tensors.len());
        let offset = spec.offset;
        self.tensors.push(spec);
        offset
    }

    /// All tensors in the order of the flat vector.
    pub fn tensors(&self) -> &[TensorSpec] {
        &self.tensors
    }

    /// The tensor of that name.
    pub fn get(&self, name: &str) -> Option<&TensorSpec> {
        self.by_name.get(name).map(|i| &self.tensors[*i])
    }

    /// Values of all tensors together.
    pub fn total(&self) -> usize {
        self.total
    }
}

/// Offsets of one layer's tensors in the flat vector.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct LayerOffsets {
    pub input_norm: usize,
    pub qkv: usize,
    /// Qwen2 only.
    pub qkv_bias: Option<usize>,
    /// q norm, k norm; Qwen3 only.
    pub qk_norm: Option<(usize, usize)>,
    pub o: usize,
    pub post_norm: usize,
    pub mlp: MlpOffsets,
}

/// Offsets of a layer's MLP or experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MlpOffsets {
    Dense {
        gate_up: usize,
        down: usize,
    },
    /// Expert e lies at `experts + e * stride`: gate and up, then down.
    Experts {
        router: usize,
        experts: usize,
        stride: usize,
    },
}

/// The layout of a model's flat vector.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    table: TensorTable,
    pub(super) embed: usize,
    pub(super) layers: Vec<LayerOffsets>,
    pub(super) final_norm: usize,
    /// Equal to `embed` when tied.
    pub(super) head: usize,
}

impl Layout {
    /// The layout that `config` asks for.
    pub fn new(config: &ModelConfig) -> Self {
        let c = config;
        let (d, f, hd) = (c.hidden_size, c.intermediate_size, c.head_dim);
        let mut t = TensorTable::default();
        let embed = t.push("model.embed_tokens.weight".into(), &[c.vocab_size, d]);
        let mut layers = Vec::with_capacity(c.num_hidden_layers);
        for i in 0..c.num_hidden_layers {
            let mut add = |name: &str, shape: &[usize]| t.push(format!("model.layers.{i}.{name}"), shape);
            let input_norm = add("input_layernorm.weight", &[d]);
            let qkv = add("self_attn.q_proj.weight", &[c.q_dim(), d]);
            add("self_attn.k_proj.weight", &[c.kv_dim(), d]);
            add("self_attn.v_proj.weight", &[c.kv_dim(), d]);
            let qkv_bias = c.qkv_bias.then(|| {
                let at = add("self_attn.q_proj.bias", &[c.q_dim()]);
                add("self_attn.k_proj.bias", &[c.kv_dim()]);
                add("self_attn.v_proj.bias", &[c.kv_dim()]);
                at
            });
            let qk_norm =
                c.qk_norm.then(|| (add("self_attn.q_norm.weight", &[hd]), add("self_attn.k_norm.weight", &[hd])));
            let o = add("self_attn.o_proj.weight", &[d, c.q_dim()]);
            let post_norm = add("post_attention_layernorm.weight", &[d]);
            let mut gated = |parent: &str, f: usize| {
                let gate_up = add(&format!("{parent}.gate_proj.weight"), &[f, d]);
                add(&format!("{parent}.up_proj.weight"), &[f, d]);
                (gate_up, add(&format!("{parent}.down_proj.weight"), &[d, f]))
            };
            let mlp = match c.experts(i) {
                None => {
                    let (gate_up, down) = gated("mlp", f);
                    MlpOffsets::Dense { gate_up, down }
                }
                Some(moe) => {
                    let places = (0..moe.num_experts).map(|e| format!("mlp.experts.{e}"));
                    let starts: Vec<_> = places.map(|p| gated(&p, moe.moe_intermediate_size).0).collect();
                    let router = add("mlp.gate.weight", &[moe.num_experts, d]);
                    let stride = 3 * moe.moe_intermediate_size * d;
                    MlpOffsets::Experts { router, experts: starts.first().copied().unwrap_or(router), stride }
                }
            };
            layers.push(LayerOffsets { input_norm, qkv, qkv_bias, qk_norm, o, post_norm, mlp });
        }
        let final_norm = t.push("model.norm.weight".into(), &[d]);
        let head = if c.tie_word_embeddings { embed } else { t.push("lm_head.weight".into(), &[c.vocab_size, d]) };
        Layout { table: t, embed, layers, final_norm, head }
    }

    /// Names, places and shapes of all tensors.
    pub fn table(&self) -> &TensorTable {
        &self.table
    }

    /// Number of parameters.
    pub fn total(&self) -> usize {
        self.table.total()
    }
}

/// A model's weights: one flat vector and its layout.
#[derive(Debug, Clone, PartialEq)]
pub struct Params {
    layout: Arc<Layout>,
    data: Vec<f32>,
}

impl Params {
    /// All zeros (for a loader to fill through [`Params::tensor_mut`]).
    pub fn zeros(config: &ModelConfig) -> Self {
        let layout = Arc::new(Layout::new(config));
        let data = vec![0.0; layout.total()];
        Params { layout, data }
    }

    /// Fresh weights as transformers initialises them: matrices normal with deviation `std` (usually
    /// 0.02), norms one, biases zero. Each tensor has its own stream, so the values do not depend on order.
    pub fn random(config: &ModelConfig, seed: u64, std: f32) -> Self {
        let mut p = Self::zeros(config);
        let layout = Arc::clone(&p.layout);
        for spec in layout.table.tensors() {
            let values = &mut p.data[spec.range()];
            if spec.name.ends_with("norm.weight") {
                values.fill(1.0);
            } else if spec.shape.len() > 1 {
                let mut d = draw(seed, "init", &[&spec.name]);
                values.iter_mut().for_each(|v| *v = std * normal(&mut d));
            }
        }
        p
    }

    /// Weights from a flat vector in the order of [`Layout::new`].
    ///
    /// # Errors
    /// [`ModelError::Length`] when the vector has another length than the model.
    pub fn from_flat(config: &ModelConfig, data: Vec<f32>) -> Result<Self, ModelError> {
        let layout = Arc::new(Layout::new(config));
        check_len("parameters", layout.total(), data.len())?;
        Ok(Params { layout, data })
    }

    /// The layout, shared.
    pub fn layout(&self) -> &Arc<Layout> {
        &self.layout
    }

    /// The flat vector.
    pub fn data(&self) -> &[f32] {
        &self.data
    }

    /// The flat vector, for the optimiser.
    pub fn data_mut(&mut self) -> &mut [f32] {
        &mut self.data
    }

    /// Gives the flat vector away.
    pub fn into_flat(self) -> Vec<f32> {
        self.data
    }

    /// One tensor's values, row-major.
    ///
    /// # Errors
    /// [`ModelError::NoTensor`].
    pub fn tensor(&self, name: &str) -> Result<&[f32], ModelError> {
        let spec = self.layout.table.get(name).ok_or_else(|| ModelError::NoTensor(name.into()))?;
        Ok(&self.data[spec.range()])
    }

    /// One tensor's values, to be written.
    ///
    /// # Errors
    /// [`ModelError::NoTensor`].
    pub fn tensor_mut(&mut self, name: &str) -> Result<&mut [f32], ModelError> {
        let spec = self.layout.table.get(name).ok_or_else(|| ModelError::NoTensor(name.into()))?;
        Ok(&mut self.data[spec.range()])
    }

    /// Every tensor with its values, in flat order.
    pub fn tensors(&self) -> impl Iterator<Item = (&TensorSpec, &[f32])> {
        self.layout.table.tensors().iter().map(|s| (s, &self.data[s.range()]))
    }
}

pub(super) fn check_len(what: &str, expected: usize, found: usize) -> Result<(), ModelError> {
    if expected == found { Ok(()) } else { Err(ModelError::Length { what: what.into(), expected, found }) }
}

/// Nearly standard normal: the centred sum of twelve 16-bit uniforms (Irwin-Hall). Exact arithmetic, so
/// the same bits on every machine, which a logarithm and a cosine of the system library do not promise.
fn normal(d: &mut Draw) -> f32 {
    let mut sum = 0i64;
    for _ in 0..3 {
        let bits = d.bits();
        sum += (0..4).map(|i| ((bits >> (16 * i)) & 0xffff) as i64).sum::<i64>();
    }
    ((sum - 6 * 65_535) as f64 / 65_536.0) as f32
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::config::{Family, MoeConfig};
    use super::super::rope::RopeScaling;
    use super::*;

    /// The families that the decoder computes.
    pub const FAMILIES: [Family; 4] = [Family::Llama, Family::Qwen2, Family::Qwen3, Family::Qwen3Moe];

    /// A tiny model of each family with awkward sizes: nothing is a multiple of 16 or 8.
    pub fn tiny(family: Family) -> ModelConfig {
        ModelConfig {
            family,
            vocab_size: 37,
            hidden_size: 20,
            intermediate_size: 27,
            num_hidden_layers: 2,
            num_attention_heads: 4,
            num_key_value_heads: 2,
            head_dim: 6,
            rms_norm_eps: 1e-5,
            rope_theta: 100.0,
            rope_scaling: RopeScaling::None,
            max_position_embeddings: 512,
            tie_word_embeddings: family != Family::Qwen2,
            qkv_bias: family == Family::Qwen2,
            qk_norm: matches!(family, Family::Qwen3 | Family::Qwen3Moe),
            // The first layer has an MLP, the second one experts.
            moe: (family == Family::Qwen3Moe).then(|| MoeConfig {
                num_experts: 5,
                num_experts_per_tok: 2,
                moe_intermediate_size: 11,
                norm_topk_prob: true,
                decoder_sparse_step: 2,
                mlp_only_layers: vec![],
            }),
            bos_token_id: None,
            eos_token_ids: vec![],
        }
    }

    #[test]
    fn tensors_tile_the_flat_vector_and_fused_ones_are_adjacent() {
        for family in FAMILIES {
            let c = tiny(family);
            let l = Layout::new(&c);
            let mut next = 0;
            for t in l.table().tensors() {
                assert_eq!(t.offset, next, "{}", t.name);
                next += t.len();
            }
            assert_eq!(next, l.total());
            let at = |n: &str| l.table().get(n).unwrap().clone();
            let q = at("model.layers.1.self_attn.q_proj.weight");
            assert_eq!(q.shape, [24, 20]);
            assert_eq!(at("model.layers.1.self_attn.k_proj.weight").offset, q.offset + 24 * 20);
            assert_eq!(at("model.layers.1.self_attn.v_proj.weight").offset, q.offset + 36 * 20);
            assert_eq!(
                at("model.layers.0.mlp.up_proj.weight").offset,
                at("model.layers.0.mlp.gate_proj.weight").offset + 27 * 20
            );
            assert_eq!(l.table().get("lm_head.weight").is_some(), family == Family::Qwen2);
            assert_eq!(l.table().get("model.layers.0.self_attn.k_proj.bias").is_some(), family == Family::Qwen2);
        }
    }

    #[test]
    fn parameter_count_is_that_of_the_published_model() {
        // SmolLM2-135M: 134,515,008 parameters (model card of the safetensors file).
        let c = ModelConfig {
            family: Family::Llama,
            vocab_size: 49_152,
            hidden_size: 576,
            intermediate_size: 1536,
            num_hidden_layers: 30,
            num_attention_heads: 9,
            num_key_value_heads: 3,
            head_dim: 64,
            tie_word_embeddings: true,
            ..tiny(Family::Llama)
        };
        assert_eq!(Layout::new(&c).total(), 134_515_008);
    }

    #[test]
    fn experts_lie_side_by_side_and_count_as_published() {
        let c = tiny(Family::Qwen3Moe);
        let l = Layout::new(&c);
        assert!(matches!(l.layers[0].mlp, MlpOffsets::Dense { .. }));
        let MlpOffsets::Experts { router, experts, stride } = l.layers[1].mlp else { panic!("{:?}", l.layers[1]) };
        let at = |n: &str| l.table().get(&format!("model.layers.1.mlp.{n}.weight")).unwrap().clone();
        assert_eq!((at("gate").offset, at("gate").shape), (router, vec![5, 20]));
        for e in 0..5 {
            let part = |n: &str| at(&format!("experts.{e}.{n}"));
            assert_eq!(part("gate_proj").offset, experts + e * stride);
            assert_eq!(part("up_proj").offset, experts + e * stride + 11 * 20);
            assert_eq!((part("down_proj").offset, part("down_proj").shape), (experts + e * stride + 440, vec![20, 11]));
        }
        assert!(l.table().get("model.layers.1.mlp.up_proj.weight").is_none());
        // Qwen3-30B-A3B: 30.5 billion parameters, 3.3 billion of them for one token (model card).
        let moe = MoeConfig {
            num_experts: 128,
            num_experts_per_tok: 8,
            moe_intermediate_size: 768,
            norm_topk_prob: true,
            decoder_sparse_step: 1,
            mlp_only_layers: vec![],
        };
        let c = ModelConfig {
            vocab_size: 151_936,
            hidden_size: 2048,
            intermediate_size: 6144,
            num_hidden_layers: 48,
            num_attention_heads: 32,
            num_key_value_heads: 4,
            head_dim: 128,
            tie_word_embeddings: false,
            moe: Some(moe),
            ..c
        };
        let total = Layout::new(&c).total();
        assert_eq!(total / 100_000_000, 305);
        let idle = 48 * (128 - 8) * 3 * 768 * 2048;
        assert_eq!((total - idle) / 100_000_000, 33);
    }

    #[test]
    fn initial_values_have_the_asked_deviation() {
        let c = ModelConfig { hidden_size: 64, vocab_size: 1000, ..tiny(Family::Qwen3) };
        let p = Params::random(&c, 1, 0.02);
        let e = p.tensor("model.embed_tokens.weight").unwrap();
        let n = e.len() as f64;
        let mean = e.iter().map(|v| f64::from(*v)).sum::<f64>() / n;
        let var = e.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / n - mean * mean;
        // Standard errors: mean 0.02/sqrt(64000) = 8e-5, deviation 0.02/sqrt(128000) = 6e-5.
        assert!(mean.abs() < 4e-4 && (var.sqrt() - 0.02).abs() < 3e-4, "{mean} {}", var.sqrt());
        assert!(p.tensor("model.layers.0.self_attn.q_norm.weight").unwrap().iter().all(|v| *v == 1.0));
        assert_eq!(p, Params::random(&c, 1, 0.02));
        assert_ne!(p, Params::random(&c, 2, 0.02));
    }
}
