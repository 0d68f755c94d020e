//! Fuzz target: regular expressions in the syntax of Go.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| coracle_apiserver::fuzz::pattern(data));
