//! Fuzz target: packets from the runtime, as a shim reads them.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| coracle_shim::fuzz_wire(data));
