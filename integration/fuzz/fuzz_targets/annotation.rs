//! Fuzz target: overlay annotations of other nodes.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| coracle_agent::fuzz::annotation(data));
