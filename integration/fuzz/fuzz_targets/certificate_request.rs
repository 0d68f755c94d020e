//! Fuzz target: requests for certificates of clients, in PEM or DER.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| coracle_kinds::fuzz::certificate_request(data));
