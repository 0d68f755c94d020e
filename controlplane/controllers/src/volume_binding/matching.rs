//! Selects a volume for a claim. A volume that is reserved for the claim comes first. Otherwise a volume with fewer
//! access modes is preferred, then a smaller volume.

use std::sync::Arc;

use coracle_values::Quantity;
use coracle_values::label_selector::LabelSelector;

use crate::object::{Claim, ObjectExt, PersistentVolume};

const TOO_SMALL: &str = "requested PV is too small";

/// The reason why a claim cannot be bound to a volume, with upstream's message.
pub(crate) fn mismatch(claim: &Claim, volume: &PersistentVolume) -> Option<&'static str> {
    let why = mismatch_of_reserved(claim, volume);
    // As upstream, the size is checked before the class.
    if why != Some(TOO_SMALL) && claim.class() != volume.class() {
        return Some("storageClassName does not match");
    }
    why
}

/// Does the same as [`mismatch`] for a volume that is reserved for the claim. As upstream, the volume may have another
/// class. For example, an administrator reserved a volume without a class by `claimRef`, and the claim has the default
/// class.
fn mismatch_of_reserved(claim: &Claim, volume: &PersistentVolume) -> Option<&'static str> {
    let requested = claim.requested().and_then(|size| Quantity::parse(&size.0).ok());
    if volume.size().zip(requested).is_some_and(|(size, requested)| size < requested) {
        return Some(TOO_SMALL);
    }
    let attributes = |name: &Option<String>| name.clone().unwrap_or_default();
    if attributes(&claim.spec.volume_attributes_class_name)
        != attributes(&volume.spec.volume_attributes_class_name)
    {
        return Some("volumeAttributesClassName does not match");
    }
    if !has_same_mode(claim, volume) {
        return Some("incompatible volumeMode");
    }
    let mut modes = claim.spec.access_modes.iter().flatten();
    if !modes.all(|mode| volume.spec.access_modes.contains(mode)) {
        return Some("incompatible accessMode");
    }
    None
}

/// Whether a claim and a volume have the same mode: a file system, or a block device.
pub(crate) fn has_same_mode(claim: &Claim, volume: &PersistentVolume) -> bool {
    let mode = |mode: &Option<String>| mode.clone().unwrap_or_else(|| "Filesystem".to_owned());
    mode(&claim.spec.volume_mode) == mode(&volume.spec.volume_mode)
}

/// The volume for a claim. With `only_reserved`, only a volume that is reserved for the claim.
pub(crate) fn best(
    claim: &Claim,
    candidates: &[Arc<PersistentVolume>],
    only_reserved: bool,
) -> Option<Arc<PersistentVolume>> {
    let selector = claim.spec.selector.as_ref().map(LabelSelector::try_from);
    let selected = |volume: &PersistentVolume| match &selector {
        None => true,
        Some(Ok(selector)) => selector.matches(volume.metadata.labels.as_ref()),
        Some(Err(_)) => false,
    };
    let mut reserved = candidates.iter().filter(|volume| volume.is_for(claim) && !volume.is_being_deleted());
    let reserved = reserved.find(|volume| mismatch_of_reserved(claim, volume).is_none());
    if only_reserved || reserved.is_some() {
        return reserved.cloned();
    }
    let free = candidates.iter().filter(|volume| {
        volume.spec.claim_ref.is_none()
            && volume.status.phase.as_deref() == Some("Available")
            && !volume.is_being_deleted()
            && selected(volume)
            && mismatch(claim, volume).is_none()
    });
    let order = |volume: &PersistentVolume| (volume.spec.access_modes.len(), volume.size());
    free.min_by(|a, b| order(a).cmp(&order(b)).then_with(|| a.name().cmp(b.name()))).cloned()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn claim(spec: Value) -> Claim {
        let mut claim = json!({"metadata": {"namespace": "n", "name": "c", "uid": "u"}, "spec": {
            "accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "2Gi"}}}});
        for (name, value) in spec.as_object().unwrap() {
            claim["spec"][name] = value.clone();
        }
        serde_json::from_value(claim).unwrap()
    }

    fn volume(name: &str, size: &str, more: Value) -> Arc<PersistentVolume> {
        let mut volume = json!({"metadata": {"name": name, "labels": {"disk": name}}, "spec": {
            "accessModes": ["ReadWriteOnce", "ReadOnlyMany"], "capacity": {"storage": size}},
            "status": {"phase": "Available"}});
        for (pointer, value) in more.as_object().unwrap() {
            volume["spec"][pointer] = value.clone();
        }
        Arc::new(serde_json::from_value(volume).unwrap())
    }

    fn found(claim: &Claim, volumes: &[Arc<PersistentVolume>]) -> String {
        best(claim, volumes, false).map(|volume| volume.name().to_owned()).unwrap_or_default()
    }

    #[test]
    fn the_smallest_volume_that_fits_is_chosen() {
        let volumes = [
            volume("small", "1Gi", json!({})),
            volume("large", "9Gi", json!({})),
            volume("right", "3Gi", json!({})),
            volume("block", "2Gi", json!({"volumeMode": "Block"})),
            volume("class", "2Gi", json!({"storageClassName": "x"})),
            volume("taken", "2Gi", json!({"claimRef": {"namespace": "n", "name": "other"}})),
        ];
        for (spec, expect) in [
            (json!({}), "right"),
            (json!({"accessModes": ["ReadWriteMany"]}), ""),
            (json!({"volumeMode": "Block"}), "block"),
            (json!({"storageClassName": "x"}), "class"),
            (json!({"selector": {"matchLabels": {"disk": "large"}}}), "large"),
        ] {
            assert_eq!(found(&claim(spec.clone()), &volumes), expect, "{spec}");
        }
        // As upstream, a volume with fewer access modes is used first, even if it is larger.
        let volumes =
            [volume("a", "2Gi", json!({})), volume("b", "9Gi", json!({"accessModes": ["ReadWriteOnce"]}))];
        assert_eq!(found(&claim(json!({})), &volumes), "b");
    }

    #[test]
    fn a_reserved_volume_comes_first_and_another_uid_is_another_claim() {
        let mine = json!({"claimRef": {"namespace": "n", "name": "c"}});
        let volumes = [volume("small", "2Gi", json!({})), volume("mine", "9Gi", mine)];
        assert_eq!(found(&claim(json!({})), &volumes), "mine");
        assert!(best(&claim(json!({})), &volumes[..1], true).is_none());
        // A reserved volume may have another class, but not another mode.
        let of_class = claim(json!({"storageClassName": "default"}));
        assert_eq!(found(&of_class, &volumes), "mine");
        assert_eq!(
            best(&of_class, &volumes, true).map(|volume| volume.name().to_owned()),
            Some("mine".to_owned())
        );
        assert_eq!(mismatch(&of_class, &volumes[1]), Some("storageClassName does not match"));
        assert_eq!(found(&claim(json!({"volumeMode": "Block"})), &volumes), "");
        let old = volume("old", "2Gi", json!({"claimRef": {"namespace": "n", "name": "c", "uid": "before"}}));
        assert_eq!(found(&claim(json!({})), &[old]), "");
    }
}
