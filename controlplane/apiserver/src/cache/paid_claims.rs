//! The claims for the extended resources of pods, for which the pods already count in quotas.
//!
//! The usage of such a claim depends on its pod. It is decided when the ledger counts the claim first, and kept as long
//! as the claim names the same pod. So the ledger later subtracts the same amount, even if the pod has changed.

use std::{collections::BTreeMap, sync::Arc};

use coracle_kinds::{
    Resource,
    kind::by_resource,
    quota::{ClaimOwner, Usage, paid_by_pod, pod_of_claim},
};
use coracle_values::pod_resources;
use serde_json::Value;

use crate::cache::{Cache, Change, key_of, prefix_of};

/// The claims in namespaces with quotas, by their store keys. Claims that count as a whole are absent.
#[derive(Default)]
pub(super) struct PaidClaims(BTreeMap<Arc<str>, Paid>);

#[derive(Clone, Default)]
struct Paid {
    /// The uid of the pod.
    pod: String,
    /// The usage for which the pod counts.
    usage: Usage,
}

fn claims() -> Option<&'static Arc<Resource>> {
    by_resource("resource.k8s.io", "v1", "resourceclaims")
}

// === impl PaidClaims ===

impl PaidClaims {
    /// The usage of a claim for which its pod counts.
    pub(super) fn get(&self, claim: &str) -> Option<&Usage> {
        self.0.get(claim).map(|paid| &paid.usage)
    }

    /// Decides about all claims of a namespace, before the first quota of the namespace counts them.
    pub(super) fn load(&mut self, cache: &Cache, namespace: &str) {
        let Some(kind) = claims() else { return };
        for claim in cache.list(kind, namespace) {
            let paid = self.after(cache, namespace, &claim.key, &claim.value());
            self.set(&claim.key, paid);
        }
    }

    /// Forgets the claims of a namespace.
    pub(super) fn remove_namespace(&mut self, namespace: &str) {
        let Some(kind) = claims() else { return };
        let prefix = prefix_of(kind, namespace);
        self.0.retain(|key, _| !key.starts_with(&prefix));
    }

    /// Applies a change of a claim. Returns the usage for which a pod counts, before and after the change.
    pub(super) fn observe(&mut self, cache: &Cache, namespace: &str, change: &Change) -> [Usage; 2] {
        let key = &change.new.key;
        let before = self.get(key).cloned().unwrap_or_default();
        let after = if change.deleted {
            Paid::default()
        } else {
            self.after(cache, namespace, key, &change.new.value())
        };
        self.set(key, after.clone());
        [before, after.usage]
    }

    /// The usage of an object for which a pod counts: in the state that the ledger has counted, and in a new state.
    pub(super) fn of(&self, cache: &Cache, kind: &Resource, namespace: &str, new: &Value) -> [Usage; 2] {
        if !kind.is("resource.k8s.io", "ResourceClaim") {
            return Default::default();
        }
        let key = key_of(kind, namespace, new["metadata"]["name"].as_str().unwrap_or_default());
        let before = self.get(&key).cloned().unwrap_or_default();
        [before, self.after(cache, namespace, &key, new).usage]
    }

    /// The decision about a new state of a claim.
    fn after(&self, cache: &Cache, namespace: &str, key: &str, claim: &Value) -> Paid {
        let Some((name, uid)) = pod_of_claim(claim) else { return Paid::default() };
        if let Some(known) = self.0.get(key).filter(|known| known.pod == uid) {
            return known.clone();
        }
        let pods = by_resource("", "v1", "pods");
        let pod = pods.and_then(|kind| cache.get(kind, namespace, name)).map(|pod| pod.value());
        let usage = pod.map(|pod| paid_by(claim, &pod)).unwrap_or_default();
        Paid { pod: uid.to_owned(), usage }
    }

    fn set(&mut self, key: &Arc<str>, paid: Paid) {
        if paid.usage.is_empty() {
            self.0.remove(key);
        } else {
            self.0.insert(key.clone(), paid);
        }
    }
}

/// The usage of a claim for which a pod counts.
fn paid_by(claim: &Value, pod: &Value) -> Usage {
    let totals = pod_resources::of_pod_json(pod);
    let requests = totals.map(|totals| totals.requests.others).unwrap_or_default();
    let request = |name: &str| requests.get(name).map_or(0, |amount| amount.saturating_mul(1000));
    let owner = ClaimOwner {
        uid: pod["metadata"]["uid"].as_str().unwrap_or_default(),
        claim: pod["status"]["extendedResourceClaimStatus"]["resourceClaimName"].as_str(),
        request: &request,
    };
    paid_by_pod(claim, &owner)
}
