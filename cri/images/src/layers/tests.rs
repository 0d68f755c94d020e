//! Tests of `layers.rs`.
