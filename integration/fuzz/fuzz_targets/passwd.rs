//! Fuzz target: account files of an image: the user of a container and its home directory.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    coracle_cri::fuzz::passwd(data);
    coracle_shim::fuzz_home(data);
});
