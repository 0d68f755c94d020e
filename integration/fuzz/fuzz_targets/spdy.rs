//! Fuzz target: SPDY/3.1 frames from a client.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| coracle_cri::fuzz::spdy(data));
