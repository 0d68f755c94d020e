//! The change of an update: from the current state of an object to the new state.

use std::sync::Arc;

use serde_json::Value;

use crate::{
    cache::Object,
    call::Call,
    convert,
    error::{ApiError, Result},
    offload,
};

/// The object of an update.
#[derive(Clone, Copy)]
pub(crate) struct Target<'a> {
    pub(crate) name: &'a str,
    /// The resourceVersion that the client requires. Empty, or "0": any.
    pub(crate) revision: &'a str,
}

/// An object before and after a change.
pub(super) struct Changed {
    pub(super) current: Arc<Object>,
    /// The current state in the version of the request.
    pub(super) old: Value,
    /// Whether the stored object has fields that the canonical form omits, or that this version does not have. Other
    /// versions of this server stored them.
    pub(super) has_unknown: bool,
    /// The new state, before strategy and admission.
    pub(super) new: Value,
    /// Whether the object or the body of the request is large.
    pub(super) is_large: bool,
}

// === impl Target ===

impl Target<'_> {
    /// Refuses the retry of a write that must fail again: the client requires a former resourceVersion.
    pub(super) fn check_retry(&self, call: &Call) -> Result<()> {
        let is_any = matches!(self.revision, "" | "0");
        if is_any || call.current(self.name)?.revision.to_string() == self.revision {
            return Ok(());
        }
        Err(ApiError::modified(&call.kind, self.name))
    }
}

/// Changes the current state of an object. `change` makes the new state.
///
/// A slow change first waits for its slot, and then reads the object again. So it changes the current object, and the
/// waiting request has no tree of the object in memory. An object that a webhook must convert is the exception: it is
/// converted before the wait, because a slow webhook must not keep a slot.
pub(super) async fn changed(
    call: &Call,
    name: &str,
    change: &mut (impl FnMut(&Value) -> Result<Value> + Send),
) -> Result<Changed> {
    let kind = &*call.kind;
    let mut current = call.current(name)?;
    if !convert::waits(kind, &current) {
        let is_slow = is_large(call, &current) || call.has_json_patch();
        let Some(slot) = offload::body_slot(is_slow).await? else {
            return changed_at_once(call, current, change);
        };
        current = call.current(name)?;
        if !convert::waits(kind, &current) {
            return slot.run(|| changed_at_once(call, current, change));
        }
    }
    let is_large = is_large(call, &current);
    let stored = offload::run(is_large, || current.value());
    let mut old = convert::value(kind, stored).await?;
    let has_unknown = kind.strategy().canonical_stored(&mut old);
    let new = offload::run_body(is_large || call.has_json_patch(), || change(&old)).await??;
    Ok(Changed { current, old, has_unknown, new, is_large })
}

/// Changes an object whose conversion does not wait.
fn changed_at_once(
    call: &Call,
    current: Arc<Object>,
    change: &mut impl FnMut(&Value) -> Result<Value>,
) -> Result<Changed> {
    let kind = &*call.kind;
    let mut old = convert::value_at_once(kind, current.value())?;
    let has_unknown = kind.strategy().canonical_stored(&mut old);
    let new = change(&old)?;
    let is_large = is_large(call, &current);
    Ok(Changed { current, old, has_unknown, new, is_large })
}

fn is_large(call: &Call, object: &Object) -> bool {
    object.is_large() || call.has_large_body()
}
