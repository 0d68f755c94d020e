//! The usage of each quota by the objects of the watch cache. A change of an object is counted without reading other
//! objects.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use coracle_kinds::{
    Resource,
    kind::by_resource,
    quota::{Quota, Usage, grace_end, reads_object, without_paid},
};
use jiff::Timestamp;
use serde_json::Value;
use tokio::sync::Notify;

use super::grace_ends::GraceEnds;
use super::paid_claims::{NamespaceAt, PaidClaims, claims};
use crate::cache::{Cache, Change, Fields, Object, prefix_of};

/// The fields of a pod that [`grace_end`] reads.
const GRACE_FIELDS: &[&[&str]] =
    &[&["metadata", "deletionTimestamp"], &["metadata", "deletionGracePeriodSeconds"], &["status", "phase"]];

/// The accounts of all quotas.
#[derive(Default)]
pub(crate) struct Ledger {
    accounts: Mutex<Accounts>,
}

/// Accounts by namespace and name of the quota.
#[derive(Default)]
pub(crate) struct Accounts {
    namespaces: HashMap<String, BTreeMap<String, Account>>,
    /// Namespace and name of quotas whose status may differ from their account.
    changed: BTreeSet<(String, String)>,
    notify: Arc<Notify>,
    /// The time for which all usages in the accounts are computed. It never decreases. Pods whose grace period ended
    /// before this time do not count.
    now: Timestamp,
    /// Pods whose usage changes after `now`.
    grace_ends: GraceEnds,
    /// Claims whose usage already counts for a pod.
    paid_claims: PaidClaims,
}

/// One quota and its usage by the objects of its namespace.
pub(crate) struct Account {
    pub(crate) quota: Quota,
    pub(crate) used: Usage,
    /// The text of the quota's spec, for comparison.
    spec: String,
}

// === impl Ledger ===

impl Ledger {
    /// Locks the accounts. The guard must not be held over an await.
    pub(crate) fn lock(&self) -> MutexGuard<'_, Accounts> {
        self.accounts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notified when an account changes, and when [`Accounts::next_change`] becomes earlier.
    pub(crate) fn notify(&self) -> Arc<Notify> {
        self.lock().notify.clone()
    }
}

// === impl Accounts ===

impl Accounts {
    /// Whether objects of the kind can use a quota of the namespace.
    pub(crate) fn track(&self, namespace: &str, kind: &Resource) -> bool {
        self.accounts(namespace).any(|account| account.quota.tracks(kind))
    }

    /// The accounts of a namespace, by the name of the quota.
    pub(crate) fn accounts(&self, namespace: &str) -> impl Iterator<Item = &Account> {
        self.namespaces.get(namespace).into_iter().flat_map(BTreeMap::values)
    }

    /// One account.
    pub(crate) fn account(&self, namespace: &str, name: &str) -> Option<&Account> {
        self.namespaces.get(namespace)?.get(name)
    }

    /// The part of a claim's usage that already counts for its pod. The first result is for the counted state, the
    /// second for the new state. Empty for other kinds.
    pub(crate) fn paid_by_pods(
        &self,
        cache: &Cache,
        kind: &Resource,
        namespace: &str,
        new: &Value,
    ) -> [Usage; 2] {
        self.paid_claims.of(&NamespaceAt { cache, namespace, now: self.now }, kind, new)
    }

    /// Removes and returns the quotas whose status may differ from their account.
    pub(crate) fn take_changed(&mut self) -> BTreeSet<(String, String)> {
        std::mem::take(&mut self.changed)
    }

    /// Marks a quota whose status may differ from its account.
    pub(crate) fn mark(&mut self, namespace: &str, name: &str) {
        self.changed.insert((namespace.to_owned(), name.to_owned()));
        self.notify.notify_one();
    }

    /// Reopens the accounts of all quotas of the cache.
    pub(crate) fn load(&mut self, cache: &Cache) {
        self.namespaces.clear();
        self.grace_ends = GraceEnds::default();
        self.paid_claims = PaidClaims::default();
        self.now = Timestamp::now().max(self.now);
        let Some(kind) = by_resource("", "v1", "resourcequotas") else { return };
        for quota in cache.list(kind, "") {
            if let Some((namespace, name)) = namespace_and_name(&quota.key) {
                self.open(cache, namespace, name, &quota);
            }
        }
    }

    /// The time of the accounts.
    pub(crate) fn now(&self) -> Timestamp {
        self.now
    }

    /// The time after which the usage of a pod changes, although the pod does not change.
    pub(crate) fn next_change(&self) -> Option<Timestamp> {
        self.grace_ends.first()
    }

    /// Advances the time of the accounts. Pods whose grace period has ended meanwhile no longer count.
    pub(crate) fn advance(&mut self, cache: &Cache, now: Timestamp) {
        let (before, now) = (self.now, now.max(self.now));
        self.now = now;
        if self.next_change().is_none_or(|end| end >= now) {
            return;
        }
        let Some(kind) = by_resource("", "v1", "pods") else { return };
        while let Some(key) = self.grace_ends.pop_before(now) {
            let Some((namespace, name)) = namespace_and_name(&key) else { continue };
            let Some(pod) = cache.get(kind, namespace, name).map(|pod| pod.value()) else { continue };
            let Some(accounts) = self.namespaces.get_mut(namespace) else { continue };
            let released = self.paid_claims.release(&key);
            let used = accounts.iter_mut().filter_map(|(name, account)| {
                let of = |time: Timestamp| account.quota.usage(kind, &pod, time);
                let (old, new) = (of(before), of(now));
                let is_changed = account.replace(old, new);
                (account.release(&released) || is_changed).then(|| name.clone())
            });
            for name in used.collect::<Vec<String>>() {
                self.mark(namespace, &name);
            }
        }
    }

    /// Counts the objects of one kind again, after the cache loaded or dropped all of them.
    pub(crate) fn recount(&mut self, cache: &Cache, kind: &Resource) {
        let mut changed = Vec::new();
        for (namespace, accounts) in &mut self.namespaces {
            let scope = NamespaceAt { cache, namespace, now: self.now };
            if kind.is("", "Pod") || kind.is("resource.k8s.io", "ResourceClaim") {
                self.paid_claims.remove_namespace(namespace);
                self.paid_claims.load(&scope);
            }
            for (name, account) in accounts.iter_mut().filter(|(_, account)| account.quota.tracks(kind)) {
                account.used = count(&scope, &account.quota, &self.paid_claims, &mut self.grace_ends);
                changed.push((namespace.clone(), name.clone()));
            }
        }
        for (namespace, name) in changed {
            self.mark(&namespace, &name);
        }
    }

    /// Applies a change of the cache.
    pub(crate) fn observe(&mut self, cache: &Cache, kind: &Resource, change: &Change) {
        if !kind.namespaced {
            return;
        }
        let Some((namespace, name)) = namespace_and_name(&change.new.key) else { return };
        if self.namespaces.contains_key(namespace) {
            self.count_change(&NamespaceAt { cache, namespace, now: self.now }, kind, change);
        }
        let is_quota = kind.is("", "ResourceQuota");
        match (is_quota, change.deleted) {
            (true, true) => self.close(namespace, name),
            (true, false) => self.open(cache, namespace, name, &change.new),
            (false, _) => {}
        }
    }

    /// Counts a change of an object in a namespace with quotas.
    fn count_change(&mut self, scope: &NamespaceAt<'_>, kind: &Resource, change: &Change) {
        let (mut paid, mut released, is_pod) = (<[Usage; 2]>::default(), Usage::new(), kind.is("", "Pod"));
        if is_pod {
            if !change.deleted && has_same_use(change) == Some(true) {
                return;
            }
            self.observe_grace(change);
            released = self.paid_claims.observe_pod(change, scope.now);
        } else if kind.is("resource.k8s.io", "ResourceClaim") {
            paid = self.paid_claims.observe(scope, change);
        }
        let Some(accounts) = self.namespaces.get_mut(scope.namespace) else { return };
        let used = accounts.iter_mut().filter(|(_, account)| account.quota.tracks(kind));
        let changed = used.filter_map(|(name, account)| {
            let is_changed = account.apply(kind, change, scope.now, &paid);
            (account.release(&released) || is_changed).then(|| name.clone())
        });
        for name in changed.collect::<Vec<String>>() {
            self.mark(scope.namespace, &name);
        }
    }

    /// Records the end of the grace period of a changed pod, in a namespace with quotas.
    fn observe_grace(&mut self, change: &Change) {
        let end = (!change.deleted).then(|| grace_end(&change.new.part(GRACE_FIELDS))).flatten();
        let is_first = self.grace_ends.set(&change.new.key, end.filter(|end| *end >= self.now));
        if is_first {
            self.notify.notify_one();
        }
    }

    /// Opens the account of a new or changed quota.
    fn open(&mut self, cache: &Cache, namespace: &str, name: &str, object: &Object) {
        let spec = object.spec().to_owned();
        let accounts = self.namespaces.entry(namespace.to_owned()).or_default();
        let is_changed = accounts.get(name).is_none_or(|known| known.spec != spec);
        if is_changed {
            let quota = Quota::read(&object.value());
            let scope = NamespaceAt { cache, namespace, now: self.now };
            if accounts.is_empty() {
                self.paid_claims.load(&scope);
            }
            let used = count(&scope, &quota, &self.paid_claims, &mut self.grace_ends);
            accounts.insert(name.to_owned(), Account { quota, used, spec });
        }
        // Another server with a faster clock may have written a status without a pod that still counts here. If this
        // server corrected the status, both servers would overwrite the status in turn, until the grace period ends on
        // this server, too.
        if is_changed || !self.has_grace_ends(namespace) {
            self.mark(namespace, name);
        }
    }

    /// Whether the usage of a pod of the namespace changes later, although the pod does not change.
    fn has_grace_ends(&self, namespace: &str) -> bool {
        let pods = by_resource("", "v1", "pods");
        pods.is_some_and(|pods| self.grace_ends.has_under(&prefix_of(pods, namespace)))
    }

    fn close(&mut self, namespace: &str, name: &str) {
        if let Some(accounts) = self.namespaces.get_mut(namespace) {
            accounts.remove(name);
            if accounts.is_empty() {
                self.namespaces.remove(namespace);
                self.paid_claims.remove_namespace(namespace);
                if let Some(pods) = by_resource("", "v1", "pods") {
                    self.grace_ends.remove_under(&prefix_of(pods, namespace));
                }
            }
        }
    }
}

// === impl Account ===

impl Account {
    /// Applies a change at the time of the accounts. Returns whether the usage changed. `paid` is the part of the usage
    /// that already counts for a pod, before and after the change.
    fn apply(&mut self, kind: &Resource, change: &Change, now: Timestamp, paid: &[Usage; 2]) -> bool {
        let (quota, reads) = (&self.quota, reads_object(kind));
        let of = |object: &Object| quota.usage(kind, &if reads { object.value() } else { Value::Null }, now);
        let [paid_before, paid_after] = paid;
        let before = change.old.as_deref().map(|old| without_paid(of(old), paid_before)).unwrap_or_default();
        let after = if change.deleted { Usage::new() } else { without_paid(of(&change.new), paid_after) };
        self.replace(before, after)
    }

    /// Adds the part of a claim's usage that counted for a pod until now. Returns whether the usage changed.
    fn release(&mut self, paid: &Usage) -> bool {
        let is_covered = || claims().is_some_and(|kind| self.quota.covers(kind, &Value::Null));
        if paid.is_empty() || !is_covered() {
            return false;
        }
        let limited = paid.iter().filter(|(name, _)| self.quota.limits(name));
        let limited: Usage = limited.map(|(name, amount)| (name.clone(), *amount)).collect();
        self.replace(Usage::new(), limited)
    }

    /// Replaces a part of the usage. Returns whether the usage changed.
    fn replace(&mut self, before: Usage, after: Usage) -> bool {
        if before == after {
            return false;
        }
        for (name, amount) in after {
            *self.used.entry(name).or_default() += amount;
        }
        for (name, amount) in before {
            *self.used.entry(name).or_default() -= amount;
        }
        true
    }
}

/// Whether a change of a pod leaves its usage the same. It does if it changes only the node name, the conditions, or
/// metadata other than the fields of a deletion. The exception is a pod with conditions of a resize: its usage can
/// depend on conditions and other metadata. A pod with the same usage is not parsed. `None` for a new pod.
fn has_same_use(change: &Change) -> Option<bool> {
    let (old, new) = (change.old.as_deref()?.fields()?, change.new.fields()?);
    let (old_spec, new_spec) = (old.object("spec")?, new.object("spec")?);
    let (old_status, new_status) = (old.object("status")?, new.object("status")?);
    let is_resized = |fields: &Fields<'_>| {
        fields.text("conditions").is_some_and(|conditions| conditions.contains("PodResize"))
    };
    let (old_meta, new_meta) = (old.object("metadata")?, new.object("metadata")?);
    let has_same_deletion = ["deletionTimestamp", "deletionGracePeriodSeconds"]
        .into_iter()
        .all(|name| old_meta.text(name) == new_meta.text(name));
    let is_same = has_same_deletion
        && old_spec.equal_except(&new_spec, "nodeName")
        && old_status.equal_except(&new_status, "conditions")
        && !is_resized(&old_status)
        && !is_resized(&new_status);
    Some(is_same)
}

/// The usage of a quota by all objects of the namespace. Adds the pods whose usage changes later to `grace_ends`.
fn count(
    scope: &NamespaceAt<'_>,
    quota: &Quota,
    paid_claims: &PaidClaims,
    grace_ends: &mut GraceEnds,
) -> Usage {
    let mut used = Usage::new();
    for collection in scope.cache.all() {
        let objects = collection.lock();
        let kind = objects.kind();
        if !quota.tracks(kind) {
            continue;
        }
        let (reads, is_pod) = (reads_object(kind), kind.is("", "Pod"));
        for object in objects.under(&prefix_of(kind, scope.namespace)) {
            let value = if reads { object.value() } else { Value::Null };
            if is_pod {
                let end = grace_end(&value).filter(|end| *end >= scope.now);
                grace_ends.set(&object.key, end);
            }
            let usage = quota.usage(kind, &value, scope.now);
            let usage = match paid_claims.get(&object.key) {
                Some(paid) => without_paid(usage, paid),
                None => usage,
            };
            for (name, amount) in usage {
                *used.entry(name).or_default() += amount;
            }
        }
    }
    used
}

/// Namespace and name in the key of a namespaced object.
fn namespace_and_name(key: &str) -> Option<(&str, &str)> {
    let mut parts = key.rsplit('/');
    let name = parts.next()?;
    Some((parts.next()?, name))
}

#[cfg(test)]
mod tests {
    use coracle_kinds::kind::by_kind;
    use coracle_store::Commit;
    use serde_json::json;

    use super::*;
    use crate::cache::{encode, key_of, parses};

    #[test]
    fn a_binding_is_counted_without_parsing_the_pod() {
        let cache = Cache::new(1);
        let apply = |name: &str, revision: u64, object: Value| {
            let kind = by_kind("v1", name).unwrap();
            let key = key_of(kind, "ns", object["metadata"]["name"].as_str().unwrap()).into();
            let value = Some(encode(kind, &object));
            cache.apply(&Commit { key, revision, value, created: revision, guard_follows: false });
        };
        let used = || cache.quotas.lock().account("ns", "q").and_then(|one| one.used.get("pods").copied());
        apply("ResourceQuota", 2, json!({"metadata": {"name": "q"}, "spec": {"hard": {"pods": "5"}}}));
        let mut pod = json!({"metadata": {"name": "p"}, "spec": {"containers": [{"name": "c"}]},
            "status": {"phase": "Pending"}});
        apply("Pod", 3, pod.clone());
        assert_eq!(used(), Some(1000));
        let before = parses::so_far();
        pod["spec"]["nodeName"] = "n".into();
        pod["status"]["conditions"] = json!([{"type": "PodScheduled", "status": "True"}]);
        apply("Pod", 4, pod.clone());
        assert_eq!((used(), parses::so_far()), (Some(1000), before));
        pod["status"]["phase"] = "Succeeded".into();
        apply("Pod", 5, pod.clone());
        assert_eq!((used(), parses::so_far()), (Some(0), before + 2));
        pod["status"]["conditions"] = json!([{"type": "PodResizePending", "status": "True"}]);
        apply("Pod", 6, pod);
        assert_eq!(parses::so_far(), before + 4);
    }

    /// Commits the pod `p` or the quota `q`, or its removal.
    fn apply(cache: &Cache, name: &str, revision: u64, object: Option<Value>) {
        let kind = by_kind("v1", name).unwrap();
        let key = key_of(kind, "ns", if name == "Pod" { "p" } else { "q" }).into();
        let value = object.map(|object| encode(kind, &object));
        cache.apply(&Commit { key, revision, value, created: revision, guard_follows: false });
    }

    #[test]
    fn a_pod_stops_counting_when_its_grace_period_is_over() {
        let cache = Cache::new(1);
        let apply = |name: &str, revision: u64, object: Option<Value>| apply(&cache, name, revision, object);
        let used = || cache.quotas.lock().account("ns", "q").and_then(|one| one.used.get("pods").copied());
        let next = || cache.quotas.lock().next_change();
        let quota = json!({"metadata": {"name": "q"}, "spec": {"hard": {"pods": "5"}}});
        apply("ResourceQuota", 2, Some(quota.clone()));
        let mut pod = json!({"metadata": {"name": "p"}, "spec": {"containers": [{"name": "c"}]},
            "status": {"phase": "Running"}});
        apply("Pod", 3, Some(pod.clone()));
        assert_eq!((used(), next()), (Some(1000), None));
        pod["metadata"]["deletionTimestamp"] = "2100-01-01T00:00:30Z".into();
        pod["metadata"]["deletionGracePeriodSeconds"] = 30.into();
        apply("Pod", 4, Some(pod.clone()));
        let end: Timestamp = "2100-01-01T00:01:00Z".parse().unwrap();
        assert_eq!((used(), next()), (Some(1000), Some(end)));
        cache.quotas.lock().advance(&cache, end);
        assert_eq!((used(), next()), (Some(1000), Some(end)));
        cache.quotas.lock().take_changed();
        let later: Timestamp = "2100-01-01T00:01:01Z".parse().unwrap();
        cache.quotas.lock().advance(&cache, later);
        assert_eq!((used(), next()), (Some(0), None));
        assert_eq!(cache.quotas.lock().take_changed().len(), 1);
        // An earlier time does not change the accounts, and the removal of the pod does not subtract its usage a second
        // time.
        cache.quotas.lock().advance(&cache, end);
        pod["metadata"]["labels"] = json!({"a": "b"});
        apply("Pod", 5, Some(pod.clone()));
        apply("Pod", 6, None);
        assert_eq!((used(), next()), (Some(0), None));
        // The ledger keeps no grace periods of pods in a namespace without quotas.
        pod["metadata"]["deletionGracePeriodSeconds"] = 3600.into();
        apply("Pod", 7, Some(pod));
        assert!(next().is_some());
        apply("ResourceQuota", 8, None);
        assert_eq!(next(), None);
        apply("ResourceQuota", 9, Some(quota));
        assert_eq!((used(), next().is_some()), (Some(1000), true));
    }

    const GPU: &str = "requests.deviceclass.resource.kubernetes.io/gpu";

    /// Commits an object of the namespace `ns`. `None` deletes it.
    fn put(cache: &Cache, kind: (&str, &str), name: &str, object: Option<&Value>) {
        let kind = by_kind(kind.0, kind.1).unwrap();
        let (key, revision) = (key_of(kind, "ns", name).into(), cache.revision() + 1);
        let value = object.map(|object| encode(kind, object));
        cache.apply(&Commit { key, revision, value, created: revision, guard_follows: false });
    }

    /// A cache with a quota for devices, and the pod `p`, which requests two devices. Each claim is for two devices,
    /// and names the pod as its owner.
    fn with_claims(names: &[&str]) -> (Cache, Value) {
        let cache = Cache::new(1);
        let quota = json!({"metadata": {"name": "q"}, "spec": {"hard": {GPU: "9"}}});
        put(&cache, ("v1", "ResourceQuota"), "q", Some(&quota));
        let resources = json!({"requests": {"deviceclass.resource.kubernetes.io/gpu": "2"}});
        let pod = json!({"metadata": {"name": "p", "uid": "u"},
            "spec": {"containers": [{"name": "c", "resources": resources}]}, "status": {"phase": "Running"}});
        put(&cache, ("v1", "Pod"), "p", Some(&pod));
        let owner = json!({"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": "u", "controller": true});
        let annotations = json!({"resource.kubernetes.io/extended-resource-claim": "true"});
        let exactly = json!({"deviceClassName": "gpu", "allocationMode": "ExactCount", "count": 2});
        for name in names {
            let claim = json!({
                "metadata": {"name": name, "annotations": annotations, "ownerReferences": [owner]},
                "spec": {"devices": {"requests": [{"name": "r", "exactly": exactly}]}}});
            put(&cache, CLAIM, name, Some(&claim));
        }
        (cache, pod)
    }

    const CLAIM: (&str, &str) = ("resource.k8s.io/v1", "ResourceClaim");

    fn devices(cache: &Cache) -> i128 {
        let quotas = cache.quotas.lock();
        quotas.account("ns", "q").and_then(|one| one.used.get(GPU).copied()).unwrap_or(0)
    }

    #[test]
    fn a_pod_counts_for_one_claim_until_it_ends() {
        let (cache, mut pod) = with_claims(&["a", "b"]);
        assert_eq!(devices(&cache), 4000, "the pod, and the second claim");
        pod["status"]["phase"] = "Succeeded".into();
        put(&cache, ("v1", "Pod"), "p", Some(&pod));
        assert_eq!(devices(&cache), 4000, "both claims");
        put(&cache, ("v1", "Pod"), "p", None);
        put(&cache, CLAIM, "a", None);
        assert_eq!(devices(&cache), 2000);
        put(&cache, CLAIM, "b", None);
        assert_eq!(devices(&cache), 0);
    }

    #[test]
    fn a_claim_counts_when_its_pod_is_deleted_or_its_grace_period_is_over() {
        for is_removed in [true, false] {
            let (cache, mut pod) = with_claims(&["a"]);
            assert_eq!(devices(&cache), 2000, "the pod");
            if is_removed {
                put(&cache, ("v1", "Pod"), "p", None);
            } else {
                pod["metadata"]["deletionTimestamp"] = "2100-01-01T00:00:30Z".into();
                pod["metadata"]["deletionGracePeriodSeconds"] = 30.into();
                put(&cache, ("v1", "Pod"), "p", Some(&pod));
                assert_eq!(devices(&cache), 2000, "the pod counts until the end of its grace period");
                cache.quotas.lock().advance(&cache, "2100-01-01T00:02:00Z".parse().unwrap());
            }
            assert_eq!(devices(&cache), 2000, "the claim");
            put(&cache, CLAIM, "a", None);
            assert_eq!(devices(&cache), 0);
        }
    }

    #[test]
    fn a_pod_counts_for_another_claim_after_the_removal_of_the_first_one() {
        let (cache, _pod) = with_claims(&["a"]);
        put(&cache, CLAIM, "a", None);
        assert_eq!(devices(&cache), 2000);
        let quotas = cache.quotas.lock();
        let owner = json!({"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": "u", "controller": true});
        let claim = json!({"metadata": {"name": "b", "ownerReferences": [owner],
                "annotations": {"resource.kubernetes.io/extended-resource-claim": "true"}},
            "spec": {"devices": {"requests": [{"name": "r", "exactly": {"deviceClassName": "gpu", "count": 1}}]}}});
        let kind = by_kind(CLAIM.0, CLAIM.1).unwrap();
        let [before, after] = quotas.paid_by_pods(&cache, kind, "ns", &claim);
        assert_eq!((before.len(), after.get(GPU)), (0, Some(&1000)));
    }

    #[test]
    fn the_status_by_another_clock_is_not_corrected_during_a_grace_period() {
        let cache = Cache::new(1);
        let apply = |name: &str, revision: u64, object: Option<Value>| {
            apply(&cache, name, revision, object);
            cache.quotas.lock().take_changed().len()
        };
        let quota = |used: &str| {
            Some(json!({"metadata": {"name": "q"}, "spec": {"hard": {"pods": "5"}},
                "status": {"hard": {"pods": "5"}, "used": {"pods": used}}}))
        };
        let metadata = json!({"name": "p", "deletionTimestamp": "2100-01-01T00:00:30Z",
            "deletionGracePeriodSeconds": 30});
        let pod = json!({"metadata": metadata, "spec": {"containers": [{"name": "c"}]},
            "status": {"phase": "Running"}});
        assert_eq!(apply("ResourceQuota", 2, quota("0")), 1);
        assert_eq!(apply("Pod", 3, Some(pod)), 1);
        assert_eq!(apply("ResourceQuota", 4, quota("1")), 0);
        assert_eq!(apply("ResourceQuota", 5, quota("0")), 0, "of a server with a faster clock");
        assert_eq!(apply("Pod", 6, None), 1);
        assert_eq!(apply("ResourceQuota", 7, quota("3")), 1, "a wrong status");
    }
}
