//! The CUDA source itself, compiled by the C++ compiler and run on the CPU, against the Rust reference.

use super::options::Options;
use super::tests::{N, T, V, configs, logits, op, targets, tokens};
use super::*;
use candle_core::{DType, Device, Var};
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

/// The emulator, or `None` (said aloud) where no C++ compiler is installed.
fn emulator(folder: &Path) -> Option<std::path::PathBuf> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/learner/kernels/grpo/emulate.cpp");
    let program = folder.join("emulate");
    let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".into());
    // No contraction to fused multiply-adds: the reference has none.
    let run = Command::new(&compiler)
        .args(["-std=c++17", "-O1", "-ffp-contract=off", "-o"])
        .arg(&program)
        .arg(&source)
        .output();
    match run {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
            eprintln!("no C++ compiler ({compiler}); the CUDA source was not run on the CPU");
            None
        }
        Err(e) => panic!("{compiler}: {e}"),
        Ok(out) => {
            assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
            Some(program)
        }
    }
}

fn words(o: &Options) -> Vec<u8> {
    let ints = [
        o.kind,
        o.kl,
        o.correction,
        o.sequence_level,
        o.has_old,
        o.has_ref,
        o.has_sampler,
        o.has_delta,
        o.has_dual,
        o.has_min,
    ];
    let floats =
        [o.low, o.high, o.cispo_bound, o.delta, o.dual, o.beta, o.correction_max, o.correction_min, o.entropy_coef];
    ints.iter().flat_map(|x| x.to_le_bytes()).chain(floats.iter().flat_map(|x| x.to_le_bytes())).collect()
}

fn emulate(program: &Path, op: &GrpoOp, logits: &[f32], gradient: f32) -> (Vec<f32>, Vec<f32>) {
    let t = &op.inner.tokens;
    let mut input = Vec::new();
    for size in [N, V, t.advantages.len()] {
        input.extend((size as i32).to_le_bytes());
    }
    input.extend(words(&Options::new(&op.inner)));
    let mut floats = |v: &[f32]| v.iter().for_each(|x| input.extend(x.to_le_bytes()));
    floats(&[(1.0 / T) as f32]);
    floats(logits);
    op.inner.targets.iter().for_each(|x| input.extend(x.to_le_bytes()));
    input.extend(t.mask.iter().map(|m| u8::from(*m)));
    t.offsets.iter().for_each(|x| input.extend((*x as u32).to_le_bytes()));
    t.advantages.iter().for_each(|x| input.extend(x.to_le_bytes()));
    t.weights.iter().for_each(|x| input.extend(x.to_le_bytes()));
    for array in [&t.logp_old, &t.logp_ref, &t.logp_sampler] {
        array.as_ref().unwrap_or(&vec![f32::NAN; N]).iter().for_each(|x| input.extend(x.to_le_bytes()));
    }
    input.extend(gradient.to_le_bytes());
    let mut child = Command::new(program).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(&input).unwrap();
    let out = child.wait_with_output().unwrap();
    assert!(out.status.success());
    let values: Vec<f32> = out.stdout.chunks_exact(4).map(|c| f32::from_le_bytes([c[0], c[1], c[2], c[3]])).collect();
    assert_eq!(values.len(), HEADER + 5 * N + N * V);
    (values[..HEADER + 5 * N].to_vec(), values[HEADER + 5 * N..].to_vec())
}

#[test]
fn the_cuda_source_computes_what_the_reference_computes() {
    let folder = tempfile::tempdir().unwrap();
    let Some(program) = emulator(folder.path()) else { return };
    let x: Vec<f32> = logits().iter().map(|x| *x as f32).collect();
    let tensor = Var::from_slice(&x, (N, V), &Device::Cpu).unwrap();
    let on_policy = TokenConstants { logp_old: None, logp_ref: None, ..tokens() };
    let mut ops: Vec<GrpoOp> = configs().iter().map(op).collect();
    ops.extend(configs().iter().map(|c| GrpoOp::new(c.clone(), T, targets(), on_policy.clone()).unwrap()));
    for op in ops {
        let result = tensor.as_tensor().apply_op1_no_bwd(&op).unwrap();
        let want: Vec<f32> = result.to_vec1().unwrap();
        // A gradient of the loss other than one must be passed on.
        let gradient = Tensor::new(&[0.5f32], &Device::Cpu).unwrap();
        let back = tensor.as_tensor().apply_op3_no_bwd(&result, &gradient, &Backward(Arc::clone(&op.inner))).unwrap();
        let slopes: Vec<f32> = back.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1().unwrap();
        let (got, dlogits) = emulate(&program, &op, &x, 0.5);
        let name = &op.inner.config;
        assert_eq!(got[4..8], want[4..8], "counts of {name:?}");
        for (i, (a, b)) in got.iter().zip(&want).enumerate() {
            assert!((a - b).abs() <= 2e-6 * (1.0 + b.abs()), "{name:?} result {i}: {a} {b}");
        }
        for (i, (a, b)) in dlogits.iter().zip(&slopes).enumerate() {
            assert!((a - b).abs() <= 2e-6 * (1.0 + b.abs()), "{name:?} dlogits {i}: {a} {b}");
        }
    }
}
