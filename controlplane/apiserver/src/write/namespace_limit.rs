//! The limits of the encoded bytes of all objects in one namespace, and in all namespaces except the system namespaces.
//!
//! All objects are in memory, so a user who may create objects in one namespace, or namespaces, could otherwise fill the
//! memory of the machine. The limits apply to all users, because controllers create pods for users. A full namespace still
//! works and can be emptied: only writes that make an object longer are refused. The following writes are never refused:
//!
//! | write | reason |
//! |---|---|
//! | of a node | it reports the state of pods that exist |
//! | of this server itself | default objects, which its start needs |
//! | of the status of a built-in kind, a binding | users cannot write them with the default roles |
//! | eviction, deletion | they make room |

use std::sync::Arc;

use coracle_kinds::Resource;
use coracle_store::Expect;

use crate::{
    cache::{ByteLimits, Full, ReservedBytes},
    call::{Call, INTERNAL_USER},
    error::{ApiError, Result},
    state::State,
};

/// The controllers and the scheduler.
const COMPONENTS: [&str; 2] = ["system:kube-controller-manager", "system:kube-scheduler"];

/// The limits for the write of a call. `None` if it has no limit.
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
    // Controllers must still update objects in a full namespace and report errors by events, so their limit is a quarter
    // higher. They act for users, so they are not exempt.
    let is_update = expect != Expect::Absent || call.kind.stored_as().volatile;
    // Some controllers and add-ons have service accounts of their own.
    let is_component =
        COMPONENTS.contains(&user.name.as_str()) || user.is_in("system:serviceaccounts:kube-system");
    Some(if is_component && is_update { limits.of_components() } else { limits })
}

/// Reserves the growth of an object up to its commit. `bytes` is its new length.
pub(super) fn reserve(
    state: &State,
    kind: &Resource,
    key: &Arc<str>,
    bytes: usize,
    limits: ByteLimits,
) -> Result<Option<ReservedBytes>> {
    let current = state.cache.of(kind)?.lock().get(key);
    let growth = bytes.saturating_sub(current.map_or(0, |current| current.stored_bytes()));
    if growth == 0 {
        return Ok(None);
    }
    state.cache.namespace_bytes.reserve(key, growth, limits).map(Some).map_err(|full| {
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
