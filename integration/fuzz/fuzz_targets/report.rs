//! Fuzz target: messages from the processes that create a container or an exec.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| coracle_shim::fuzz_report(data));
