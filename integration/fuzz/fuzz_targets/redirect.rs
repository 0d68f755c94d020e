//! Fuzz target: redirects of containers in responses to probes.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| coracle_agent::fuzz::redirect(data));
