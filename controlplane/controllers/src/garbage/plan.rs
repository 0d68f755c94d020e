//! The action for one object, from the state of its owners and dependents.

use coracle_events::Event;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::api::PropagationPolicy;

/// The finalizer of foreground deletion: dependents are deleted first.
pub(crate) const FOREGROUND: &str = "foregroundDeletion";
/// The finalizer of an object whose dependents must be orphaned.
pub(crate) const ORPHAN: &str = "orphan";

/// The state of an owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Owner {
    /// The owner exists.
    Existing,
    /// The owner does not exist, another object has its name, or it is in another namespace.
    Absent,
    /// The owner waits for the deletion of its dependents.
    Waiting,
}

/// The input of the plan.
pub(crate) struct ObservedObject<'a> {
    pub(crate) meta: &'a ObjectMeta,
    pub(crate) owners: Vec<(&'a OwnerReference, Owner)>,
    pub(crate) has_dependents: bool,
    /// Whether dependents block the object's deletion.
    pub(crate) has_blocking_dependents: bool,
    /// Whether a dependent waits for its own dependents: the objects could wait for each other in a cycle.
    pub(crate) has_waiting_dependents: bool,
}

/// An action.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Action {
    Nothing,
    /// All blocking dependents are deleted: remove the finalizer.
    Finish,
    /// Queue the dependents, which must be deleted.
    AttemptDependents,
    /// Replace the owner references of the object by this list.
    KeepOwners(Vec<OwnerReference>),
    /// Delete the object. With `unblock`, first remove blockOwnerDeletion from its owner references.
    Delete {
        policy: PropagationPolicy,
        unblock: bool,
    },
}

/// Plans the action.
pub(crate) fn plan(observed: &ObservedObject<'_>) -> Action {
    let finalizers = observed.meta.finalizers.as_deref().unwrap_or_default();
    let has = |name: &str| finalizers.iter().any(|finalizer| finalizer == name);
    if observed.meta.deletion_timestamp.is_some() {
        return match (has(FOREGROUND), observed.has_blocking_dependents) {
            (false, _) => Action::Nothing,
            (true, false) => Action::Finish,
            (true, true) => Action::AttemptDependents,
        };
    }
    if observed.owners.is_empty() {
        return Action::Nothing;
    }
    let existing: Vec<OwnerReference> = observed
        .owners
        .iter()
        .filter(|(_, owner)| *owner == Owner::Existing)
        .map(|(owner, _)| (*owner).clone())
        .collect();
    if existing.len() == observed.owners.len() {
        return Action::Nothing;
    }
    if !existing.is_empty() {
        return Action::KeepOwners(existing);
    }
    let waiting = observed.owners.iter().any(|(_, owner)| *owner == Owner::Waiting);
    if waiting && observed.has_dependents {
        return Action::Delete {
            policy: PropagationPolicy::Foreground,
            unblock: observed.has_waiting_dependents,
        };
    }
    let policy = if has(ORPHAN) {
        PropagationPolicy::Orphan
    } else if has(FOREGROUND) {
        PropagationPolicy::Foreground
    } else {
        PropagationPolicy::Background
    };
    Action::Delete { policy, unblock: false }
}

/// The event about an object whose owner exists, but not in its namespace.
pub(crate) fn foreign_owner(owner: &OwnerReference, namespace: &str) -> Event {
    let OwnerReference { api_version, kind, name, uid, .. } = owner;
    let message = format!(
        "ownerRef [{api_version}/{kind}, namespace: {namespace}, name: {name}, uid: {uid}] does not exist in namespace \
         {namespace:?}"
    );
    Event::warning("OwnerRefInvalidNamespace", message)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::api_kind::ApiKind;
    use kube::core::{ApiResource, GroupVersionKind};
    use serde_json::{Value, json};
    use std::sync::Arc;

    /// A kind for tests.
    pub(crate) fn kind(name: &str, namespaced: bool) -> Arc<ApiKind> {
        let resource = ApiResource::from_gvk(&GroupVersionKind::gvk("", "v1", name));
        Arc::new(ApiKind { resource, namespaced, verbs: Vec::new() })
    }

    fn decide(meta: Value, owners: &[Owner], dependents: [bool; 3]) -> Action {
        let meta: ObjectMeta = serde_json::from_value(meta).unwrap();
        let reference =
            |number: usize| OwnerReference { uid: number.to_string(), ..OwnerReference::default() };
        let references: Vec<_> = (0..owners.len()).map(reference).collect();
        plan(&ObservedObject {
            meta: &meta,
            owners: references.iter().zip(owners.iter().copied()).collect(),
            has_dependents: dependents[0],
            has_blocking_dependents: dependents[1],
            has_waiting_dependents: dependents[2],
        })
    }

    fn delete(policy: PropagationPolicy) -> Action {
        Action::Delete { policy, unblock: false }
    }

    #[test]
    fn objects_without_owners_or_with_an_existing_owner_stay() {
        use Owner::{Absent, Existing, Waiting};
        assert_eq!(decide(json!({}), &[], [false; 3]), Action::Nothing);
        assert_eq!(decide(json!({}), &[Existing], [false; 3]), Action::Nothing);
        let Action::KeepOwners(kept) = decide(json!({}), &[Absent, Existing, Waiting], [false; 3]) else {
            panic!()
        };
        assert_eq!(kept.iter().map(|owner| owner.uid.as_str()).collect::<Vec<_>>(), ["1"]);
    }

    #[test]
    fn objects_without_existing_owners_are_deleted_with_the_policy_of_their_finalizers() {
        let with = |finalizer: &str| json!({"finalizers": [finalizer]});
        assert_eq!(decide(json!({}), &[Owner::Absent], [false; 3]), delete(PropagationPolicy::Background));
        assert_eq!(decide(with(ORPHAN), &[Owner::Absent], [false; 3]), delete(PropagationPolicy::Orphan));
        assert_eq!(
            decide(with(FOREGROUND), &[Owner::Absent], [false; 3]),
            delete(PropagationPolicy::Foreground)
        );
    }

    #[test]
    fn dependents_of_a_waiting_owner_are_deleted_after_their_own_dependents() {
        let decide = |dependents| decide(json!({}), &[Owner::Waiting], dependents);
        assert_eq!(decide([false; 3]), delete(PropagationPolicy::Background));
        assert_eq!(decide([true, true, false]), delete(PropagationPolicy::Foreground));
        let cycle = Action::Delete { policy: PropagationPolicy::Foreground, unblock: true };
        assert_eq!(decide([true, true, true]), cycle);
    }

    #[test]
    fn a_waiting_object_is_finished_when_no_dependent_blocks_it() {
        let waiting = json!({"deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": [FOREGROUND]});
        assert_eq!(decide(waiting.clone(), &[], [true, false, false]), Action::Finish);
        assert_eq!(decide(waiting, &[], [true, true, false]), Action::AttemptDependents);
        let deleting = json!({"deletionTimestamp": "2026-01-01T00:00:00Z"});
        assert_eq!(decide(deleting, &[Owner::Absent], [false; 3]), Action::Nothing);
    }
}
