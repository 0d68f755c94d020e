//! Fuzz target: CDI files, the device descriptions of vendors.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| coracle_cri::fuzz::cdi(data));
