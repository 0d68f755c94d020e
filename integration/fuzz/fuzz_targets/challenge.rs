//! Fuzz target: `WWW-Authenticate` headers of registries.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| coracle_images::fuzz::challenge(data));
