//! One object and what is known of its owners and dependents → what to do about it.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::api::PropagationPolicy;

/// The finalizer of an object that is deleted after its dependents.
pub(crate) const FOREGROUND: &str = "foregroundDeletion";
/// The finalizer of an object whose dependents are to stay.
pub(crate) const ORPHAN: &str = "orphan";

/// How an owner stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Owner {
    /// It is there.
    Solid,
    /// It is not there, or is another object of the same name.
    Absent,
    /// It waits for its dependents to be deleted.
    Waiting,
}

/// All that the plan depends on.
pub(crate) struct Facts<'a> {
    pub(crate) meta: &'a ObjectMeta,
    pub(crate) owners: Vec<(&'a OwnerReference, Owner)>,
    pub(crate) has_dependents: bool,
    /// Dependents that the object's deletion waits for.
    pub(crate) has_blocking_dependents: bool,
    /// A dependent waits for its own dependents: together they could wait in a circle.
    pub(crate) has_waiting_dependents: bool,
}

/// What to do.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Action {
    Nothing,
    /// All it waited for is gone: take the finalizer off.
    Finish,
    /// Look at its dependents, which are to be deleted.
    AttemptDependents,
    /// Keep only these owners.
    KeepOwners(Vec<OwnerReference>),
    /// Delete it. With `unblock`, first make its owners not wait for it.
    Delete {
        policy: PropagationPolicy,
        unblock: bool,
    },
}

/// Decides what to do.
pub(crate) fn plan(facts: &Facts<'_>) -> Action {
    let finalizers = facts.meta.finalizers.as_deref().unwrap_or_default();
    let has = |name: &str| finalizers.iter().any(|finalizer| finalizer == name);
    if facts.meta.deletion_timestamp.is_some() {
        return match (has(FOREGROUND), facts.has_blocking_dependents) {
            (false, _) => Action::Nothing,
            (true, false) => Action::Finish,
            (true, true) => Action::AttemptDependents,
        };
    }
    if facts.owners.is_empty() {
        return Action::Nothing;
    }
    let solid: Vec<OwnerReference> = facts
        .owners
        .iter()
        .filter(|(_, owner)| *owner == Owner::Solid)
        .map(|(owner, _)| (*owner).clone())
        .collect();
    if solid.len() == facts.owners.len() {
        return Action::Nothing;
    }
    if !solid.is_empty() {
        return Action::KeepOwners(solid);
    }
    let waiting = facts.owners.iter().any(|(_, owner)| *owner == Owner::Waiting);
    if waiting && facts.has_dependents {
        return Action::Delete {
            policy: PropagationPolicy::Foreground,
            unblock: facts.has_waiting_dependents,
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
        plan(&Facts {
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
    fn what_has_no_owner_or_a_solid_one_stays() {
        use Owner::{Absent, Solid, Waiting};
        assert_eq!(decide(json!({}), &[], [false; 3]), Action::Nothing);
        assert_eq!(decide(json!({}), &[Solid], [false; 3]), Action::Nothing);
        let Action::KeepOwners(kept) = decide(json!({}), &[Absent, Solid, Waiting], [false; 3]) else {
            panic!()
        };
        assert_eq!(kept.iter().map(|owner| owner.uid.as_str()).collect::<Vec<_>>(), ["1"]);
    }

    #[test]
    fn what_nobody_owns_any_more_goes_in_the_way_that_its_finalizers_say() {
        let with = |finalizer: &str| json!({"finalizers": [finalizer]});
        assert_eq!(decide(json!({}), &[Owner::Absent], [false; 3]), delete(PropagationPolicy::Background));
        assert_eq!(decide(with(ORPHAN), &[Owner::Absent], [false; 3]), delete(PropagationPolicy::Orphan));
        assert_eq!(
            decide(with(FOREGROUND), &[Owner::Absent], [false; 3]),
            delete(PropagationPolicy::Foreground)
        );
    }

    #[test]
    fn dependents_of_one_that_waits_go_with_their_own_dependents_first() {
        let decide = |dependents| decide(json!({}), &[Owner::Waiting], dependents);
        assert_eq!(decide([false; 3]), delete(PropagationPolicy::Background));
        assert_eq!(decide([true, true, false]), delete(PropagationPolicy::Foreground));
        let circle = Action::Delete { policy: PropagationPolicy::Foreground, unblock: true };
        assert_eq!(decide([true, true, true]), circle);
    }

    #[test]
    fn one_that_waits_is_finished_when_nothing_blocks_it() {
        let waiting = json!({"deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": [FOREGROUND]});
        assert_eq!(decide(waiting.clone(), &[], [true, false, false]), Action::Finish);
        assert_eq!(decide(waiting, &[], [true, true, false]), Action::AttemptDependents);
        let deleting = json!({"deletionTimestamp": "2026-01-01T00:00:00Z"});
        assert_eq!(decide(deleting, &[Owner::Absent], [false; 3]), Action::Nothing);
    }
}
