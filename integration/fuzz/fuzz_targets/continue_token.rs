//! Fuzz target: continue tokens of lists.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| coracle_apiserver::fuzz::continue_token(data));
