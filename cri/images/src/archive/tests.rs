//! Tests of `archive.rs`.
