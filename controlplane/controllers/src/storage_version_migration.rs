//! Rewrites the stored objects of a resource in the current stored version and with the current encryption key.
//! Migrations of the same resource run one after another.

mod definition;
pub(crate) mod plan;
pub(crate) mod run;
