//! Fuzz target: files with environment variables, which containers write.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| coracle_agent::fuzz::env_file(data));
