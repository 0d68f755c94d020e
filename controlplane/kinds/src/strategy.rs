//! What each way of writing may change: status, spec, generation.

use serde_json::Value;

use crate::Kind;

/// A new object: status reset, generation 1 where the kind has one.
pub fn prepare_for_create(kind: &Kind, object: &mut Value) {
    let _ = (kind, object);
}

/// The main path: the old status stays, generation grows with the spec.
pub fn prepare_for_update(kind: &Kind, new: &mut Value, old: &Value) {
    let _ = (kind, new, old);
}

/// `/status`: only status changes (and, as upstream, metadata.annotations, labels and finalizers where it allows).
pub fn prepare_for_status_update(kind: &Kind, new: &mut Value, old: &Value) {
    let _ = (kind, new, old);
}

/// Whether a write changes nothing, so that it gets no new resourceVersion.
pub fn is_noop(new: &Value, old: &Value) -> bool {
    new == old
}
