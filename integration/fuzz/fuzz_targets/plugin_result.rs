//! Fuzz target: results of CNI plugins of others.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| coracle_cni::fuzz_result(data));
