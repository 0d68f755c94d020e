//! The usage of each quota by the objects of the watch cache. A change of an object is counted without reading other
//! objects.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use coracle_kinds::{
    Resource,
    quota::{Quota, Usage, reads_object},
};
use serde_json::Value;
use tokio::sync::Notify;

use crate::cache::{Cache, Change, Fields, Object, prefix_of};

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

    /// Notified when an account changes.
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
        let Some(kind) = coracle_kinds::kind::by_resource("", "v1", "resourcequotas") else { return };
        for quota in cache.list(kind, "") {
            if let Some((namespace, name)) = namespace_and_name(&quota) {
                self.open(cache, namespace, name, &quota);
            }
        }
    }

    /// Counts the objects of one kind again, after the cache loaded or dropped all of them.
    pub(crate) fn recount(&mut self, cache: &Cache, kind: &Resource) {
        let mut changed = Vec::new();
        for (namespace, accounts) in &mut self.namespaces {
            for (name, account) in accounts.iter_mut().filter(|(_, account)| account.quota.tracks(kind)) {
                account.used = count(cache, namespace, &account.quota);
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
        let Some((namespace, name)) = namespace_and_name(&change.new) else { return };
        let is_quota = kind.is("", "ResourceQuota");
        let is_same = || kind.is("", "Pod") && !change.deleted && has_same_use(change) == Some(true);
        if let Some(accounts) = self.namespaces.get_mut(namespace).filter(|_| !is_same()) {
            let used = accounts.iter_mut().filter(|(_, account)| account.quota.tracks(kind));
            let changed: Vec<String> = used
                .filter_map(|(name, account)| account.apply(kind, change).then(|| name.clone()))
                .collect();
            for name in changed {
                self.mark(namespace, &name);
            }
        }
        match (is_quota, change.deleted) {
            (true, true) => self.close(namespace, name),
            (true, false) => self.open(cache, namespace, name, &change.new),
            (false, _) => {}
        }
    }

    /// Opens the account of a new or changed quota.
    fn open(&mut self, cache: &Cache, namespace: &str, name: &str, object: &Object) {
        let spec = object.spec().to_owned();
        let accounts = self.namespaces.entry(namespace.to_owned()).or_default();
        if accounts.get(name).is_none_or(|known| known.spec != spec) {
            let quota = Quota::read(&object.value());
            let used = count(cache, namespace, &quota);
            accounts.insert(name.to_owned(), Account { quota, used, spec });
        }
        self.mark(namespace, name);
    }

    fn close(&mut self, namespace: &str, name: &str) {
        if let Some(accounts) = self.namespaces.get_mut(namespace) {
            accounts.remove(name);
            if accounts.is_empty() {
                self.namespaces.remove(namespace);
            }
        }
    }
}

// === impl Account ===

impl Account {
    /// Applies a change. Returns whether the usage changed.
    fn apply(&mut self, kind: &Resource, change: &Change) -> bool {
        let (quota, reads) = (&self.quota, reads_object(kind));
        let of = |object: &Object| quota.usage(kind, &if reads { object.value() } else { Value::Null });
        let before = change.old.as_deref().map(of).unwrap_or_default();
        let after = if change.deleted { Usage::new() } else { of(&change.new) };
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

/// Whether a change of a pod cannot change its usage: a binding, or a change of the metadata or of conditions. Such
/// pods are not parsed. The usage of a pod depends on conditions and metadata only while the pod has conditions of a
/// resize. `None` for a new pod.
fn has_same_use(change: &Change) -> Option<bool> {
    let (old, new) = (change.old.as_deref()?.fields()?, change.new.fields()?);
    let (old_spec, new_spec) = (old.object("spec")?, new.object("spec")?);
    let (old_status, new_status) = (old.object("status")?, new.object("status")?);
    let is_resized = |fields: &Fields<'_>| {
        fields.text("conditions").is_some_and(|conditions| conditions.contains("PodResize"))
    };
    let is_same = old_spec.equal_except(&new_spec, "nodeName")
        && old_status.equal_except(&new_status, "conditions")
        && !is_resized(&old_status)
        && !is_resized(&new_status);
    Some(is_same)
}

/// The usage of a quota by all objects of the namespace.
fn count(cache: &Cache, namespace: &str, quota: &Quota) -> Usage {
    let mut used = Usage::new();
    for collection in cache.all() {
        let objects = collection.lock();
        let kind = objects.kind();
        if !quota.tracks(kind) {
            continue;
        }
        let reads = reads_object(kind);
        for object in objects.under(&prefix_of(kind, namespace)) {
            let usage = quota.usage(kind, &if reads { object.value() } else { Value::Null });
            for (name, amount) in usage {
                *used.entry(name).or_default() += amount;
            }
        }
    }
    used
}

/// Namespace and name of a namespaced object.
fn namespace_and_name(object: &Object) -> Option<(&str, &str)> {
    let mut parts = object.key.rsplit('/');
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
}
