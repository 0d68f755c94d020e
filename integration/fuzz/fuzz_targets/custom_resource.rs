//! Fuzz target: custom resources with the schema of their definition: pruning, defaults, validation, rules in CEL.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| coracle_kinds::fuzz::custom_resource(data));
