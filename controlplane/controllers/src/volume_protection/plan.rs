//! The finalizers of claims and volumes.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use crate::object::{ClaimSource, ObjectExt, PersistentVolume, Pod};

/// The finalizer of claims.
pub(crate) const CLAIM: &str = "kubernetes.io/pvc-protection";
/// The finalizer of volumes.
pub(crate) const VOLUME: &str = "kubernetes.io/pv-protection";

/// The new list of finalizers. `None` if it does not change.
pub(crate) fn finalizers(
    meta: &ObjectMeta,
    name: &str,
    in_use: impl FnOnce() -> bool,
) -> Option<Vec<String>> {
    let held = meta.finalizers.clone().unwrap_or_default();
    let protected = held.iter().any(|finalizer| finalizer == name);
    match (meta.deletion_timestamp.is_some(), protected) {
        (false, false) => Some(held.into_iter().chain([name.to_owned()]).collect()),
        (true, true) if !in_use() => Some(held.into_iter().filter(|finalizer| finalizer != name).collect()),
        (true, _) | (false, true) => None,
    }
}

/// Whether a pod on a node uses the claim.
pub(crate) fn uses(pod: &Pod, claim: &str) -> bool {
    used_by(pod).any(|name| name == claim)
}

/// The names of the claims that a pod on a node uses. Nodes do not start pods whose claim is being deleted.
///
/// A pod that is shut down does not use the claims that were created for it. With foreground deletion, the pod waits
/// for the deletion of these claims.
pub(crate) fn used_by(pod: &Pod) -> impl Iterator<Item = String> {
    let is_placed = pod.spec.node_name.as_deref().is_some_and(|node| !node.is_empty());
    let volumes = pod.spec.volumes.iter().filter(move |_| is_placed);
    volumes
        .filter(move |volume| {
            let own = matches!(volume.source, ClaimSource::Template(_));
            !(own && is_shut_down(pod))
        })
        .map(move |volume| volume.claim_name(pod.name()))
}

/// Whether the node has stopped a deleted pod. The node then sets the grace period to 0.
fn is_shut_down(pod: &Pod) -> bool {
    pod.is_being_deleted() && pod.metadata.deletion_grace_period_seconds == Some(0)
}

/// Whether a changed pod may no longer use one of its claims. The pod was deleted, was replaced by another pod of its
/// name, or is shut down.
pub(crate) fn frees_claims(old: &Pod, new: Option<&Pod>) -> bool {
    new.is_none_or(|new| new.uid() != old.uid() || (is_shut_down(new) && !is_shut_down(old)))
}

/// Whether the volume is bound to a claim.
pub(crate) fn is_bound(volume: &PersistentVolume) -> bool {
    volume.status.phase.as_deref() == Some("Bound")
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn the_finalizer_stays_as_long_as_the_object_is_used() {
        let meta = |fields: Value| -> ObjectMeta { serde_json::from_value(fields).unwrap() };
        let deleted = json!({"deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": ["x", CLAIM]});
        let both = vec!["x".to_owned(), CLAIM.to_owned()];
        assert_eq!(finalizers(&meta(json!({"finalizers": ["x"]})), CLAIM, || true), Some(both));
        assert_eq!(finalizers(&meta(json!({"finalizers": [CLAIM]})), CLAIM, || false), None);
        assert_eq!(finalizers(&meta(deleted.clone()), CLAIM, || true), None);
        assert_eq!(finalizers(&meta(deleted), CLAIM, || false), Some(vec!["x".to_owned()]));
    }

    #[test]
    fn only_pods_on_a_node_use_a_claim() {
        let pod = |node: &str| -> Pod {
            serde_json::from_value(json!({"metadata": {"name": "p"}, "spec": {"nodeName": node, "volumes": [
                {"name": "a", "persistentVolumeClaim": {"claimName": "c"}},
                {"name": "b", "ephemeral": {"volumeClaimTemplate": {"spec": {}}}},
                {"name": "e", "emptyDir": {}}]}}))
            .unwrap()
        };
        assert!(uses(&pod("n"), "c") && uses(&pod("n"), "p-b"));
        assert!(!uses(&pod(""), "c") && !uses(&pod("n"), "p-e"));
    }

    #[test]
    fn a_pod_that_is_shut_down_does_not_use_its_own_claims() {
        let pod = |grace: i64| -> Pod {
            let deleted = "2026-01-01T00:00:00Z";
            serde_json::from_value(json!({
                "metadata": {"name": "p", "deletionTimestamp": deleted, "deletionGracePeriodSeconds": grace},
                "spec": {"nodeName": "n", "volumes": [
                    {"name": "a", "persistentVolumeClaim": {"claimName": "c"}},
                    {"name": "b", "ephemeral": {"volumeClaimTemplate": {"spec": {}}}}]}}))
            .unwrap()
        };
        assert!(uses(&pod(30), "c") && uses(&pod(30), "p-b"));
        assert!(uses(&pod(0), "c") && !uses(&pod(0), "p-b"));
        assert!(frees_claims(&pod(30), Some(&pod(0))) && frees_claims(&pod(0), None));
        assert!(!frees_claims(&pod(30), Some(&pod(30))) && !frees_claims(&pod(0), Some(&pod(0))));
    }
}
