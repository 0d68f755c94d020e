//! Fuzz target: request bodies of the API in JSON.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| coracle_kinds::fuzz::json(data));
