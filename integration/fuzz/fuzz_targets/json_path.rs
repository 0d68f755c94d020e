//! Fuzz target: paths of printer columns.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| coracle_kinds::fuzz::json_path(data));
