//! Patches of the API: an object and a JSON, merge or strategic merge patch of it.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| coracle_kinds::fuzz::patch(data));
