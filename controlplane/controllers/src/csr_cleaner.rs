//! Deletes certificate signing requests that are old.

mod plan;
pub(crate) mod run;
