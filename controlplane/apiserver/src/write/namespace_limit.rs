//! The limits of the encoded bytes of all objects in one namespace, and in all namespaces except the system namespaces.
//!
//! All objects are in memory, so a user who may create objects in one namespace, or namespaces, could otherwise fill
//! the memory of the machine. The limits apply to all users, because controllers create pods for users. A full
//! namespace still works and can be emptied: only writes that make an object longer are refused. The following writes
//! are never refused:
//!
//! | write | reason |
//! |---|---|
//! | of a node | it reports the state of pods that exist |
//! | of this server itself | default objects, which its start needs |
//! | of the status of a built-in kind, a binding | users cannot write them with the default roles |
//! | eviction, deletion | they make room |
//!
//! A write that removes a finalizer, or that changes an object that is being deleted, may make the object longer. For
//! example, it adds an entry to `managedFields`. Such writes may add a few bytes to a full namespace, up to a limit of
//! their own.

use std::{collections::HashSet, sync::Arc};

use bytes::Bytes;
use coracle_kinds::Resource;
use coracle_store::Expect;
use serde_json::Value;

use crate::{
    cache::{ByteLimits, Full, Object, ReservedBytes},
    call::{Call, INTERNAL_USER},
    error::{ApiError, Result},
    state::State,
};

/// The controllers and the scheduler.
const COMPONENTS: [&str; 2] = ["system:kube-controller-manager", "system:kube-scheduler"];

/// Maximum bytes that a write that helps a deletion adds to a full namespace.
const MAX_DELETION_GROWTH: usize = 4 << 10;

/// The limits for the write of a call. `None` if the write has no limit.
pub(super) fn limits(call: &Call, expect: Expect) -> Option<ByteLimits> {
    let (limits, user) = (call.state.byte_limits, &call.user);
    let is_exempt = match &*call.resource.subresource {
        "status" => call.kind.is_built_in(),
        "eviction" => true,
        _ => false,
    };
    if is_exempt || user.is_in("system:nodes") || user.name == INTERNAL_USER {
        return None;
    }
    // Controllers must still update objects in a full namespace and report errors by events. So they may exceed the
    // limit of one namespace by a quarter, and the limit of all namespaces by three eighths. They act for users, so
    // they are not exempt.
    let is_update = expect != Expect::Absent || call.kind.stored_as().volatile;
    // Some controllers and add-ons have service accounts of their own.
    let is_component =
        COMPONENTS.contains(&user.name.as_str()) || user.is_in("system:serviceaccounts:kube-system");
    Some(if is_component && is_update { limits.of_components() } else { limits })
}

/// Reserves the growth of an object up to its commit. `bytes` is its new encoding.
pub(super) fn reserve(
    state: &State,
    kind: &Resource,
    key: &Arc<str>,
    bytes: &Bytes,
    limits: ByteLimits,
) -> Result<Option<ReservedBytes>> {
    let current = state.cache.of(kind)?.lock().get(key);
    let growth = bytes.len().saturating_sub(current.as_ref().map_or(0, |current| current.stored_bytes()));
    if growth == 0 {
        return Ok(None);
    }
    let counts = &state.cache.namespace_bytes;
    let reserved = counts.reserve(key, growth, limits).or_else(|full| match &current {
        Some(current) if growth <= MAX_DELETION_GROWTH && helps_deletion(current, bytes) => {
            counts.reserve(key, growth, limits.of_deletions())
        }
        _ => Err(full),
    });
    reserved.map(Some).map_err(|full| {
        let mut parts = key.rsplit('/');
        let (name, namespace) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
        let (of, used, limit, setting) = match full {
            Full::Namespace(used) => {
                (format!("namespace \"{namespace}\""), used, limits.namespace, "max-namespace-bytes")
            }
            Full::All(used) => ("all namespaces".to_owned(), used, limits.all, "max-all-namespaces-bytes"),
        };
        let why = format!(
            "the objects of {of} have {used} bytes, this write adds {growth}, the limit is {limit}: delete objects or raise \
             the setting {setting}"
        );
        ApiError::forbidden_object(kind, name, why)
    })
}

/// Whether the written object is being deleted, or the write removes a finalizer and adds no finalizer.
fn helps_deletion(current: &Object, new: &Bytes) -> bool {
    const FIELDS: &[&[&str]] = &[&["metadata", "deletionTimestamp"], &["metadata", "finalizers"]];
    let new = Object::from_stored(current.key.clone(), current.revision, new.clone()).part(FIELDS);
    let is_being_deleted = !new["metadata"]["deletionTimestamp"].is_null();
    is_being_deleted || removes_finalizer(&current.part(FIELDS), &new)
}

fn removes_finalizer(current: &Value, new: &Value) -> bool {
    let of = |object: &Value| -> HashSet<String> {
        let list = object["metadata"]["finalizers"].as_array().into_iter().flatten();
        list.filter_map(Value::as_str).map(str::to_owned).collect()
    };
    let (current, new) = (of(current), of(new));
    new.len() < current.len() && new.is_subset(&current)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_write_that_replaces_a_finalizer_does_not_help_the_deletion() {
        let with = |finalizers: &[&str]| json!({"metadata": {"finalizers": finalizers}});
        let removes = |new: &[&str]| removes_finalizer(&with(&["a/b", "a/c"]), &with(new));
        assert!(removes(&[]) && removes(&["a/c"]));
        assert!(!removes(&["a/b", "a/c"]) && !removes(&["a/d"]) && !removes(&["a/b", "a/c", "a/d"]));
        assert!(!removes_finalizer(&json!({}), &json!({})));
    }
}
