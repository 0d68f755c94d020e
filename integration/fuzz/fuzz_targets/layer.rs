//! Layers: compressed or not, unpacked into a directory that nothing may leave.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| coracle_images::fuzz::layer(data));
