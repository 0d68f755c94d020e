//! The API's kinds as data: schemas, defaults, validation, patches, wire decoding and tables. No I/O.
//!
//! Start at [`kind`]: one table with a row for each built-in kind, so that a new kind is added in one place.
//! [`resource`] has the form in which rows and custom resources are served. Objects are JSON
//! trees (`serde_json::Value`), never typed structs: a typed round trip would drop fields of later versions.
//!
//! A write passes: bytes → [`schema::parse_json`] or [`protobuf::decode`] → [`schema::decode`] (types, unknown and
//! duplicate fields) → [`strategy`] `prepare_for_*` → [`defaults::apply`] → [`validate`] → store.
//! Invariants: no I/O, no clock, no panic on any input; every schema look-up is by definition name.

mod cause;
pub mod defaults;
pub mod discovery;
mod fields;
pub mod flow_control;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzz;
mod initialization;
pub mod initializers;
pub mod kind;
pub mod limit_range;
pub mod openapi;
pub mod ownership;
pub mod patch;
mod pod_level;
pub mod pod_security;
pub mod protobuf;
pub mod quota;
pub mod resource;
pub mod scale;
pub mod schema;
pub mod selector;
pub mod strategy;
pub mod table;
pub mod validate;
pub mod warnings;

pub use kind::{KINDS, Kind};
pub use resource::{Resource, ResourceNames, Resources};
