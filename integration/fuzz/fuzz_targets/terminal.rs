//! A client's WebSocket frames of exec and attach, and the sizes of its terminal.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| coracle_cri::fuzz::terminal(data));
