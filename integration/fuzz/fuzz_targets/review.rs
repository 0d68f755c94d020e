//! Fuzz target: responses of admission webhooks.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| coracle_apiserver::fuzz::review(data));
