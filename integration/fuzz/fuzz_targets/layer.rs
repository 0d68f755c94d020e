//! Fuzz target: layers, which may be compressed. They are unpacked into a directory, and must not write outside of it.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| coracle_images::fuzz::layer(data));
