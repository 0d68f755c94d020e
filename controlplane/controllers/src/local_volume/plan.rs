//! The action for a claim: the volume to create, or the reason why no volume is created.

use coracle_values::Quantity;
use serde_json::{Value, json};

use super::{DIRECTORY, DISK, FINALIZER, NODE, PROVISIONER_NAME};
use crate::annotation::{PROVISIONED_BY, SELECTED_NODE};
use crate::object::{Claim, Node, ObjectExt, PersistentVolume, StorageClass};

/// The action for a claim.
#[derive(Debug, PartialEq)]
pub(crate) enum Provision {
    /// The claim does not need a volume from this provisioner now.
    Nothing,
    /// Creates this PersistentVolume.
    Create(Box<Value>),
    /// The node cannot have the volume. The scheduler must select another node.
    Reschedule(String),
    /// The claim can never get a volume.
    Refuse(String),
}

/// Name of the volume for a claim.
pub(crate) fn name_of(claim: &Claim) -> String {
    format!("pvc-{}", claim.uid())
}

/// The selected node of a claim that may need a volume from this provisioner. The outer value is `None` if the claim
/// needs no volume. The inner value is `None` if no node is selected yet.
pub(crate) fn needs_volume<'a>(claim: &'a Claim, class: &StorageClass) -> Option<Option<&'a str>> {
    let unbound = claim.volume().is_empty() && !claim.is_being_deleted();
    (unbound && class.provisioner == PROVISIONER_NAME).then(|| claim.annotation(SELECTED_NODE))
}

/// Decides whether to create a volume for a claim. `node` is the selected node. `None` if the node does not exist.
pub(crate) fn provision(claim: &Claim, class: &StorageClass, node: Option<&Node>) -> Provision {
    let Some(selected) = needs_volume(claim, class) else { return Provision::Nothing };
    if let Some(why) = unsupported(claim) {
        return Provision::Refuse(why);
    }
    let Some(selected) = selected else { return without_node(class) };
    let Some(node) = node else {
        return Provision::Reschedule(format!("node \"{selected}\" does not exist"));
    };
    let annotation = node.metadata.annotations.as_ref().and_then(|all| all.get(DIRECTORY));
    let label = node.metadata.labels.as_ref().and_then(|all| all.get("kubernetes.io/hostname"));
    let (Some(directory), Some(hostname)) = (annotation.filter(|dir| dir.starts_with('/')), label) else {
        return Provision::Reschedule(format!("node \"{selected}\" has no directory for local volumes"));
    };
    if selected.len() > 63 {
        return Provision::Reschedule(format!("the name of node \"{selected}\" is too long for a label"));
    }
    if let Some(why) = exceeds_disk(claim, node) {
        return Provision::Reschedule(why);
    }
    let place = Place { node: selected, hostname, directory };
    Provision::Create(Box::new(volume(claim, class, &place)))
}

/// The decision without a selected node. If the class does not wait for a pod, the scheduler selects no node. Source:
/// `Provision` of rancher's local-path-provisioner, which refuses such a claim with the same error.
fn without_node(class: &StorageClass) -> Provision {
    if class.waits_for_pod() {
        return Provision::Nothing;
    }
    Provision::Refuse(format!(
        "configuration error, no node was specified: volumeBindingMode of StorageClass \"{}\" must be WaitForFirstConsumer",
        class.name()
    ))
}

/// The reason why the disk of a node cannot have a volume of the requested size. `None` if the volume fits, or if
/// the node reports no size.
pub(crate) fn exceeds_disk(claim: &Claim, node: &Node) -> Option<String> {
    let disk = node.metadata.annotations.as_ref()?.get(DISK)?;
    let requested = &claim.requested()?.0;
    let is_larger = Quantity::parse(requested).ok()? > Quantity::parse(disk).ok()?;
    is_larger.then(|| {
        format!("the claim requests {requested}, and the disk of node \"{}\" has {disk}", node.name())
    })
}

fn unsupported(claim: &Claim) -> Option<String> {
    let spec = &claim.spec;
    if spec.selector.is_some() {
        return Some("claim.spec.selector is not supported".to_owned());
    }
    if spec.data_source.is_some() || spec.data_source_ref.is_some() {
        return Some("claim.spec.dataSource is not supported".to_owned());
    }
    if spec.volume_attributes_class_name.as_deref().is_some_and(|name| !name.is_empty()) {
        return Some("claim.spec.volumeAttributesClassName is not supported".to_owned());
    }
    if spec.volume_mode.as_deref() == Some("Block") {
        return Some("volumeMode Block is not supported".to_owned());
    }
    let mut modes = spec.access_modes.iter().flatten();
    let shared = modes.find(|mode| !matches!(mode.as_str(), "ReadWriteOnce" | "ReadWriteOncePod"))?;
    Some(format!("access mode {shared} is not supported: the volume is on one node"))
}

/// The place of a new volume.
struct Place<'a> {
    node: &'a str,
    /// The node's label `kubernetes.io/hostname`.
    hostname: &'a str,
    /// The directory of all local volumes of the node.
    directory: &'a str,
}

fn volume(claim: &Claim, class: &StorageClass, place: &Place<'_>) -> Value {
    let Place { node, hostname, directory } = place;
    let name = name_of(claim);
    let expression = json!({"key": "kubernetes.io/hostname", "operator": "In", "values": [hostname]});
    json!({
        "metadata": {
            "name": name,
            "labels": {NODE: node},
            "annotations": {PROVISIONED_BY: PROVISIONER_NAME},
            "finalizers": ["kubernetes.io/pv-protection", FINALIZER],
        },
        "spec": {
            "accessModes": claim.spec.access_modes,
            "capacity": {"storage": claim.requested()},
            "claimRef": {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "namespace": claim.namespace(),
                "name": claim.name(), "uid": claim.uid()},
            "local": {"path": format!("{}/{name}", directory.trim_end_matches('/'))},
            "mountOptions": class.mount_options,
            "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [expression]}]}},
            "persistentVolumeReclaimPolicy": class.reclaim_policy.as_deref().unwrap_or("Delete"),
            "storageClassName": class.name(),
            "volumeMode": "Filesystem",
        },
    })
}

/// The size that a bound claim requests, if it is larger than its volume.
pub(crate) fn expansion(claim: &Claim, volume: &PersistentVolume) -> Option<String> {
    let requested = claim.requested()?;
    let size = Quantity::parse(&requested.0).ok()?;
    let capacity = claim.status.capacity.as_ref().and_then(|all| all.get("storage"));
    let current = capacity.and_then(|text| Quantity::parse(&text.0).ok());
    let grows = volume.size().is_some_and(|own| own < size) || current.is_some_and(|own| own < size);
    (claim.status.phase.as_deref() == Some("Bound") && volume.is_for(claim) && grows)
        .then(|| requested.0.clone())
}

/// Whether a volume that is being deleted waits for a node that does not exist. No agent can remove its directory.
pub(crate) fn is_orphan(volume: &PersistentVolume, node_exists: bool) -> bool {
    volume.is_being_deleted()
        && !node_exists
        && volume.metadata.finalizers.iter().flatten().any(|finalizer| finalizer == FINALIZER)
}

/// The node that has the volume's directory.
pub(crate) fn node_of(volume: &PersistentVolume) -> Option<&str> {
    volume.metadata.labels.as_ref()?.get(NODE).map(String::as_str)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claim(spec: Value, node: Option<&str>) -> Claim {
        let mut claim = json!({"metadata": {"namespace": "n", "name": "c", "uid": "u"}, "spec": {
            "accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "2Gi"}}}});
        if let Some(node) = node {
            claim["metadata"]["annotations"] = json!({SELECTED_NODE: node});
        }
        for (name, value) in spec.as_object().unwrap() {
            claim["spec"][name] = value.clone();
        }
        serde_json::from_value(claim).unwrap()
    }

    fn class() -> StorageClass {
        serde_json::from_value(json!({"metadata": {"name": "s"}, "provisioner": PROVISIONER_NAME,
            "volumeBindingMode": "WaitForFirstConsumer", "reclaimPolicy": "Retain"}))
        .unwrap()
    }

    fn node(annotations: Value) -> Node {
        serde_json::from_value(json!({"metadata": {"name": "a", "annotations": annotations,
            "labels": {"kubernetes.io/hostname": "a"}}}))
        .unwrap()
    }

    #[test]
    fn the_volume_is_on_the_selected_node_below_its_directory() {
        let ready = node(json!({DIRECTORY: "/data/"}));
        let Provision::Create(volume) = provision(&claim(json!({}), Some("a")), &class(), Some(&ready))
        else {
            panic!("no volume")
        };
        assert_eq!(volume["spec"]["local"]["path"], "/data/pvc-u");
        assert_eq!(volume["metadata"]["labels"][NODE], "a");
        assert_eq!(volume["spec"]["claimRef"]["uid"], "u");
        assert_eq!(volume["spec"]["persistentVolumeReclaimPolicy"], "Retain");
        let terms = &volume["spec"]["nodeAffinity"]["required"]["nodeSelectorTerms"];
        assert_eq!(terms[0]["matchExpressions"][0]["values"], json!(["a"]));
    }

    #[test]
    fn without_a_node_the_claim_waits_and_with_an_unusable_node_it_is_rescheduled() {
        assert_eq!(provision(&claim(json!({}), None), &class(), None), Provision::Nothing);
        let selected = claim(json!({}), Some("a"));
        assert!(matches!(provision(&selected, &class(), None), Provision::Reschedule(_)));
        let foreign = node(json!({}));
        assert!(matches!(provision(&selected, &class(), Some(&foreign)), Provision::Reschedule(_)));
        let bound = claim(json!({"volumeName": "v"}), Some("a"));
        assert_eq!(provision(&bound, &class(), Some(&foreign)), Provision::Nothing);
    }

    #[test]
    fn a_class_that_does_not_wait_for_a_pod_is_refused_without_a_node() {
        let class = StorageClass { volume_binding_mode: Some("Immediate".to_owned()), ..class() };
        let why = "configuration error, no node was specified: volumeBindingMode of StorageClass \"s\" must be \
                   WaitForFirstConsumer";
        let refused = provision(&claim(json!({}), None), &class, None);
        assert_eq!(refused, Provision::Refuse(why.to_owned()));
        let ready = node(json!({DIRECTORY: "/data"}));
        let selected = provision(&claim(json!({}), Some("a")), &class, Some(&ready));
        assert!(matches!(selected, Provision::Create(_)), "the claim names a node: {selected:?}");
    }

    #[test]
    fn a_claim_larger_than_the_disk_gets_no_volume_on_it() {
        let on = |disk: &str| node(json!({DIRECTORY: "/data", DISK: disk}));
        let selected = claim(json!({}), Some("a"));
        let why = "the claim requests 2Gi, and the disk of node \"a\" has 2097151Ki";
        let refused = provision(&selected, &class(), Some(&on("2097151Ki")));
        assert_eq!(refused, Provision::Reschedule(why.to_owned()));
        for disk in ["2097152Ki", "unknown"] {
            let created = provision(&selected, &class(), Some(&on(disk)));
            assert!(matches!(created, Provision::Create(_)), "{disk}");
        }
    }

    #[test]
    fn claims_that_a_directory_cannot_serve_are_refused() {
        for spec in [
            json!({"accessModes": ["ReadWriteMany"]}),
            json!({"volumeMode": "Block"}),
            json!({"selector": {"matchLabels": {"a": "b"}}}),
            json!({"dataSource": {"kind": "PersistentVolumeClaim", "name": "x"}}),
        ] {
            let refused = provision(&claim(spec.clone(), Some("a")), &class(), None);
            assert!(matches!(refused, Provision::Refuse(_)), "{spec}");
        }
    }

    #[test]
    fn a_claim_is_expanded_until_claim_and_volume_have_the_size() {
        let volume = |size: &str| -> PersistentVolume {
            serde_json::from_value(json!({"spec": {"capacity": {"storage": size},
                "claimRef": {"namespace": "n", "name": "c", "uid": "u"}}}))
            .unwrap()
        };
        let mut bound = claim(json!({}), None);
        bound.status =
            serde_json::from_value(json!({"phase": "Bound", "capacity": {"storage": "1Gi"}})).unwrap();
        assert_eq!(expansion(&bound, &volume("1Gi")).as_deref(), Some("2Gi"));
        assert_eq!(expansion(&bound, &volume("2Gi")).as_deref(), Some("2Gi"));
        bound.status =
            serde_json::from_value(json!({"phase": "Bound", "capacity": {"storage": "2Gi"}})).unwrap();
        assert_eq!(expansion(&bound, &volume("2Gi")), None);
    }
}
