//! Workloads and groups of pods. Source: `pkg/apis/scheduling/v1alpha2/zz_generated.validations.go` and
//! `pkg/apis/scheduling/validation`.

use serde_json::Value;

use super::{Causes, Path, condition, format, items, text};

/// Maximum number of templates of a workload.
const MAX_TEMPLATES: usize = 8;

/// Checks a workload.
pub(crate) fn workload(causes: &mut Causes, object: &Value, old: Option<&Value>) {
    let (path, spec) = (Path::root("spec"), &object["spec"]);
    if let Some(old) = old {
        return unchanged(causes, &["controllerRef", "podGroupTemplates"], spec, &old["spec"]);
    }
    controller(causes, &path.field("controllerRef"), &spec["controllerRef"]);
    let (here, templates) = (path.field("podGroupTemplates"), &spec["podGroupTemplates"]);
    let count = items(templates).count();
    match count {
        0 => return causes.required(&here, ""),
        1..=MAX_TEMPLATES => {}
        _ => return causes.too_many(&here, count, MAX_TEMPLATES),
    }
    let mut seen: Vec<&str> = Vec::new();
    for (index, template) in items(templates) {
        let (here, name) = (here.index(index), text(&template["name"]));
        if seen.contains(&name) {
            causes.duplicate(&here, template);
        }
        seen.push(name);
        required(causes, &here.field("name"), name, format::dns1123_label);
        policy(causes, &here.field("schedulingPolicy"), &template["schedulingPolicy"]);
    }
}

/// Checks a group of pods.
pub(crate) fn pod_group(causes: &mut Causes, object: &Value, old: Option<&Value>) {
    let (path, spec) = (Path::root("spec"), &object["spec"]);
    if let Some(old) = old {
        return unchanged(causes, &["podGroupTemplateRef", "schedulingPolicy"], spec, &old["spec"]);
    }
    let (here, reference) = (path.field("podGroupTemplateRef"), &spec["podGroupTemplateRef"]);
    if !reference.is_null() {
        let workload = &reference["workload"];
        if workload.is_null() {
            causes.invalid(&here, &"".into(), "must specify one of: `workload`");
        } else {
            let here = here.field("workload");
            let (of, name) = (text(&workload["workloadName"]), text(&workload["podGroupTemplateName"]));
            required(causes, &here.field("workloadName"), of, format::dns1123_subdomain);
            required(causes, &here.field("podGroupTemplateName"), name, format::dns1123_label);
        }
    }
    policy(causes, &path.field("schedulingPolicy"), &spec["schedulingPolicy"]);
}

/// Checks the status of a group of pods. The status has no `resourceClaimStatuses`, because a write removes them.
pub(crate) fn status(causes: &mut Causes, object: &Value) {
    let (path, status) = (Path::root("status"), &object["status"]);
    condition::conditions(causes, &path.field("conditions"), &status["conditions"]);
}

fn policy(causes: &mut Causes, path: &Path, policy: &Value) {
    match (policy["basic"].is_null(), policy["gang"].is_null()) {
        (false, false) => {
            causes.invalid(path, &"{basic, gang}".into(), "must specify exactly one of: `basic`, `gang`");
        }
        (true, true) => causes.invalid(path, &"".into(), "must specify one of: `basic`, `gang`"),
        (false, true) => {}
        (true, false) => {
            let (here, count) = (path.field("gang").field("minCount"), &policy["gang"]["minCount"]);
            match count.as_i64().unwrap_or(0) {
                0 => causes.required(&here, ""),
                1.. => {}
                _ => causes.invalid(&here, count, "must be greater than or equal to 1"),
            }
        }
    }
}

fn controller(causes: &mut Causes, path: &Path, reference: &Value) {
    if reference.is_null() {
        return;
    }
    let group = text(&reference["apiGroup"]);
    if !group.is_empty() {
        causes.format(&path.field("apiGroup"), group, format::dns1123_subdomain(group));
    }
    for field in ["kind", "name"] {
        required(causes, &path.field(field), text(&reference[field]), format::path_segment);
    }
}

fn required(causes: &mut Causes, path: &Path, value: &str, rule: fn(&str) -> Vec<String>) {
    if value.is_empty() {
        causes.required(path, "");
    } else {
        causes.format(path, value, rule(value));
    }
}

/// Checks that these fields of a spec are the same as before.
fn unchanged(causes: &mut Causes, fields: &[&str], new: &Value, old: &Value) {
    for &field in fields {
        if new[field] != old[field] {
            causes.invalid(&Path::root("spec").field(field), &Value::Null, "field is immutable");
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::tests::found;
    use super::*;

    fn group(spec: Value) -> Vec<String> {
        found(|causes| pod_group(causes, &json!({"spec": spec}), None))
    }

    #[test]
    fn a_group_has_one_policy() {
        assert!(group(json!({"schedulingPolicy": {"gang": {"minCount": 1}}})).is_empty());
        assert!(group(json!({"schedulingPolicy": {"basic": {}}, "podGroupTemplateRef": null})).is_empty());
        for (spec, expect) in [
            (json!({}), "spec.schedulingPolicy: Invalid value: \"\": must specify one of: `basic`, `gang`"),
            (
                json!({"schedulingPolicy": {"gang": {"minCount": 1}, "basic": {}}}),
                "spec.schedulingPolicy: Invalid value: \"{basic, gang}\": must specify exactly one of: `basic`, `gang`",
            ),
            (
                json!({"schedulingPolicy": {"gang": {"minCount": 0}}}),
                "spec.schedulingPolicy.gang.minCount: Required value",
            ),
            (
                json!({"schedulingPolicy": {"gang": {"minCount": -1}}}),
                "spec.schedulingPolicy.gang.minCount: Invalid value: -1: must be greater than or equal to 1",
            ),
            (
                json!({"schedulingPolicy": {"basic": {}}, "podGroupTemplateRef": {"workload": {"workloadName": "w"}}}),
                "spec.podGroupTemplateRef.workload.podGroupTemplateName: Required value",
            ),
            (
                json!({"schedulingPolicy": {"basic": {}}, "podGroupTemplateRef": {}}),
                "spec.podGroupTemplateRef: Invalid value: \"\": must specify one of: `workload`",
            ),
        ] {
            assert_eq!(group(spec), [expect]);
        }
    }

    #[test]
    fn specs_are_immutable() {
        let spec = |count: i32| json!({"spec": {"schedulingPolicy": {"gang": {"minCount": count}}}});
        let of = |new: &Value, old: &Value| found(|causes| pod_group(causes, new, Some(old)));
        assert!(of(&spec(1), &spec(1)).is_empty());
        let refused = ["spec.schedulingPolicy: Invalid value: null: field is immutable"];
        assert_eq!(of(&spec(2), &spec(1)), refused);
        let templates = |name: &str| json!({"spec": {"podGroupTemplates": [{"name": name}]}});
        let refused = ["spec.podGroupTemplates: Invalid value: null: field is immutable"];
        assert_eq!(found(|causes| workload(causes, &templates("a"), Some(&templates("b")))), refused);
    }

    #[test]
    fn a_workload_has_templates_with_different_names() {
        let of = |spec: Value| found(|causes| workload(causes, &json!({"spec": spec}), None));
        let template = |name: &str| json!({"name": name, "schedulingPolicy": {"basic": {}}});
        assert!(of(json!({"podGroupTemplates": [template("a"), template("b")]})).is_empty());
        assert_eq!(of(json!({})), ["spec.podGroupTemplates: Required value"]);
        let nine: Vec<_> = (0..9).map(|number| template(&format!("t{number}"))).collect();
        let refused = ["spec.podGroupTemplates: Too many: 9: must have at most 8 items"];
        assert_eq!(of(json!({"podGroupTemplates": nine})), refused);
        let twice = of(json!({"podGroupTemplates": [template("a"), template("a")]}));
        assert!(twice[0].starts_with("spec.podGroupTemplates[1]: Duplicate value"), "{twice:?}");
        let bad =
            json!({"podGroupTemplates": [template("a")], "controllerRef": {"kind": "Job", "name": "a/b"}});
        assert!(of(bad)[0].starts_with("spec.controllerRef.name: Invalid value"));
    }
}
