//! Launcher of the CUDA kernels. f32, contiguous. The reference is `cpu.rs`.

use super::options::Options;
use super::{CUDA_SOURCE, HEADER, Inner};
use crate::learner::kernels::nvrtc;
use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::{
    CudaFunction, CudaSlice, CudaView, DeviceRepr, LaunchConfig, PushKernelArg,
};
use candle_core::{CudaDevice, CudaStorage, Layout, Result, Shape};

const ROW_THREADS: u32 = 256;
const SEQUENCE_THREADS: u32 = 128;

// SAFETY: repr(C), only 4-byte plain numbers, no padding: the bytes are what the kernel declares.
unsafe impl DeviceRepr for Options {}

fn function(device: &CudaDevice, name: &str) -> Result<CudaFunction> {
    let capability = device.cuda_stream().context().compute_capability().w()?;
    let arch = format!("compute_{}{}", capability.0, capability.1);
    let ptx = nvrtc::cached_ptx(CUDA_SOURCE, "grpo.cu", &arch).map_err(candle_core::Error::wrap)?;
    // candle caches modules by name and ignores the PTX: the name holds a hash of the source.
    let hash = blake3::hash(CUDA_SOURCE.as_bytes()).to_hex();
    Ok(device.get_or_load_custom_func(name, &format!("grpo_{}", &hash[..16]), &ptx)?.into_cuda_function())
}

fn view<'a>(storage: &'a CudaStorage, layout: &Layout, what: &str) -> Result<CudaView<'a, f32>> {
    match layout.contiguous_offsets() {
        Some((from, to)) => Ok(storage.as_cuda_slice::<f32>()?.slice(from..to)),
        None => candle_core::bail!("grpo-loss: {what} must be contiguous"),
    }
}

fn dim(what: &str, n: usize) -> Result<i32> {
    i32::try_from(n).map_err(|_| candle_core::Error::Msg(format!("grpo-loss: {n} {what} are too many for one launch")))
}

fn blocks(n: usize, threads: u32) -> LaunchConfig {
    LaunchConfig { grid_dim: (n as u32, 1, 1), block_dim: (threads, 1, 1), shared_mem_bytes: 0 }
}

/// An array on the device; one zero stands for a missing one, which the kernel never reads.
fn upload(device: &CudaDevice, values: Option<&Vec<f32>>) -> Result<CudaSlice<f32>> {
    match values {
        Some(values) if !values.is_empty() => device.clone_htod(values),
        _ => device.alloc_zeros::<f32>(1),
    }
}

pub(super) fn forward(
    op: &Inner,
    logits: &CudaStorage,
    layout: &Layout,
    n: usize,
    v: usize,
) -> Result<(CudaStorage, Shape)> {
    let device = logits.device().clone();
    let stream = device.cuda_stream();
    let x = view(logits, layout, "logits")?;
    let sequences = op.tokens.advantages.len();
    let (rows, vocabulary, count) = (dim("rows", n)?, dim("logits", v)?, dim("sequences", sequences)?);
    let mut out = device.alloc_zeros::<f32>(HEADER + 5 * n)?;
    let shape = Shape::from(HEADER + 5 * n);
    if n == 0 || sequences == 0 {
        return Ok((CudaStorage::wrap_cuda_slice(out, device), shape));
    }
    let (targets, mask) = constants(&device, op)?;
    let offsets =
        op.tokens.offsets.iter().map(|o| dim("tokens", *o).map(|o| o as u32)).collect::<Result<Vec<u32>>>()?;
    let offsets = device.clone_htod(&offsets)?;
    let advantages = device.clone_htod(&op.tokens.advantages)?;
    let weights = device.clone_htod(&op.tokens.weights)?;
    let old = upload(&device, op.tokens.logp_old.as_ref())?;
    let reference = upload(&device, op.tokens.logp_ref.as_ref())?;
    let sampler = upload(&device, op.tokens.logp_sampler.as_ref())?;
    let mut partial = device.alloc_zeros::<f64>(7 * sequences)?;
    let options = Options::new(op);
    let inverse_temperature = (1.0 / op.temperature) as f32;

    let f = function(&device, "grpo_rows")?;
    let mut launch = stream.launch_builder(&f);
    launch.arg(&x).arg(&targets).arg(&mask).arg(&mut out).arg(&rows).arg(&vocabulary).arg(&inverse_temperature);
    // SAFETY: the arguments are those of grpo_rows; n blocks read n rows of v logits and write out[8..8 + 3n].
    unsafe { launch.launch(blocks(n, ROW_THREADS)) }.w()?;

    let f = function(&device, "grpo_sequences")?;
    let mut launch = stream.launch_builder(&f);
    launch.arg(&mut out).arg(&mask).arg(&offsets).arg(&advantages).arg(&weights).arg(&old).arg(&reference);
    launch.arg(&sampler).arg(&mut partial).arg(&rows).arg(&options);
    // SAFETY: offsets were checked to rise from 0 to n, optional arrays are read only where their flag is set.
    unsafe { launch.launch(blocks(sequences, SEQUENCE_THREADS)) }.w()?;

    let f = function(&device, "grpo_total")?;
    let mut launch = stream.launch_builder(&f);
    launch.arg(&partial).arg(&weights).arg(&mut out).arg(&count).arg(&options.beta).arg(&options.entropy_coef);
    // SAFETY: reads 7 sums and one weight per sequence, writes the header.
    unsafe { launch.launch(blocks(1, 32)) }.w()?;
    Ok((CudaStorage::wrap_cuda_slice(out, device), shape))
}

fn constants(device: &CudaDevice, op: &Inner) -> Result<(CudaSlice<u32>, CudaSlice<u8>)> {
    let mask: Vec<u8> = op.tokens.mask.iter().map(|m| u8::from(*m)).collect();
    Ok((device.clone_htod(&op.targets)?, device.clone_htod(&mask)?))
}

pub(super) fn backward(
    op: &Inner,
    (logits, l1): (&CudaStorage, &Layout),
    (result, l2): (&CudaStorage, &Layout),
    (gradient, l3): (&CudaStorage, &Layout),
    n: usize,
    v: usize,
) -> Result<CudaStorage> {
    let device = logits.device().clone();
    let stream = device.cuda_stream();
    let mut out = device.alloc_zeros::<f32>(n * v)?;
    if n > 0 {
        let x = view(logits, l1, "logits")?;
        let (targets, mask) = constants(&device, op)?;
        let (r, g) = (view(result, l2, "result")?, view(gradient, l3, "gradient")?);
        let (rows, vocabulary) = (dim("rows", n)?, dim("logits", v)?);
        let inverse_temperature = (1.0 / op.temperature) as f32;
        let f = function(&device, "grpo_backward")?;
        let mut launch = stream.launch_builder(&f);
        launch.arg(&x).arg(&mut out).arg(&r).arg(&g).arg(&targets).arg(&mask).arg(&rows).arg(&vocabulary);
        launch.arg(&inverse_temperature);
        // SAFETY: n blocks read and write n rows of v values; result has 8 + 5n values, gradient at least one.
        unsafe { launch.launch(blocks(n, ROW_THREADS)) }.w()?;
    }
    Ok(CudaStorage::wrap_cuda_slice(out, device))
}

pub(super) fn backward_in_place(
    op: &Inner,
    (logits, l1): (&mut CudaStorage, &Layout),
    (result, l2): (&CudaStorage, &Layout),
    (gradient, l3): (&CudaStorage, &Layout),
    n: usize,
    v: usize,
) -> Result<()> {
    if n == 0 {
        return Ok(());
    }
    let device = logits.device().clone();
    let stream = device.cuda_stream();
    let Some((from, to)) = l1.contiguous_offsets() else {
        candle_core::bail!("grpo-loss: logits must be contiguous");
    };
    let (targets, mask) = constants(&device, op)?;
    let (r, g) = (view(result, l2, "result")?, view(gradient, l3, "gradient")?);
    let (rows, vocabulary) = (dim("rows", n)?, dim("logits", v)?);
    let inverse_temperature = (1.0 / op.temperature) as f32;
    let f = function(&device, "grpo_backward")?;
    let x = logits.as_cuda_slice::<f32>()?.slice(from..to);
    let mut launch = stream.launch_builder(&f);
    // The kernel reads each value before it overwrites it, so both pointers are the logits.
    launch.arg(&x).arg(&x).arg(&r).arg(&g).arg(&targets).arg(&mask).arg(&rows).arg(&vocabulary);
    launch.arg(&inverse_temperature);
    // SAFETY: as in `backward`; we hold the storage exclusively, so nothing else reads it meanwhile.
    unsafe { launch.launch(blocks(n, ROW_THREADS)) }.w()?;
    Ok(())
}
