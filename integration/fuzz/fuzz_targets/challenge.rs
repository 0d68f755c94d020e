//! What registries demand in `WWW-Authenticate`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| coracle_images::fuzz::challenge(data));
