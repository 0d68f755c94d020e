//! Volumes, claims, storage classes.

use serde_json::Value;

use super::workload::label_selector;
use super::{Causes, Path, entries, format, items, text};
use coracle_values::Quantity;

const ACCESS_MODES: &[&str] = &["ReadOnlyMany", "ReadWriteMany", "ReadWriteOnce", "ReadWriteOncePod"];
const VOLUME_MODES: &[&str] = &["Block", "Filesystem"];
const RECLAIM_POLICIES: &[&str] = &["Delete", "Recycle", "Retain"];
/// Fields of a volume's spec that are no volume source.
const NO_SOURCES: &[&str] = &[
    "capacity",
    "accessModes",
    "claimRef",
    "persistentVolumeReclaimPolicy",
    "storageClassName",
    "mountOptions",
    "volumeMode",
    "nodeAffinity",
    "volumeAttributesClassName",
];
const CLAIM_IMMUTABLE: &str = "spec is immutable after creation except resources.requests and volumeAttributesClassName for bound claims";

pub(crate) fn volume(causes: &mut Causes, object: &Value, old: Option<&Value>) {
    let (path, spec) = (Path::root("spec"), &object["spec"]);
    access_modes(causes, &path, spec, "");
    if entries(&spec["capacity"]).next().is_none() {
        causes.required(&path.field("capacity"), "");
    }
    let size = &spec["capacity"]["storage"];
    if size.is_null() || entries(&spec["capacity"]).count() > 1 {
        causes.unsupported(&path.field("capacity"), &spec["capacity"], &["storage"]);
    } else {
        positive(causes, &path.field("capacity").key("storage"), size);
    }
    let policy = &spec["persistentVolumeReclaimPolicy"];
    if !text(policy).is_empty() {
        causes.one_of(&path.field("persistentVolumeReclaimPolicy"), policy, RECLAIM_POLICIES);
    }
    source(causes, &path, spec);
    class_name(causes, &path, spec);
    if !spec["volumeMode"].is_null() {
        causes.one_of(&path.field("volumeMode"), &spec["volumeMode"], VOLUME_MODES);
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
                ],
            )
        };
        if others(spec) != others(&old["spec"]) {
            let detail = "spec.persistentvolumesource is immutable after creation";
            causes.forbidden(&path.field("persistentvolumesource"), detail);
        }
        let affinity = &old["spec"]["nodeAffinity"];
        if !affinity.is_null() && *affinity != spec["nodeAffinity"] {
            causes.invalid(&path.field("nodeAffinity"), &spec["nodeAffinity"], "field is immutable");
        }
    }
}

pub(crate) fn claim(causes: &mut Causes, object: &Value, old: Option<&Value>) {
    let (path, spec) = (Path::root("spec"), &object["spec"]);
    claim_spec(causes, &path, spec);
    let Some(old) = old else { return };
    let before = &old["spec"];
    let mut free = vec!["volumeAttributesClassName"];
    if text(&before["volumeName"]).is_empty() {
        // The binder sets the volume; a claim without a class may still get the default one.
        free.push("volumeName");
        if before["storageClassName"].is_null() {
            free.push("storageClassName");
        }
    }
    if old["status"]["phase"] == "Bound" {
        free.push("resources");
        let size = |spec: &Value| Quantity::parse(text(&spec["resources"]["requests"]["storage"])).ok();
        if size(spec).zip(size(before)).is_some_and(|(new, old)| new < old) {
            let here = path.field("resources").field("requests").field("storage");
            causes.forbidden(&here, "field can not be less than previous value");
        }
    }
    if spec_without(spec, &free) != spec_without(before, &free) {
        causes.forbidden(&path, CLAIM_IMMUTABLE);
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
    if !spec["volumeMode"].is_null() {
        causes.one_of(&path.field("volumeMode"), &spec["volumeMode"], VOLUME_MODES);
    }
}

pub(crate) fn class(causes: &mut Causes, object: &Value, old: Option<&Value>) {
    let provisioner = text(&object["provisioner"]);
    if provisioner.is_empty() {
        causes.required(&Path::root("provisioner"), "");
    } else {
        let problems = format::qualified_name(&provisioner.to_lowercase());
        causes.format(&Path::root("provisioner"), provisioner, problems);
    }
    if !object["reclaimPolicy"].is_null() {
        causes.one_of(&Path::root("reclaimPolicy"), &object["reclaimPolicy"], &["Delete", "Retain"]);
    }
    let modes = &["Immediate", "WaitForFirstConsumer"];
    causes.one_of(&Path::root("volumeBindingMode"), &object["volumeBindingMode"], modes);
    let Some(old) = old else { return };
    for name in ["parameters", "provisioner"] {
        if object[name] != old[name] {
            causes.forbidden(&Path::root(name), &format!("updates to {name} are forbidden."));
        }
    }
    for name in ["reclaimPolicy", "volumeBindingMode"] {
        if object[name] != old[name] {
            causes.invalid(&Path::root(name), &object[name], "field is immutable");
        }
    }
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

fn source(causes: &mut Causes, path: &Path, spec: &Value) {
    let mut sources =
        entries(spec).filter(|(name, value)| !NO_SOURCES.contains(&name.as_str()) && !value.is_null());
    if sources.next().is_none() {
        causes.required(path, "must specify a volume type");
    }
    for (name, _) in sources {
        causes.forbidden(&path.field(name), "may not specify more than 1 volume type");
    }
    for name in ["hostPath", "local"] {
        let directory = text(&spec[name]["path"]);
        if spec[name].is_null() {
            continue;
        }
        let here = path.field(name).field("path");
        if directory.is_empty() {
            causes.required(&here, "");
        } else if directory.split('/').any(|part| part == "..") {
            causes.invalid(&here, &spec[name]["path"], "must not contain '..'");
        }
    }
    if !spec["local"].is_null() && spec["nodeAffinity"].is_null() {
        causes.required(&path.field("nodeAffinity"), "Local volume requires node affinity");
    }
}

fn spec_without(spec: &Value, names: &[&str]) -> Value {
    let mut spec = spec.clone();
    if let Some(spec) = spec.as_object_mut() {
        spec.retain(|name, value| !names.contains(&name.as_str()) && !value.is_null());
    }
    spec
}
