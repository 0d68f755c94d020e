//! Field ownership (`metadata.managedFields`) and server-side apply.
//!
//! Every write to an object belongs to a *field manager*. The API server records for each manager the set of fields
//! that it owns. An apply request contains all fields that its manager owns after the request. Fields that the manager
//! owned before and omits now are removed. Fields that another manager owns with another value are conflicts.
//!
//! Start reading at [`Updater`]. Its parts:
//!
//! - [`FieldSet`]: a set of field paths, as `fieldsV1` encodes it.
//! - [`Schema`]: the lists that are sets or maps, and the values that are owned as a whole.
//! - `walk`: functions that take an object and its schema: owned fields, comparison, merge, removal.
//! - [`Managers`]: the decoded `managedFields`.
//!
//! The rules are from Kubernetes' structured-merge-diff v6 and from `apimachinery/pkg/util/managedfields`.
//!
//! Invariants:
//! - The crate is pure: no I/O, no clock, no global state.
//! - Every function is total. A value that does not fit its schema counts as a leaf.

mod annotation;
mod conflict;
mod field_set;
mod managers;
mod path;
mod schema;
mod update;
mod walk;

pub use conflict::{Conflict, Conflicts, MAX_LISTED, conflict_message};
pub use field_set::{FieldSet, InvalidFields};
pub use managers::{InvalidManagedFields, ManagerId, Managers, Operation, Owned};
pub use path::{Path, PathElement, Scalar};
pub use schema::{Field, Key, Schema, Type, TypeId};
pub use update::{Applied, ApplyError, ApplyRequest, SingleVersion, UpdateRequest, Updater, Versions};
pub use walk::validate::{InvalidElement, validate};
