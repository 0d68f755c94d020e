//! Writes the stored objects of a resource again, in the current stored version and with the current encryption key. One
//! migration of a resource runs at a time.

mod definition;
pub(crate) mod plan;
pub(crate) mod run;
