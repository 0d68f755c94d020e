//! Deletes expired bootstrap tokens.

pub(crate) mod run;
