//! Fuzz target: request lines of the API: paths, queries and media types.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| coracle_apiserver::fuzz::request(data));
