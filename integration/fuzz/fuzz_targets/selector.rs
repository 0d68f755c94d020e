//! Fuzz target: label and field selectors of query strings.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| coracle_kinds::fuzz::selector(data));
