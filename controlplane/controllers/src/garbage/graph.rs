//! The ownership graph: every object of the API by uid, with its owners and finalizers only.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;

use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::plan::{FOREGROUND, ORPHAN, Owner};
use crate::api_kind::ApiKind;
use crate::object::Key;

/// An object in the graph.
#[derive(Clone, Debug)]
pub(crate) struct Item {
    pub(crate) kind: Arc<ApiKind>,
    pub(crate) key: Key,
    owners: Arc<[Edge]>,
    state: State,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Edge {
    uid: Box<str>,
    blocking: bool,
}

/// A dependent with a valid reference to its owner ([`may_own`]).
struct Dependent<'a> {
    uid: &'a String,
    item: &'a Item,
    /// Whether it blocks the foreground deletion of the owner.
    is_blocking: bool,
}

/// The progress of an object's deletion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Stays,
    /// The object has a deletion timestamp, without one of the two finalizers below.
    Deleting,
    /// The object waits for the deletion of its dependents.
    Foreground,
    /// The object waits until its dependents are orphaned.
    Orphaning,
}

/// The work that follows from a change.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct FollowUp {
    /// Uids of objects that may have to be deleted, or whose finalizer may have to be removed.
    pub(crate) attempt: Vec<String>,
    /// Uids of objects whose dependents are to be orphaned.
    pub(crate) orphan: Vec<String>,
}

/// The graph.
#[derive(Debug, Default)]
pub(crate) struct Graph {
    items: HashMap<String, Item>,
    /// The dependents of each owner, and whether they block its foreground deletion. The flag is stored here, because a
    /// dependent can have thousands of owners. A search among them for each owner would take quadratic time.
    dependents: HashMap<Box<str>, HashMap<String, bool>>,
    /// The most recently deleted owners. Their dependents need no request to the API server.
    deleted_owners: VecDeque<String>,
}

/// Summary of the dependents that an object may own.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Dependents {
    pub(crate) count: usize,
    /// Whether a dependent blocks the object's foreground deletion.
    pub(crate) has_blocking: bool,
    /// Whether a dependent waits for its own dependents.
    pub(crate) has_waiting: bool,
}

/// Capacity of the list of deleted owners.
const MAX_DELETED_OWNERS: usize = 500;
/// Maximum number of objects that a search for a cycle of owners finds.
const MAX_CYCLE: usize = 1000;
/// Maximum owner references that the search for a cycle reads.
const MAX_CYCLE_EDGES: usize = 10 * MAX_CYCLE;

fn state(meta: &ObjectMeta) -> State {
    let has = |name: &str| meta.finalizers.iter().flatten().any(|finalizer| finalizer == name);
    match meta.deletion_timestamp {
        None => State::Stays,
        Some(_) if has(FOREGROUND) => State::Foreground,
        Some(_) if has(ORPHAN) => State::Orphaning,
        Some(_) => State::Deleting,
    }
}

impl Graph {
    /// Adds a new or changed object.
    pub(crate) fn set(&mut self, kind: &Arc<ApiKind>, meta: &ObjectMeta) -> FollowUp {
        let Some(uid) = meta.uid.clone() else { return FollowUp::default() };
        let owners: Arc<[Edge]> = meta
            .owner_references
            .iter()
            .flatten()
            .map(|owner| Edge {
                uid: owner.uid.as_str().into(),
                blocking: owner.block_owner_deletion == Some(true),
            })
            .collect();
        let item = Item { kind: kind.clone(), key: Key::of(meta), owners, state: state(meta) };
        let mut work = FollowUp::default();
        let old = self.items.get(&uid);
        let new_state = old.is_none_or(|old| old.state != item.state);
        let new_owners = old.is_none_or(|old| old.owners != item.owners);
        match item.state {
            State::Foreground if new_state => work.attempt.push(uid.clone()),
            State::Orphaning if new_state => work.orphan.push(uid.clone()),
            State::Foreground | State::Orphaning | State::Stays | State::Deleting => {}
        }
        if new_owners {
            // A former owner may have waited for this object, and may now finish its own deletion.
            let before: Vec<Box<str>> =
                old.iter().flat_map(|old| old.owners.iter()).map(|edge| edge.uid.clone()).collect();
            for owner in before {
                self.unlink(&owner, &uid);
                self.wake_waiting(&owner, &mut work);
            }
            for owner in item.owners.iter() {
                let dependents = self.dependents.entry(owner.uid.clone()).or_default();
                *dependents.entry(uid.clone()).or_default() |= owner.blocking;
            }
            let settled = |edge: &Edge| {
                let owner = self.items.get(&*edge.uid);
                owner.is_some_and(|owner| owner.state == State::Stays && may_own(&item, owner))
            };
            if !item.owners.iter().all(settled) {
                work.attempt.push(uid.clone());
            }
        }
        self.items.insert(uid, item);
        work
    }

    /// Removes an object whose kind is no longer served. Unlike [`Self::remove`], its dependents are not queued for
    /// collection.
    pub(crate) fn remove_unserved(&mut self, uid: &str) {
        let Some(item) = self.items.remove(uid) else { return };
        for owner in item.owners.iter() {
            self.unlink(&owner.uid, uid);
        }
    }

    /// Removes a deleted object.
    pub(crate) fn remove(&mut self, uid: &str) -> FollowUp {
        let mut work = FollowUp::default();
        if let Some(item) = self.items.remove(uid) {
            for owner in item.owners.iter() {
                self.unlink(&owner.uid, uid);
                self.wake_waiting(&owner.uid, &mut work);
            }
        }
        let dependents = self.dependents_of(uid);
        if !dependents.is_empty() {
            self.deleted_owners.push_back(uid.to_owned());
            if self.deleted_owners.len() > MAX_DELETED_OWNERS {
                self.deleted_owners.pop_front();
            }
        }
        work.attempt.extend(dependents);
        work
    }

    /// The uids of all objects of a kind.
    pub(crate) fn of_kind(&self, kind: &Arc<ApiKind>) -> Vec<String> {
        let own = self.items.iter().filter(|(_, item)| Arc::ptr_eq(&item.kind, kind));
        own.map(|(uid, _)| uid.clone()).collect()
    }

    /// The uids of the objects that wait for the deletion of their dependents.
    pub(crate) fn foreground(&self) -> Vec<String> {
        let waiting = self.items.iter().filter(|(_, item)| item.is_foreground());
        waiting.map(|(uid, _)| uid.clone()).collect()
    }

    /// The object with this uid.
    pub(crate) fn get(&self, uid: &str) -> Option<&Item> {
        self.items.get(uid)
    }

    /// The key of an object in the queues: its namespace and its uid. The namespaces take turns in the queues. `None`
    /// if the object does not exist any more.
    pub(crate) fn queue_key(&self, uid: &str) -> Option<Key> {
        self.items.get(uid).map(|item| Key::new(&item.key.namespace, uid))
    }

    /// Whether the object was deleted lately. Uids are never reused.
    pub(crate) fn was_deleted_lately(&self, uid: &str) -> bool {
        self.deleted_owners.iter().any(|owner| owner == uid)
    }

    /// The dependents of an object.
    fn dependents_of(&self, uid: &str) -> Vec<String> {
        self.dependents.get(uid).into_iter().flat_map(HashMap::keys).cloned().collect()
    }

    /// The dependents that the object may own, and whether they block its foreground deletion. A reference from another
    /// namespace has no effect on its owner: otherwise a tenant could delay the deletion of another tenant's objects.
    fn own(&self, uid: &str) -> impl Iterator<Item = Dependent<'_>> {
        let owner = self.items.get(uid);
        self.dependents.get(uid).into_iter().flatten().filter_map(move |(uid, blocking)| {
            let item = self.items.get(uid)?;
            may_own(item, owner?).then_some(Dependent { uid, item, is_blocking: *blocking })
        })
    }

    /// The uids of the dependents that the object may own.
    pub(crate) fn own_dependents(&self, uid: &str) -> Vec<String> {
        self.own(uid).map(|one| one.uid.clone()).collect()
    }

    /// The summary of the dependents that the object may own.
    pub(crate) fn observe_dependents(&self, uid: &str) -> Dependents {
        let (waiting, mut found) = (self.waiting_for(uid), Dependents::default());
        for one in self.own(uid) {
            found.count += 1;
            found.has_blocking |= one.is_blocking && !waiting.contains(one.uid);
            found.has_waiting |= one.item.is_foreground();
        }
        found
    }

    /// The dependents that block the object's foreground deletion. A dependent that itself waits for the object does
    /// not block it. Otherwise both would wait for each other forever.
    pub(crate) fn blocking_dependents(&self, uid: &str) -> Vec<String> {
        let waiting = self.waiting_for(uid);
        let blocking = self.own(uid).filter(|one| one.is_blocking && !waiting.contains(one.uid));
        blocking.map(|one| one.uid.clone()).collect()
    }

    /// Objects whose foreground deletion waits for an object: its owners, their owners and so on. After many owner
    /// references the rest is left out, so that objects with thousands of owners do not delay other objects.
    fn waiting_for(&self, uid: &str) -> HashSet<String> {
        let (mut open, mut found) = (vec![uid.to_owned()], HashSet::new());
        let mut edges = 0;
        while let Some(item) = open.pop().and_then(|uid| self.items.get(&uid)) {
            for edge in item.owners.iter().filter(|edge| edge.blocking) {
                edges += 1;
                if edges > MAX_CYCLE_EDGES {
                    return found;
                }
                let owner = self.items.get(&*edge.uid);
                let waits = owner.is_some_and(|owner| owner.is_foreground() && may_own(item, owner));
                if waits && found.len() < MAX_CYCLE && found.insert(edge.uid.to_string()) {
                    open.push(edge.uid.to_string());
                }
            }
        }
        found
    }

    /// Whether the object may need an action. This needs no requests to the API server.
    pub(crate) fn is_suspect(&self, uid: &str) -> bool {
        let Some(item) = self.items.get(uid) else { return false };
        let settled = |edge: &Edge| {
            self.items
                .get(&*edge.uid)
                .is_some_and(|owner| owner.state != State::Foreground && may_own(item, owner))
        };
        item.state == State::Foreground || !item.owners.iter().all(settled)
    }

    fn unlink(&mut self, owner: &str, uid: &str) {
        if let Some(dependents) = self.dependents.get_mut(owner) {
            dependents.remove(uid);
            if dependents.is_empty() {
                self.dependents.remove(owner);
            }
        }
    }

    fn wake_waiting(&self, owner: &str, work: &mut FollowUp) {
        if self.items.get(owner).is_some_and(|owner| owner.state == State::Foreground) {
            work.attempt.push(owner.to_owned());
        }
    }
}

impl Item {
    /// Whether the object waits for the deletion of its dependents.
    pub(crate) fn is_foreground(&self) -> bool {
        self.state == State::Foreground
    }

    /// A reference to the object, for its events.
    pub(crate) fn reference(&self, uid: &str) -> ObjectReference {
        let resource = &self.kind.resource;
        let text = |text: &str| Some(text.to_owned()).filter(|text| !text.is_empty());
        ObjectReference {
            api_version: text(&resource.api_version),
            kind: text(&resource.kind),
            namespace: text(&self.key.namespace),
            name: text(&self.key.name),
            uid: text(uid),
            ..ObjectReference::default()
        }
    }

    /// The state of one owner of the object, if the graph has the owner.
    ///
    /// A namespaced owner of a cluster-scoped object is not valid: the object is kept. Source:
    /// `namespacedOwnerOfClusterScopedObjectErr` in the garbage collector.
    pub(crate) fn owner_state(&self, owner: &Item) -> Owner {
        if self.key.namespace.is_empty() && owner.kind.namespaced {
            return Owner::Existing;
        }
        match (may_own(self, owner), owner.is_foreground()) {
            (false, _) => Owner::Absent,
            (true, true) => Owner::Waiting,
            (true, false) => Owner::Existing,
        }
    }
}

/// Whether `owner` may own `item`: an owner is cluster-scoped or in the same namespace.
fn may_own(item: &Item, owner: &Item) -> bool {
    !owner.kind.namespaced || owner.key.namespace == item.key.namespace
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::garbage::plan::tests::kind;
    use serde_json::{Value, json};

    fn meta(uid: &str, owners: &[&str], more: Value) -> ObjectMeta {
        let owners: Vec<Value> = owners
            .iter()
            .map(|uid| json!({"apiVersion": "v1", "kind": "K", "name": uid, "uid": uid, "blockOwnerDeletion": true}))
            .collect();
        let mut value = json!({"name": uid, "namespace": "n", "uid": uid, "ownerReferences": owners});
        for (name, field) in more.as_object().unwrap() {
            value[name] = field.clone();
        }
        serde_json::from_value(value).unwrap()
    }

    fn foreground() -> Value {
        json!({"deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": [FOREGROUND]})
    }

    #[test]
    fn references_from_other_namespaces_do_not_hold_up_an_owner() {
        let (mut graph, kind) = (Graph::default(), kind("K", true));
        graph.set(&kind, &meta("owner", &[], foreground()));
        graph.set(&kind, &meta("foreign", &["owner"], json!({"namespace": "other"})));
        assert_eq!(graph.blocking_dependents("owner"), Vec::<String>::new());
        graph.set(&kind, &meta("own", &["owner"], json!({})));
        assert_eq!(graph.blocking_dependents("owner"), ["own"]);
        assert_eq!(graph.own_dependents("owner"), ["own"]);
        let state = |uid| graph.items[uid].owner_state(&graph.items["owner"]);
        assert_eq!((state("own"), state("foreign")), (Owner::Waiting, Owner::Absent));
    }

    #[test]
    fn an_object_with_an_owner_in_another_namespace_is_queued_in_any_order() {
        let kind = kind("K", true);
        let (owner, child) =
            (meta("owner", &[], json!({})), meta("child", &["owner"], json!({"namespace": "other"})));
        for order in [[&owner, &child], [&child, &owner]] {
            let mut graph = Graph::default();
            let queued: Vec<String> =
                order.into_iter().flat_map(|object| graph.set(&kind, object).attempt).collect();
            assert_eq!(queued, ["child"]);
            assert!(graph.is_suspect("child"));
        }
    }

    #[test]
    fn a_cluster_scoped_object_with_a_namespaced_owner_is_kept() {
        let (mut graph, namespaced, global) = (Graph::default(), kind("K", true), kind("G", false));
        graph.set(&namespaced, &meta("owner", &[], foreground()));
        graph.set(&global, &meta("global", &["owner"], json!({"namespace": null})));
        assert_eq!(graph.items["global"].owner_state(&graph.items["owner"]), Owner::Existing);
        assert_eq!(graph.blocking_dependents("owner"), Vec::<String>::new());
    }

    #[test]
    fn dependents_are_queued_when_their_owner_is_deleted() {
        let (mut graph, kind) = (Graph::default(), kind("K", true));
        assert_eq!(graph.set(&kind, &meta("owner", &[], json!({}))), FollowUp::default());
        assert_eq!(graph.set(&kind, &meta("child", &["owner"], json!({}))), FollowUp::default());
        assert!(!graph.is_suspect("child"));
        assert_eq!(graph.remove("owner").attempt, ["child"]);
        assert!(graph.is_suspect("child") && graph.was_deleted_lately("owner"));
        assert!(graph.remove("child").attempt.is_empty());
        assert!(graph.dependents.is_empty() && graph.items.is_empty());
    }

    #[test]
    fn dependents_of_an_object_whose_kind_is_not_served_any_more_stay() {
        let (mut graph, kind) = (Graph::default(), kind("K", true));
        graph.set(&kind, &meta("owner", &[], json!({})));
        graph.set(&kind, &meta("child", &["owner"], json!({})));
        graph.remove_unserved("owner");
        assert!(!graph.was_deleted_lately("owner"));
        graph.remove_unserved("child");
        assert!(graph.dependents.is_empty() && graph.items.is_empty());
    }

    #[test]
    fn an_object_with_an_unknown_owner_is_queued_until_the_owner_appears() {
        let (mut graph, kind) = (Graph::default(), kind("K", true));
        assert_eq!(graph.set(&kind, &meta("child", &["owner"], json!({}))).attempt, ["child"]);
        assert!(graph.is_suspect("child"));
        graph.set(&kind, &meta("owner", &[], json!({})));
        assert!(!graph.is_suspect("child"));
    }

    #[test]
    fn a_waiting_owner_is_queued_when_a_dependent_is_deleted_or_orphaned() {
        let (mut graph, kind) = (Graph::default(), kind("K", true));
        graph.set(&kind, &meta("owner", &[], json!({})));
        graph.set(&kind, &meta("one", &["owner"], json!({})));
        graph.set(&kind, &meta("two", &["owner"], json!({})));
        assert_eq!(graph.set(&kind, &meta("owner", &[], foreground())).attempt, ["owner"]);
        assert!(graph.is_suspect("one"));
        let mut blocking = graph.blocking_dependents("owner");
        blocking.sort();
        assert_eq!(blocking, ["one", "two"]);
        assert_eq!(graph.remove("one").attempt, ["owner"]);
        assert_eq!(graph.set(&kind, &meta("two", &[], json!({}))).attempt, ["owner"]);
        assert!(graph.blocking_dependents("owner").is_empty());
    }

    #[test]
    fn objects_that_own_each_other_do_not_wait_for_each_other() {
        let (mut graph, kind) = (Graph::default(), kind("K", true));
        graph.set(&kind, &meta("itself", &["itself"], foreground()));
        assert!(graph.blocking_dependents("itself").is_empty());
        for (uid, owner) in [("a", "c"), ("b", "a"), ("c", "b")] {
            graph.set(&kind, &meta(uid, &[owner], json!({})));
        }
        graph.set(&kind, &meta("a", &["c"], foreground()));
        assert_eq!(graph.blocking_dependents("a"), ["b"], "it is not deleted yet");
        graph.set(&kind, &meta("b", &["a"], foreground()));
        assert_eq!(graph.blocking_dependents("a"), ["b"], "it waits for another object");
        graph.set(&kind, &meta("c", &["b"], foreground()));
        for uid in ["a", "b", "c"] {
            assert!(graph.blocking_dependents(uid).is_empty(), "{uid}");
        }
        graph.set(&kind, &meta("outside", &["a"], json!({})));
        assert_eq!(graph.blocking_dependents("a"), ["outside"]);
        assert!(graph.remove("b").attempt.contains(&"a".to_owned()), "the owner is queued");
    }

    #[test]
    fn a_search_for_a_cycle_reads_a_limited_number_of_references() {
        let (mut graph, kind) = (Graph::default(), kind("K", true));
        graph.set(&kind, &meta("b", &["a"], foreground()));
        let absent: Vec<String> = (0..MAX_CYCLE_EDGES).map(|number| format!("x{number}")).collect();
        for (count, blocking) in [(MAX_CYCLE_EDGES - 1, 0), (MAX_CYCLE_EDGES, 1)] {
            let mut owners: Vec<&str> = absent[..count].iter().map(String::as_str).collect();
            owners.push("b");
            graph.set(&kind, &meta("a", &owners, foreground()));
            assert_eq!(
                graph.blocking_dependents("a").len(),
                blocking,
                "{count} references before that of the cycle"
            );
        }
    }

    #[test]
    fn very_many_owners_of_a_dependent_take_linear_time() {
        // A search for each owner among the owners of the dependent would take minutes.
        let (mut graph, kind) = (Graph::default(), kind("K", true));
        let names: Vec<String> = (0..100_000).map(|number| format!("owner-{number}")).collect();
        let owners: Vec<&str> = names.iter().map(String::as_str).collect();
        graph.set(&kind, &meta("child", &owners, json!({})));
        let expect = Dependents { count: 1, has_blocking: true, has_waiting: false };
        for name in &names {
            graph.set(&kind, &meta(name, &[], foreground()));
            assert_eq!(graph.observe_dependents(name), expect);
            assert_eq!(graph.blocking_dependents(name), ["child"]);
        }
    }

    #[test]
    fn one_of_several_references_to_an_owner_blocks_its_deletion() {
        let (mut graph, kind) = (Graph::default(), kind("K", true));
        graph.set(&kind, &meta("owner", &[], foreground()));
        let reference = |blocks: bool| {
            let mut owner = json!({"apiVersion": "v1", "kind": "K", "name": "owner", "uid": "owner"});
            owner["blockOwnerDeletion"] = blocks.into();
            owner
        };
        for (blocks, expect) in [(vec![false, true, false], true), (vec![false], false), (vec![true], true)] {
            let owners: Vec<Value> = blocks.into_iter().map(reference).collect();
            graph.set(&kind, &meta("child", &[], json!({"ownerReferences": owners})));
            assert_eq!(graph.observe_dependents("owner").has_blocking, expect);
        }
    }

    #[test]
    fn orphaning_is_queued_separately() {
        let (mut graph, kind) = (Graph::default(), kind("K", true));
        let orphaning = json!({"deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": [ORPHAN]});
        assert_eq!(graph.set(&kind, &meta("owner", &[], orphaning)).orphan, ["owner"]);
    }
}
