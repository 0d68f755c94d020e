//! Vendors' descriptions of devices.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| coracle_cri::fuzz::cdi(data));
