//! Secrets of type `kubernetes.io/service-account-token`: filled with a token, deleted with their service account.
//!
//! Source: `pkg/controller/serviceaccount/tokens_controller.go`. No Secret is made for an account that asks for none.

pub(crate) mod plan;
pub(crate) mod run;
pub(crate) mod signer;
