//! Fuzz target: bearer tokens of the API.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| coracle_apiserver::fuzz::token(data));
