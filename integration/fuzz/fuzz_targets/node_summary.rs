//! Fuzz target: summaries of the usage of a node.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| coracle_apiserver::fuzz::node_summary(data));
