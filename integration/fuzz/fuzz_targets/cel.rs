//! Fuzz target: CEL expressions of definitions and policies.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| coracle_apiserver::fuzz::cel(data));
