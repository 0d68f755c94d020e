//! The claims that a pod needs.

use serde_json::{Value, json};

use crate::object::{Claim, ClaimSource, ObjectExt, Pod, controller_of};

/// Claims of the pod's ephemeral volumes, by name.
pub(crate) fn claims(pod: &Pod) -> Vec<(String, Value)> {
    if pod.is_being_deleted() || pod.finished() {
        return Vec::new();
    }
    let claim = |name: String, template: &Value| {
        let meta = &template["metadata"];
        let claim = json!({
            "metadata": {
                "name": name,
                "labels": meta["labels"],
                "annotations": meta["annotations"],
                "ownerReferences": [pod.controller_reference()],
            },
            "spec": template["spec"],
        });
        (name, claim)
    };
    let volumes = pod.spec.volumes.iter();
    let templates = volumes.filter_map(|volume| match &volume.source {
        ClaimSource::Template(template) => Some(claim(volume.claim_name(pod.name()), template)),
        ClaimSource::Named(_) => None,
    });
    templates.collect()
}

/// Whether the claim was created for the pod.
pub(crate) fn is_of(claim: &Claim, pod: &Pod) -> bool {
    controller_of(&claim.metadata).is_some_and(|owner| owner.uid == pod.uid())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_ephemeral_volume_gets_a_claim_that_belongs_to_the_pod() {
        let template =
            json!({"metadata": {"labels": {"a": "b"}}, "spec": {"accessModes": ["ReadWriteOnce"]}});
        let mut pod: Pod =
            serde_json::from_value(json!({"metadata": {"name": "p", "namespace": "n", "uid": "u"},
            "spec": {"volumes": [{"name": "data", "ephemeral": {"volumeClaimTemplate": template}},
                {"name": "other", "persistentVolumeClaim": {"claimName": "c"}}]}}))
            .unwrap();
        let made = claims(&pod);
        let [(name, claim)] = made.as_slice() else { panic!("{made:?}") };
        assert_eq!((name.as_str(), &claim["spec"]), ("p-data", &template["spec"]));
        assert_eq!(claim["metadata"]["ownerReferences"][0]["uid"], "u");
        let stored: Claim = serde_json::from_value(claim.clone()).unwrap();
        assert!(is_of(&stored, &pod));
        pod.status.phase = Some("Failed".to_owned());
        assert_eq!(claims(&pod), []);
    }
}
