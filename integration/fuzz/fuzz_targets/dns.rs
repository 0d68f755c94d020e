//! Fuzz target: DNS messages of clients and of other servers.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| coracle_dns::fuzz::dns(data));
