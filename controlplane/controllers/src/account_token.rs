//! Secrets of type `kubernetes.io/service-account-token`: the controller writes a token into each, and deletes them
//! with their service account.
//!
//! Source: `pkg/controller/serviceaccount/tokens_controller.go`. The controller creates no Secrets itself.

pub(crate) mod plan;
pub(crate) mod run;
