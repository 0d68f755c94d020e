//! Fuzz target: output of containers, as it is written to the log.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| coracle_shim::fuzz_log(data));
