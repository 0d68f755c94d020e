//! Fuzz target: the bytes that gRPC clients send on Unix sockets. The server changes the `:authority`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| coracle_cri::fuzz::client(data));
