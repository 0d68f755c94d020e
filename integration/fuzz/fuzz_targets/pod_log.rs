//! Fuzz target: a client's query for a container's log, and the lines of the log.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| coracle_agent::fuzz::pod_log(data));
