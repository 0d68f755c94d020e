//! Fuzz target: request bodies of the API in YAML.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| coracle_apiserver::fuzz::yaml(data));
