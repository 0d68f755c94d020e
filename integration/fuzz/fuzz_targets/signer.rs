//! Fuzz target: requests for certificates that the controllers approve and sign.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| coracle_controllers::fuzz::signer(data));
