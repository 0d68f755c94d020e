//! Fuzz target: OpenAPI documents of aggregated servers, which are converted to version 3.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| coracle_apiserver::fuzz::openapi(data));
