#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    coevolve_fuzz::packed(bytes);
});
