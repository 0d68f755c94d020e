//! The kinds of storage drivers: attachments, drivers, capacities, classes of attributes.

use std::collections::HashSet;

use serde_json::Value;

use super::selector::label_selector;
use super::storage::{parameters, provisioner};
use super::volume_source::driver;
use super::{Causes, Path, entries, format, items, persistent_volume, text};
use coracle_values::Quantity;

/// Maximum size of an attachment's metadata, in bytes.
const MAX_METADATA: usize = 256 * 1024;
/// Maximum size of an error message, in bytes.
const MAX_MESSAGE: usize = 1024;
const FS_GROUP_POLICIES: &[&str] = &["File", "None", "ReadWriteOnceWithFSType"];
const LIFECYCLE_MODES: &[&str] = &["Persistent", "Ephemeral"];

pub(crate) fn attachment(causes: &mut Causes, object: &Value, old: Option<&Value>) {
    let (path, spec) = (Path::root("spec"), &object["spec"]);
    driver(causes, &path.field("attacher"), text(&spec["attacher"]));
    source(causes, &path.field("source"), &spec["source"]);
    let node = text(&spec["nodeName"]);
    causes.format(&path.field("nodeName"), node, format::dns1123_subdomain(node));
    attachment_status(causes, &object["status"]);
    if old.is_some_and(|old| old["spec"] != object["spec"]) {
        causes.invalid(&path, spec, "field is immutable");
    }
}

/// Checks the status of an attachment.
pub(super) fn attachment_status(causes: &mut Causes, status: &Value) {
    let path = Path::root("status");
    let metadata = &status["attachmentMetadata"];
    let size: usize = entries(metadata).map(|(key, value)| key.len() + text(value).len()).sum();
    if size > MAX_METADATA {
        causes.too_long(&path.field("attachmentMetadata"), MAX_METADATA);
    }
    for name in ["attachError", "detachError"] {
        let here = path.field(name);
        if text(&status[name]["message"]).len() > MAX_MESSAGE {
            // Upstream's error names the limit on metadata instead of the limit on messages.
            causes.too_long(&here.field("message"), MAX_METADATA);
        }
        causes.in_range(&here.field("errorCode"), &status[name]["errorCode"], 0..=i64::from(i32::MAX));
    }
}

fn source(causes: &mut Causes, path: &Path, source: &Value) {
    let (inline, named) = (&source["inlineVolumeSpec"], &source["persistentVolumeName"]);
    let one = "must specify exactly one of inlineVolumeSpec and persistentVolumeName";
    if let Some(name) = named.as_str() {
        causes.format(&path.field("persistentVolumeName"), name, format::dns1123_subdomain(name));
    }
    match (inline.is_null(), named.as_str()) {
        (true, None) => causes.required(path, one),
        (false, Some(_)) => causes.forbidden(path, one),
        (true, Some("")) => {
            let detail = "must specify non empty persistentVolumeName";
            causes.required(&path.field("persistentVolumeName"), detail);
        }
        (true, Some(_)) => {}
        (false, None) => {
            persistent_volume::inline(causes, &path.field("inlineVolumeSpec"), inline);
        }
    }
}

pub(crate) fn csi_driver(causes: &mut Causes, object: &Value, old: Option<&Value>) {
    let (path, spec) = (Path::root("spec"), &object["spec"]);
    causes.optional_word(&path.field("fsGroupPolicy"), &spec["fsGroupPolicy"], FS_GROUP_POLICIES);
    token_requests(causes, &path.field("tokenRequests"), &spec["tokenRequests"]);
    for (_, mode) in items(&spec["volumeLifecycleModes"]) {
        if !LIFECYCLE_MODES.contains(&text(mode)) {
            causes.unsupported(&path.field("volumeLifecycleModes"), mode, LIFECYCLE_MODES);
        }
    }
    let period = &spec["nodeAllocatableUpdatePeriodSeconds"];
    if period.as_i64().is_some_and(|seconds| seconds < 10) {
        let detail = "must be greater than or equal to 10 seconds";
        causes.invalid(&path.field("nodeAllocatableUpdatePeriodSeconds"), period, detail);
    }
    let secrets = &spec["serviceAccountTokenInSecrets"];
    if !secrets.is_null() && items(&spec["tokenRequests"]).next().is_none() {
        let detail = "serviceAccountTokenInSecrets is set but no tokenRequests are specified";
        causes.invalid(&path.field("serviceAccountTokenInSecrets"), secrets, detail);
    }
    let Some(old) = old else { return };
    // Upstream's error has the misspelled name `attachedRequired`.
    for (shown, name) in
        [("attachedRequired", "attachRequired"), ("volumeLifecycleModes", "volumeLifecycleModes")]
    {
        if spec[name] != old["spec"][name] {
            causes.invalid(&path.field(shown), &spec[name], "field is immutable");
        }
    }
}

fn token_requests(causes: &mut Causes, path: &Path, requests: &Value) {
    let mut audiences = HashSet::new();
    for (index, request) in items(requests) {
        let here = path.index(index);
        if !audiences.insert(text(&request["audience"])) {
            causes.duplicate(&here.field("audience"), &request["audience"]);
            continue;
        }
        let (here, seconds) = (here.field("expirationSeconds"), &request["expirationSeconds"]);
        match seconds.as_i64() {
            Some(..600) => {
                causes.invalid(&here, seconds, "may not specify a duration less than 10 minutes");
            }
            Some(4_294_967_297..) => {
                causes.invalid(&here, seconds, "may not specify a duration larger than 2^32 seconds");
            }
            Some(_) | None => {}
        }
    }
}

pub(crate) fn csi_capacity(causes: &mut Causes, object: &Value, old: Option<&Value>) {
    if !object["nodeTopology"].is_null() {
        label_selector(causes, &Path::root("nodeTopology"), &object["nodeTopology"]);
    }
    let class = text(&object["storageClassName"]);
    causes.format(&Path::root("storageClassName"), class, format::dns1123_subdomain(class));
    let capacity = &object["capacity"];
    if Quantity::parse(text(capacity)).is_ok_and(|quantity| quantity.signum() < 0) {
        causes.invalid(&Path::root("capacity"), capacity, "must be greater than or equal to 0");
    }
    for name in ["nodeTopology", "storageClassName"] {
        if old.is_some_and(|old| old[name] != object[name]) {
            causes.invalid(&Path::root(name), &object[name], "field is immutable");
        }
    }
}

pub(crate) fn attributes_class(causes: &mut Causes, object: &Value, old: Option<&Value>) {
    for name in ["driverName", "parameters"] {
        if old.is_some_and(|old| old[name] != object[name]) {
            causes.forbidden(&Path::root(name), &format!("updates to {name} are forbidden."));
        }
    }
    provisioner(causes, &Path::root("driverName"), &object["driverName"]);
    parameters(causes, &object["parameters"]);
    if entries(&object["parameters"]).next().is_none() {
        causes.required(&Path::root("parameters"), "must contain at least one key/value pair");
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn fields(check: impl Fn(&mut Causes)) -> Vec<String> {
        let mut causes = Causes::default();
        check(&mut causes);
        causes.into_list().into_iter().map(|cause| cause.field).collect()
    }

    #[test]
    fn an_attachment_has_one_source_and_never_changes() {
        let object = |source: Value| json!({"spec": {"attacher": "a.io", "nodeName": "n", "source": source}});
        let named = object(json!({"persistentVolumeName": "pv"}));
        let inline = json!({"csi": {"driver": "a", "volumeHandle": "h"}, "accessModes": ["ReadWriteOnce"]});
        assert_eq!(fields(|c| attachment(c, &named, None)), [""; 0]);
        assert_eq!(fields(|c| attachment(c, &object(json!({"inlineVolumeSpec": inline})), None)), [""; 0]);
        assert_eq!(fields(|c| attachment(c, &object(json!({})), None)), ["spec.source"]);
        let both = object(json!({"persistentVolumeName": "pv", "inlineVolumeSpec": inline}));
        assert_eq!(fields(|c| attachment(c, &both, None)), ["spec.source"]);
        let both = object(json!({"persistentVolumeName": "A", "inlineVolumeSpec": inline}));
        let named_twice = ["spec.source.persistentVolumeName", "spec.source"];
        assert_eq!(fields(|c| attachment(c, &both, None)), named_twice);
        let empty = object(json!({"persistentVolumeName": ""}));
        let name = "spec.source.persistentVolumeName";
        assert_eq!(fields(|c| attachment(c, &empty, None)), [name, name]);
        let status = |size: usize| json!({"attachmentMetadata": {"k": "v".repeat(size)}});
        assert_eq!(fields(|c| attachment_status(c, &status(256 * 1024 - 1))), [""; 0]);
        assert_eq!(fields(|c| attachment_status(c, &status(256 * 1024))), ["status.attachmentMetadata"]);
        let other = object(json!({"persistentVolumeName": "other"}));
        assert_eq!(fields(|c| attachment(c, &other, Some(&named))), ["spec"]);
    }

    #[test]
    fn a_driver_keeps_its_modes_and_has_one_token_for_each_audience() {
        let object = |modes: Value, tokens: Value| json!({"spec": {"attachRequired": true, "volumeLifecycleModes": modes, "tokenRequests": tokens}});
        let plain = object(json!(["Persistent"]), json!([{"audience": "a"}]));
        assert_eq!(fields(|c| csi_driver(c, &plain, None)), [""; 0]);
        let twice = object(json!(["Odd"]), json!([{"audience": "a"}, {"audience": "a"}]));
        let expect = ["spec.tokenRequests[1].audience", "spec.volumeLifecycleModes"];
        assert_eq!(fields(|c| csi_driver(c, &twice, None)), expect);
        let policy = json!({"spec": {"fsGroupPolicy": ""}});
        assert_eq!(fields(|c| csi_driver(c, &policy, None)), ["spec.fsGroupPolicy"]);
        let changed = object(json!(["Ephemeral"]), json!([]));
        assert_eq!(fields(|c| csi_driver(c, &changed, Some(&plain))), ["spec.volumeLifecycleModes"]);
    }

    #[test]
    fn capacities_and_classes_of_attributes_are_fixed() {
        let capacity = |class: &str, size: &str| json!({"storageClassName": class, "capacity": size});
        assert_eq!(fields(|c| csi_capacity(c, &capacity("x", "-1"), None)), ["capacity"]);
        let changed = |c: &mut Causes| csi_capacity(c, &capacity("x", "1"), Some(&capacity("y", "1")));
        assert_eq!(fields(changed), ["storageClassName"]);
        let class = |parameters: Value| json!({"driverName": "d.io", "parameters": parameters});
        assert_eq!(fields(|c| attributes_class(c, &class(json!({})), None)), ["parameters"]);
        let (old, new) = (class(json!({"a": "b"})), class(json!({"a": "c"})));
        assert_eq!(fields(|c| attributes_class(c, &new, Some(&old))), ["parameters"]);
    }
}
