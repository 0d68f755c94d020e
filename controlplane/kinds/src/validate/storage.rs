//! Volumes, claims, storage classes.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use serde_json::{Value, json};

use super::scheduling::node_terms;
use super::selector::label_selector;
use super::volume::provisioner_name;
use super::{Causes, Path, entries, file_path, format, items, text};
use coracle_values::Quantity;

const ACCESS_MODES: &[&str] = &["ReadOnlyMany", "ReadWriteMany", "ReadWriteOnce", "ReadWriteOncePod"];
const VOLUME_MODES: &[&str] = &["Block", "Filesystem"];
const RECLAIM_POLICIES: &[&str] = &["Delete", "Recycle", "Retain"];
/// The sources of a volume, in the order in which upstream checks them, and their names in errors.
const SOURCES: &[(&str, &str)] = &[
    ("hostPath", "hostPath"),
    ("gcePersistentDisk", "gcePersistentDisk"),
    ("awsElasticBlockStore", "awsElasticBlockStore"),
    ("glusterfs", "glusterfs"),
    ("flocker", "flocker"),
    ("nfs", "nfs"),
    ("rbd", "rbd"),
    ("quobyte", "quobyte"),
    ("cephfs", "cephFS"),
    ("iscsi", "iscsi"),
    ("cinder", "cinder"),
    ("fc", "fc"),
    ("flexVolume", "flexVolume"),
    ("azureFile", "azureFile"),
    ("vsphereVolume", "vsphereVolume"),
    ("photonPersistentDisk", "photonPersistentDisk"),
    ("portworxVolume", "portworxVolume"),
    ("azureDisk", "azureDisk"),
    ("scaleIO", "scaleIO"),
    ("local", "local"),
    ("storageos", "storageos"),
    ("csi", "csi"),
];
const MAX_PARAMETERS: usize = 512;
/// Maximum size of all parameters of a class, in bytes.
const MAX_PARAMETERS_SIZE: usize = 256 * 1024;
const CLAIM_IMMUTABLE: &str = "spec is immutable after creation except resources.requests and volumeAttributesClassName for bound claims";

pub(crate) fn volume(causes: &mut Causes, object: &Value, old: Option<&Value>) {
    let (path, spec) = (Path::root("spec"), &object["spec"]);
    access_modes(causes, &path, spec, "");
    if entries(&spec["capacity"]).next().is_none() {
        causes.required(&path.field("capacity"), "");
    }
    let size = &spec["capacity"]["storage"];
    if size.is_null() || entries(&spec["capacity"]).count() > 1 {
        causes.unsupported_map(&path.field("capacity"), &spec["capacity"], "storage");
    }
    for (name, size) in entries(&spec["capacity"]) {
        positive(causes, &path.field("capacity").key(name), size);
    }
    let policy = &spec["persistentVolumeReclaimPolicy"];
    if !text(policy).is_empty() {
        causes.one_of(&path.field("persistentVolumeReclaimPolicy"), policy, RECLAIM_POLICIES);
    }
    source(causes, &path, spec);
    class_name(causes, &path, spec);
    volume_attributes(causes, &path, spec);
    causes.optional_word(&path.field("volumeMode"), &spec["volumeMode"], VOLUME_MODES);
    if !spec["nodeAffinity"].is_null() {
        let (here, required) =
            (path.field("nodeAffinity").field("required"), &spec["nodeAffinity"]["required"]);
        if required.is_null() {
            causes.required(&here, "must specify required node constraints");
        }
        node_terms(causes, &here, required);
    }
    if let Some(old) = old {
        let others = |spec: &Value| {
            spec_without(
                spec,
                &[
                    "capacity",
                    "accessModes",
                    "claimRef",
                    "persistentVolumeReclaimPolicy",
                    "storageClassName",
                    "mountOptions",
                    "nodeAffinity",
                    "volumeAttributesClassName",
                    "volumeMode",
                ],
            )
        };
        if others(spec) != others(&old["spec"]) {
            let detail = "spec.persistentvolumesource is immutable after creation";
            causes.forbidden(&path.field("persistentvolumesource"), detail);
        }
        check_volume_mode_unchanged(causes, spec, &old["spec"]);
        let affinity = &old["spec"]["nodeAffinity"];
        if !affinity.is_null() && *affinity != spec["nodeAffinity"] {
            let detail = "field is immutable, except for updating from beta label to GA";
            causes.invalid(&Path::root("nodeAffinity"), &spec["nodeAffinity"], detail);
        }
    }
}

/// Checks that the volume mode does not change. Upstream reports it without `spec`.
fn check_volume_mode_unchanged(causes: &mut Causes, spec: &Value, old: &Value) {
    if spec["volumeMode"] != old["volumeMode"] {
        causes.invalid(&Path::root("volumeMode"), &spec["volumeMode"], "field is immutable");
    }
}

pub(crate) fn claim(causes: &mut Causes, object: &Value, old: Option<&Value>) {
    let (path, spec) = (Path::root("spec"), &object["spec"]);
    claim_spec(causes, &path, spec);
    let Some(old) = old else { return };
    let before = &old["spec"];
    let mut free = Vec::new();
    if text(&before["volumeName"]).is_empty() {
        // The binder sets the volume; a claim without a class may still get the default one.
        free.push("volumeName");
    }
    if before["storageClassName"].is_null() && !spec["storageClassName"].is_null() {
        free.push("storageClassName");
    }
    if old["status"]["phase"] == "Bound" {
        free.extend(["resources", "volumeAttributesClassName"]);
    }
    let size = |size: &Value| Quantity::parse(text(size)).ok();
    let requested = |spec: &Value| size(&spec["resources"]["requests"]["storage"]);
    // A request may shrink again down to the actual size, after an expansion that failed.
    let actual = size(&old["status"]["capacity"]["storage"]);
    if requested(spec).zip(requested(before)).is_some_and(|(new, old)| new < old)
        && requested(spec).zip(actual).is_some_and(|(new, actual)| new <= actual)
    {
        let here = path.field("resources").field("requests").field("storage");
        causes.forbidden(&here, "field can not be less than status.capacity");
    }
    if !old["status"]["currentVolumeAttributesClassName"].is_null()
        && before["volumeAttributesClassName"] != spec["volumeAttributesClassName"]
        && text(&spec["volumeAttributesClassName"]).is_empty()
    {
        let state = if spec["volumeAttributesClassName"].is_null() { "nil" } else { "empty string" };
        let detail =
            format!("update to {state} is forbidden when status.currentVolumeAttributesClassName is not nil");
        causes.forbidden(&path.field("volumeAttributesClassName"), &detail);
    }
    check_volume_mode_unchanged(causes, spec, before);
    if spec_without(spec, &free) != spec_without(before, &free) {
        causes.forbidden(&path, CLAIM_IMMUTABLE);
    }
}

/// Checks the class of attributes of a volume. Only drivers have such classes.
fn volume_attributes(causes: &mut Causes, path: &Path, spec: &Value) {
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

/// Checks the spec of a claim, also of one in a stateful set.
pub(super) fn claim_spec(causes: &mut Causes, path: &Path, spec: &Value) {
    access_modes(causes, path, spec, "at least 1 access mode is required");
    if !spec["selector"].is_null() {
        label_selector(causes, &path.field("selector"), &spec["selector"]);
    }
    let here = path.field("resources").key("storage");
    match &spec["resources"]["requests"]["storage"] {
        Value::Null => causes.required(&here, ""),
        size => positive(causes, &here, size),
    }
    class_name(causes, path, spec);
    causes.optional_word(&path.field("volumeMode"), &spec["volumeMode"], VOLUME_MODES);
    for field in ["dataSource", "dataSourceRef"] {
        data_source(causes, &path.field(field), &spec[field]);
    }
    check_data_sources_match(causes, path, spec);
    let attributes = text(&spec["volumeAttributesClassName"]);
    if !attributes.is_empty() {
        let here = path.field("volumeAttributesClassName");
        causes.format(&here, attributes, format::dns1123_subdomain(attributes));
    }
}

/// Checks that both fields of a claim's data source name the same object. Upstream reports this at the spec, with an empty
/// object as the value.
fn check_data_sources_match(causes: &mut Causes, path: &Path, spec: &Value) {
    let (source, reference) = (&spec["dataSource"], &spec["dataSourceRef"]);
    if source.is_null() || reference.is_null() {
        return;
    }
    let differs = ["apiGroup", "kind", "name"].iter().any(|name| source[name] != reference[name]);
    let detail = if !text(&reference["namespace"]).is_empty() {
        "may not be specified when dataSourceRef.namespace is specified"
    } else if differs {
        "must match dataSourceRef"
    } else {
        return;
    };
    causes.invalid(path, &json!({}), detail);
}

/// Checks the object from which a claim gets its data.
fn data_source(causes: &mut Causes, path: &Path, source: &Value) {
    if source.is_null() {
        return;
    }
    for field in ["name", "kind"] {
        if text(&source[field]).is_empty() {
            causes.required(&path.field(field), "");
        }
    }
    let group = text(&source["apiGroup"]);
    if group.is_empty() && source["kind"] != "PersistentVolumeClaim" {
        let detail = "must be 'PersistentVolumeClaim' when referencing the default apiGroup";
        causes.invalid(path, &source["kind"], detail);
    }
    if !group.is_empty() {
        causes.format(&path.field("apiGroup"), group, format::dns1123_subdomain(group));
    }
}

pub(crate) fn class(causes: &mut Causes, object: &Value, old: Option<&Value>) {
    provisioner(causes, &Path::root("provisioner"), &object["provisioner"]);
    if !text(&object["reclaimPolicy"]).is_empty() {
        causes.one_of(&Path::root("reclaimPolicy"), &object["reclaimPolicy"], &["Delete", "Retain"]);
    }
    let modes = &["Immediate", "WaitForFirstConsumer"];
    if object["volumeBindingMode"].is_null() {
        causes.required(&Path::root("volumeBindingMode"), "");
    }
    causes.optional_word(&Path::root("volumeBindingMode"), &object["volumeBindingMode"], modes);
    parameters(causes, &object["parameters"]);
    topologies(causes, &object["allowedTopologies"]);
    let Some(old) = old else { return };
    for name in ["parameters", "provisioner", "reclaimPolicy", "volumeBindingMode"] {
        if object[name] != old[name] {
            causes.invalid(&Path::root(name), &object[name], "field is immutable");
        }
    }
}

/// Checks the name of a provisioner or a driver.
pub(super) fn provisioner(causes: &mut Causes, path: &Path, name: &Value) {
    match text(name) {
        "" => causes.required(path, ""),
        name => {
            // Upstream shows the name in lower case, too.
            let name = name.to_lowercase();
            causes.format(path, &name, format::qualified_name(&name));
        }
    }
}

/// Checks the number and the size of parameters.
pub(super) fn parameters(causes: &mut Causes, parameters: &Value) {
    let path = Path::root("parameters");
    if entries(parameters).count() > MAX_PARAMETERS {
        return causes.too_long(&path, MAX_PARAMETERS);
    }
    if entries(parameters).any(|(key, _)| key.is_empty()) {
        causes.invalid(&path, &"".into(), "field can not be empty.");
    }
    let size: usize = entries(parameters).map(|(key, value)| key.len() + text(value).len()).sum();
    if size > MAX_PARAMETERS_SIZE {
        causes.too_long(&path, MAX_PARAMETERS_SIZE);
    }
}

/// Checks the topologies in which a class makes volumes.
fn topologies(causes: &mut Causes, terms: &Value) {
    let mut seen = Vec::new();
    for (index, term) in items(terms) {
        let here = Path::root("allowedTopologies").index(index).field("matchLabelExpressions");
        let labels = labels_of(term);
        // Upstream compares a term with empty ones, too.
        if labels.is_empty() || seen.contains(&labels) {
            causes.duplicate(&here, &"".into());
        }
        seen.push(labels);
        let mut keys = HashSet::new();
        for (at, expression) in items(&term["matchLabelExpressions"]) {
            let here = here.index(at);
            if items(&expression["values"]).next().is_none() {
                causes.required(&here.field("values"), "");
            }
            let mut values = HashSet::new();
            for (at, value) in items(&expression["values"]) {
                if !values.insert(text(value)) {
                    causes.duplicate(&here.field("values").index(at), value);
                }
            }
            let key = text(&expression["key"]);
            if !keys.insert(key) {
                causes.duplicate(&here.field("key"), &expression["key"]);
            }
            causes.format(&here.field("key"), key, format::qualified_name(key));
        }
    }
}

/// The labels of a topology term and their values, in order.
fn labels_of(term: &Value) -> BTreeMap<&str, BTreeSet<&str>> {
    let expressions = items(&term["matchLabelExpressions"]);
    expressions
        .map(|(_, one)| (text(&one["key"]), items(&one["values"]).map(|(_, value)| text(value)).collect()))
        .collect()
}

fn access_modes(causes: &mut Causes, path: &Path, spec: &Value, missing: &str) {
    let here = path.field("accessModes");
    let modes: Vec<&Value> = items(&spec["accessModes"]).map(|(_, mode)| mode).collect();
    if modes.is_empty() {
        causes.required(&here, missing);
    }
    for mode in &modes {
        if !ACCESS_MODES.contains(&text(mode)) {
            causes.unsupported(&here, mode, ACCESS_MODES);
        }
    }
    if modes.iter().any(|mode| *mode == "ReadWriteOncePod")
        && modes.iter().any(|mode| *mode != "ReadWriteOncePod")
    {
        causes.forbidden(&here, "may not use ReadWriteOncePod with other access modes");
    }
}

fn positive(causes: &mut Causes, path: &Path, size: &Value) {
    match Quantity::parse(text(size)) {
        Ok(quantity) if quantity.signum() > 0 => {}
        _ => causes.invalid(path, size, "must be greater than zero"),
    }
}

fn class_name(causes: &mut Causes, path: &Path, spec: &Value) {
    let name = text(&spec["storageClassName"]);
    if !name.is_empty() {
        causes.format(&path.field("storageClassName"), name, format::dns1123_subdomain(name));
    }
}

/// Checks that a volume has one source, and checks it. Upstream checks the first one and refuses the others.
fn source(causes: &mut Causes, path: &Path, spec: &Value) {
    let mut sources = SOURCES.iter().filter(|(name, _)| !spec[*name].is_null());
    let Some((first, _)) = sources.next() else {
        return causes.required(path, "must specify a volume type");
    };
    let here = path.field(first);
    match *first {
        "hostPath" => host_path(causes, path, spec),
        "local" => {
            directory(causes, &here, &spec["local"]);
            if spec["nodeAffinity"].is_null() {
                causes.required(&path.field("nodeAffinity"), "Local volume requires node affinity");
            }
        }
        "nfs" => nfs(causes, path, &spec["nfs"]),
        "csi" => csi(causes, path, &spec["csi"]),
        _ => {}
    }
    for (_, shown) in sources.filter(|(name, _)| *name != "flexVolume") {
        causes.forbidden(&path.field(shown), "may not specify more than 1 volume type");
    }
}

fn host_path(causes: &mut Causes, path: &Path, spec: &Value) {
    let here = path.field("hostPath");
    if text(&spec["hostPath"]["path"]) == "/" && spec["persistentVolumeReclaimPolicy"] == "Recycle" {
        let detail = "may not be 'recycle' for a hostPath mount of '/'";
        causes.forbidden(&path.field("persistentVolumeReclaimPolicy"), detail);
    }
    file_path::host_path_type(causes, &here.field("type"), &spec["hostPath"]["type"]);
    directory(causes, &here, &spec["hostPath"]);
}

/// Checks the path of a directory of a node.
fn directory(causes: &mut Causes, path: &Path, source: &Value) {
    let (here, directory) = (path.field("path"), text(&source["path"]));
    if directory.is_empty() {
        causes.required(&here, "");
    } else if directory.split('/').any(|part| part == "..") {
        causes.invalid(&here, &source["path"], "must not contain '..'");
    }
}

fn nfs(causes: &mut Causes, path: &Path, nfs: &Value) {
    if nfs.is_null() {
        return;
    }
    let path = path.field("nfs");
    if text(&nfs["server"]).is_empty() {
        causes.required(&path.field("server"), "");
    }
    match text(&nfs["path"]) {
        "" => causes.required(&path.field("path"), ""),
        directory if !directory.starts_with('/') => {
            causes.invalid(&path.field("path"), &nfs["path"], "must be an absolute path");
        }
        _ => {}
    }
}

fn csi(causes: &mut Causes, path: &Path, csi: &Value) {
    if csi.is_null() {
        return;
    }
    let path = path.field("csi");
    provisioner_name(causes, &path.field("driver"), text(&csi["driver"]));
    if text(&csi["volumeHandle"]).is_empty() {
        causes.required(&path.field("volumeHandle"), "");
    }
}

fn spec_without(spec: &Value, names: &[&str]) -> Value {
    let mut spec = spec.clone();
    if let Some(spec) = spec.as_object_mut() {
        spec.retain(|name, value| !names.contains(&name.as_str()) && !value.is_null());
    }
    spec
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fields(rule: impl Fn(&mut Causes)) -> Vec<String> {
        let mut causes = Causes::default();
        rule(&mut causes);
        causes.into_list().into_iter().map(|cause| cause.field).collect()
    }

    #[test]
    fn a_volume_has_one_source() {
        let problems = |sources: Value| {
            let mut spec = json!({"accessModes": ["ReadWriteOnce"], "capacity": {"storage": "1"}});
            if let (Some(spec), Some(sources)) = (spec.as_object_mut(), sources.as_object()) {
                spec.extend(sources.clone());
            }
            fields(|causes| volume(causes, &json!({"spec": spec}), None))
        };
        let csi = json!({"driver": "d", "volumeHandle": "h"});
        assert_eq!(problems(json!({})), ["spec"]);
        assert_eq!(problems(json!({"csi": csi})), Vec::<String>::new());
        assert_eq!(problems(json!({"nfs": {"path": "x"}})), ["spec.nfs.server", "spec.nfs.path"]);
        let three = json!({"hostPath": {"path": "/a"}, "nfs": {}, "cephfs": {}, "csi": {}, "flexVolume": {}});
        assert_eq!(problems(three), ["spec.nfs", "spec.cephFS", "spec.csi"], "only the first is checked");
        let class = |name: &str| json!({"csi": csi, "volumeAttributesClassName": name});
        assert_eq!(problems(class("gold")), Vec::<String>::new());
        assert_eq!(problems(class("")), ["spec.volumeAttributesClassName"]);
        assert_eq!(problems(class("A")), ["spec.volumeAttributesClassName"]);
        let other = json!({"hostPath": {"path": "/a"}, "volumeAttributesClassName": "gold"});
        assert_eq!(problems(other), ["spec.csi"]);
        let capacity = json!({"csi": csi, "capacity": {"storage": "1", "a": "0"}});
        assert_eq!(problems(capacity), ["spec.capacity", "spec.capacity[a]"]);
    }

    #[test]
    fn names_of_drivers_and_provisioners_are_checked_in_lower_case() {
        let long = "x".repeat(64);
        let spec = |driver: &str| {
            json!({"accessModes": ["ReadWriteOnce"], "capacity": {"storage": "1"},
                "csi": {"driver": driver, "volumeHandle": "h"}})
        };
        let driver = |name: &str| fields(|causes| volume(causes, &json!({"spec": spec(name)}), None));
        assert_eq!((driver("D.io"), driver(&long)), (vec![], vec!["spec.csi.driver".to_owned()]));
        let mut causes = Causes::default();
        provisioner(&mut causes, &Path::root("provisioner"), &"A b/c".into());
        let message = causes.into_list().remove(0).message;
        assert!(message.starts_with("Invalid value: \"a b/c\": prefix part"), "{message}");
    }

    #[test]
    fn a_topology_without_labels_is_a_duplicate() {
        let term = |values: Value| json!({"matchLabelExpressions": [{"key": "zone", "values": values}]});
        let class = |terms: Value| fields(|causes| topologies(causes, &terms));
        let (a, b) = (term(json!(["a"])), term(json!(["b"])));
        assert_eq!(class(json!([a, b])), Vec::<String>::new());
        let duplicate = |index| vec![format!("allowedTopologies[{index}].matchLabelExpressions")];
        assert_eq!(class(json!([a, a])), duplicate(1));
        assert_eq!(class(json!([{}])), duplicate(0));
    }

    #[test]
    fn both_data_sources_of_a_claim_are_the_same_object() {
        let problems = |source: &str, reference: Value| {
            let spec = json!({"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1"}},
                "dataSource": {"kind": "PersistentVolumeClaim", "name": source}, "dataSourceRef": reference});
            fields(|causes| claim_spec(causes, &Path::root("spec"), &spec))
        };
        let reference = |name: &str| json!({"kind": "PersistentVolumeClaim", "name": name});
        assert_eq!(problems("a", reference("a")), Vec::<String>::new());
        assert_eq!(problems("a", reference("b")), ["spec"]);
        let foreign = json!({"kind": "PersistentVolumeClaim", "name": "a", "namespace": "n"});
        assert_eq!(problems("a", foreign), ["spec"]);
    }
}
