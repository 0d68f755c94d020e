//! Fuzz target: files in /proc of the processes of containers.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| coracle_cri::fuzz::process(data));
