//! Counts the usage of resource quotas, for API servers of other programs that do not count the usage themselves.
//! Source: upstream's `resourcequota` controller.
//!
//! The API server adds the usage of each new object to the status. This controller sets the limits and the first usage
//! of a quota, and counts again after deletions and every five minutes. It does not run with the API server of this
//! program.

mod plan;
pub(crate) mod run;
