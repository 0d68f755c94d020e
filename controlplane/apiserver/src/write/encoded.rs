//! Writes of encoded objects.

use std::sync::Arc;

use bytes::Bytes;
use coracle_kinds::Resource;
use coracle_store::{Expect, Tier, Write};

use super::{Expected, Failed, MAX_ATTEMPTS, limits, namespace_limit};
use crate::{
    cache::Object,
    call::Call,
    error::{ApiError, Result},
    offload,
    state::State,
};

/// Commits an object that is encoded in its stored version, and waits until the cache has the commit. Returns the
/// revision. `None` deletes the entry.
pub(super) async fn commit_encoded(
    state: &State,
    kind: &Resource,
    key: &Arc<str>,
    expected: Expected,
    value: Option<Bytes>,
) -> std::result::Result<u64, Failed> {
    // While the objects are not loaded, the server does not know which names are in use, and which objects refer to
    // each other.
    state.cache.check_readable(kind).map_err(Failed::Other)?;
    let Expected { entry: expect, guard, byte_limits } = expected;
    let stored_kind = kind.stored_as();
    // Only events have a time to live.
    let ttl = (stored_kind.ttl_seconds > 0).then_some(state.event_lifetime);
    let tier = if stored_kind.volatile { Tier::Volatile { ttl } } else { Tier::Durable };
    if let Some(bytes) = &value {
        limits::check(bytes).map_err(Failed::Other)?;
    }
    let growth = value.as_ref().zip(byte_limits);
    let growth = growth.map(|(bytes, limits)| namespace_limit::reserve(state, kind, key, bytes, limits));
    let _reserved = growth.transpose().map_err(Failed::Other)?;
    match state.store.write(Write { key: key.clone(), expect, value, tier, guard }).await {
        Ok(revision) => {
            state.cache.reach(revision).await.map_err(Failed::Other)?;
            Ok(revision)
        }
        Err(coracle_store::Error::Conflict { at, .. }) => {
            state.cache.reach(at).await.map_err(Failed::Other)?;
            if expect != Expect::Absent {
                state.cache.check_newest(kind, key).map_err(Failed::Other)?;
            }
            Err(Failed::Conflict)
        }
        Err(coracle_store::Error::Guard { at }) => {
            state.cache.reach(at).await.map_err(Failed::Other)?;
            Err(Failed::Allocated)
        }
        Err(error) => Err(Failed::Other(error.into())),
    }
}

/// Changes an object by its encoding, without strategy, admission and validation. The kind must have one version.
/// `change` makes the new encoding from the current object; it is called again after a conflict with another write.
pub(crate) async fn update_encoded(
    call: &Call,
    name: &str,
    change: impl Fn(&Object) -> Result<Bytes> + Send,
) -> Result<()> {
    let (kind, is_dry_run) = (&*call.kind, call.dry_run()?);
    for _ in 0..MAX_ATTEMPTS {
        let current = call.current(name)?;
        let new = offload::run(current.is_large(), || change(&current))?;
        if is_dry_run {
            return Ok(());
        }
        let expected = Expected::from(Expect::Revision(current.revision));
        match commit_encoded(&call.state, kind, &current.key, expected, Some(new)).await {
            Ok(_) => return Ok(()),
            Err(Failed::Conflict | Failed::Allocated) => {}
            Err(Failed::Other(error)) => return Err(error),
        }
    }
    Err(ApiError::modified(kind, name))
}
