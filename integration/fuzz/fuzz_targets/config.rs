//! What clients ask for: containers and the pods that they are in.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| coracle_cri::fuzz::config(data));
