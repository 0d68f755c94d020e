//! The stateful set controller: pods with an ordinal, a stable name and their own claims.

mod claims;
pub(crate) mod plan;
mod pods;
pub(crate) mod run;
mod status;
