//! Fields of workloads and groups of pods that depend on features of the scheduler. They are removed, as upstream does
//! while the feature gates are off.

use serde_json::{Map, Value, json};

/// Fields of a group of pods and of its template that no scheduler honours without further feature gates:
/// `TopologyAwareWorkloadScheduling`, `DRAWorkloadResourceClaims`, `WorkloadAwarePreemption`.
const GATED: [&str; 5] =
    ["schedulingConstraints", "resourceClaims", "disruptionMode", "priorityClassName", "priority"];

/// Prepares a new group of pods.
pub(crate) fn new_pod_group(object: &mut Value) {
    object["status"] = json!({});
    drop_from_pod_group(object);
}

/// Removes the fields from a group of pods.
pub(crate) fn drop_from_pod_group(object: &mut Value) {
    drop_gated(object.get_mut("spec").and_then(Value::as_object_mut));
}

/// Removes the field of the status that depends on resource claims of groups. The gate `DRAWorkloadResourceClaims` for
/// these claims is off.
pub(crate) fn drop_from_status(object: &mut Value) {
    if let Some(status) = object.get_mut("status").and_then(Value::as_object_mut) {
        status.remove("resourceClaimStatuses");
    }
}

/// Removes the fields from the templates of a workload.
pub(crate) fn drop_from_workload(object: &mut Value) {
    let templates = object.pointer_mut("/spec/podGroupTemplates").and_then(Value::as_array_mut);
    templates.into_iter().flatten().for_each(|template| drop_gated(template.as_object_mut()));
}

fn drop_gated(fields: Option<&mut Map<String, Value>>) {
    if let Some(fields) = fields {
        fields.retain(|name, _| !GATED.contains(&name.as_str()));
    }
}

/// Removes the group of a pod, or of a workload's pod template, unless the old object has a group. Returns whether a
/// group was removed. Source: `dropDisabledSchedulingGroup`. A ReplicaSet with a controller keeps the group. Otherwise
/// a Deployment with a group would create ReplicaSets without end, because no ReplicaSet would equal its template.
pub fn drop_scheduling_group(group: &str, plural: &str, object: &mut Value, old: Option<&Value>) -> bool {
    const FIELD: &str = "schedulingGroup";
    let pointer = match (group, plural) {
        ("", "pods") => "/spec",
        _ => match crate::pod_security::template_path(group, plural) {
            Some("/template") => "/template/spec",
            Some("/spec/template") => "/spec/template/spec",
            Some("/spec/jobTemplate/spec/template") => "/spec/jobTemplate/spec/template/spec",
            _ => return false,
        },
    };
    let has_group = |object: &Value| object.pointer(pointer).is_some_and(|spec| !spec[FIELD].is_null());
    let mut owners = object["metadata"]["ownerReferences"].as_array().into_iter().flatten();
    let is_of_deployment = plural == "replicasets" && owners.any(|owner| owner["controller"] == true);
    if is_of_deployment || old.is_some_and(has_group) || !has_group(object) {
        return false;
    }
    let spec = object.pointer_mut(pointer).and_then(Value::as_object_mut);
    spec.and_then(|spec| spec.remove(FIELD)).is_some()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kind::by_kind;
    use crate::strategy::{prepare_for_create, prepare_for_status_update, prepare_for_update};

    #[test]
    fn fields_of_disabled_features_are_removed() {
        let kind = by_kind("scheduling.k8s.io/v1alpha2", "PodGroup").unwrap();
        let spec =
            json!({"schedulingPolicy": {"gang": {"minCount": 2}}, "priority": 3, "disruptionMode": "Pod"});
        let mut group = json!({"metadata": {"name": "g"}, "spec": spec, "status": {"conditions": [1]}});
        prepare_for_create(kind, &mut group);
        assert_eq!(
            (&group["spec"]["schedulingPolicy"]["gang"], &group["spec"]["priority"], &group["status"]),
            (&json!({"minCount": 2}), &Value::Null, &json!({}))
        );
        let old = group.clone();
        group["spec"]["priorityClassName"] = "high".into();
        prepare_for_update(kind, &mut group, &old);
        assert_eq!(group["spec"].get("priorityClassName"), None);

        let mut new = old.clone();
        let statuses = json!([{"name": "c", "resourceClaimName": "d"}]);
        new["status"] = json!({"resourceClaimStatuses": statuses, "conditions": []});
        prepare_for_status_update(kind, &mut new, &old);
        assert_eq!(new["status"], json!({"conditions": []}));

        let kind = by_kind("scheduling.k8s.io/v1alpha2", "Workload").unwrap();
        let mut workload = json!({"metadata": {}, "spec": {"podGroupTemplates": [{"name": "a", "priorityClassName": "high"}]}});
        prepare_for_create(kind, &mut workload);
        let template = &workload["spec"]["podGroupTemplates"][0];
        assert_eq!((&template["name"], template.get("priorityClassName")), (&json!("a"), None));
    }

    #[test]
    fn the_group_of_a_pod_is_kept_only_where_the_old_object_has_one() {
        let spec = json!({"nodeName": "n", "schedulingGroup": {"podGroupName": "g"}});
        let all = [
            ("", "pods", json!({"spec": spec})),
            ("", "podtemplates", json!({"template": {"spec": spec}})),
            ("apps", "deployments", json!({"spec": {"template": {"spec": spec}}})),
            ("batch", "cronjobs", json!({"spec": {"jobTemplate": {"spec": {"template": {"spec": spec}}}}})),
        ];
        for (group, plural, object) in all {
            let mut new = object.clone();
            assert!(!drop_scheduling_group(group, plural, &mut new, Some(&object)), "{plural}");
            assert_eq!(new, object);
            assert!(drop_scheduling_group(group, plural, &mut new, Some(&json!({}))), "{plural}");
            assert!(!new.to_string().contains("podGroupName") && new.to_string().contains("nodeName"));
            assert!(!drop_scheduling_group(group, plural, &mut new, None));
        }
        let mut other = json!({"spec": spec});
        assert!(!drop_scheduling_group("", "services", &mut other, None));
        let mut set = json!({"metadata": {"ownerReferences": [{"kind": "Deployment", "controller": true}]},
            "spec": {"template": {"spec": spec}}});
        assert!(!drop_scheduling_group("apps", "replicasets", &mut set, None), "it equals its template");
        set["metadata"] = json!({});
        assert!(drop_scheduling_group("apps", "replicasets", &mut set, None));
    }
}
