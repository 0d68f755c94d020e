//! Fuzz target: quantities of resources.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| coracle_kinds::fuzz::quantity(data));
