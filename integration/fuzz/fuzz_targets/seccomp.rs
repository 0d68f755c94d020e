//! Fuzz target: seccomp profiles in files of the machine.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| coracle_cri::fuzz::seccomp(data));
