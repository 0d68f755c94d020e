//! Fuzz target: WebSocket frames from a client of exec and attach, with terminal sizes.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| coracle_cri::fuzz::terminal(data));
