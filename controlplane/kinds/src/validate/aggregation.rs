//! API services. Source: `kube-aggregator/pkg/apis/apiregistration/validation/validation.go`.

use serde_json::{Value, json};

use super::{Causes, Path, format, items, text};

/// The status of a new API service. A local API service is always available.
pub(crate) fn new_status(object: &mut Value) {
    let is_local = object["spec"]["service"].is_null();
    let created = object["metadata"]["creationTimestamp"].clone();
    let Some(object) = object.as_object_mut() else { return };
    let status = match is_local {
        true => json!({"conditions": [{"type": "Available", "status": "True", "reason": "Local",
            "message": "Local APIServices are always available", "lastTransitionTime": created}]}),
        false => json!({}),
    };
    object.insert("status".to_owned(), status);
}

/// Checks an API service.
pub(crate) fn api_service(causes: &mut Causes, object: &Value, _old: Option<&Value>) {
    let (path, spec) = (Path::root("spec"), &object["spec"]);
    let (group, version) = (text(&spec["group"]), text(&spec["version"]));
    let name = format!("{version}.{group}");
    if object["metadata"]["name"] != name.as_str() {
        let detail = format!("must be `spec.version+\".\"+spec.group`: {name:?}");
        causes.invalid(&Path::root("metadata").field("name"), &object["metadata"]["name"], &detail);
    }
    match group {
        "" if version != "v1" => {
            let detail = "only v1 may have an empty group and it better be legacy kube";
            causes.required(&path.field("group"), detail);
        }
        "" => {}
        _ => causes.format(&path.field("group"), group, format::dns1123_subdomain(group)),
    }
    causes.format(&path.field("version"), version, format::dns1035_label(version));
    for (field, max) in [("groupPriorityMinimum", 20_000), ("versionPriority", 1000)] {
        if !(1..=max).contains(&spec[field].as_i64().unwrap_or(0)) {
            let detail = format!("must be positive and less than {max}");
            causes.invalid(&path.field(field), &spec[field], &detail);
        }
    }
    let has_bundle = !text(&spec["caBundle"]).is_empty();
    let is_insecure = spec["insecureSkipTLSVerify"] == true;
    if spec["service"].is_null() {
        // The object has no service if the aggregator itself serves the group and version.
        if has_bundle {
            let size = format!("{} bytes", text(&spec["caBundle"]).len());
            let detail = "local APIServices may not have a caBundle";
            causes.invalid(&path.field("caBundle"), &size.into(), detail);
        }
        if is_insecure {
            let detail = "local APIServices may not have insecureSkipTLSVerify";
            causes.invalid(&path.field("insecureSkipTLSVerify"), &true.into(), detail);
        }
    } else {
        service(causes, &path.field("service"), &spec["service"]);
        if is_insecure && has_bundle {
            let here = path.field("insecureSkipTLSVerify");
            causes.invalid(&here, &true.into(), "may not be true if caBundle is present");
        }
    }
}

fn service(causes: &mut Causes, path: &Path, service: &Value) {
    for field in ["namespace", "name"] {
        if text(&service[field]).is_empty() {
            causes.required(&path.field(field), "");
        }
    }
    for problem in format::port_number(service["port"].as_i64().unwrap_or(0)) {
        causes.invalid(&path.field("port"), &service["port"], &format!("port is not valid: {problem}"));
    }
}

/// Checks the status of an API service.
pub(super) fn status(causes: &mut Causes, status: &Value) {
    let path = Path::root("status").field("conditions");
    for (index, condition) in items(&status["conditions"]) {
        let value = &condition["status"];
        if !["True", "False", "Unknown"].contains(&text(value)) {
            causes.unsupported(&path.index(index).field("status"), value, &["True", "False", "Unknown"]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_contains_the_group_version() {
        let fields = |name: &str, spec: Value| {
            let mut causes = Causes::default();
            api_service(&mut causes, &json!({"metadata": {"name": name}, "spec": spec}), None);
            causes.into_list().into_iter().map(|cause| cause.field).collect::<Vec<_>>()
        };
        let spec = |more: Value| {
            let mut spec =
                json!({"group": "a.b", "version": "v1", "groupPriorityMinimum": 1, "versionPriority": 1});
            spec.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            spec
        };
        assert_eq!(fields("v1.a.b", spec(json!({}))), Vec::<String>::new());
        assert_eq!(fields("v2.a.b", spec(json!({}))), ["metadata.name"]);
        assert_eq!(fields("v1.a.b", spec(json!({"caBundle": "YQ=="}))), ["spec.caBundle"]);
        let service = json!({"service": {"name": "s", "port": 0}, "versionPriority": 1001});
        assert_eq!(
            fields("v1.a.b", spec(service)),
            ["spec.versionPriority", "spec.service.namespace", "spec.service.port"]
        );
    }
}
