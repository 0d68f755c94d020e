//! Fuzz target: lists of devices of device plugins.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| coracle_agent::fuzz::devices(data));
