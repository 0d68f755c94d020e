//! Fuzz target: records of pods and containers, and manifests of checkpoints.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| coracle_cri::fuzz::record(data));
