//! Fuzz target: WebSocket frames of a client during a log or a watch.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| coracle_apiserver::fuzz::log_socket(data));
