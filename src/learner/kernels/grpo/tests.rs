//! The fused op against finite differences and against the same loss composed of candle ops.

use super::*;
use crate::learner::loss::{Correction, CorrectionKind, CorrectionLevel, KlKind, LossKind, loss};
use crate::world::draw;
use candle_core::{D, DType, Device, Var};

pub(super) const N: usize = 9;
pub(super) const V: usize = 23;
pub(super) const T: f64 = 0.9;

fn values(purpose: &str, n: usize, from: f64, to: f64) -> Vec<f64> {
    let mut d = draw(11, purpose, &[]);
    (0..n).map(|_| from + (to - from) * d.unit()).collect()
}

fn singles(purpose: &str, n: usize, from: f64, to: f64) -> Vec<f32> {
    values(purpose, n, from, to).iter().map(|x| *x as f32).collect()
}

pub(super) fn tokens() -> TokenConstants {
    TokenConstants {
        logp_old: Some(singles("old", N, -4.0, -2.0)),
        logp_ref: Some(singles("ref", N, -4.0, -2.0)),
        logp_sampler: Some(singles("sampler", N, -4.0, -2.0)),
        mask: vec![true, true, false, true, true, true, true, false, true],
        offsets: vec![0, 4, 4, 9],
        advantages: vec![1.2, -3.0, -0.7],
        weights: vec![0.11, 0.2, 0.15],
    }
}

pub(super) fn targets() -> Vec<u32> {
    let mut d = draw(11, "targets", &[]);
    (0..N).map(|_| d.below(V) as u32).collect()
}

pub(super) fn configs() -> Vec<LossConfig> {
    let correction = |kind, level| Some(Correction { kind, level, max: 1.5, min: Some(0.3) });
    let mut all = Vec::new();
    for (kind, _) in LossKind::ALL {
        let base = LossConfig { beta: 0.2, entropy_coef: 0.3, ..LossConfig::new(kind) };
        all.push(base.clone());
        all.push(LossConfig { kl: KlKind::K2, entropy_coef: 0.0, dual_clip: Some(1.4), ..base.clone() });
        let tis = correction(CorrectionKind::Tis, CorrectionLevel::Token);
        all.push(LossConfig { kl: KlKind::K1, correction: tis, delta: Some(1.6), ..base.clone() });
        all.push(LossConfig { correction: correction(CorrectionKind::Mis, CorrectionLevel::Sequence), ..base });
    }
    all
}

pub(super) fn op(config: &LossConfig) -> GrpoOp {
    GrpoOp::new(config.clone(), T, targets(), tokens()).unwrap()
}

pub(super) fn logits() -> Vec<f64> {
    values("logits", N * V, -2.0, 2.0)
}

/// dL/dlogits of the op as a flat vector, through candle's autograd.
fn gradient(op: &GrpoOp, logits: &Var) -> Vec<f64> {
    let grads = op.forward(logits.as_tensor()).unwrap().loss.backward().unwrap();
    let g = grads.get(logits).unwrap().to_dtype(DType::F64).unwrap();
    g.flatten_all().unwrap().to_vec1().unwrap()
}

/// Log-probs and entropies by candle's log_softmax, the loss by `learner::loss`, gradient by chain rule
/// through candle's autograd: loss = sum(dlogp * logp) + sum(dentropy * entropy) has the same gradient.
fn composed(config: &LossConfig, logits: &Var) -> (Summary, Vec<f64>) {
    let z = (logits.as_tensor() / T).unwrap();
    let all = candle_nn::ops::log_softmax(&z, D::Minus1).unwrap();
    let index = Tensor::from_vec(targets(), (N, 1), &Device::Cpu).unwrap();
    let logp = all.gather(&index, 1).unwrap().squeeze(1).unwrap();
    let entropy = (all.exp().unwrap() * &all).unwrap().sum(1).unwrap().neg().unwrap();
    let (lp, h) = (logp.to_vec1::<f64>().unwrap(), entropy.to_vec1::<f64>().unwrap());
    let wide = |v: &Option<Vec<f32>>| -> Vec<f64> { v.iter().flatten().map(|x| f64::from(*x)).collect() };
    let t = tokens();
    let out = loss(
        config,
        &TokenBatch {
            logp: &lp,
            logp_old: Some(&wide(&t.logp_old)),
            logp_ref: Some(&wide(&t.logp_ref)),
            logp_sampler: Some(&wide(&t.logp_sampler)),
            entropy: Some(&h),
            mask: &t.mask,
            offsets: &t.offsets,
            advantages: &t.advantages.iter().map(|a| f64::from(*a)).collect::<Vec<_>>(),
            weights: &t.weights,
        },
    )
    .unwrap();
    let mut dentropy = out.dentropy.clone();
    dentropy.resize(N, 0.0);
    let slopes = |v: Vec<f64>| Tensor::from_vec(v, N, &Device::Cpu).unwrap();
    let linear = ((logp * slopes(out.dlogp)).unwrap() + (entropy * slopes(dentropy)).unwrap()).unwrap();
    let grads = linear.sum_all().unwrap().backward().unwrap();
    let g = grads.get(logits).unwrap().flatten_all().unwrap().to_vec1().unwrap();
    (out.summary, g)
}

#[test]
fn f64_equals_the_composed_ops_and_f32_follows() {
    let double = Var::from_vec(logits(), (N, V), &Device::Cpu).unwrap();
    let single = Var::from_tensor(&double.to_dtype(DType::F32).unwrap()).unwrap();
    for config in configs() {
        let (want, slopes) = composed(&config, &double);
        for (var, tolerance) in [(&double, 1e-12), (&single, 1e-5)] {
            let fused = op(&config).forward(var.as_tensor()).unwrap();
            let loss = fused.loss.to_dtype(DType::F64).unwrap().to_scalar::<f64>().unwrap();
            assert!((loss - want.loss).abs() < tolerance, "{config:?} {loss} {}", want.loss);
            assert!((fused.summary.kl_sum - want.kl_sum).abs() < 10.0 * tolerance);
            assert!((fused.summary.entropy_sum - want.entropy_sum).abs() < 10.0 * tolerance);
            assert_eq!(fused.summary.trained_tokens, 7);
            assert_eq!((fused.summary.clipped, fused.summary.capped), (want.clipped, want.capped), "{config:?}");
            for (got, want) in gradient(&op(&config), var).iter().zip(&slopes) {
                assert!((got - want).abs() < tolerance, "{config:?} {got} {want}");
            }
        }
    }
}

#[test]
fn gradients_equal_finite_differences_of_the_logits() {
    const H: f64 = 1e-5;
    let base = logits();
    for config in configs().into_iter().filter(|c| c.kind != LossKind::Cispo) {
        let value = |x: &[f64]| {
            let t = Tensor::from_slice(x, (N, V), &Device::Cpu).unwrap();
            op(&config).forward(&t).unwrap().loss.to_scalar::<f64>().unwrap()
        };
        let got = gradient(&op(&config), &Var::from_slice(&base, (N, V), &Device::Cpu).unwrap());
        for i in (0..N * V).step_by(3) {
            let at = |by: f64| {
                let mut x = base.clone();
                x[i] += by;
                value(&x)
            };
            let slope = (at(H) - at(-H)) / (2.0 * H);
            assert!((got[i] - slope).abs() < 1e-8, "{config:?} {i}: {} {slope}", got[i]);
        }
    }
}

#[test]
fn uniform_logits_by_hand() {
    // p = 1/V everywhere: log-prob -ln V, entropy ln V; on-policy dapo of one token with A = 2 and weight 1.
    let config = LossConfig { beta: 0.0, ..LossConfig::new(LossKind::Dapo) };
    let tokens = TokenConstants {
        mask: vec![true],
        offsets: vec![0, 1],
        advantages: vec![2.0],
        weights: vec![1.0],
        ..TokenConstants::default()
    };
    let op = GrpoOp::new(config, 1.0, vec![3], tokens).unwrap();
    let z = Var::from_vec(vec![7f32; 4], (1, 4), &Device::Cpu).unwrap();
    let fused = op.forward(z.as_tensor()).unwrap();
    let ln4 = 4f32.ln();
    assert!((fused.logp.to_vec1::<f32>().unwrap()[0] + ln4).abs() < 1e-6);
    assert!((fused.entropy.to_vec1::<f32>().unwrap()[0] - ln4).abs() < 1e-6);
    assert_eq!(fused.loss.to_scalar::<f32>().unwrap(), -2.0);
    // -A (onehot - p)
    for (got, want) in gradient(&op, &z).iter().zip([0.5, 0.5, 0.5, -1.5]) {
        assert!((got - want).abs() < 1e-6);
    }
}

#[test]
fn in_place_and_any_thread_count_give_the_same_bits() {
    let config = &configs()[0];
    let x = Tensor::from_vec(logits(), (N, V), &Device::Cpu).unwrap().to_dtype(DType::F32).unwrap();
    let run = |threads: usize| {
        rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap().install(|| {
            let var = Var::from_tensor(&x.copy().unwrap()).unwrap();
            let plain = gradient(&op(config), &var);

            // Logits that come out of an op, whose memory the backward may take.
            let source = Var::from_tensor(&x.copy().unwrap()).unwrap();
            let produced = (source.as_tensor() * 1.0).unwrap();
            let loss = op(config).reusing_logits().forward(&produced).unwrap().loss;
            let grads = loss.backward().unwrap();
            let through: Vec<f32> = grads.get(&source).unwrap().flatten_all().unwrap().to_vec1().unwrap();
            let reused: Vec<f32> = produced.flatten_all().unwrap().to_vec1().unwrap();

            let chunk = x.copy().unwrap();
            let fused = op(config).forward_backward(&chunk).unwrap();
            let direct: Vec<f32> = chunk.flatten_all().unwrap().to_vec1().unwrap();
            assert_eq!(reused, direct);
            assert_eq!(reused, through);
            assert_eq!(direct.iter().map(|g| f64::from(*g)).collect::<Vec<_>>(), plain);
            (direct, fused.loss.to_scalar::<f32>().unwrap().to_bits())
        })
    };
    let one = run(1);
    assert!(one == run(2) && one == run(4));
}

#[test]
fn masked_rows_and_impossible_tokens_stay_finite() {
    let mut x = logits();
    x[2 * V..3 * V].fill(f64::NAN); // row 2 is masked
    let target = targets()[0] as usize;
    x[(target + 1) % V] = f64::NEG_INFINITY; // row 0, not its target
    for config in configs() {
        let var = Var::from_slice(&x, (N, V), &Device::Cpu).unwrap();
        let fused = op(&config).forward(var.as_tensor()).unwrap();
        assert!(fused.summary.skip().is_none(), "{config:?} {:?}", fused.summary);
        let g = gradient(&op(&config), &var);
        assert!(g.iter().all(|g| g.is_finite()));
        assert!(g[2 * V..3 * V].iter().all(|g| *g == 0.0));
        assert_eq!(g[(target + 1) % V], 0.0);
    }
    x[3 * V] = f64::NAN; // row 3 is trained
    let bad = Tensor::from_slice(&x, (N, V), &Device::Cpu).unwrap();
    assert!(op(&configs()[0]).forward(&bad).unwrap().summary.skip().is_some());
}

#[test]
fn wrong_shapes_are_named() {
    let op = op(&configs()[0]);
    let text = |x: Tensor| op.forward(&x).unwrap_err().to_string();
    let zeros = |r, c| Tensor::zeros((r, c), DType::F32, &Device::Cpu).unwrap();
    assert!(text(zeros(N + 1, V)).contains("10 rows of logits for 9 targets"));
    assert!(text(zeros(N, 2)).contains("is outside 2 logits"));
    assert!(text(zeros(V, N).t().unwrap()).contains("contiguous"));
    assert!(text(Tensor::zeros((N, V), DType::BF16, &Device::Cpu).unwrap()).contains("f32 or f64"));
    let short = TokenConstants { mask: vec![true], ..tokens() };
    assert!(GrpoOp::new(configs()[0].clone(), T, targets(), short).is_err());
    assert!(GrpoOp::new(configs()[0].clone(), 0.0, targets(), tokens()).is_err());
}
