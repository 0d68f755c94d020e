//! Tests and benches that run the built binary as a user would.
