//! The runtime's packets, as a shim takes them.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| coracle_shim::fuzz_wire(data));
