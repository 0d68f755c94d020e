//! Fuzz target: names of images.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| coracle_images::fuzz::reference(data));
