//! Fuzz target: schedules of cron jobs.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| coracle_kinds::fuzz::schedule(data));
