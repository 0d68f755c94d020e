//! Tests of `manifest.rs`.
