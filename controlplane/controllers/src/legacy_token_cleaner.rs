//! Removes unused tokens of service accounts that Kubernetes before 1.24 created automatically. The controller first
//! marks the Secret as invalid, and deletes the Secret a year later.
//!
//! Source: `pkg/controller/serviceaccount/legacy_serviceaccount_token_cleaner.go`. The API server labels a Secret with
//! the day of its token's last use, and refuses tokens of marked Secrets.

mod plan;
pub(crate) mod run;
