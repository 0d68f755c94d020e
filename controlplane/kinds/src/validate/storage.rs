//! Volumes, claims, storage classes.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use coracle_values::CollectMap;
use serde_json::{Value, json};

use super::{Causes, Path, claim_spec, entries, format, items, text};
use crate::strategy::storage::normalize_data_sources;
use coracle_values::Quantity;

const MAX_PARAMETERS: usize = 512;
/// Maximum size of all parameters of a class, in bytes.
const MAX_PARAMETERS_SIZE: usize = 256 * 1024;
/// The annotation with the storage class of a claim. It was used before the field existed.
const BETA_CLASS: &str = "volume.beta.kubernetes.io/storage-class";
/// The states of a resize in the status of a claim.
const RESIZES: &[&str] = &[
    "ControllerResizeInProgress",
    "ControllerResizeInfeasible",
    "NodeResizeInProgress",
    "NodeResizeInfeasible",
    "NodeResizePending",
];
const CLAIM_IMMUTABLE: &str = "spec is immutable after creation except resources.requests and volumeAttributesClassName for bound claims";

/// Checks that the volume mode does not change. As upstream, the path of the error lacks `spec`.
pub(super) fn check_volume_mode_unchanged(causes: &mut Causes, spec: &Value, old: &Value) {
    if spec["volumeMode"] != old["volumeMode"] {
        causes.invalid(&Path::root("volumeMode"), &spec["volumeMode"], "field is immutable");
    }
}

/// Checks the amounts and the resize states in the status of a claim. Source:
/// `ValidatePersistentVolumeClaimStatusUpdate`.
pub(super) fn claim_status(causes: &mut Causes, status: &Value) {
    let path = Path::root("status");
    for (name, amount) in entries(&status["capacity"]) {
        basic_amount(causes, &path.field("capacity").key(name), amount);
    }
    let here = path.field("allocatedResourceStatuses");
    for (name, word) in entries(&status["allocatedResourceStatuses"]) {
        claim_resource(causes, &here, name);
        if !RESIZES.contains(&text(word)) {
            // As upstream, the message shows the name of the resource.
            causes.unsupported(&here, &name.as_str().into(), RESIZES);
        }
    }
    let here = path.field("allocatedResources");
    for (name, amount) in entries(&status["allocatedResources"]) {
        if claim_resource(causes, &here, name) {
            basic_amount(causes, &here.key(name), amount);
        }
    }
}

/// Checks the name of a resource of a claim. A name other than `storage` needs a domain outside of Kubernetes. Returns
/// whether the name is valid.
fn claim_resource(causes: &mut Causes, path: &Path, name: &str) -> bool {
    let before = causes.count();
    causes.format(path, name, format::qualified_name(name));
    let is_native = !name.contains('/') || name.contains("kubernetes.io/");
    if causes.count() == before && is_native && name != "storage" {
        causes.unsupported(path, &name.into(), &["storage"]);
    }
    causes.count() == before
}

fn basic_amount(causes: &mut Causes, path: &Path, amount: &Value) {
    let Some(amount) = amount.as_str().and_then(|amount| Quantity::parse(amount).ok()) else { return };
    if amount.signum() < 0 {
        causes.invalid(path, &amount.value().into(), "must be a valid resource quantity");
    }
}

pub(crate) fn claim(causes: &mut Causes, object: &Value, old: Option<&Value>) {
    let (path, spec) = (Path::root("spec"), &object["spec"]);
    // As upstream, an update may have any API group if the stored data source has an API group. The source is
    // immutable.
    let fields = ["dataSource", "dataSourceRef"];
    let has_group = |old: &Value| fields.iter().any(|field| !old["spec"][*field]["apiGroup"].is_null());
    claim_spec::check(causes, &path, spec, !old.is_some_and(has_group));
    let Some(old) = old else { return };
    let before = &old["spec"];
    let (beta, beta_before) = (beta_class(object), beta_class(old));
    if beta.unwrap_or_default() != beta_before.unwrap_or_default() && !moves_class(object, old) {
        let here = Path::root("metadata").field("annotations").field(BETA_CLASS);
        causes.invalid(&here, &beta.unwrap_or_default().into(), "field is immutable");
    }
    if kept(spec, old) != kept(before, old) {
        causes.forbidden(&path, CLAIM_IMMUTABLE);
    }
    // As upstream, an absent size is zero.
    let size = |size: &Value| Quantity::parse(text(size)).unwrap_or_default();
    let requested = |spec: &Value| size(&spec["resources"]["requests"]["storage"]);
    // After a failed expansion, the request may shrink, but it must stay above the actual size.
    let actual = size(&old["status"]["capacity"]["storage"]);
    if requested(spec) < requested(before) && requested(spec) <= actual {
        let here = path.field("resources").field("requests").field("storage");
        causes.forbidden(&here, "field can not be less than status.capacity");
    }
    check_volume_mode_unchanged(causes, spec, before);
    if !old["status"]["currentVolumeAttributesClassName"].is_null()
        && before["volumeAttributesClassName"] != spec["volumeAttributesClassName"]
        && text(&spec["volumeAttributesClassName"]).is_empty()
    {
        let state = if spec["volumeAttributesClassName"].is_null() { "nil" } else { "empty string" };
        let detail =
            format!("update to {state} is forbidden when status.currentVolumeAttributesClassName is not nil");
        causes.forbidden(&path.field("volumeAttributesClassName"), &detail);
    }
}

/// The class in the annotation of a claim.
fn beta_class(claim: &Value) -> Option<&str> {
    claim["metadata"]["annotations"][BETA_CLASS].as_str()
}

/// Whether an update moves the class of a claim from its annotation to the field `storageClassName`. Source:
/// `validateStorageClassUpgradeFromAnnotation`.
fn moves_class(new: &Value, old: &Value) -> bool {
    let class = &new["spec"]["storageClassName"];
    old["spec"]["storageClassName"].is_null()
        && beta_class(new).is_none()
        && beta_class(old).is_some_and(|beta| class == beta)
}

/// The parts of `spec` that an update of the claim `old` cannot change.
fn kept(spec: &Value, old: &Value) -> Value {
    let mut free = Vec::new();
    if text(&old["spec"]["volumeName"]).is_empty() {
        // The binder sets the volume.
        free.push("volumeName");
    }
    // A claim without a class may get one. If the claim has the annotation, only its class is allowed.
    let class = &spec["storageClassName"];
    if old["spec"]["storageClassName"].is_null()
        && !class.is_null()
        && beta_class(old).is_none_or(|beta| class == beta)
    {
        free.push("storageClassName");
    }
    let is_bound = old["status"]["phase"] == "Bound";
    if is_bound {
        free.push("volumeAttributesClassName");
    }
    let mut kept = spec_without(spec, &free);
    // A bound claim may request another size, and nothing else.
    let requests = kept.pointer_mut("/resources/requests").and_then(Value::as_object_mut);
    if let Some(requests) = requests.filter(|_| is_bound) {
        requests.remove("storage");
    }
    // A claim of an earlier version may have the data source in one field only.
    let mut claim = json!({"spec": kept});
    normalize_data_sources(&mut claim);
    claim["spec"].take()
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
            // As upstream, the error shows the name in lower case.
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
    let mut seen = HashSet::new();
    for (index, term) in items(terms) {
        let here = Path::root("allowedTopologies").index(index).field("matchLabelExpressions");
        let labels = labels_of(term);
        // Upstream also reports an empty term as a duplicate.
        if labels.is_empty() || !seen.insert(labels) {
            causes.duplicate(&here, &"".into());
        }
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
        .collect_map()
}

pub(super) fn spec_without(spec: &Value, names: &[&str]) -> Value {
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
    fn names_of_provisioners_are_shown_in_lower_case() {
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
    fn the_class_of_a_claim_moves_from_the_annotation_to_the_field() {
        let of = |annotation: Option<&str>, class: Option<&str>| {
            let annotations = annotation.map(|name| json!({BETA_CLASS: name}));
            let spec = json!({"accessModes": ["ReadWriteOnce"], "storageClassName": class,
                "resources": {"requests": {"storage": "1"}}});
            json!({"metadata": {"annotations": annotations}, "spec": spec})
        };
        let old = of(Some("a"), None);
        let problems = |new: &Value| fields(|causes| claim(causes, new, Some(&old)));
        let annotation = format!("metadata.annotations.{BETA_CLASS}");
        assert_eq!(problems(&of(None, Some("a"))), Vec::<String>::new());
        assert_eq!(problems(&of(Some("a"), Some("a"))), Vec::<String>::new());
        assert_eq!(problems(&of(Some("a"), Some("b"))), ["spec"]);
        assert_eq!(problems(&of(None, None)), std::slice::from_ref(&annotation));
        assert_eq!(problems(&of(None, Some("b"))), [annotation.as_str(), "spec"]);
    }

    #[test]
    fn a_claim_that_was_stored_with_one_data_source_can_be_updated() {
        let source = |name: &str| json!({"kind": "PersistentVolumeClaim", "name": name});
        let of = |sources: Value| {
            let mut spec =
                json!({"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1"}}});
            spec.as_object_mut().unwrap().extend(sources.as_object().cloned().unwrap());
            json!({"spec": spec})
        };
        let old = of(json!({"dataSource": source("a")}));
        let update = |name: &str| {
            let new = of(json!({"dataSource": source(name), "dataSourceRef": source(name)}));
            fields(|causes| claim(causes, &new, Some(&old)))
        };
        assert_eq!(update("a"), Vec::<String>::new());
        assert_eq!(update("b"), ["spec"]);
    }

    #[test]
    fn the_group_of_a_source_is_checked_at_the_creation() {
        let of = |group: &str| {
            let source = json!({"apiGroup": group, "kind": "K", "name": "a"});
            json!({"spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1"}},
                "dataSource": source, "dataSourceRef": source}})
        };
        let (bad, good) = (of("A b"), of("a.b"));
        let both = ["spec.dataSource.apiGroup", "spec.dataSourceRef.apiGroup"];
        assert_eq!(fields(|causes| claim(causes, &bad, None)), both);
        assert_eq!(fields(|causes| claim(causes, &bad, Some(&good))), ["spec"]);
    }

    #[test]
    fn a_claim_requests_no_less_than_its_size() {
        let of = |requests: Value| {
            json!({"spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": requests}},
                "status": {"phase": "Bound", "capacity": {"storage": "2Gi"}}})
        };
        let old = of(json!({"storage": "3Gi"}));
        let update = |requests: Value| {
            let new = of(requests);
            fields(|causes| claim(causes, &new, Some(&old)))
        };
        let size = "spec.resources.requests.storage";
        assert_eq!(update(json!({"storage": "2500Mi"})), Vec::<String>::new());
        assert_eq!(update(json!({"storage": "2Gi"})), [size]);
        assert_eq!(update(json!({})), ["spec.resources[storage]", size]);
    }
}
