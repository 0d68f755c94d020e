//! Resource quotas: the charge of a request.
//!
//! | part | module |
//! |---|---|
//! | the use of each quota by the objects in the cache | `cache/ledger.rs` |
//! | the times at which pods that are being deleted stop counting | `cache/grace_ends.rs` |
//! | the locks of namespaces | `quota_locks.rs` |
//! | the controller that writes the status of a quota when its use changes | `controllers/quota_status.rs` |
//!
//! A request that increases the use of a quota holds the lock of its namespace from the check to the commit. A commit
//! returns after the cache and its ledger contain the object. The ledger is therefore exact while the lock is held, and
//! concurrent requests cannot exceed a quota.
//!
//! Several servers on one store also use guards. The commit of such a request updates the guard of the namespace, which
//! is an entry of the store. The commit fails if another server has updated the guard since the check. Then the request
//! is checked again. Services already have a guard for their addresses. Objects in memory, such as leases, have no
//! guard.

use std::borrow::Cow;

use coracle_kinds::{
    Resource,
    initializers::is_pending,
    quota::{
        Quota, Uncovered, Usage, growth, is_terminating, missing_requests, uncovered, whole_usage,
        without_paid,
    },
};
use jiff::Timestamp;
use serde_json::Value;

use crate::{
    allocate::is_allocated,
    cache::prefix_of,
    call::Call,
    error::{ApiError, Result},
    part::Part,
    quota_locks::{QuotaLock, QuotaPermit, slot},
};

/// An update of an object.
#[derive(Clone, Copy)]
pub(crate) struct Update<'a> {
    pub(crate) old: &'a Value,
    /// The updated part.
    pub(crate) part: Part,
}

/// Checks a create, or an update, against the quotas of the namespace. `name` is used in errors. Returns the permit
/// that the caller must hold until the commit, if the commit needs one.
pub(crate) async fn charge(
    call: &Call,
    name: &str,
    object: &Value,
    update: Option<Update<'_>>,
) -> Result<QuotaLock> {
    let namespace = call.namespace();
    let plugins = &call.state.admission.plugins;
    if !plugins.charges_quota || namespace.is_empty() {
        return Ok(None);
    }
    // Objects that no quota tracks, for example events, do not wait for the commits of objects that a quota tracks.
    let is_tracked = || call.state.cache.quotas.lock().track(namespace, &call.kind);
    let is_checked = !plugins.limited.is_empty() || is_tracked();
    if !is_checked || !is_charged(&call.kind, object, update) {
        return Ok(None);
    }
    let lock = call.state.quota_locks.lock(namespace).await;
    // The guard is read before the accounts, so the accounts contain all uses up to the revision of the guard.
    let guard = needs_guard(call).then(|| call.state.cache.quota_guard(slot(namespace)));
    let uses = check(call, name, object, update.map(|update| update.old))?;
    Ok((uses && !call.dry_run()?).then_some(QuotaPermit::new(lock, guard)))
}

/// Whether the commit needs a guard: other servers can write objects of this kind, and the kind has no guard of its
/// own.
fn needs_guard(call: &Call) -> bool {
    call.state.store.is_shared() && !call.kind.stored_as().volatile && !is_allocated(&call.kind)
}

/// Whether a request can change the use of a quota. True for each create.
fn is_charged(kind: &Resource, object: &Value, update: Option<Update<'_>>) -> bool {
    let Some(Update { old, part }) = update else { return true };
    match (&*kind.group, &*kind.plural, part) {
        ("", "pods", Part::Resize) => true,
        // An initializer may change the resources of a pod.
        ("", "pods", Part::Main) => is_terminating(old) != is_terminating(object) || is_pending(old),
        ("", "persistentvolumeclaims", _) | ("", "services", Part::Main) => true,
        ("resource.k8s.io", "resourceclaims", Part::Main) => true,
        _ => false,
    }
}

/// Checks the request against each quota, and whether the quotas cover the `limitedResources` of the admission plugin.
/// Returns whether the commit must hold the lock. The commit must hold the lock if the request increases the use of a
/// quota. It must also hold the lock if a pod pays for the claim, because a pod pays for one claim only.
fn check(call: &Call, name: &str, object: &Value, old: Option<&Value>) -> Result<bool> {
    let kind = &*call.kind;
    let forbidden = |why: String| Err(ApiError::forbidden_object(kind, name, why));
    let mut ledger = call.state.cache.quotas.lock();
    ledger.advance(&call.state.cache, Timestamp::now());
    let now = ledger.now();
    let [paid_before, paid] = ledger.paid_by_pods(&call.state.cache, kind, call.namespace(), object);
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
        let before =
            old.map(|old| without_paid(quota.usage(kind, old, now), &paid_before)).unwrap_or_default();
        let requested = growth(&without_paid(quota.usage(kind, object, now), &paid), &before);
        uses |= !requested.is_empty();
        let used = with_unknown(call, quota, &account.used, now)?;
        if let Some(why) = quota.exceeded(&used, &requested) {
            return forbidden(why);
        }
    }
    let needs_lock = uses || !paid.is_empty();
    let limited = &call.state.admission.plugins.limited;
    if limited.is_empty() {
        return Ok(needs_lock);
    }
    // As upstream, an amount that no quota of the namespace limits also counts as growth.
    let before = old.map(|old| without_paid(whole_usage(kind, old, now), &paid_before)).unwrap_or_default();
    let usage = without_paid(whole_usage(kind, object, now), &paid);
    let grows = uses || !growth(&usage, &before).is_empty();
    let quotas = ledger.accounts(call.namespace()).map(|account| &account.quota);
    match uncovered(limited, quotas, kind, object, &usage).filter(|_| grows) {
        None => Ok(needs_lock),
        Some(Uncovered::Amounts(why)) => forbidden(why),
        Some(Uncovered::Scopes(why)) => Err(ApiError::without_reason(why)),
    }
}

/// The usage of an account, including objects of the requested kind that cannot be decrypted. No account contains these
/// objects. Each of them counts with the amounts that every object of the kind has.
fn with_unknown<'a>(call: &Call, quota: &Quota, used: &'a Usage, now: Timestamp) -> Result<Cow<'a, Usage>> {
    let collection = call.state.cache.of(&call.kind)?;
    let unknown = collection.lock().unknown_len(&prefix_of(&call.kind, call.namespace()));
    let mut used = Cow::Borrowed(used);
    if unknown > 0 {
        let count = i128::try_from(unknown).unwrap_or(i128::MAX);
        for (name, amount) in quota.usage(&call.kind, &Value::Null, now) {
            let used = used.to_mut().entry(name).or_default();
            *used = used.saturating_add(amount.saturating_mul(count));
        }
    }
    Ok(used)
}
