//! Bootstrap tokens that have expired are removed.

pub(crate) mod run;
