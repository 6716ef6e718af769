//! A tiny differentiable policy for tests: a bigram table, logits of the next token = row of the current one.
//! Its gradient is written independently of the model's code, and it can be told to misbehave.

use super::compute::Compute;
use super::error::LearnerError;
use crate::event::{EndReason, Reward, RolloutFinished, RolloutKey};
use crate::model::{Forward, TensorSpec, TrainBatch};
use crate::world::draw;

/// [`Compute`] over `vocab * vocab` parameters in two tensors.
pub struct Bigram {
    pub vocab: usize,
    pub reference: Vec<f32>,
    held: Option<(Vec<f32>, TrainBatch, f32)>,
    generation: u64,
    /// Put a NaN into the log-probs of this forward (counted from 1 over the life of the object).
    pub poison_forward: Option<u64>,
    /// Put an infinity into the gradient of this backward.
    pub poison_backward: Option<u64>,
    pub forwards: u64,
    pub backwards: u64,
}

impl Bigram {
    pub fn new(vocab: usize, seed: u64) -> (Bigram, Vec<f32>) {
        let mut d = draw(seed, "bigram", &[]);
        let weights: Vec<f32> = (0..vocab * vocab).map(|_| (2.0 * d.unit() - 1.0) as f32).collect();
        let bigram = Bigram {
            vocab,
            reference: weights.clone(),
            held: None,
            generation: 0,
            poison_forward: None,
            poison_backward: None,
            forwards: 0,
            backwards: 0,
        };
        (bigram, weights)
    }

    /// (current token, target) of every target of a batch.
    fn pairs(batch: &TrainBatch) -> Vec<(usize, usize)> {
        let of_row = |row: &crate::model::TrainRow| {
            row.targets.iter().map(|(p, t)| (row.ids[*p as usize] as usize, *t as usize)).collect::<Vec<_>>()
        };
        batch.rows.iter().flat_map(of_row).collect()
    }

    /// Probabilities after `token`, in f64.
    fn row(&self, weights: &[f32], token: usize, temperature: f32) -> Vec<f64> {
        let z: Vec<f64> = weights[token * self.vocab..(token + 1) * self.vocab]
            .iter()
            .map(|x| f64::from(*x) / f64::from(temperature))
            .collect();
        let total: f64 = z.iter().map(|x| x.exp()).sum();
        z.iter().map(|x| x.exp() / total).collect()
    }

    fn evaluate(&self, weights: &[f32], batch: &TrainBatch, temperature: f32) -> (Vec<f32>, Vec<f32>) {
        Self::pairs(batch)
            .into_iter()
            .map(|(token, target)| {
                let p = self.row(weights, token, temperature);
                let entropy: f64 = p.iter().map(|p| -p * p.ln()).sum();
                (p[target].ln() as f32, entropy as f32)
            })
            .unzip()
    }
}

impl Compute for Bigram {
    fn tensors(&self) -> Vec<TensorSpec> {
        let (v, half) = (self.vocab, self.vocab / 2);
        vec![
            TensorSpec { name: "table.low".into(), offset: 0, shape: vec![half, v] },
            TensorSpec { name: "table.high".into(), offset: half * v, shape: vec![v - half, v] },
        ]
    }

    fn forward(&mut self, trainable: &[f32], batch: &TrainBatch, temperature: f32) -> Result<Forward, LearnerError> {
        self.generation += 1;
        self.forwards += 1;
        let (mut logp, entropy) = self.evaluate(trainable, batch, temperature);
        if self.poison_forward == Some(self.forwards) {
            logp[0] = f32::NAN;
        }
        self.held = Some((trainable.to_vec(), batch.clone(), temperature));
        Ok(Forward { generation: self.generation, logp, entropy })
    }

    fn backward(
        &mut self,
        generation: u64,
        _trainable: &[f32],
        dlogp: &[f32],
        dentropy: Option<&[f32]>,
        gradient: &mut [f32],
    ) -> Result<(), LearnerError> {
        self.backwards += 1;
        let Some((weights, batch, temperature)) = self.held.clone().filter(|_| generation == self.generation) else {
            return Err(LearnerError::Generation { asked: generation, held: self.generation });
        };
        for (i, (token, target)) in Self::pairs(&batch).into_iter().enumerate() {
            let p = self.row(&weights, token, temperature);
            let h: f64 = p.iter().map(|p| -p * p.ln()).sum();
            for (j, p) in p.iter().enumerate() {
                let hit = if j == target { 1.0 } else { 0.0 };
                let mut g = f64::from(dlogp[i]) * (hit - p);
                g -= dentropy.map_or(0.0, |d| f64::from(d[i])) * p * (p.ln() + h);
                gradient[token * self.vocab + j] += (g / f64::from(temperature)) as f32;
            }
        }
        if self.poison_backward == Some(self.backwards) {
            gradient[0] = f32::INFINITY;
        }
        Ok(())
    }

    fn reference(&mut self, batch: &TrainBatch, temperature: f32) -> Result<Vec<f32>, LearnerError> {
        self.generation += 1;
        let reference = self.reference.clone();
        Ok(self.evaluate(&reference, batch, temperature).0)
    }
}

/// A rollout of random tokens: a prompt of 4 that its group shares, then sampled and environment tokens.
pub fn rollout(step: u32, task: &str, k: u32, vocab: usize, reward: Reward) -> RolloutFinished {
    let mut prompt = draw(9, "prompt", &[&step.to_string(), task]);
    let mut ids: Vec<u32> = (0..4).map(|_| prompt.below(vocab) as u32).collect();
    let mut d = draw(9, "body", &[&step.to_string(), task, &k.to_string()]);
    let mut sampled = Vec::new();
    for _ in 0..2 {
        let length = 1 + d.below(4) as u32;
        sampled.push((ids.len() as u32, length));
        for _ in 0..length + 2 {
            ids.push(d.below(vocab) as u32);
        }
    }
    let count: u32 = sampled.iter().map(|s| s.1).sum();
    RolloutFinished {
        key: RolloutKey { step, task: task.into(), draw: 0, k },
        policy_version: 0,
        prompt_len: 4,
        sampled,
        logprobs: (0..count).map(|_| -1.0 - d.unit() as f32).collect(),
        sampling_logprobs: Vec::new(),
        ids,
        actions: Vec::new(),
        env_steps: 1,
        reward,
        end: EndReason::Done,
    }
}
