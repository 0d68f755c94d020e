//! Fuzz target: the bytes of HTTP/2 clients before their authentication.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| coracle_apiserver::fuzz::frames(data));
