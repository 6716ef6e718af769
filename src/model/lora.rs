//! Low-rank adapters (LoRA) on any linear of the model, under PEFT names.
//!
//! The effective weight is `W + (alpha / rank) B A` with `A [rank, in]`, `B [out, rank]`. Training and
//! decoding both compute with the effective weight, so both see the same policy.

use std::sync::Arc;

use super::config::ModelConfig;
use super::error::ModelError;
use super::params::{TensorSpec, TensorTable, check_len};
use crate::world::draw;

/// A linear that can carry an adapter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum LoraTarget {
    /// `self_attn.q_proj`
    Q,
    /// `self_attn.k_proj`
    K,
    /// `self_attn.v_proj`
    V,
    /// `self_attn.o_proj`
    O,
    /// `mlp.gate_proj`
    Gate,
    /// `mlp.up_proj`
    Up,
    /// `mlp.down_proj`
    Down,
}

impl LoraTarget {
    /// Every linear ("all-linear" in PEFT).
    pub const ALL: [LoraTarget; 7] = [
        LoraTarget::Q,
        LoraTarget::K,
        LoraTarget::V,
        LoraTarget::O,
        LoraTarget::Gate,
        LoraTarget::Up,
        LoraTarget::Down,
    ];

    /// The linears of attention.
    pub const ATTENTION: [LoraTarget; 4] = [LoraTarget::Q, LoraTarget::K, LoraTarget::V, LoraTarget::O];

    /// Every linear that can carry an adapter in a model of this shape.
    pub fn all(model: &ModelConfig) -> Vec<LoraTarget> {
        if model.moe.is_some() { Self::ATTENTION.to_vec() } else { Self::ALL.to_vec() }
    }

    /// PEFT's module name, e.g. `q_proj`.
    pub fn module(self) -> &'static str {
        match self {
            LoraTarget::Q => "q_proj",
            LoraTarget::K => "k_proj",
            LoraTarget::V => "v_proj",
            LoraTarget::O => "o_proj",
            LoraTarget::Gate => "gate_proj",
            LoraTarget::Up => "up_proj",
            LoraTarget::Down => "down_proj",
        }
    }

    /// The target of a PEFT module name.
    ///
    /// # Errors
    /// [`ModelError::Lora`] naming the known ones.
    pub fn from_module(name: &str) -> Result<Self, ModelError> {
        Self::ALL.into_iter().find(|t| t.module() == name).ok_or_else(|| {
            let known: Vec<_> = Self::ALL.iter().map(|t| t.module()).collect();
            ModelError::Lora(format!("unknown target module {name}; known are {}", known.join(", ")))
        })
    }

    fn parent(self) -> &'static str {
        match self {
            LoraTarget::Q | LoraTarget::K | LoraTarget::V | LoraTarget::O => "self_attn",
            _ => "mlp",
        }
    }

    /// (rows, columns) of the linear's weight.
    pub fn shape(self, c: &ModelConfig) -> (usize, usize) {
        match self {
            LoraTarget::Q => (c.q_dim(), c.hidden_size),
            LoraTarget::K | LoraTarget::V => (c.kv_dim(), c.hidden_size),
            LoraTarget::O => (c.hidden_size, c.q_dim()),
            LoraTarget::Gate | LoraTarget::Up => (c.intermediate_size, c.hidden_size),
            LoraTarget::Down => (c.hidden_size, c.intermediate_size),
        }
    }
}

/// What to adapt and how.
#[derive(Debug, Clone, PartialEq)]
pub struct LoraConfig {
    /// Inner width r, at least 1.
    pub rank: usize,
    /// Scale: the adapter counts alpha / rank.
    pub alpha: f32,
    /// Which linears, in every layer.
    pub targets: Vec<LoraTarget>,
}

impl LoraConfig {
    /// alpha / rank.
    pub fn scale(&self) -> f32 {
        self.alpha / self.rank as f32
    }
}

/// Offsets of one adapter in the flat vector: `a [rank, in]`, `b [out, rank]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Adapter {
    pub a: usize,
    pub b: usize,
}

/// Names and places of all adapters.
#[derive(Debug, Clone, PartialEq)]
pub struct LoraLayout {
    config: LoraConfig,
    table: TensorTable,
    adapters: Vec<[Option<Adapter>; 7]>,
}

impl LoraLayout {
    /// The layout for `lora` on `model`; targets are taken once each, in the order of [`LoraTarget::ALL`].
    ///
    /// # Errors
    /// [`ModelError::Lora`] for rank 0, no target, an alpha that is not finite, or a target inside the experts of
    /// a mixture (Qwen3-MoE takes q, k, v and o).
    pub fn new(model: &ModelConfig, lora: &LoraConfig) -> Result<Self, ModelError> {
        if lora.rank == 0 || lora.targets.is_empty() || !lora.alpha.is_finite() {
            return Err(ModelError::Lora(format!(
                "rank {} and {} targets with alpha {}: rank and targets must be positive, alpha finite",
                lora.rank,
                lora.targets.len(),
                lora.alpha
            )));
        }
        if model.moe.is_some()
            && let Some(target) = lora.targets.iter().find(|t| !LoraTarget::ATTENTION.contains(t))
        {
            let known = LoraTarget::ATTENTION.map(LoraTarget::module).join(", ");
            return Err(ModelError::Lora(format!(
                "{} is inside the experts of this model, which carry no adapters; possible targets are {known}",
                target.module()
            )));
        }
        let mut table = TensorTable::default();
        let mut adapters = Vec::with_capacity(model.num_hidden_layers);
        for layer in 0..model.num_hidden_layers {
            let mut of_layer = [None; 7];
            for target in LoraTarget::ALL.into_iter().filter(|t| lora.targets.contains(t)) {
                let (rows, cols) = target.shape(model);
                let (parent, module) = (target.parent(), target.module());
                let name = |x: char| format!("base_model.model.model.layers.{layer}.{parent}.{module}.lora_{x}.weight");
                let a = table.push(name('A'), &[lora.rank, cols]);
                let b = table.push(name('B'), &[rows, lora.rank]);
                of_layer[target as usize] = Some(Adapter { a, b });
            }
            adapters.push(of_layer);
        }
        Ok(LoraLayout { config: lora.clone(), table, adapters })
    }

    /// Names (PEFT), places and shapes.
    pub fn table(&self) -> &TensorTable {
        &self.table
    }

    /// The settings.
    pub fn config(&self) -> &LoraConfig {
        &self.config
    }

    pub(super) fn check_model(&self, model: &ModelConfig) -> Result<(), ModelError> {
        if *self == LoraLayout::new(model, &self.config)? {
            Ok(())
        } else {
            Err(ModelError::Lora("the adapters are of another model".into()))
        }
    }

    /// Number of adapter parameters.
    pub fn total(&self) -> usize {
        self.table.total()
    }

    pub(super) fn adapter(&self, layer: usize, target: LoraTarget) -> Option<Adapter> {
        self.adapters[layer][target as usize]
    }
}

/// The adapters' weights: one flat vector and its layout.
#[derive(Debug, Clone, PartialEq)]
pub struct LoraParams {
    layout: Arc<LoraLayout>,
    data: Vec<f32>,
}

impl LoraParams {
    /// Fresh adapters as PEFT makes them: A uniform in +-1/sqrt(in) (Kaiming with a = sqrt 5), B zero, so
    /// the policy starts as the base model.
    ///
    /// # Errors
    /// As [`LoraLayout::new`].
    pub fn new(model: &ModelConfig, lora: &LoraConfig, seed: u64) -> Result<Self, ModelError> {
        let layout = Arc::new(LoraLayout::new(model, lora)?);
        let mut data = vec![0.0; layout.total()];
        for spec in layout.table.tensors().iter().filter(|s| s.name.ends_with("lora_A.weight")) {
            let bound = 1.0 / (spec.shape[1] as f64).sqrt();
            let mut d = draw(seed, "lora", &[&spec.name]);
            data[spec.range()].iter_mut().for_each(|v| *v = ((2.0 * d.unit() - 1.0) * bound) as f32);
        }
        Ok(LoraParams { layout, data })
    }

    /// Adapters from a flat vector in layout order.
    ///
    /// # Errors
    /// As [`LoraLayout::new`], and [`ModelError::Length`].
    pub fn from_flat(model: &ModelConfig, lora: &LoraConfig, data: Vec<f32>) -> Result<Self, ModelError> {
        let layout = Arc::new(LoraLayout::new(model, lora)?);
        check_len("LoRA parameters", layout.total(), data.len())?;
        Ok(LoraParams { layout, data })
    }

    /// Checks that the adapters belong to a model of this shape.
    ///
    /// # Errors
    /// [`ModelError::Lora`].
    pub fn check_model(&self, model: &ModelConfig) -> Result<(), ModelError> {
        self.layout.check_model(model)
    }

    /// The layout, shared.
    pub fn layout(&self) -> &Arc<LoraLayout> {
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

    /// Every tensor with its values, in flat order.
    pub fn tensors(&self) -> impl Iterator<Item = (&TensorSpec, &[f32])> {
        self.layout.table.tensors().iter().map(|s| (s, &self.data[s.range()]))
    }
}

#[cfg(test)]
mod tests {
    use super::super::config::Family;
    use super::super::params::tests::tiny;
    use super::*;

    #[test]
    fn names_shapes_and_start_are_peft_s() {
        let c = tiny(Family::Qwen3);
        let lora = LoraConfig { rank: 3, alpha: 6.0, targets: vec![LoraTarget::Down, LoraTarget::Q] };
        let p = LoraParams::new(&c, &lora, 7).unwrap();
        let names: Vec<_> = p.tensors().map(|(s, _)| (s.name.as_str(), s.shape.clone())).take(4).collect();
        assert_eq!(
            names,
            [
                ("base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight", vec![3, 20]),
                ("base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight", vec![24, 3]),
                ("base_model.model.model.layers.0.mlp.down_proj.lora_A.weight", vec![3, 27]),
                ("base_model.model.model.layers.0.mlp.down_proj.lora_B.weight", vec![20, 3]),
            ]
        );
        for (s, v) in p.tensors() {
            if s.name.ends_with("lora_B.weight") {
                assert!(v.iter().all(|x| *x == 0.0));
            } else {
                let bound = 1.0 / (s.shape[1] as f32).sqrt();
                assert!(v.iter().all(|x| x.abs() <= bound) && v.iter().any(|x| x.abs() > 0.5 * bound));
            }
        }
        assert_eq!(lora.scale(), 2.0);
        assert!(LoraParams::new(&c, &LoraConfig { rank: 0, ..lora }, 7).is_err());
        assert!(LoraTarget::from_module("lm_head").is_err());
        let moe = tiny(Family::Qwen3Moe);
        let error = LoraLayout::new(&moe, &LoraConfig { rank: 2, alpha: 1.0, targets: LoraTarget::ALL.to_vec() });
        assert!(error.unwrap_err().to_string().contains("gate_proj is inside the experts"));
        assert!(LoraLayout::new(&moe, &LoraConfig { rank: 2, alpha: 1.0, targets: LoraTarget::all(&moe) }).is_ok());
    }
}
