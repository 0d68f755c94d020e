//! Fuzz target: responses of the webhooks of authentication and authorization.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| coracle_apiserver::fuzz::access_review(data));
