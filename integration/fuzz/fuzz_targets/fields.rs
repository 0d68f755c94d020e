//! Fuzz target: field sets of server-side apply.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| coracle_kinds::fuzz::fields(data));
