//! The fused loss on the CPU: the rows of the reference in parallel, same bits for any number of threads.

use super::reference::{row, row_gradient};
use super::{Arrays, HEADER, Inner};
use crate::learner::loss::{Real, loss};
use candle_core::{CpuStorage, Layout, Result, Shape};
use rayon::prelude::*;

fn arrays<F: Real>(op: &Inner) -> Arrays<F> {
    let convert = |v: &Vec<f32>| v.iter().map(|x| F::of(f64::from(*x))).collect();
    Arrays {
        old: op.tokens.logp_old.as_ref().map(convert),
        reference: op.tokens.logp_ref.as_ref().map(convert),
        sampler: op.tokens.logp_sampler.as_ref().map(convert),
        advantages: convert(&op.tokens.advantages),
    }
}

fn forward_in<F: Real>(op: &Inner, logits: &[F], n: usize, v: usize) -> Result<Vec<F>> {
    let scale = F::of(1.0 / op.temperature);
    let rows: Vec<(F, F, F)> = (0..n)
        .into_par_iter()
        .map(|i| {
            // A masked row may hold anything; it is not looked at.
            if op.tokens.mask[i] {
                row(&logits[i * v..(i + 1) * v], op.targets[i] as usize, scale)
            } else {
                (F::ZERO, F::ZERO, F::ZERO)
            }
        })
        .collect();
    let logp: Vec<F> = rows.iter().map(|r| r.0).collect();
    let entropy: Vec<F> = rows.iter().map(|r| r.1).collect();
    let arrays = arrays(op);
    let output = loss(&op.config, &op.batch(&arrays, &logp, &entropy)).map_err(candle_core::Error::wrap)?;
    let s = output.summary;
    let header = [
        s.loss,
        s.policy_loss,
        s.kl_sum,
        s.entropy_sum,
        s.clipped as f64,
        s.capped as f64,
        s.trained_tokens as f64,
        f64::from(u8::from(s.non_finite)),
    ];
    let mut out = Vec::with_capacity(HEADER + 5 * n);
    out.extend(header.map(F::of));
    out.extend_from_slice(&logp);
    out.extend_from_slice(&entropy);
    out.extend(rows.iter().map(|r| r.2));
    out.extend_from_slice(&output.dlogp);
    out.extend_from_slice(&output.dentropy);
    out.resize(HEADER + 5 * n, F::ZERO);
    Ok(out)
}

fn backward_in<F: Real>(op: &Inner, logits: &mut [F], result: &[F], scale: F, v: usize) {
    let n = op.targets.len();
    let array = |k: usize| &result[HEADER + k * n..HEADER + (k + 1) * n];
    let (entropy, lse, dlogp, dentropy) = (array(1), array(2), array(3), array(4));
    let inverse_temperature = F::of(1.0 / op.temperature);
    logits.par_chunks_mut(v).enumerate().for_each(|(i, row)| {
        if op.tokens.mask[i] {
            let slopes = (scale * dlogp[i], scale * dentropy[i]);
            row_gradient(row, op.targets[i] as usize, inverse_temperature, (entropy[i], lse[i]), slopes);
        } else {
            row.fill(F::ZERO);
        }
    });
}

fn within<'a, F>(values: &'a [F], layout: &Layout, what: &str) -> Result<&'a [F]> {
    match layout.contiguous_offsets() {
        Some((from, to)) => Ok(&values[from..to]),
        None => candle_core::bail!("grpo-loss: {what} must be contiguous"),
    }
}

pub(super) fn forward(
    op: &Inner,
    logits: &CpuStorage,
    layout: &Layout,
    n: usize,
    v: usize,
) -> Result<(CpuStorage, Shape)> {
    let shape = Shape::from(HEADER + 5 * n);
    match logits {
        CpuStorage::F32(x) => Ok((CpuStorage::F32(forward_in(op, within(x, layout, "logits")?, n, v)?), shape)),
        CpuStorage::F64(x) => Ok((CpuStorage::F64(forward_in(op, within(x, layout, "logits")?, n, v)?), shape)),
        _ => candle_core::bail!("grpo-loss: logits must be f32 or f64"),
    }
}

/// A contiguous copy of the logits.
pub(super) fn copy(logits: &CpuStorage, layout: &Layout) -> Result<CpuStorage> {
    match logits {
        CpuStorage::F32(x) => Ok(CpuStorage::F32(within(x, layout, "logits")?.to_vec())),
        CpuStorage::F64(x) => Ok(CpuStorage::F64(within(x, layout, "logits")?.to_vec())),
        _ => candle_core::bail!("grpo-loss: logits must be f32 or f64"),
    }
}

/// `logits[from..]` become dL/dlogits.
pub(super) fn backward(
    op: &Inner,
    logits: &mut CpuStorage,
    from: usize,
    result: (&CpuStorage, &Layout),
    gradient: (&CpuStorage, &Layout),
    v: usize,
) -> Result<()> {
    let n = op.targets.len();
    macro_rules! run {
        ($kind:ident, $logits:expr) => {{
            let (CpuStorage::$kind(result_values), CpuStorage::$kind(gradient_values)) = (result.0, gradient.0) else {
                candle_core::bail!("grpo-loss: logits, result and gradient must have one number type");
            };
            let (r, g) = (within(result_values, result.1, "result")?, within(gradient_values, gradient.1, "gradient")?);
            if r.len() != HEADER + 5 * n || g.is_empty() {
                candle_core::bail!("grpo-loss: {} result and {} gradient values for {n} rows", r.len(), g.len());
            }
            backward_in(op, &mut $logits[from..from + n * v], r, g[0], v);
            Ok(())
        }};
    }
    match logits {
        CpuStorage::F32(x) => run!(F32, x),
        CpuStorage::F64(x) => run!(F64, x),
        _ => candle_core::bail!("grpo-loss: logits must be f32 or f64"),
    }
}
