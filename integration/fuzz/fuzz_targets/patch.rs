//! Fuzz target: patches of the API: an object, and a JSON patch, merge patch or strategic merge patch for it.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| coracle_kinds::fuzz::patch(data));
