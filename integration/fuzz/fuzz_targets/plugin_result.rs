//! Fuzz target: results of third-party CNI plugins.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| coracle_cni::fuzz_result(data));
