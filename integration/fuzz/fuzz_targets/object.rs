//! Fuzz target: objects of the built-in kinds, through all stages of a create and an update.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| coracle_kinds::fuzz::object(data));
