//! Fuzz target: responses of conversion webhooks.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| coracle_apiserver::fuzz::conversion_review(data));
