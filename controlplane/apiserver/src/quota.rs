//! Resource quotas: the charge of a request, and the status of the quotas.
//!
//! | part | module |
//! |---|---|
//! | what the objects of the cache use of each quota | `ledger` |
//! | writes the status of a quota when its use changes | `status` |
//!
//! A request that uses more holds the lock of its namespace from the check to the commit. A commit ends after the cache,
//! and with it the ledger, has the object. So the ledger is exact while the lock is held, and concurrent requests cannot
//! exceed a quota.

mod ledger;
mod status;

use std::{
    hash::{DefaultHasher, Hash, Hasher},
    sync::Arc,
};

use coracle_kinds::{
    Resource,
    quota::{growth, is_terminating, missing_requests},
};
use serde_json::Value;
use tokio::sync::{Mutex, OwnedMutexGuard};

use crate::{
    call::Call,
    error::{ApiError, Result},
    write::Part,
};
pub(crate) use ledger::Ledger;
pub(crate) use status::write_statuses;

/// Number of locks that the namespaces share.
const LOCK_COUNT: usize = 64;

/// Locks by a hash of the namespace.
pub(crate) struct Locks([Arc<Mutex<()>>; LOCK_COUNT]);

/// The lock of the namespace, if the request uses a quota.
pub(crate) type QuotaLock = Option<OwnedMutexGuard<()>>;

// === impl Locks ===

impl Default for Locks {
    fn default() -> Self {
        Self(std::array::from_fn(|_| Arc::default()))
    }
}

impl Locks {
    async fn lock(&self, namespace: &str) -> OwnedMutexGuard<()> {
        let mut hasher = DefaultHasher::new();
        namespace.hash(&mut hasher);
        let place = usize::try_from(hasher.finish() % 64).unwrap_or(0);
        self.0[place % LOCK_COUNT].clone().lock_owned().await
    }
}

/// Checks a create, or an update of the given part, against the quotas of the namespace. `name` is for the error.
pub(crate) async fn charge(
    call: &Call,
    name: &str,
    object: &Value,
    old: Option<(&Value, Part)>,
) -> Result<QuotaLock> {
    let namespace = call.namespace();
    let quotas = &call.state.cache.quotas;
    if namespace.is_empty() || !quotas.lock().has(namespace) || !is_charged(&call.kind, object, old) {
        return Ok(None);
    }
    let guard = call.state.quota_locks.lock(namespace).await;
    let uses = check(call, name, object, old.map(|(old, _)| old))?;
    Ok((uses && !call.dry_run()?).then_some(guard))
}

/// Whether a request can change what is used. An update is given with the old object and the updated part.
fn is_charged(kind: &Resource, object: &Value, old: Option<(&Value, Part)>) -> bool {
    let Some((old, part)) = old else { return true };
    match (&*kind.group, &*kind.plural, part) {
        ("", "pods", Part::Resize) => true,
        ("", "pods", Part::Main) => is_terminating(old) != is_terminating(object),
        ("", "persistentvolumeclaims", _) | ("", "services", Part::Main) => true,
        ("resource.k8s.io", "resourceclaims", Part::Main) => true,
        _ => false,
    }
}

/// Checks the request against each quota. Returns whether it uses any.
fn check(call: &Call, name: &str, object: &Value, old: Option<&Value>) -> Result<bool> {
    let kind = &*call.kind;
    let forbidden = |why: String| Err(ApiError::forbidden_object(kind, name, why));
    let ledger = call.state.cache.quotas.lock();
    let mut uses = false;
    for account in ledger.accounts(call.namespace()) {
        let quota = &account.quota;
        if !quota.tracks(kind) || !quota.covers(kind, object) {
            continue;
        }
        if kind.is("", "Pod")
            && let Some(missing) = missing_requests(quota, object)
        {
            return forbidden(format!("failed quota: {}: {missing}", quota.name));
        }
        let before = old.map(|old| quota.usage(kind, old)).unwrap_or_default();
        let requested = growth(&quota.usage(kind, object), &before);
        uses |= !requested.is_empty();
        if let Some(why) = quota.exceeded(&account.used, &requested) {
            return forbidden(why);
        }
    }
    Ok(uses)
}
