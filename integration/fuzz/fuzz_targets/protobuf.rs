//! Fuzz target: request bodies of the API in protobuf.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| coracle_kinds::fuzz::protobuf(data));
