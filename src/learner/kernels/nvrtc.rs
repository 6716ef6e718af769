//! CUDA C++ to PTX (and cubin reports) through NVRTC. Needs libnvrtc, neither a card nor a driver.
//!
//! With feature `cuda` candle's cudarc is used; with feature `nvrtc` alone our own, loaded at run time.

#[cfg(feature = "cuda")]
use candle_core::cuda_backend::cudarc;
#[cfg(not(feature = "cuda"))]
use cudarc;

use cudarc::nvrtc::result as raw;
use cudarc::nvrtc::sys;
use std::collections::BTreeMap;
use std::ffi::{CString, c_char};
use std::sync::{Arc, Mutex, PoisonError};

/// What can go wrong.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum NvrtcError {
    /// The library is not installed.
    #[error("libnvrtc is not installed; run tools/setup-nvrtc.sh and set LD_LIBRARY_PATH as it says")]
    Missing,
    /// A source or option holds a zero byte.
    #[error("{0} holds a zero byte")]
    ZeroByte(&'static str),
    /// The compiler refused the source.
    #[error("{name} for {arch}: {log}")]
    Refused {
        /// Source name.
        name: String,
        /// Architecture.
        arch: String,
        /// The compiler's words.
        log: String,
    },
    /// A call of the library failed.
    #[error("nvrtc: {0}")]
    Library(String),
}

/// What ptxas says about one kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KernelReport {
    /// Kernel.
    pub name: String,
    /// Registers per thread.
    pub registers: u32,
    /// Bytes of spill stores.
    pub spill_stores: u32,
    /// Bytes of spill loads.
    pub spill_loads: u32,
}

/// Whether libnvrtc can be loaded.
pub fn is_present() -> bool {
    #[cfg(feature = "cuda")]
    {
        true // linked
    }
    #[cfg(not(feature = "cuda"))]
    {
        // SAFETY: only tries to open the library; its initialisers are NVIDIA's own.
        unsafe { sys::is_culib_present() }
    }
}

struct Program(sys::nvrtcProgram);

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: the program came from create_program and is destroyed once.
        let _ = unsafe { raw::destroy_program(self.0) };
    }
}

fn text(chars: &[c_char]) -> String {
    let bytes: Vec<u8> = chars.iter().map(|c| *c as u8).take_while(|b| *b != 0).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// A compiled program and the compiler's log.
fn compile(source: &str, name: &str, arch: &str, options: &[String]) -> Result<(Program, String), NvrtcError> {
    if !is_present() {
        return Err(NvrtcError::Missing);
    }
    let failed = |e: raw::NvrtcError| NvrtcError::Library(format!("{e:?}"));
    let c_source = CString::new(source).map_err(|_| NvrtcError::ZeroByte("the source"))?;
    let c_name = CString::new(name).map_err(|_| NvrtcError::ZeroByte("the name"))?;
    let program = Program(raw::create_program(&c_source, Some(&c_name)).map_err(failed)?);
    let mut all = vec![format!("--gpu-architecture={arch}")];
    all.extend_from_slice(options);
    // SAFETY: the program is alive and was not compiled before.
    let compiled = unsafe { raw::compile_program(program.0, &all) };
    // SAFETY: the program is alive.
    let log = unsafe { raw::get_program_log(program.0) }.map(|l| text(&l)).unwrap_or_default();
    match compiled {
        Ok(()) => Ok((program, log)),
        Err(e) => Err(NvrtcError::Refused {
            name: name.into(),
            arch: arch.into(),
            log: if log.is_empty() { format!("{e:?}") } else { log },
        }),
    }
}

/// Compiles `source` for a virtual architecture, e.g. `compute_90`.
pub fn ptx(source: &str, name: &str, arch: &str) -> Result<String, NvrtcError> {
    let (program, _) = compile(source, name, arch, &[])?;
    // SAFETY: the program is alive and compiled.
    let ptx = unsafe { raw::get_ptx(program.0) }.map_err(|e| NvrtcError::Library(format!("{e:?}")))?;
    Ok(text(&ptx))
}

/// [`ptx`], compiled once per process, source and architecture.
pub fn cached_ptx(source: &str, name: &str, arch: &str) -> Result<Arc<str>, NvrtcError> {
    type Key = ([u8; 32], String);
    static CACHE: Mutex<BTreeMap<Key, Arc<str>>> = Mutex::new(BTreeMap::new());
    let key = (*blake3::hash(source.as_bytes()).as_bytes(), arch.to_string());
    let mut cache = CACHE.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(ptx) = cache.get(&key) {
        return Ok(Arc::clone(ptx));
    }
    let ptx: Arc<str> = ptx(source, name, arch)?.into();
    cache.insert(key, Arc::clone(&ptx));
    Ok(ptx)
}

/// Compiles to machine code for a real architecture, e.g. `sm_90`: registers and spills of each kernel.
pub fn report(source: &str, name: &str, arch: &str) -> Result<Vec<KernelReport>, NvrtcError> {
    let (_program, log) = compile(source, name, arch, &["--ptxas-options=-v".to_string()])?;
    Ok(parse_report(&log))
}

/// Reads `ptxas info` lines.
fn parse_report(log: &str) -> Vec<KernelReport> {
    let mut reports: Vec<KernelReport> = Vec::new();
    let before = |line: &str, marker: &str| -> Option<u32> {
        let head = &line[..line.find(marker)?];
        head.split_whitespace().last()?.parse().ok()
    };
    for line in log.lines() {
        if let Some(at) = line.find("Compiling entry function '") {
            let rest = &line[at + "Compiling entry function '".len()..];
            let name = rest.split('\'').next().unwrap_or_default().to_string();
            reports.push(KernelReport { name, registers: 0, spill_stores: 0, spill_loads: 0 });
        } else if let Some(last) = reports.last_mut() {
            if let (Some(stores), Some(loads)) =
                (before(line, " bytes spill stores"), before(line, " bytes spill loads"))
            {
                (last.spill_stores, last.spill_loads) = (stores, loads);
            }
            if let Some(at) = line.find("Used ") {
                last.registers = before(&line[at..], " registers").unwrap_or(0);
            }
        }
    }
    reports
}

/// The version of the loaded library.
pub fn version() -> Result<(i32, i32), NvrtcError> {
    if !is_present() {
        return Err(NvrtcError::Missing);
    }
    let (mut major, mut minor) = (0, 0);
    // SAFETY: two valid pointers to int.
    let code = unsafe { sys::nvrtcVersion(&mut major, &mut minor) };
    code.result().map_err(|e| NvrtcError::Library(format!("{e:?}")))?;
    Ok((major, minor))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_ptxas_lines() {
        let log = "ptxas info    : 0 bytes gmem\n\
                   ptxas info    : Compiling entry function 'a' for 'sm_90'\n\
                   ptxas info    : Function properties for a\n    \
                   16 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads\n\
                   ptxas info    : Used 30 registers, used 1 barriers, 2048 bytes smem\n\
                   ptxas info    : Compiling entry function 'b' for 'sm_90'\n\
                   ptxas info    : Used 8 registers, 380 bytes cmem[0]\n";
        let report = |name: &str, registers, spill_stores, spill_loads| KernelReport {
            name: name.into(),
            registers,
            spill_stores,
            spill_loads,
        };
        assert_eq!(parse_report(log), [report("a", 30, 4, 12), report("b", 8, 0, 0)]);
    }
}
