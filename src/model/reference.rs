//! The decoder again, composed only of candle operations that have a gradient: slow, plain, and in f64 if
//! asked. It shares no code with the kernels and is the measure for them; a CUDA path is measured by it too.
//!
//! Each sequence is computed by itself with its prefix in front, so it also checks prefix sharing.

use std::collections::BTreeMap;

use candle_core::{D, DType, Device, Result, Tensor, Var};
use candle_nn::ops::{log_softmax, softmax};
use candle_nn::rotary_emb::rope_slow;

use super::config::{ModelConfig, MoeConfig};
use super::lora::{LoraParams, LoraTarget};
use super::params::{Params, TensorSpec};
use super::train::TrainBatch;

/// A model as named candle variables.
pub struct Reference {
    config: ModelConfig,
    vars: BTreeMap<String, Var>,
    lora: Option<(f64, BTreeMap<String, Var>)>,
    dtype: DType,
}

fn variables<'a>(
    tensors: impl Iterator<Item = (&'a TensorSpec, &'a [f32])>,
    dtype: DType,
    device: &Device,
) -> Result<BTreeMap<String, Var>> {
    tensors
        .map(|(spec, values)| {
            let t = Tensor::from_slice(values, spec.shape.as_slice(), device)?.to_dtype(dtype)?;
            Ok((spec.name.clone(), Var::from_tensor(&t)?))
        })
        .collect()
}

impl Reference {
    /// Copies the weights (and adapters) into variables of `dtype` (f32 or f64).
    ///
    /// # Errors
    /// What candle reports.
    pub fn new(
        config: &ModelConfig,
        params: &Params,
        lora: Option<&LoraParams>,
        dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        let lora = match lora {
            None => None,
            Some(l) => Some((f64::from(l.layout().config().scale()), variables(l.tensors(), dtype, device)?)),
        };
        Ok(Reference { config: config.clone(), vars: variables(params.tensors(), dtype, device)?, lora, dtype })
    }

    /// The variable of a tensor name (Hugging Face or PEFT).
    pub fn var(&self, name: &str) -> Option<&Var> {
        self.vars.get(name).or_else(|| self.lora.as_ref().and_then(|(_, l)| l.get(name)))
    }

    fn get(&self, name: &str) -> Result<&Tensor> {
        self.vars.get(name).map(Var::as_tensor).ok_or_else(|| candle_core::Error::Msg(format!("no tensor {name}")))
    }

    /// `x W^T` (+ adapter, + bias).
    fn linear(&self, x: &Tensor, layer: usize, parent: &str, target: LoraTarget) -> Result<Tensor> {
        let name = format!("model.layers.{layer}.{parent}.{}", target.module());
        let mut y = x.matmul(&self.get(&format!("{name}.weight"))?.t()?)?;
        if let Some((scale, vars)) = &self.lora {
            let var = |m: char| vars.get(&format!("base_model.model.{name}.lora_{m}.weight"));
            if let (Some(a), Some(b)) = (var('A'), var('B')) {
                y = (y + (x.matmul(&a.t()?)?.matmul(&b.t()?)? * *scale)?)?;
            }
        }
        match self.vars.get(&format!("{name}.bias")) {
            Some(b) => y.broadcast_add(b),
            None => Ok(y),
        }
    }

    fn norm(&self, x: &Tensor, name: &str) -> Result<Tensor> {
        // candle's rms_norm_slow takes epsilon as f32; written out so that f64 stays f64.
        let mean = (x.sqr()?.sum_keepdim(D::Minus1)? / x.dim(D::Minus1)? as f64)?;
        x.broadcast_div(&(mean + self.config.rms_norm_eps)?.sqrt()?)?.broadcast_mul(self.get(name)?)
    }

    /// `[tokens, heads * dim]` to `[1, heads, tokens, dim]`, normalised where the model does, rotated.
    fn heads(&self, x: &Tensor, heads: usize, norm: Option<String>, rope: &(Tensor, Tensor)) -> Result<Tensor> {
        let x = x.reshape((1, x.dim(0)?, heads, self.config.head_dim))?.transpose(1, 2)?.contiguous()?;
        let x = match norm {
            Some(name) => self.norm(&x, &name)?,
            None => x,
        };
        rope_slow(&x, &rope.0, &rope.1)
    }

    /// A mixture of experts: every expert answers every token, with weight zero where it was not chosen.
    fn experts(&self, h: &Tensor, layer: usize, moe: &MoeConfig) -> Result<Tensor> {
        let weight = |name: &str| self.get(&format!("model.layers.{layer}.mlp.{name}.weight"));
        let p = softmax(&h.matmul(&weight("gate")?.t()?)?, D::Minus1)?;
        let chosen: Vec<f64> = p
            .to_dtype(DType::F64)?
            .to_vec2::<f64>()?
            .iter()
            .flat_map(|p| {
                // As many as are larger: fewer than k means chosen.
                let k = moe.num_experts_per_tok;
                p.iter().map(|x| f64::from(u8::from(p.iter().filter(|y| *y > x).count() < k))).collect::<Vec<_>>()
            })
            .collect();
        let chosen = Tensor::from_vec(chosen, p.shape(), p.device())?.to_dtype(self.dtype)?;
        let mut w = (p * chosen)?;
        if moe.norm_topk_prob {
            w = w.broadcast_div(&w.sum_keepdim(D::Minus1)?)?;
        }
        let mut sum = h.zeros_like()?;
        for e in 0..moe.num_experts {
            let apply = |x: &Tensor, name: &str| x.matmul(&weight(&format!("experts.{e}.{name}"))?.t()?);
            let act = (apply(h, "gate_proj")?.silu()? * apply(h, "up_proj")?)?;
            sum = (sum + apply(&act, "down_proj")?.broadcast_mul(&w.narrow(1, e, 1)?)?)?;
        }
        Ok(sum)
    }

    /// Logits `[tokens, vocab]` of one sequence.
    ///
    /// # Errors
    /// What candle reports.
    pub fn logits(&self, ids: &[u32]) -> Result<Tensor> {
        let (c, n) = (&self.config, ids.len());
        let embed = self.get("model.embed_tokens.weight")?;
        let device = embed.device();
        let half = c.head_dim / 2;
        let periods = c.rope_periods();
        let angles: Vec<f64> = (0..n * half).map(|i| (i / half) as f64 / periods[i % half]).collect();
        let angles = Tensor::from_vec(angles, (n, half), device)?;
        let scaled = |t: Tensor| (t * c.rope_scaling.attention_factor())?.to_dtype(self.dtype);
        let rope = (scaled(angles.cos()?)?, scaled(angles.sin()?)?);
        let mask: Vec<f64> = (0..n * n).map(|i| if i % n > i / n { f64::NEG_INFINITY } else { 0.0 }).collect();
        let mask = Tensor::from_vec(mask, (n, n), device)?.to_dtype(self.dtype)?;
        let group = c.num_attention_heads / c.num_key_value_heads;
        let repeat = |x: Tensor| -> Result<Tensor> {
            let (b, h, t, d) = x.dims4()?;
            x.unsqueeze(2)?.broadcast_as((b, h, group, t, d))?.reshape((b, h * group, t, d))
        };
        let mut x = embed.index_select(&Tensor::new(ids, device)?, 0)?;
        for l in 0..c.num_hidden_layers {
            let at = |name: &str| format!("model.layers.{l}.{name}.weight");
            let h = self.norm(&x, &at("input_layernorm"))?;
            let p = |t| self.linear(&h, l, "self_attn", t);
            let norm = |name: &str| c.qk_norm.then(|| at(name));
            let q = self.heads(&p(LoraTarget::Q)?, c.num_attention_heads, norm("self_attn.q_norm"), &rope)?;
            let k = self.heads(&p(LoraTarget::K)?, c.num_key_value_heads, norm("self_attn.k_norm"), &rope)?;
            let v = p(LoraTarget::V)?.reshape((1, n, c.num_key_value_heads, c.head_dim))?.transpose(1, 2)?;
            let (k, v) = (repeat(k)?, repeat(v.contiguous()?)?);
            let scores = (q.matmul(&k.t()?)? / (c.head_dim as f64).sqrt())?;
            let o = softmax(&scores.broadcast_add(&mask)?, D::Minus1)?.matmul(&v)?;
            let o = o.transpose(1, 2)?.reshape((n, c.q_dim()))?;
            x = (x + self.linear(&o, l, "self_attn", LoraTarget::O)?)?;
            let h = self.norm(&x, &at("post_attention_layernorm"))?;
            let answer = match c.experts(l) {
                Some(moe) => self.experts(&h, l, moe)?,
                None => {
                    let gate = self.linear(&h, l, "mlp", LoraTarget::Gate)?.silu()?;
                    let act = (gate * self.linear(&h, l, "mlp", LoraTarget::Up)?)?;
                    self.linear(&act, l, "mlp", LoraTarget::Down)?
                }
            };
            x = (x + answer)?;
        }
        let head = if c.tie_word_embeddings { embed } else { self.get("lm_head.weight")? };
        self.norm(&x, "model.norm.weight")?.matmul(&head.t()?)
    }

    /// Log-probs and entropies (nats) of all targets of a batch, as [`super::Trainer::forward`] orders them.
    ///
    /// # Errors
    /// What candle reports.
    pub fn forward(&self, batch: &TrainBatch, temperature: f64) -> Result<(Tensor, Tensor)> {
        let (mut logps, mut entropies) = (Vec::new(), Vec::new());
        for row in batch.rows.iter().filter(|r| !r.targets.is_empty()) {
            let before = row.prefix.map_or(&[][..], |p| &batch.prefixes[p]);
            let logits = self.logits(&[before, &row.ids].concat())?;
            let at: Vec<u32> = row.targets.iter().map(|t| t.0 + before.len() as u32).collect();
            let tokens: Vec<u32> = row.targets.iter().map(|t| t.1).collect();
            let device = logits.device();
            let z = (logits.index_select(&Tensor::new(at, device)?, 0)? / temperature)?;
            let lp = log_softmax(&z, D::Minus1)?;
            entropies.push((lp.exp()? * &lp)?.sum(D::Minus1)?.neg()?);
            logps.push(lp.gather(&Tensor::new(tokens, device)?.unsqueeze(1)?, 1)?.squeeze(1)?);
        }
        Ok((Tensor::cat(&logps, 0)?, Tensor::cat(&entropies, 0)?))
    }
}
