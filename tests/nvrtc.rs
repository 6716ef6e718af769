//! Compiles the CUDA kernels with NVRTC, without a card or a driver. Run with
//! `eval "$(tools/setup-nvrtc.sh)" && cargo test --release --test nvrtc -- --nocapture`.
#![cfg(feature = "nvrtc")]

use coevolve::learner::kernels::grpo::{CUDA_KERNELS, CUDA_SOURCE};
use coevolve::learner::kernels::nvrtc;

/// Absence is only accepted where nobody said that the library must be there.
fn missing() -> bool {
    if nvrtc::is_present() {
        return false;
    }
    assert!(
        std::env::var_os("COEVOLVE_REQUIRE_NVRTC").is_none(),
        "COEVOLVE_REQUIRE_NVRTC is set but libnvrtc is absent"
    );
    eprintln!("libnvrtc is not installed, nothing compiled: run tools/setup-nvrtc.sh");
    true
}

#[test]
fn kernels_compile_for_ampere_and_hopper() {
    if missing() {
        return;
    }
    println!("NVRTC {:?}", nvrtc::version().unwrap());
    for (virtual_arch, real_arch) in [("compute_80", "sm_80"), ("compute_90", "sm_90")] {
        let ptx = nvrtc::ptx(CUDA_SOURCE, "grpo.cu", virtual_arch).unwrap();
        assert!(ptx.contains(&format!(".target {real_arch}")), "wrong target");
        for kernel in CUDA_KERNELS {
            assert!(ptx.contains(&format!(".visible .entry {kernel}(")), "{kernel} is missing for {virtual_arch}");
        }
        let reports = nvrtc::report(CUDA_SOURCE, "grpo.cu", real_arch).unwrap();
        let mut names: Vec<&str> = reports.iter().map(|r| r.name.as_str()).collect();
        names.sort_unstable();
        assert_eq!(names, {
            let mut k = CUDA_KERNELS;
            k.sort_unstable();
            k
        });
        for r in &reports {
            println!(
                "{real_arch} {:<16} {:>3} registers, {} bytes spill stores, {} bytes spill loads",
                r.name, r.registers, r.spill_stores, r.spill_loads
            );
            assert!(r.registers > 0 && r.registers <= 128, "{r:?}");
            assert_eq!((r.spill_stores, r.spill_loads), (0, 0), "{r:?} spills");
        }
    }
}

#[test]
fn a_wrong_kernel_is_refused_with_the_compilers_words() {
    if missing() {
        return;
    }
    let error = nvrtc::ptx("__global__ void f() { int x = y; }", "wrong.cu", "compute_90").unwrap_err();
    assert!(error.to_string().contains("identifier \"y\" is undefined"), "{error}");
}
