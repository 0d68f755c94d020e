//! Fuzz target: configurations of containers and their pods, from clients.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| coracle_cri::fuzz::config(data));
