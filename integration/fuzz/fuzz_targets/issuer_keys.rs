//! Fuzz target: discovery documents and key sets of OpenID Connect issuers.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| coracle_apiserver::fuzz::issuer_keys(data));
