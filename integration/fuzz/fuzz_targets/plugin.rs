//! Fuzz target: frames from an NRI plugin.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| coracle_nri::ttrpc::fuzz(data));
