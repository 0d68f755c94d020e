//! The API's kinds as data: schemas, defaults, validation, patches, wire decoding and tables. Pure: no I/O.
//!
//! Start at [`kind`]: one table of kinds, each row naming all that the API does for that kind, so that a new kind
//! is added in one place. Objects are JSON trees (`serde_json::Value`), never typed structs: a typed round trip
//! would drop the fields of newer clients' schemas.
//!
//! The way of a write: bytes → [`schema::parse_json`] or [`protobuf::decode`] → [`schema::decode`] (types, unknown
//! and duplicate fields) → [`strategy`] `prepare_for_*` → [`defaults::apply`] → [`validate`] → store.
//! Invariants: nothing here does I/O, keeps a clock or panics on input; every schema lookup is by definition name.

pub mod defaults;
pub mod discovery;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzz;
pub mod kind;
pub mod openapi;
pub mod ownership;
pub mod patch;
pub mod pod_security;
pub mod protobuf;
pub mod quantity;
pub mod scale;
pub mod schema;
pub mod selector;
pub mod strategy;
pub mod table;
pub mod validate;

pub use kind::{KINDS, Kind, Subresource};
