//! Tests of `unpack.rs`.
