//! ResourceClaims for the extended resources of pods. The pod may already count in quotas for the same resources. This
//! part of the claim's usage is _paid_ by the pod: quotas do not count it again for the claim.
//!
//! The ledger determines the paid usage when it first counts the claim. The paid usage stays the same while the claim
//! names the same pod and the pod counts. So the ledger later subtracts the same amount that it has added.
//!
//! A pod pays for one claim only. Any number of claims can name the pod until the scheduler writes the name of the
//! claim into the pod's status.

use std::{
    collections::{BTreeMap, HashMap},
    ops::Bound,
    sync::Arc,
};

use coracle_kinds::{
    Resource,
    kind::by_resource,
    quota::{ClaimOwner, Usage, paid_by_pod, pod_of_claim, whole_usage},
};
use jiff::Timestamp;
use serde_json::Value;

use crate::cache::{Cache, Change, key_of, prefix_of};

/// The paid claims in namespaces with quotas. A claim that counts fully is absent.
#[derive(Default)]
pub(super) struct PaidClaims {
    /// By the store keys of the claims.
    claims: BTreeMap<Arc<str>, Paid>,
    /// The store key of the claim that a pod pays for, by the store key of the pod.
    by_pod: HashMap<String, Arc<str>>,
}

/// A claim that a pod pays for. The default means that no pod pays.
#[derive(Clone, Default)]
struct Paid {
    /// The store key of the pod.
    pod: String,
    /// The uid of the pod.
    uid: String,
    /// The usage that the pod pays for.
    usage: Usage,
}

/// The objects of a namespace. Their usage is computed for the time `now`.
pub(super) struct NamespaceAt<'a> {
    pub(super) cache: &'a Cache,
    pub(super) namespace: &'a str,
    pub(super) now: Timestamp,
}

/// The resource `resourceclaims`.
pub(super) fn claims() -> Option<&'static Arc<Resource>> {
    by_resource("resource.k8s.io", "v1", "resourceclaims")
}

fn pods() -> Option<&'static Arc<Resource>> {
    by_resource("", "v1", "pods")
}

// === impl PaidClaims ===

impl PaidClaims {
    /// The usage of a claim that its pod pays for. `None` if no pod pays.
    pub(super) fn get(&self, claim: &str) -> Option<&Usage> {
        self.claims.get(claim).map(|paid| &paid.usage)
    }

    /// Determines the paid usage of all claims of a namespace, before a quota counts them.
    pub(super) fn load(&mut self, scope: &NamespaceAt<'_>) {
        let Some(kind) = claims() else { return };
        for claim in scope.cache.list(kind, scope.namespace) {
            let paid = self.after(scope, &claim.key, &claim.value());
            self.set(&claim.key, paid);
        }
    }

    /// Forgets the claims of a namespace.
    pub(super) fn remove_namespace(&mut self, namespace: &str) {
        let Some(kind) = claims() else { return };
        let prefix = prefix_of(kind, namespace);
        let range = self.claims.range::<str, _>((Bound::Included(prefix.as_str()), Bound::Unbounded));
        let own = range.map(|(claim, _)| claim).take_while(|claim| claim.starts_with(prefix.as_str()));
        for claim in own.cloned().collect::<Vec<Arc<str>>>() {
            self.set(&claim, Paid::default());
        }
    }

    /// Applies a change of a claim. Returns its paid usage before and after the change.
    pub(super) fn observe(&mut self, scope: &NamespaceAt<'_>, change: &Change) -> [Usage; 2] {
        let key = &change.new.key;
        let before = self.get(key).cloned().unwrap_or_default();
        let after =
            if change.deleted { Paid::default() } else { self.after(scope, key, &change.new.value()) };
        self.set(key, after.clone());
        [before, after.usage]
    }

    /// Applies a change of a pod. If the pod does not count any more, it no longer pays for its claim. Then the result
    /// is the usage that the pod paid for.
    pub(super) fn observe_pod(&mut self, change: &Change, now: Timestamp) -> Usage {
        let key = &*change.new.key;
        let claim = self.by_pod.get(key).and_then(|claim| self.claims.get(claim));
        let Some(paid) = claim else { return Usage::new() };
        let still_counts = |pod: &Value| pod["metadata"]["uid"] == paid.uid.as_str() && counts(pod, now);
        if !change.deleted && still_counts(&change.new.value()) {
            return Usage::new();
        }
        self.release(key)
    }

    /// Removes the claim that a pod pays for. Returns the usage that the pod paid for.
    pub(super) fn release(&mut self, pod: &str) -> Usage {
        let claim = self.by_pod.remove(pod).and_then(|claim| self.claims.remove(&claim));
        claim.map(|paid| paid.usage).unwrap_or_default()
    }

    /// The paid usage of an object in the state that the ledger has counted, and in a new state. Empty for other kinds
    /// than ResourceClaim.
    pub(super) fn of(&self, scope: &NamespaceAt<'_>, kind: &Resource, new: &Value) -> [Usage; 2] {
        if !kind.is("resource.k8s.io", "ResourceClaim") {
            return Default::default();
        }
        let key = key_of(kind, scope.namespace, new["metadata"]["name"].as_str().unwrap_or_default());
        let before = self.get(&key).cloned().unwrap_or_default();
        [before, self.after(scope, &key, new).usage]
    }

    /// The pod and the paid usage of a claim in a new state.
    fn after(&self, scope: &NamespaceAt<'_>, key: &str, claim: &Value) -> Paid {
        let (Some((name, uid)), Some(kind)) = (pod_of_claim(claim), pods()) else { return Paid::default() };
        if let Some(known) = self.claims.get(key).filter(|known| known.uid == uid) {
            return known.clone();
        }
        let pod = key_of(kind, scope.namespace, name);
        if self.by_pod.get(&pod).is_some_and(|other| **other != *key) {
            return Paid::default();
        }
        let object = scope.cache.get(kind, scope.namespace, name).map(|object| object.value());
        let usage = object.map(|object| paid_by(claim, &object, scope.now)).unwrap_or_default();
        Paid { pod, uid: uid.to_owned(), usage }
    }

    /// Replaces the entry of a claim. Removes it if no usage is paid.
    fn set(&mut self, key: &Arc<str>, paid: Paid) {
        if let Some(old) = self.claims.remove(key) {
            self.by_pod.remove(&old.pod);
        }
        if !paid.usage.is_empty() {
            self.by_pod.insert(paid.pod.clone(), key.clone());
            self.claims.insert(key.clone(), paid);
        }
    }
}

/// Whether quotas count the resources of a pod. They do not count a pod that has ended.
fn counts(pod: &Value, now: Timestamp) -> bool {
    pods().is_some_and(|kind| whole_usage(kind, pod, now).contains_key("pods"))
}

/// The usage of a claim that a pod pays for.
fn paid_by(claim: &Value, pod: &Value, now: Timestamp) -> Usage {
    ClaimOwner::of(pod, now).map(|owner| paid_by_pod(claim, &owner)).unwrap_or_default()
}
