//! Fuzz target: registry settings, `hosts.toml`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| coracle_images::fuzz::hosts(data));
