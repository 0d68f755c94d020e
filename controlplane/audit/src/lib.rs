//! The audit log of the API server: user, time, request and result.
//!
//! A [`Policy`] decides how much of a request is recorded. An [`Event`] is the record of one stage of one request. A
//! [`Log`] writes events to a file. This crate does not depend on HTTP or on the API server.
//!
//! Source of formats and rules: `audit.k8s.io/v1`, `k8s.io/apiserver/pkg/audit`.

mod event;
mod log;
mod mode;
mod policy;

pub use event::{AuthenticationMetadata, Event, ObjectReference, UserInfo};
pub use log::{LineMemory, Log, LogOptions};
pub use mode::Mode;
pub use policy::{Attributes, Decision, Level, Policy, PolicyError, ResourceAttributes, Stage};
