//! The pods of a stateful set: names, ordinals, readiness, and new pods.

use jiff::Timestamp;
use serde_json::{Value, json};

use super::claims::claim_name;
use crate::object::{ObjectExt, Pod, StatefulSet};
use crate::pod_control;
use crate::revision_history::POD_REVISION;
use crate::template::Template;

const POD_NAME: &str = "statefulset.kubernetes.io/pod-name";
const POD_INDEX: &str = "apps.kubernetes.io/pod-index";

/// The ordinal of a pod. `None` if its name does not belong to this set.
pub(super) fn ordinal(set: &StatefulSet, pod: &Pod) -> Option<i32> {
    let digits = pod.name().strip_prefix(set.name())?.strip_prefix('-')?;
    let plain = digits == "0" || !digits.starts_with('0');
    (plain && digits.bytes().all(|byte| byte.is_ascii_digit())).then(|| digits.parse().ok())?
}

/// The revision of a pod.
pub(super) fn revision(pod: &Pod) -> &str {
    let label = pod.metadata.labels.as_ref().and_then(|labels| labels.get(POD_REVISION));
    label.map(String::as_str).unwrap_or_default()
}

/// Whether the pod runs and is ready.
pub(super) fn is_ready(pod: &Pod) -> bool {
    pod.status.phase.as_deref() == Some("Running") && pod.ready_since().is_some()
}

/// The time at which a ready pod becomes available. `None` if the pod is not ready.
pub(super) fn available_at(set: &StatefulSet, pod: &Pod, now: Timestamp) -> Option<Timestamp> {
    let since = pod.ready_since().filter(|_| is_ready(pod))?;
    let seconds = set.spec.min_ready_seconds.unwrap_or_default();
    if seconds == 0 {
        return Some(Timestamp::MIN);
    }
    let since = since.map_or(now, |time| time.0);
    Timestamp::from_second(since.as_second().saturating_add(seconds.into())).ok()
}

/// Whether the pod has been ready for `minReadySeconds`.
pub(super) fn is_available(set: &StatefulSet, pod: &Pod, now: Timestamp) -> bool {
    available_at(set, pod, now).is_some_and(|at| at <= now)
}

/// The patch that restores the labels of a pod's identity. `None` if the pod has its name as a label. Upstream checks
/// only this label, too. Services for single pods select by this label.
pub(super) fn identity_patch(pod: &Pod, ordinal: i32) -> Option<Value> {
    let label = pod.metadata.labels.as_ref().and_then(|labels| labels.get(POD_NAME));
    if label.is_some_and(|name| name == pod.name()) {
        return None;
    }
    let labels = json!({(POD_NAME): pod.name(), (POD_INDEX): ordinal.to_string()});
    let version = &pod.metadata.resource_version;
    Some(json!({"metadata": {"uid": pod.uid(), "resourceVersion": version, "labels": labels}}))
}

/// A new pod with this ordinal, template and revision.
pub(super) fn new_pod(set: &StatefulSet, ordinal: i32, template: &Template, revision: &str) -> Value {
    let mut pod = pod_control::from_template(set, &template.value());
    let name = format!("{}-{ordinal}", set.name());
    pod["metadata"]["name"] = name.clone().into();
    // `generateName` has no effect beside the name. Upstream sets it, too.
    pod["metadata"]["generateName"] = format!("{}-", set.name()).into();
    for (label, value) in
        [(POD_NAME, name.as_str()), (POD_INDEX, &ordinal.to_string()), (POD_REVISION, revision)]
    {
        pod["metadata"]["labels"][label] = value.into();
    }
    pod["spec"]["hostname"] = name.into();
    if let Some(service) = set.spec.service_name.as_deref().filter(|name| !name.is_empty()) {
        pod["spec"]["subdomain"] = service.into();
    }
    let templates: Vec<&str> = set
        .spec
        .volume_claim_templates
        .iter()
        .filter_map(|claim| claim["metadata"]["name"].as_str())
        .collect();
    if !templates.is_empty() {
        let own = pod["spec"]["volumes"].as_array().cloned().unwrap_or_default();
        let others = own.into_iter().filter(|volume| templates.iter().all(|name| volume["name"] != *name));
        let claims = templates.iter().map(|template| {
            let claim = claim_name(set, template, ordinal);
            json!({"name": template, "persistentVolumeClaim": {"claimName": claim}})
        });
        pod["spec"]["volumes"] = claims.chain(others).collect();
    }
    pod
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::revision_history::template_of;

    #[test]
    fn a_pod_without_its_name_as_label_gets_it() {
        let pod = |labels: Value| -> Pod {
            serde_json::from_value(json!({"metadata": {"name": "db-1", "uid": "p", "labels": labels}}))
                .unwrap()
        };
        assert_eq!(identity_patch(&pod(json!({(POD_NAME): "db-1"})), 1), None);
        for labels in [json!({}), json!({(POD_NAME): "db-2", (POD_INDEX): "2"})] {
            let patch = identity_patch(&pod(labels), 1).unwrap();
            assert_eq!(patch["metadata"]["labels"], json!({(POD_NAME): "db-1", (POD_INDEX): "1"}));
        }
    }

    #[test]
    fn a_template_with_fields_of_a_wrong_type_makes_a_pod() {
        let set: StatefulSet = serde_json::from_value(json!({"metadata": {"name": "db"}})).unwrap();
        for template in [
            json!("text"),
            json!({"metadata": {"labels": "text", "annotations": [1], "finalizers": {}}, "spec": [1]}),
            json!({"metadata": 1, "spec": "text"}),
        ] {
            let pod = new_pod(&set, 0, &Template::new(&template), "r");
            assert_eq!(pod["metadata"]["labels"][POD_REVISION], "r", "{template}");
            assert_eq!(pod["spec"], json!({"hostname": "db-0"}), "{template}");
            assert_eq!(pod["metadata"]["generateName"], "db-", "{template}");
        }
    }

    /// CVE-2026-2270: the metadata in a revision chose the namespace and the owners of a pod.
    #[test]
    fn cve_2026_2270_a_revision_determines_no_namespace_and_no_owner() {
        let set = json!({"metadata": {"name": "db", "namespace": "own", "uid": "u"}});
        let set: StatefulSet = serde_json::from_value(set).unwrap();
        let foreign = json!({"name": "x", "namespace": "victim", "ownerReferences": [{"uid": "v"}]});
        let template = json!({"metadata": foreign, "spec": {"containers": [{"image": "i"}]}});
        let revision = json!({
            "metadata": {"name": "r"},
            "revision": 1,
            "data": {"metadata": foreign, "spec": {"template": template, "serviceName": "y"}},
        });
        let revision = serde_json::from_value(revision).unwrap();
        let pod = new_pod(&set, 0, &template_of(&revision), "r");
        assert_eq!(pod["spec"], json!({"containers": [{"image": "i"}], "hostname": "db-0"}));
        let metadata = pod["metadata"].as_object().unwrap();
        let names: std::collections::BTreeSet<&str> = metadata.keys().map(String::as_str).collect();
        assert_eq!(names, ["generateName", "labels", "name", "ownerReferences"].into());
        assert_eq!(metadata["name"], "db-0");
        assert_eq!(metadata["ownerReferences"], json!([set.controller_reference()]));
    }
}
