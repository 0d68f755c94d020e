//! Fuzz target: APIResourceLists of aggregated servers.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| coracle_apiserver::fuzz::remote_resources(data));
