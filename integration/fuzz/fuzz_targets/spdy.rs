//! A client's frames of SPDY/3.1.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| coracle_cri::fuzz::spdy(data));
