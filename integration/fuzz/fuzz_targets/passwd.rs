//! Account files of an image: whom a container becomes, and where the home of its user is.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    coracle_cri::fuzz::passwd(data);
    coracle_shim::fuzz_home(data);
});
