//! Deletes old certificate signing requests.

mod plan;
pub(crate) mod run;
