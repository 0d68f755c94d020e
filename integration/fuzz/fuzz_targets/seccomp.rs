//! Seccomp profiles of the machine's own.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| coracle_cri::fuzz::seccomp(data));
