//! Fuzz target: responses of image policy webhooks.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| coracle_apiserver::fuzz::image_review(data));
