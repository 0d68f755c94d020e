//! The classes that claims and volumes use.

use crate::object::{Claim, PersistentVolume};

/// The finalizer of classes.
pub(crate) const FINALIZER: &str = "kubernetes.io/vac-protection";

/// The classes of a claim: the requested class, the current class, and the target of a change.
pub(crate) fn classes_of_claim(claim: &Claim) -> impl Iterator<Item = &str> {
    let target = claim.status.modify_volume_status.as_ref();
    let target = target.and_then(|status| status.target_volume_attributes_class_name.as_deref());
    let requested = claim.spec.volume_attributes_class_name.as_deref();
    let current = claim.status.current_volume_attributes_class_name.as_deref();
    [requested, current, target].into_iter().flatten().filter(|name| !name.is_empty())
}

/// The class of a volume.
pub(crate) fn class_of_volume(volume: &PersistentVolume) -> Option<&str> {
    volume.spec.volume_attributes_class_name.as_deref().filter(|name| !name.is_empty())
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn a_claim_uses_the_requested_the_current_and_the_target_class() {
        let classes = |spec: Value, status: Value| -> Vec<String> {
            let claim: Claim = serde_json::from_value(json!({"spec": spec, "status": status})).unwrap();
            classes_of_claim(&claim).map(str::to_owned).collect()
        };
        let status = json!({"currentVolumeAttributesClassName": "b",
            "modifyVolumeStatus": {"status": "Pending", "targetVolumeAttributesClassName": "c"}});
        assert_eq!(classes(json!({"volumeAttributesClassName": "a"}), status), ["a", "b", "c"]);
        assert!(classes(json!({"volumeAttributesClassName": ""}), json!({})).is_empty());
    }

    #[test]
    fn a_volume_uses_its_class() {
        let volume =
            |spec: Value| -> PersistentVolume { serde_json::from_value(json!({"spec": spec})).unwrap() };
        assert_eq!(class_of_volume(&volume(json!({"volumeAttributesClassName": "a"}))), Some("a"));
        assert_eq!(class_of_volume(&volume(json!({}))), None);
    }
}
