//! The kinds of the API as data: schemas, defaults, validation, patches, decoding of requests and tables.
//!
//! Start at [`kind`]: one table with a row for each built-in kind, so that a new kind is added in one place. The API
//! server uses [`Resource`], the common type of built-in kinds and custom resources. Objects are JSON trees
//! (`serde_json::Value`), not typed structs, because a conversion to a struct and back would drop fields of later
//! versions.
//!
//! Steps of a write: bytes → [`schema::parse_json`] or [`protobuf::decode`] → [`schema::decode`] (types, unknown and
//! duplicate fields) → [`strategy`] `prepare_for_*` → [`defaults::apply`] → [`validate`] → store.
//! Invariants: no I/O, no panic on any input; schemas are found by the name of their definition. The clock is read only
//! for times that are set in objects, such as `lastPhaseTransitionTime`.

pub mod cel_type;
pub mod defaults;
pub mod discovery;
mod fields;
pub mod flow_control;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzz;
pub mod initializers;
pub mod kind;
pub mod limit_range;
pub mod openapi;
pub mod ownership;
pub mod patch;
pub mod pod_security;
pub mod protobuf;
pub mod quota;
pub mod resource;
pub mod scale;
pub mod selector;
pub mod strategy;
pub mod table;
pub mod validate;
pub mod warnings;

use coracle_pod_rules::{cause, initialization};

pub use coracle_schemas as schema;
pub use kind::{KINDS, Kind};
pub use resource::{Resource, ResourceNames, Resources};
