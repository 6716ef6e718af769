//! The fused path from hidden state to loss and back (norm, linear head in chunks of rows, scores, loss),
//! against its formulas in f64: dL/dW of the head, dL/d(norm) and, through the embedding, dL/d(hidden), for
//! every loss with entropy bonus, correction, KL and temperature.
//!
//! The layer between embedding and norm is silenced (its output projections are zero), so that the hidden
//! state of a token is its embedding and the whole reference fits on a page.

use super::*;
use crate::event::{Reward, RolloutFinished};
use crate::learner::batch::group_rollouts;
use crate::learner::fake::rollout;
use crate::learner::loss::{Correction, CorrectionKind, CorrectionLevel, KlKind, LossKind, TokenBatch, loss};
use crate::world::draw;

const D: usize = 8;

fn model(v: usize) -> ModelConfig {
    ModelConfig::from_json(&format!(
        r#"{{"model_type": "llama", "vocab_size": {v}, "hidden_size": {D}, "intermediate_size": 8,
            "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8,
            "rms_norm_eps": 1e-5, "tie_word_embeddings": false, "max_position_embeddings": 64}}"#
    ))
    .unwrap()
}

/// Random parameters whose layer passes the residual stream through.
fn params(model: &ModelConfig, seed: u64) -> Params {
    let mut params = Params::random(model, seed, 0.7);
    for name in ["self_attn.o_proj.weight", "mlp.down_proj.weight"] {
        params.tensor_mut(&format!("model.layers.0.{name}")).unwrap().fill(0.0);
    }
    let mut d = draw(seed, "norm", &[]);
    params.tensor_mut("model.norm.weight").unwrap().iter_mut().for_each(|x| *x = 0.5 + d.unit() as f32);
    params
}

fn groups(v: usize, size: u32) -> Vec<GroupRollouts> {
    let all = ["a", "b", "c"].into_iter().flat_map(|task| (0..size).map(move |k| (task, k)));
    let scored = |k: u32| Reward::Scored(f64::from(k % 3) / 2.0);
    group_rollouts(all.map(|(task, k)| rollout(1, task, k, v, scored(k))).collect())
}

/// (current token, sampled token) of a rollout, straight from the event.
fn pairs(r: &RolloutFinished) -> Vec<(usize, usize)> {
    let positions = r.sampled.iter().flat_map(|(start, n)| *start..start + n);
    positions.map(|p| (r.ids[p as usize - 1] as usize, r.ids[p as usize] as usize)).collect()
}

/// Embedding, norm and head in f64.
struct Wide {
    embed: Vec<f64>,
    norm: Vec<f64>,
    head: Vec<f64>,
}

impl Wide {
    fn new(p: &Params) -> Wide {
        let get = |name: &str| p.tensor(name).unwrap().iter().map(|x| f64::from(*x)).collect();
        Wide { embed: get("model.embed_tokens.weight"), norm: get("model.norm.weight"), head: get("lm_head.weight") }
    }

    /// (embedding, 1/rms, hidden state) of a token.
    fn hidden(&self, token: usize) -> (&[f64], f64, Vec<f64>) {
        let x = &self.embed[token * D..][..D];
        let r = 1.0 / (x.iter().map(|x| x * x).sum::<f64>() / D as f64 + 1e-5).sqrt();
        (x, r, x.iter().zip(&self.norm).map(|(x, w)| x * r * w).collect())
    }

    /// (log-probabilities, entropy) after a token.
    fn distribution(&self, token: usize, t: f64) -> (Vec<f64>, f64) {
        let h = self.hidden(token).2;
        let mut z: Vec<f64> =
            self.head.chunks_exact(D).map(|w| w.iter().zip(&h).map(|(w, h)| w * h).sum::<f64>() / t).collect();
        let top = z.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let lse = top + z.iter().map(|z| (z - top).exp()).sum::<f64>().ln();
        z.iter_mut().for_each(|z| *z -= lse);
        let entropy = z.iter().map(|lp| -lp.exp() * lp).sum();
        (z, entropy)
    }

    /// Adds the gradient of `sum g_i logp_i + e_i H_i` to (embed, norm, head).
    fn backward(&self, tokens: &[(usize, usize)], g: &[f64], e: &[f64], t: f64, out: &mut Wide) {
        for (i, (token, target)) in tokens.iter().enumerate() {
            let (x, r, h) = self.hidden(*token);
            let (logp, entropy) = self.distribution(*token, t);
            let mut dh = [0.0; D];
            for (j, logp) in logp.iter().enumerate() {
                let p = logp.exp();
                let hit = f64::from(u8::from(j == *target));
                let dz = (g[i] * (hit - p) - e[i] * p * (logp + entropy)) / t;
                for k in 0..D {
                    out.head[j * D + k] += dz * h[k];
                    dh[k] += dz * self.head[j * D + k];
                }
            }
            let along: f64 = (0..D).map(|k| dh[k] * self.norm[k] * x[k]).sum();
            for k in 0..D {
                out.norm[k] += dh[k] * x[k] * r;
                out.embed[token * D + k] += r * self.norm[k] * dh[k] - x[k] * r.powi(3) * along / D as f64;
            }
        }
    }
}

fn relative(got: &[f32], want: &[f64]) -> f64 {
    let square = |x: f64| x * x;
    let difference: f64 = got.iter().zip(want).map(|(a, b)| square(f64::from(*a) - b)).sum();
    (difference / want.iter().map(|b| square(*b)).sum::<f64>()).sqrt()
}

/// Runs one micro-batch through the learner and through the formulas.
fn compare(v: usize, size: u32, temperature: f32, config: &LearnerConfig) {
    let model = model(v);
    let (reference, policy) = (params(&model, 1), params(&model, 2));
    let compute = ModelCompute::full(&model, reference.clone(), 2, &LearnerConfig::default()).unwrap();
    let learner = Learner::new(Box::new(compute), policy.data().to_vec(), config.clone()).unwrap();
    let groups = groups(v, size);
    let batch = updates(&groups, config).unwrap().remove(0);
    assert_eq!(batch.micro_batches.len(), 1);
    let m = &batch.micro_batches[0];
    let of_key = |key| groups.iter().flat_map(|g| &g.rollouts).find(|r| &r.key == key).unwrap();
    let tokens: Vec<(usize, usize)> = m.keys.iter().flat_map(|key| pairs(of_key(key))).collect();

    let t = f64::from(temperature);
    let (policy, reference) = (Wide::new(&policy), Wide::new(&reference));
    let scored: Vec<(f64, f64)> = tokens
        .iter()
        .map(|(token, target)| {
            let (logp, entropy) = policy.distribution(*token, t);
            (logp[*target], entropy)
        })
        .collect();
    let logp: Vec<f64> = scored.iter().map(|s| s.0).collect();
    let entropy: Vec<f64> = scored.iter().map(|s| s.1).collect();
    let logp_ref: Vec<f64> = tokens.iter().map(|(token, y)| reference.distribution(*token, t).0[*y]).collect();
    let mut noise = draw(3, "old", &[]);
    let old: Vec<f32> = logp.iter().map(|x| (x + 0.6 * noise.unit() - 0.3) as f32).collect();
    let wide = |x: &[f32]| -> Vec<f64> { x.iter().map(|x| f64::from(*x)).collect() };
    let expected = loss(
        &config.loss_config(),
        &TokenBatch {
            logp: &logp,
            logp_old: Some(&wide(&old)),
            logp_ref: config.needs_reference().then_some(&logp_ref),
            logp_sampler: Some(&wide(&m.logp_sampler)),
            entropy: Some(&entropy),
            mask: &vec![true; logp.len()],
            offsets: &m.offsets,
            advantages: &wide(&m.advantages),
            weights: &m.weights,
        },
    )
    .unwrap();
    let mut of_entropy = expected.dentropy;
    of_entropy.resize(logp.len(), 0.0);
    let mut want = Wide { embed: vec![0.0; v * D], norm: vec![0.0; D], head: vec![0.0; v * D] };
    policy.backward(&tokens, &expected.dlogp, &of_entropy, t, &mut want);

    let gradient = learner.zero_gradient();
    let summary = learner.micro_batch(m, temperature, Some(old), &gradient).unwrap();
    let what = format!("{:?} v {v} T {temperature}", config.loss_config());
    assert!((summary.loss - expected.summary.loss).abs() < 1e-5 * (1.0 + summary.loss.abs()), "{what}");
    assert!((summary.entropy() - entropy.iter().sum::<f64>() / entropy.len() as f64).abs() < 1e-4, "{what}");
    let gradient = std::mem::take(&mut lock(&gradient).sum);
    let tensors = lock(learner.compute()).tensors();
    for (name, want) in
        [("model.embed_tokens.weight", &want.embed), ("model.norm.weight", &want.norm), ("lm_head.weight", &want.head)]
    {
        assert!(want.iter().any(|x| x.abs() > 1e-6), "{what}: nothing to compare in {name}");
        let tensor = tensors.iter().find(|t| t.name == name).unwrap();
        let error = relative(&gradient[tensor.range()], want);
        assert!(error < 2e-5, "{what}: {name} differs by {error}");
    }
}

fn config(kind: LossKind) -> LearnerConfig {
    // Ranges wide enough for a gradient everywhere and narrow enough to clip some.
    let (low, high) = if kind == LossKind::Cispo { (0.2, 1.1) } else { (0.15, 0.2) };
    LearnerConfig {
        loss: kind,
        epsilon_low: Some(low),
        epsilon_high: Some(high),
        beta: 0.1,
        ..LearnerConfig::default()
    }
}

#[test]
fn every_loss_has_the_gradient_of_f64() {
    for (kind, _) in LossKind::ALL {
        let base = config(kind);
        let correction = |kind, level| Some(Correction { kind, level, max: 1.5, min: Some(0.2) });
        for config in [
            base.clone(),
            LearnerConfig { entropy_coef: 0.05, ..base.clone() },
            LearnerConfig { entropy_coef: -0.05, beta: 0.0, kl: KlKind::K1, ..base.clone() },
            LearnerConfig { dual_clip: 1.1, delta: 1.15, kl: KlKind::K2, ..base.clone() },
            LearnerConfig { correction: correction(CorrectionKind::Tis, CorrectionLevel::Token), ..base.clone() },
            LearnerConfig { correction: correction(CorrectionKind::Tis, CorrectionLevel::Sequence), ..base },
        ] {
            for temperature in [0.7, 1.0, 1.3] {
                compare(37, 4, temperature, &config);
            }
        }
    }
}

/// A vocabulary so large that the head works in several chunks of 64 rows, the last one not full.
#[test]
fn chunks_change_nothing() {
    let v = (1 << 17) + 5;
    let tokens: usize = groups(v, 12).iter().flat_map(|g| &g.rollouts).map(|r| r.logprobs.len()).sum();
    assert!(tokens > 128 && !tokens.is_multiple_of(64), "{tokens}");
    compare(v, 12, 0.9, &LearnerConfig { entropy_coef: 0.05, ..config(LossKind::Dapo) });
}
