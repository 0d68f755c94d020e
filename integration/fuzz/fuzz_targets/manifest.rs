//! Fuzz target: manifests, indexes and image configurations.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| coracle_images::fuzz::manifest(data));
