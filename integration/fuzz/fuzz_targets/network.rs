//! Fuzz target: network configuration lists.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| coracle_cni::fuzz(data));
