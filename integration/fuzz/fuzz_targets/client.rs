//! Fuzz target: bytes of gRPC clients on Unix sockets, whose `:authority` is changed.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| coracle_cri::fuzz::client(data));
