//! Fuzz target: packets from a shim, as the runtime reads them.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| coracle_cri::fuzz::link(data));
