//! Secrets of type `kubernetes.io/service-account-token`: the controller writes a token into each Secret, and deletes
//! the Secrets together with their service account.
//!
//! Source: `pkg/controller/serviceaccount/tokens_controller.go`. The controller does not create Secrets.

pub(crate) mod plan;
pub(crate) mod run;
