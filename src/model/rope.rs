//! Rotary frequencies, and how models stretch them to contexts longer than they were first trained on.
//!
//! A head of width `dim` rotates pairs j = 0 .. dim / 2 by `position / period_j`, in the unscaled form with
//! `period_j = theta^(2 j / dim)`. The scaled forms (names and formulas of transformers'
//! `modeling_rope_utils`) give other periods; yarn also multiplies cosines and sines by a constant.
//!
//! | kind | period | used by |
//! |---|---|---|
//! | `linear` | `factor` times longer | |
//! | `llama3` | short ones as they are, long ones `factor` times longer, a blend between | Llama 3.1, 3.2, 3.3 |
//! | `yarn` | pairs that turn often as they are, those that turn seldom `factor` times longer, a ramp between | Qwen2.5, Qwen3 beyond 32 k |
//!
//! Others (`dynamic`, `longrope`, ...) are refused by name: their frequencies depend on the length of the
//! sequence, so that cached keys would no longer be those of the model.

use serde_json::{Map, Value, json};

use super::config::{float_or, size_or};
use super::error::ModelError;

/// How the rotary frequencies are scaled.
#[derive(Debug, Clone, PartialEq, Default)]
pub enum RopeScaling {
    /// Not at all.
    #[default]
    None,
    /// Positions are divided by `factor`.
    Linear {
        /// At least 1.
        factor: f64,
    },
    /// By wavelength (Llama 3.1 and later).
    Llama3 {
        /// How much long wavelengths are stretched; at least 1.
        factor: f64,
        /// Wavelengths above `original / low_freq_factor` are stretched fully.
        low_freq_factor: f64,
        /// Wavelengths below `original / high_freq_factor` are kept.
        high_freq_factor: f64,
        /// Context of the first training, tokens.
        original_max_position_embeddings: usize,
    },
    /// By number of turns within the original context (YaRN, arXiv 2309.00071).
    Yarn {
        /// How much slow pairs are stretched; at least 1.
        factor: f64,
        /// Context of the first training, tokens.
        original_max_position_embeddings: usize,
        /// Multiplies cosines and sines; `0.1 ln(factor) + 1` where the configuration names none.
        attention_factor: Option<f64>,
        /// Pairs with more turns are kept.
        beta_fast: f64,
        /// Pairs with fewer turns are stretched fully.
        beta_slow: f64,
        /// Whether the ramp's ends are rounded to whole pairs.
        truncate: bool,
    },
}

fn at_least_one(v: &Value, key: &str) -> Result<f64, ModelError> {
    match v.get(key) {
        None | Some(Value::Null) => Err(ModelError::Config(format!("rope scaling: field {key} is missing"))),
        Some(_) => match float_or(v, key, 1.0)? {
            x if x >= 1.0 => Ok(x),
            x => Err(ModelError::Config(format!("rope scaling: {key} = {x} is below 1"))),
        },
    }
}

impl RopeScaling {
    /// From `rope_scaling` (or `rope_parameters`) of a `config.json`; `context` is its
    /// `max_position_embeddings`, which stands in for an original context that is not named.
    ///
    /// # Errors
    /// [`ModelError::Unsupported`] for other kinds, [`ModelError::Config`] for missing or impossible values.
    pub fn from_json(v: &Value, context: usize) -> Result<Self, ModelError> {
        let unsupported = |value: String| ModelError::Unsupported {
            what: "rope_scaling",
            value,
            supported: "default, linear, llama3, yarn",
        };
        let Some(fields) = v.as_object() else {
            return match v {
                Value::Null => Ok(RopeScaling::None),
                other => Err(unsupported(other.to_string())),
            };
        };
        if fields.values().any(Value::is_object) {
            return Err(unsupported("one for each kind of layer".into()));
        }
        let kind = v.get("rope_type").or_else(|| v.get("type")).unwrap_or(&Value::Null);
        let original = || size_or(v, "original_max_position_embeddings", Some(context));
        let optional = |key: &str| match v.get(key) {
            None | Some(Value::Null) => Ok(None),
            Some(_) => float_or(v, key, 1.0).map(Some),
        };
        let scaling = match kind.as_str() {
            None if kind.is_null() => RopeScaling::None,
            Some("default") => RopeScaling::None,
            Some("linear") => RopeScaling::Linear { factor: at_least_one(v, "factor")? },
            Some("llama3") => RopeScaling::Llama3 {
                factor: at_least_one(v, "factor")?,
                low_freq_factor: float_or(v, "low_freq_factor", 1.0)?,
                high_freq_factor: float_or(v, "high_freq_factor", 4.0)?,
                original_max_position_embeddings: original()?,
            },
            Some("yarn") => {
                let factor = at_least_one(v, "factor")?;
                let both = optional("mscale")?.zip(optional("mscale_all_dim")?);
                let scaled = both.map(|(a, b)| yarn_magnitude(factor, a) / yarn_magnitude(factor, b));
                RopeScaling::Yarn {
                    factor,
                    original_max_position_embeddings: original()?,
                    attention_factor: optional("attention_factor")?.or(scaled),
                    beta_fast: float_or(v, "beta_fast", 32.0)?,
                    beta_slow: float_or(v, "beta_slow", 1.0)?,
                    truncate: v.get("truncate").and_then(Value::as_bool).unwrap_or(true),
                }
            }
            _ => return Err(unsupported(kind.as_str().map_or_else(|| kind.to_string(), str::to_owned))),
        };
        if let RopeScaling::Llama3 { low_freq_factor: low, high_freq_factor: high, .. } = scaling
            && low >= high
        {
            return Err(ModelError::Config(format!(
                "rope scaling: low_freq_factor = {low} is not below high_freq_factor = {high}"
            )));
        }
        Ok(scaling)
    }

    /// As `rope_scaling` of a `config.json` (null for none), in the form that transformers 4 and 5 read.
    pub fn to_json(&self) -> Value {
        match self {
            RopeScaling::None => Value::Null,
            RopeScaling::Linear { factor } => json!({"rope_type": "linear", "factor": factor}),
            RopeScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_max_position_embeddings: original,
            } => {
                json!({"rope_type": "llama3", "factor": factor, "low_freq_factor": low_freq_factor,
                    "high_freq_factor": high_freq_factor, "original_max_position_embeddings": original})
            }
            RopeScaling::Yarn {
                factor,
                original_max_position_embeddings: original,
                attention_factor,
                beta_fast,
                beta_slow,
                truncate,
            } => {
                let mut map = Map::new();
                map.insert("rope_type".into(), json!("yarn"));
                map.insert("factor".into(), json!(factor));
                map.insert("original_max_position_embeddings".into(), json!(original));
                map.insert("beta_fast".into(), json!(beta_fast));
                map.insert("beta_slow".into(), json!(beta_slow));
                if let Some(a) = attention_factor {
                    map.insert("attention_factor".into(), json!(a));
                }
                if !truncate {
                    map.insert("truncate".into(), json!(false));
                }
                Value::Object(map)
            }
        }
    }

    /// Longest sequence of a model whose configuration says `max_position_embeddings`. Configurations that
    /// were switched to yarn by hand (as Qwen's model cards describe) keep the original context there.
    pub fn context(&self, max_position_embeddings: usize) -> usize {
        match self {
            RopeScaling::Yarn { factor, original_max_position_embeddings: original, .. }
                if max_position_embeddings == *original =>
            {
                (*original as f64 * factor) as usize
            }
            _ => max_position_embeddings,
        }
    }

    /// Positions per radian of each pair of a head of `dim` values.
    pub fn periods(&self, dim: usize, theta: f64) -> Vec<f64> {
        let plain = |j: usize| theta.powf(2.0 * j as f64 / dim as f64);
        let pairs = 0..dim / 2;
        match self {
            RopeScaling::None => pairs.map(plain).collect(),
            RopeScaling::Linear { factor } => pairs.map(|j| plain(j) * factor).collect(),
            RopeScaling::Llama3 {
                factor,
                low_freq_factor: low,
                high_freq_factor: high,
                original_max_position_embeddings,
            } => {
                let period = |j| {
                    let p = plain(j);
                    // Wavelengths within the original context.
                    let turns = *original_max_position_embeddings as f64 / (std::f64::consts::TAU * p);
                    if turns > *high {
                        p
                    } else if turns < *low {
                        p * factor
                    } else {
                        blend(p, *factor, (turns - low) / (high - low))
                    }
                };
                pairs.map(period).collect()
            }
            RopeScaling::Yarn { factor, original_max_position_embeddings, beta_fast, beta_slow, truncate, .. } => {
                let context = *original_max_position_embeddings as f64;
                // The pair that makes `turns` turns within the original context.
                let pair =
                    |turns: f64| dim as f64 * (context / (turns * std::f64::consts::TAU)).ln() / (2.0 * theta.ln());
                let (mut from, mut to) = (pair(*beta_fast), pair(*beta_slow));
                if *truncate {
                    (from, to) = (from.floor(), to.ceil());
                }
                (from, to) = (from.max(0.0), to.min(dim as f64 - 1.0));
                if from == to {
                    to += 0.001;
                }
                let kept = |j: usize| 1.0 - ((j as f64 - from) / (to - from)).clamp(0.0, 1.0);
                pairs.map(|j| blend(plain(j), *factor, kept(j))).collect()
            }
        }
    }

    /// What cosines and sines are multiplied by.
    pub fn attention_factor(&self) -> f64 {
        match self {
            RopeScaling::Yarn { factor, attention_factor, .. } => {
                attention_factor.unwrap_or_else(|| yarn_magnitude(*factor, 1.0))
            }
            _ => 1.0,
        }
    }
}

/// The period whose frequency lies `kept` of the way from the stretched one to the plain one.
fn blend(period: f64, factor: f64, kept: f64) -> f64 {
    1.0 / (kept / period + (1.0 - kept) / (factor * period))
}

fn yarn_magnitude(factor: f64, mscale: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * mscale * factor.ln() + 1.0 }
}

#[cfg(test)]
#[path = "tests/rope.rs"]
mod tests;
