//! Fuzz target: pages of servers behind a proxy, whose links are rewritten.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| coracle_apiserver::fuzz::page(data));
