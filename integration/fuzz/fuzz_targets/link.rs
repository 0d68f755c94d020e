//! A shim's packets, as the runtime takes them.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| coracle_cri::fuzz::link(data));
