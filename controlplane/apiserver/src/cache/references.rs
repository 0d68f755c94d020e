//! Index of pods by node, with the secrets, config maps, service accounts, claims and ResourceClaims that they refer
//! to.
//!
//! The cache of pods updates the index with each change. The node authorizer therefore does not read pods, and a node's
//! list or watch does not read the pods of other nodes. References are counted, because several pods of a node can
//! refer to one object.

mod names;

use std::{
    collections::{BTreeSet, HashMap, hash_map::Entry},
    sync::Arc,
};

use self::names::Names;
use super::Object;

/// Kinds of objects that a node may read for its pods.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum ReferenceKind {
    Secret,
    ConfigMap,
    ServiceAccount,
    Claim,
    ResourceClaim,
}

/// The references of the pods of each node.
#[derive(Debug, Default)]
pub(crate) struct References {
    /// Bound pods by key.
    pods: HashMap<Arc<str>, Bound>,
    nodes: HashMap<Arc<str>, Node>,
}

/// A node with bound pods.
#[derive(Debug, Default)]
struct Node {
    /// Keys of the pods of the node.
    pods: BTreeSet<Arc<str>>,
    /// For each object, the number of pods of the node that refer to it.
    names: HashMap<Arc<Reference>, usize>,
}

/// A bound pod.
#[derive(Debug)]
struct Bound {
    node: Arc<str>,
    names: Vec<Arc<Reference>>,
    /// Whether the status may name additional ResourceClaims.
    has_resource_claims: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Reference {
    kind: ReferenceKind,
    namespace: Box<str>,
    name: Box<str>,
}

// === impl References ===

impl References {
    /// Whether a pod on the node refers to this object.
    pub(crate) fn needed(&self, node: &str, kind: ReferenceKind, namespace: &str, name: &str) -> bool {
        let wanted = Reference { kind, namespace: namespace.into(), name: name.into() };
        self.nodes.get(node).is_some_and(|node| node.names.contains_key(&wanted))
    }

    /// Namespaces and names of the PersistentVolumeClaims of the pods on a node.
    pub(crate) fn claims_of(&self, node: &str) -> Vec<(Box<str>, Box<str>)> {
        let names = self.nodes.get(node).into_iter().flat_map(|node| node.names.keys());
        let claims = names.filter(|name| name.kind == ReferenceKind::Claim);
        claims.map(|claim| (claim.namespace.clone(), claim.name.clone())).collect()
    }

    /// The keys of the pods that are bound to a node, in order.
    pub(super) fn pods_of(&self, node: &str) -> impl Iterator<Item = &Arc<str>> {
        self.nodes.get(node).into_iter().flat_map(|node| &node.pods)
    }

    /// Adds or updates a pod. If only the status of a bound pod has changed, which is the most frequent case, the pod
    /// is parsed only if it has ResourceClaims. The scheduler names the claim of extended resources before it binds the
    /// pod.
    pub(super) fn set(&mut self, old: Option<&Object>, pod: &Object) {
        // The comparison of the specs reads both pods. Specs of unbound pods are not compared, because most changes of
        // an unbound pod are its binding.
        let compares = self.pods.get(&pod.key).is_some_and(|bound| !bound.has_resource_claims);
        if compares && old.is_some_and(|old| old.spec() == pod.spec()) {
            return;
        }
        self.remove(&pod.key);
        let names = Names::read(pod.name(), pod.encoded());
        let has_resource_claims = names.has_resource_claims;
        if names.node.is_empty() {
            return;
        }
        let node = self.nodes.get_key_value(names.node.as_str());
        let node = node.map_or_else(|| names.node.as_str().into(), |(known, _)| known.clone());
        // Keys of pods are `/pods/namespace/name`.
        let namespace = pod.key.split('/').nth(2).unwrap_or_default();
        let entry = self.nodes.entry(node.clone()).or_default();
        entry.pods.insert(pod.key.clone());
        let counts = &mut entry.names;
        let found = [
            (ReferenceKind::Secret, names.secrets),
            (ReferenceKind::ConfigMap, names.config_maps),
            (ReferenceKind::ServiceAccount, names.accounts),
            (ReferenceKind::Claim, names.claims),
            (ReferenceKind::ResourceClaim, names.resource_claims),
        ];
        let found =
            found.into_iter().flat_map(|(kind, names)| names.into_iter().map(move |name| (kind, name)));
        let reference = |(kind, name): (ReferenceKind, String)| Reference {
            kind,
            namespace: namespace.into(),
            name: name.into(),
        };
        let names = found.map(|named| count(counts, reference(named))).collect();
        self.pods.insert(pod.key.clone(), Bound { node, names, has_resource_claims });
    }

    /// Removes a deleted pod.
    pub(super) fn remove(&mut self, key: &str) {
        let Some(Bound { node, names, .. }) = self.pods.remove(key) else { return };
        let Some(found) = self.nodes.get_mut(&node) else { return };
        found.pods.remove(key);
        for name in names {
            if let Entry::Occupied(mut entry) = found.names.entry(name) {
                *entry.get_mut() -= 1;
                if *entry.get() == 0 {
                    entry.remove();
                }
            }
        }
        if found.pods.is_empty() {
            self.nodes.remove(&node);
        }
    }
}

/// Increases the count of a name. Equal names are stored once.
fn count(counts: &mut HashMap<Arc<Reference>, usize>, name: Reference) -> Arc<Reference> {
    let name = counts.get_key_value(&name).map_or_else(|| Arc::new(name.clone()), |(known, _)| known.clone());
    *counts.entry(name.clone()).or_default() += 1;
    name
}

#[cfg(test)]
mod tests {
    use coracle_kinds::kind::by_kind;
    use serde_json::json;

    use super::*;
    use crate::cache::{encode, parses};

    fn pod(name: &str, revision: u64, node: &str, secret: &str, phase: &str) -> Object {
        let kind = by_kind("v1", "Pod").unwrap();
        let stored = encode(
            kind,
            &json!({"metadata": {"name": name, "namespace": "ns"},
                "spec": {"nodeName": node, "volumes": [{"secret": {"secretName": secret}}], "serviceAccountName": "default"},
                "status": {"phase": phase}}),
        );
        Object::from_stored(format!("/pods/ns/{name}").into(), revision, stored)
    }

    #[test]
    fn a_node_needs_the_resource_claims_that_a_status_names_later() {
        let kind = by_kind("v1", "Pod").unwrap();
        let pod = |revision: u64, status: serde_json::Value| {
            let claims = json!([{"name": "a", "resourceClaimName": "named"},
                {"name": "b", "resourceClaimTemplateName": "t"}]);
            let object = json!({"metadata": {"name": "p", "namespace": "ns"},
                "spec": {"nodeName": "n", "resourceClaims": claims}, "status": status});
            Object::from_stored("/pods/ns/p".into(), revision, encode(kind, &object))
        };
        let mut references = References::default();
        let needs = |references: &References, name: &str| {
            references.needed("n", ReferenceKind::ResourceClaim, "ns", name)
        };
        let first = pod(1, json!({}));
        references.set(None, &first);
        assert!(needs(&references, "named") && !needs(&references, "p-b-x"));
        let made =
            json!({"resourceClaimStatuses": [{"name": "b", "resourceClaimName": "p-b-x"}, {"name": "c"}]});
        references.set(Some(&first), &pod(2, made));
        assert!(needs(&references, "named") && needs(&references, "p-b-x"));
        assert!(!references.needed("n", ReferenceKind::Claim, "ns", "named"), "no PersistentVolumeClaim");
        references.remove("/pods/ns/p");
        assert!(references.pods.is_empty() && references.nodes.is_empty());
    }

    #[test]
    fn the_specs_of_a_pod_are_compared_only_while_it_is_bound() {
        let (unbound, bound) = (pod("a", 1, "", "s", ""), pod("a", 2, "n", "s", ""));
        let (mut references, before) = (References::default(), parses::specs());
        references.set(None, &unbound);
        references.set(Some(&unbound), &bound);
        assert_eq!(parses::specs(), before);
        assert!(references.needed("n", ReferenceKind::Secret, "ns", "s"));
        references.set(Some(&bound), &pod("a", 3, "n", "s", "Running"));
        assert_eq!(parses::specs(), before + 2);
        assert!(references.needed("n", ReferenceKind::Secret, "ns", "s"));
    }

    #[test]
    fn a_node_needs_what_its_pods_name_as_long_as_one_does() {
        let mut references = References::default();
        let needs =
            |references: &References, name: &str| references.needed("n", ReferenceKind::Secret, "ns", name);
        let (unbound, a, b) =
            (pod("a", 1, "", "s", ""), pod("a", 2, "n", "s", ""), pod("b", 3, "n", "s", ""));
        references.set(None, &unbound);
        assert!(!needs(&references, "s"));
        references.set(Some(&unbound), &a);
        references.set(None, &b);
        assert!(needs(&references, "s"));
        assert!(references.needed("n", ReferenceKind::ServiceAccount, "ns", "default"));
        for (node, kind, namespace, name) in [
            ("m", ReferenceKind::Secret, "ns", "s"),
            ("n", ReferenceKind::ConfigMap, "ns", "s"),
            ("n", ReferenceKind::Secret, "other", "s"),
            ("n", ReferenceKind::Secret, "ns", "t"),
        ] {
            assert!(!references.needed(node, kind, namespace, name), "{node} {namespace}/{name}");
        }
        let keys: Vec<&str> = references.pods_of("n").map(|key| &**key).collect();
        assert_eq!(keys, ["/pods/ns/a", "/pods/ns/b"]);
        references.remove(&a.key);
        assert!(needs(&references, "s"));
        assert_eq!(references.pods_of("n").count(), 1);
        let changed = pod("b", 4, "n", "t", "");
        references.set(Some(&b), &changed);
        assert!(!needs(&references, "s") && needs(&references, "t"));
        let running = pod("b", 5, "n", "t", "Running");
        references.set(Some(&changed), &running);
        assert!(needs(&references, "t"));
        references.remove(&running.key);
        assert!(references.pods.is_empty() && references.nodes.is_empty());
    }
}
