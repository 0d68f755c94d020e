//! Persistent volumes, including the volumes in the specs of attachments. Source: `ValidatePersistentVolumeSpec` and
//! `ValidatePersistentVolumeUpdate` of `pkg/apis/core/validation`.

use serde_json::Value;

use super::claim_spec::{VOLUME_MODES, access_modes, class_name, positive};
use super::scheduling::node_terms;
use super::storage::{check_volume_mode_unchanged, spec_without};
use super::volume_source::{self, GivenSource, Owner, driver, need};
use super::{Causes, Path, entries, file_path, format, text};

const RECLAIM_POLICIES: &[&str] = &["Delete", "Recycle", "Retain"];
/// Sources of volumes, in upstream's order. If a volume has several sources, only the first source is checked, and the
/// other sources are refused.
#[rustfmt::skip]
const SOURCES: &[&str] = &[
    "hostPath", "gcePersistentDisk", "awsElasticBlockStore", "glusterfs", "flocker", "nfs", "rbd", "quobyte", "cephfs", "iscsi",
    "cinder", "fc", "flexVolume", "azureFile", "vsphereVolume", "photonPersistentDisk", "portworxVolume", "azureDisk", "scaleIO",
    "local", "storageos", "csi",
];
const FLEX: &str = "flexVolume";
/// Fields of the spec besides the sources.
const NO_SOURCES: &[&str] = &[
    "capacity",
    "accessModes",
    "claimRef",
    "persistentVolumeReclaimPolicy",
    "storageClassName",
    "mountOptions",
    "nodeAffinity",
    "volumeAttributesClassName",
    "volumeMode",
];
/// Fields that refer to a secret of a storage driver.
const SECRETS: [&str; 4] = [
    "controllerPublishSecretRef",
    "controllerExpandSecretRef",
    "nodePublishSecretRef",
    "nodeExpandSecretRef",
];
/// Deprecated labels of nodes, each with its successor.
const BETA_LABELS: [(&str, &str); 5] = [
    ("failure-domain.beta.kubernetes.io/zone", "topology.kubernetes.io/zone"),
    ("failure-domain.beta.kubernetes.io/region", "topology.kubernetes.io/region"),
    ("beta.kubernetes.io/os", "kubernetes.io/os"),
    ("beta.kubernetes.io/arch", "kubernetes.io/arch"),
    ("beta.kubernetes.io/instance-type", "node.kubernetes.io/instance-type"),
];

pub(crate) fn volume(causes: &mut Causes, object: &Value, old: Option<&Value>) {
    let (path, spec) = (Path::root("spec"), &object["spec"]);
    access_modes(causes, &path, spec, "");
    capacity(causes, &path.field("capacity"), &spec["capacity"]);
    let policy = &spec["persistentVolumeReclaimPolicy"];
    if !text(policy).is_empty() {
        causes.one_of(&path.field("persistentVolumeReclaimPolicy"), policy, RECLAIM_POLICIES);
    }
    if !spec["nodeAffinity"].is_null() {
        let (here, required) =
            (path.field("nodeAffinity").field("required"), &spec["nodeAffinity"]["required"]);
        if required.is_null() {
            causes.required(&here, "must specify required node constraints");
        }
        node_terms(causes, &here, required);
    }
    source(causes, &path, spec, text(&object["metadata"]["name"]));
    class_name(causes, &path, spec);
    causes.optional_word(&path.field("volumeMode"), &spec["volumeMode"], VOLUME_MODES);
    attributes_class(causes, &path, spec);
    if let Some(old) = old {
        update(causes, spec, &old["spec"]);
    }
}

/// Checks the volume spec in a VolumeAttachment. Such an attachment does not name a PersistentVolume.
pub(super) fn inline(causes: &mut Causes, path: &Path, spec: &Value) {
    let forbidden = "may not be specified in the context of inline volumes";
    for field in ["claimRef", "capacity"] {
        if !spec[field].is_null() {
            causes.forbidden(&path.field(field), forbidden);
        }
    }
    if spec["csi"].is_null() {
        causes.required(&path.field("csi"), "has to be specified in the context of inline volumes");
    }
    access_modes(causes, path, spec, "");
    if !matches!(text(&spec["persistentVolumeReclaimPolicy"]), "" | "Retain") {
        let detail = "may only be Retain in the context of inline volumes";
        causes.forbidden(&path.field("persistentVolumeReclaimPolicy"), detail);
    }
    if !spec["nodeAffinity"].is_null() {
        causes.forbidden(&path.field("nodeAffinity"), forbidden);
    }
    source(causes, path, spec, "");
    if !text(&spec["storageClassName"]).is_empty() {
        causes.forbidden(&path.field("storageClassName"), forbidden);
    }
    if spec["volumeMode"].as_str().is_some_and(|mode| mode != "Filesystem") {
        let detail = "may not specify volumeMode other than Filesystem in the context of inline volumes";
        causes.forbidden(&path.field("volumeMode"), detail);
    }
}

fn capacity(causes: &mut Causes, path: &Path, capacity: &Value) {
    if entries(capacity).next().is_none() {
        causes.required(path, "");
    }
    if capacity["storage"].is_null() || entries(capacity).count() > 1 {
        causes.unsupported_map(path, capacity, "storage");
    }
    for (name, size) in entries(capacity) {
        positive(causes, &path.key(name), size);
    }
}

fn source(causes: &mut Causes, path: &Path, spec: &Value, name: &str) {
    let owner = Owner { name, is_of_pod: false };
    // As upstream, `flexVolume` is not refused if the volume has another source before it in the order.
    let is_first = SOURCES.iter().find(|kind| !spec[**kind].is_null()) == Some(&FLEX);
    let kinds: Vec<&'static str> = SOURCES.iter().copied().filter(|kind| *kind != FLEX || is_first).collect();
    if let Some(given) = volume_source::one(causes, path, spec, &kinds) {
        let GivenSource { kind, path: here, value: source } = given;
        match kind {
            "local" => local(causes, path, spec),
            "csi" => csi(causes, &here, source),
            _ => volume_source::shared(causes, &here, kind, source, owner),
        }
    }
    if !is_first && !spec[FLEX].is_null() {
        volume_source::shared(causes, &path.field(FLEX), FLEX, &spec[FLEX], owner);
    }
    let is_root = is_root(text(&spec["hostPath"]["path"]));
    if is_root && spec["persistentVolumeReclaimPolicy"] == "Recycle" {
        let detail = "may not be 'recycle' for a hostPath mount of '/'";
        causes.forbidden(&path.field("persistentVolumeReclaimPolicy"), detail);
    }
}

/// Whether a path is the root directory: it has no other elements than `.` and `..`.
fn is_root(path: &str) -> bool {
    path.starts_with('/') && path.split('/').all(|part| matches!(part, "" | "." | ".."))
}

fn local(causes: &mut Causes, path: &Path, spec: &Value) {
    let (here, directory) = (path.field("local").field("path"), text(&spec["local"]["path"]));
    if directory.is_empty() {
        causes.required(&here, "");
    } else if file_path::has_backstep(directory) {
        causes.invalid(&here, &directory.into(), "must not contain '..'");
    }
    if spec["nodeAffinity"].is_null() {
        causes.required(&path.field("nodeAffinity"), "Local volume requires node affinity");
    }
}

fn csi(causes: &mut Causes, path: &Path, source: &Value) {
    driver(causes, &path.field("driver"), text(&source["driver"]));
    need(causes, path, source, &["volumeHandle"]);
    for secret in SECRETS.into_iter().filter(|secret| !source[*secret].is_null()) {
        let here = path.field(secret);
        for (field, rule) in [
            ("name", format::dns1123_subdomain as fn(&str) -> Vec<String>),
            ("namespace", format::dns1123_label),
        ] {
            match text(&source[secret][field]) {
                "" => causes.required(&here.field(field), ""),
                name => causes.format(&here.field(field), name, rule(name)),
            }
        }
    }
}

fn attributes_class(causes: &mut Causes, path: &Path, spec: &Value) {
    let here = path.field("volumeAttributesClassName");
    match spec["volumeAttributesClassName"].as_str() {
        None => return,
        Some("") => causes.required(&here, "an empty string is disallowed"),
        Some(name) => causes.format(&here, name, format::dns1123_subdomain(name)),
    }
    if spec["csi"].is_null() {
        causes.required(&path.field("csi"), "has to be specified when using volumeAttributesClassName");
    }
}

fn update(causes: &mut Causes, new: &Value, old: &Value) {
    let path = Path::root("spec");
    let mut sources = spec_without(new, NO_SOURCES);
    // An update may add the secret for expansions.
    if old["csi"].is_object()
        && old["csi"]["controllerExpandSecretRef"].is_null()
        && let Some(csi) = sources.get_mut("csi").and_then(Value::as_object_mut)
    {
        csi.remove("controllerExpandSecretRef");
    }
    if sources != spec_without(old, NO_SOURCES) {
        let detail = "spec.persistentvolumesource is immutable after creation";
        causes.forbidden(&path.field("persistentvolumesource"), detail);
    }
    check_volume_mode_unchanged(causes, new, old);
    if !old["nodeAffinity"].is_null() && !is_same_affinity(&new["nodeAffinity"], &old["nodeAffinity"]) {
        let detail = "field is immutable, except for updating from beta label to GA";
        causes.invalid(&Path::root("nodeAffinity"), &new["nodeAffinity"], detail);
    }
    if !old["volumeAttributesClassName"].is_null() && new["volumeAttributesClassName"].is_null() {
        let detail = "update from non-nil value to nil is forbidden";
        causes.forbidden(&path.field("volumeAttributesClassName"), detail);
    }
}

/// Whether two affinities are equal. A deprecated label of the old node affinity may be replaced by its successor in
/// the new node affinity. As upstream, this check also accepts an empty key in place of any other label. The validation
/// of the new affinity refuses the empty key.
fn is_same_affinity(new: &Value, old: &Value) -> bool {
    let mut old = old.clone();
    let after = |term: usize, at: usize| {
        new["required"]["nodeSelectorTerms"][term]["matchExpressions"][at]["key"].clone()
    };
    let terms = old.pointer_mut("/required/nodeSelectorTerms").and_then(Value::as_array_mut);
    for (index, term) in terms.into_iter().flatten().enumerate() {
        let expressions = term.get_mut("matchExpressions").and_then(Value::as_array_mut);
        for (at, expression) in expressions.into_iter().flatten().enumerate() {
            let after = after(index, at);
            let found = BETA_LABELS.iter().find(|(beta, _)| expression["key"] == *beta);
            if after == found.map_or("", |(_, label)| *label) {
                expression["key"] = after;
            }
        }
    }
    old == *new
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::tests::found;
    use super::*;

    fn spec(more: Value) -> Value {
        let mut spec = json!({"accessModes": ["ReadWriteOnce"], "capacity": {"storage": "1Gi"}});
        spec.as_object_mut().unwrap().extend(more.as_object().cloned().unwrap());
        json!({"metadata": {"name": "v"}, "spec": spec})
    }

    fn csi(more: Value) -> Value {
        let mut csi = json!({"driver": "d.io", "volumeHandle": "h"});
        csi.as_object_mut().unwrap().extend(more.as_object().cloned().unwrap());
        spec(json!({"csi": csi}))
    }

    fn said(object: &Value, old: Option<&Value>) -> Vec<String> {
        found(|causes| volume(causes, object, old))
    }

    #[test]
    fn secrets_of_a_driver_have_a_name_and_a_namespace() {
        for secret in SECRETS {
            assert!(
                said(&csi(json!({(secret): {"name": "s", "namespace": "n"}})), None).is_empty(),
                "{secret}"
            );
            let causes = said(&csi(json!({(secret): {"name": "A"}})), None);
            assert_eq!(causes.len(), 2, "{causes:?}");
            assert!(
                causes[0].starts_with(&format!("spec.csi.{secret}.name: Invalid value: \"A\"")),
                "{causes:?}"
            );
            assert_eq!(causes[1], format!("spec.csi.{secret}.namespace: Required value"));
        }
        let long = said(&csi(json!({"driver": "a".repeat(64)})), None);
        assert!(long[0].starts_with("spec.csi.driver: Too long"), "{long:?}");
    }

    #[test]
    fn the_secret_for_expansions_can_be_added() {
        let secret = |name: &str| csi(json!({"controllerExpandSecretRef": {"name": name, "namespace": "n"}}));
        assert!(said(&secret("s"), Some(&csi(json!({})))).is_empty());
        for new in [secret("t"), csi(json!({}))] {
            let causes = said(&new, Some(&secret("s")));
            assert!(
                causes.len() == 1 && causes[0].starts_with("spec.persistentvolumesource: Forbidden"),
                "{causes:?}"
            );
        }
    }

    #[test]
    fn a_volume_has_one_valid_source() {
        let of = |more: Value| said(&spec(more), None);
        assert_eq!(of(json!({})), ["spec: Required value: must specify a volume type"]);
        let both = of(json!({"hostPath": {"path": "/a"}, "nfs": {"server": "s", "path": "/"}}));
        assert_eq!(both, ["spec.nfs: Forbidden: may not specify more than 1 volume type"]);
        assert_eq!(
            of(json!({"local": {"path": "/a"}})),
            ["spec.nodeAffinity: Required value: Local volume requires node affinity"]
        );
        let flex = json!({"driver": "a/b"});
        assert!(of(json!({"hostPath": {"path": "/a"}, "flexVolume": flex})).is_empty());
        let later = of(json!({"flexVolume": flex, "csi": {"driver": "d.io", "volumeHandle": "h"}}));
        assert_eq!(later, ["spec.csi: Forbidden: may not specify more than 1 volume type"]);
        let wrong = of(json!({"hostPath": {"path": "/a"}, "flexVolume": {"driver": ""}}));
        assert!(wrong.len() == 1 && wrong[0].starts_with("spec.flexVolume.driver: "), "{wrong:?}");
        let recycled = of(json!({"hostPath": {"path": "/./"}, "persistentVolumeReclaimPolicy": "Recycle"}));
        assert!(recycled[0].starts_with("spec.persistentVolumeReclaimPolicy: Forbidden"), "{recycled:?}");
        let class = of(json!({"hostPath": {"path": "/a"}, "volumeAttributesClassName": "c"}));
        assert!(class[0].starts_with("spec.csi: Required value: has to be specified"), "{class:?}");
    }

    #[test]
    fn a_node_affinity_gets_newer_labels_only() {
        let of = |key: &str| {
            let expression = json!({"key": key, "operator": "In", "values": ["a"]});
            let affinity = json!({"required": {"nodeSelectorTerms": [{"matchExpressions": [expression]}]}});
            spec(json!({"hostPath": {"path": "/a"}, "nodeAffinity": affinity}))
        };
        let (beta, stable) = BETA_LABELS[0];
        assert!(said(&of(stable), Some(&of(beta))).is_empty());
        for (new, old) in [(beta, stable), ("a", beta)] {
            let causes = said(&of(new), Some(&of(old)));
            assert!(causes.len() == 1 && causes[0].starts_with("nodeAffinity: Invalid value"), "{causes:?}");
        }
        let empty = said(&of(""), Some(&of("a")));
        assert!(!empty.iter().any(|cause| cause.starts_with("nodeAffinity")), "{empty:?}");
        let without = spec(json!({"hostPath": {"path": "/a"}}));
        assert!(said(&of("a"), Some(&without)).is_empty());
    }

    #[test]
    fn an_inline_volume_has_a_driver_and_no_claim() {
        let of = |spec: Value| found(|causes| inline(causes, &Path::root("s"), &spec));
        let csi = json!({"driver": "d.io", "volumeHandle": "h"});
        assert!(of(json!({"csi": csi, "accessModes": ["ReadWriteOnce"]})).is_empty());
        let wrong = of(json!({"csi": csi, "accessModes": ["ReadWriteOnce"], "capacity": {"storage": "1"},
            "storageClassName": "c", "volumeMode": "Block", "persistentVolumeReclaimPolicy": "Delete"}));
        let fields: Vec<&str> = wrong.iter().filter_map(|cause| cause.split(':').next()).collect();
        assert_eq!(
            fields,
            ["s.capacity", "s.persistentVolumeReclaimPolicy", "s.storageClassName", "s.volumeMode"]
        );
        assert_eq!(of(json!({"csi": csi})), ["s.accessModes: Required value"]);
    }
}
