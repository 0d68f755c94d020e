//! Certificate signing requests that nobody needs any more are removed.

mod plan;
pub(crate) mod run;
