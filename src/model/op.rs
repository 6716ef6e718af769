//! The trainer as one candle operation over a flat variable: `(logp, entropy) = f(parameters)`.
//!
//! The loss is then composed of candle operations, and `backward` returns the flat gradient of the
//! variable. The cost against calling the trainer directly is one copy of the outputs.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use candle_core::{CpuStorage, CustomOp1, Error, Layout as CandleLayout, Result, Shape, Storage, Tensor};

use super::lora::LoraLayout;
use super::params::Params;
use super::train::{TrainBatch, Trainer};

/// A trainer that candle operations share. One forward at a time: a backward must come before the next
/// forward, else it fails by its generation number.
pub type SharedTrainer = Arc<Mutex<Trainer>>;

/// What the flat variable holds.
#[derive(Debug, Clone)]
pub enum Trained {
    /// All parameters.
    All,
    /// Adapters of this layout on a frozen base.
    Adapters(Arc<Params>, Arc<LoraLayout>),
}

struct LogProbs {
    trainer: SharedTrainer,
    trained: Trained,
    batch: Arc<TrainBatch>,
    temperature: f32,
    generation: AtomicU64,
}

fn lock(trainer: &SharedTrainer) -> Result<MutexGuard<'_, Trainer>> {
    trainer.lock().map_err(|_| Error::Msg("the trainer panicked in an earlier call".into()))
}

fn values<'a>(storage: &'a CpuStorage, layout: &CandleLayout) -> Result<&'a [f32]> {
    let all = storage.as_slice::<f32>()?;
    match layout.contiguous_offsets() {
        Some((from, to)) => Ok(&all[from..to]),
        None => candle_core::bail!("the flat parameter tensor must be contiguous"),
    }
}

impl LogProbs {
    /// Base values and adapters for the trainer, given the flat variable's.
    fn split<'a>(&'a self, flat: &'a [f32]) -> (&'a [f32], Option<(&'a LoraLayout, &'a [f32])>) {
        match &self.trained {
            Trained::All => (flat, None),
            Trained::Adapters(base, layout) => (base.data(), Some((layout, flat))),
        }
    }
}

impl CustomOp1 for LogProbs {
    fn name(&self) -> &'static str {
        "decoder-log-probs"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &CandleLayout) -> Result<(CpuStorage, Shape)> {
        let (base, lora) = self.split(values(storage, layout)?);
        let f = lock(&self.trainer)?
            .forward_flat(base, lora, &self.batch, self.temperature)
            .map_err(candle_core::Error::wrap)?;
        self.generation.store(f.generation, Ordering::SeqCst);
        let n = f.logp.len();
        let mut out = f.logp;
        out.extend(f.entropy);
        Ok((CpuStorage::F32(out), (2, n).into()))
    }

    fn bwd(&self, flat: &Tensor, _out: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        let grad = grad.to_vec2::<f32>()?;
        let (storage, layout) = flat.storage_and_layout();
        let Storage::Cpu(storage) = &*storage else { candle_core::bail!("the trainer runs on the CPU") };
        let (base, lora) = self.split(values(storage, layout)?);
        let mut out = vec![0.0; flat.elem_count()];
        let generation = self.generation.load(Ordering::SeqCst);
        lock(&self.trainer)?
            .backward_flat(generation, base, lora, &grad[0], Some(&grad[1]), &mut out)
            .map_err(candle_core::Error::wrap)?;
        Ok(Some(Tensor::from_vec(out, flat.shape(), flat.device())?))
    }
}

/// Log-probs and entropies (nats, `[targets]` each) of a batch as differentiable functions of the flat
/// variable `flat` (f32, on the CPU; parameters in the order of [`super::Layout`], or adapters).
///
/// # Errors
/// Those of [`Trainer::forward`], wrapped; a tensor that is not contiguous f32.
pub fn log_probs(
    trainer: &SharedTrainer,
    flat: &Tensor,
    trained: Trained,
    batch: Arc<TrainBatch>,
    temperature: f32,
) -> Result<(Tensor, Tensor)> {
    let op = LogProbs { trainer: Arc::clone(trainer), trained, batch, temperature, generation: AtomicU64::new(0) };
    let both = flat.apply_op1(op)?;
    Ok((both.get(0)?, both.get(1)?))
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device, Var};

    use super::super::config::Family;
    use super::super::lora::LoraTarget;
    use super::super::params::tests::tiny;
    use super::super::reference::Reference;
    use super::super::train::tests::{adapters, batch, weights};
    use super::*;

    /// A loss that is not linear in the log-probs, composed in candle, on both sides.
    fn loss(lp: &Tensor, h: &Tensor) -> Tensor {
        (lp.exp().unwrap().mean_all().unwrap() - h.sqr().unwrap().mean_all().unwrap()).unwrap()
    }

    fn close(ours: &Tensor, theirs: &Tensor, what: &str) {
        let flat = |t: &Tensor| t.flatten_all().unwrap().to_dtype(DType::F64).unwrap().to_vec1::<f64>().unwrap();
        let (a, b) = (flat(ours), flat(theirs));
        let diff: f64 = a.iter().zip(&b).map(|(a, b)| (a - b).powi(2)).sum();
        let norm: f64 = b.iter().map(|b| b * b).sum();
        assert!(norm > 0.0 && (diff / norm).sqrt() < 1e-4, "{what}: {}", (diff / norm).sqrt());
    }

    #[test]
    fn a_loss_composed_in_candle_gets_the_reference_gradient() {
        let c = tiny(Family::Qwen3);
        let (p, b) = (weights(&c), Arc::new(batch(&c)));
        let l = adapters(&c, &LoraTarget::ALL);
        let trainer = Arc::new(Mutex::new(Trainer::new(&c, 1).unwrap()));
        for lora in [None, Some(&l)] {
            let reference = Reference::new(&c, &p, lora, DType::F64, &Device::Cpu).unwrap();
            let (lp, h) = reference.forward(&b, 0.9).unwrap();
            let want = loss(&lp, &h).backward().unwrap();
            let values = lora.map_or(p.data(), |l| l.data());
            let var = Var::new(values, &Device::Cpu).unwrap();
            let trained = lora.map_or(Trained::All, |l| Trained::Adapters(Arc::new(p.clone()), Arc::clone(l.layout())));
            let (lp, h) = log_probs(&trainer, &var, trained, Arc::clone(&b), 0.9).unwrap();
            let grads = loss(&lp, &h).backward().unwrap();
            let grad = grads.get(&var).unwrap();
            let table = lora.map_or(p.layout().table(), |l| l.layout().table());
            for spec in table.tensors() {
                let ours = grad.narrow(0, spec.offset, spec.len()).unwrap();
                close(&ours, want.get(reference.var(&spec.name).unwrap()).unwrap(), &spec.name);
            }
        }
    }

    #[test]
    fn a_backward_after_another_forward_is_an_error() {
        let c = tiny(Family::Llama);
        let (p, b) = (weights(&c), Arc::new(batch(&c)));
        let trainer = Arc::new(Mutex::new(Trainer::new(&c, 1).unwrap()));
        let var = Var::new(p.data(), &Device::Cpu).unwrap();
        let run = || log_probs(&trainer, &var, Trained::All, Arc::clone(&b), 1.0).unwrap();
        let first = run().0.sum_all().unwrap();
        let second = run().0.sum_all().unwrap();
        let error = first.backward().unwrap_err().to_string();
        assert!(error.contains("backward of forward 1, but the workspace holds 2"), "{error}");
        assert!(second.backward().is_ok());
        assert!(log_probs(&trainer, &var.narrow(0, 0, 5).unwrap(), Trained::All, b, 1.0).is_err());
    }
}
