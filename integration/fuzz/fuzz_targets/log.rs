//! Containers' output, as it becomes a log.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| coracle_shim::fuzz_log(data));
