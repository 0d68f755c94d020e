//! Roles and their bindings.

use serde_json::Value;

use super::{Causes, Path, format, items, selector, text};

const GROUP: &str = "rbac.authorization.k8s.io";

pub(crate) fn role(causes: &mut Causes, object: &Value, _old: Option<&Value>) {
    rules(causes, &object["rules"], true);
}

pub(crate) fn cluster_role(causes: &mut Causes, object: &Value, _old: Option<&Value>) {
    rules(causes, &object["rules"], false);
    let aggregation = &object["aggregationRule"];
    if aggregation.is_null() {
        return;
    }
    let path = Path::root("aggregationRule").field("clusterRoleSelectors");
    let selectors = &aggregation["clusterRoleSelectors"];
    if items(selectors).next().is_none() {
        causes.required(&path, "at least one clusterRoleSelector required if aggregationRule is non-nil");
    }
    for (index, selector) in items(selectors) {
        let here = path.index(index);
        if !selector::is_label_selector(causes, &here, selector) {
            // Upstream shows the parsed selector, which is null after an error.
            causes.invalid(&here, &Value::Null, "invalid label selector.");
        }
    }
}

pub(crate) fn binding(causes: &mut Causes, object: &Value, old: Option<&Value>) {
    bound(causes, object, old, true);
}

pub(crate) fn cluster_binding(causes: &mut Causes, object: &Value, old: Option<&Value>) {
    bound(causes, object, old, false);
}

fn rules(causes: &mut Causes, list: &Value, namespaced: bool) {
    for (index, rule) in items(list) {
        let path = Path::root("rules").index(index);
        let has = |field: &str| items(&rule[field]).next().is_some();
        if !has("verbs") {
            causes.required(&path.field("verbs"), "verbs must contain at least one value");
        }
        if has("nonResourceURLs") {
            let (here, urls) = (path.field("nonResourceURLs"), &rule["nonResourceURLs"]);
            if namespaced {
                causes.invalid(&here, urls, "namespaced rules cannot apply to non-resource URLs");
            }
            if has("apiGroups") || has("resources") || has("resourceNames") {
                let detail = "rules cannot apply to both regular resources and non-resource URLs";
                causes.invalid(&here, urls, detail);
            }
            continue;
        }
        if !has("apiGroups") {
            causes.required(&path.field("apiGroups"), "resource rules must supply at least one api group");
        }
        if !has("resources") {
            causes.required(&path.field("resources"), "resource rules must supply at least one resource");
        }
    }
}

fn bound(causes: &mut Causes, object: &Value, old: Option<&Value>, namespaced: bool) {
    let kinds: &[&str] = if namespaced { &["Role", "ClusterRole"] } else { &["ClusterRole"] };
    let (path, role) = (Path::root("roleRef"), &object["roleRef"]);
    if role["apiGroup"] != GROUP {
        causes.unsupported(&path.field("apiGroup"), &role["apiGroup"], &[GROUP]);
    }
    if !kinds.contains(&text(&role["kind"])) {
        causes.unsupported(&path.field("kind"), &role["kind"], kinds);
    }
    let name = text(&role["name"]);
    if name.is_empty() {
        causes.required(&path.field("name"), "");
    } else {
        causes.format(&path.field("name"), name, format::path_segment(name));
    }
    for (index, one) in items(&object["subjects"]) {
        subject(causes, &Path::root("subjects").index(index), one, namespaced);
    }
    if old.is_some_and(|old| old["roleRef"] != *role) {
        causes.invalid(&path, role, "cannot change roleRef");
    }
}

fn subject(causes: &mut Causes, path: &Path, subject: &Value, namespaced: bool) {
    let name = text(&subject["name"]);
    if name.is_empty() {
        causes.required(&path.field("name"), "");
    }
    let group = &subject["apiGroup"];
    match text(&subject["kind"]) {
        "ServiceAccount" => {
            if !name.is_empty() {
                causes.format(&path.field("name"), name, format::dns1123_subdomain(name));
            }
            if !text(group).is_empty() {
                causes.unsupported(&path.field("apiGroup"), group, &[""]);
            }
            // In a RoleBinding an absent namespace means the binding's namespace.
            if !namespaced && text(&subject["namespace"]).is_empty() {
                causes.required(&path.field("namespace"), "");
            }
        }
        "User" | "Group" if *group == GROUP => {}
        "User" | "Group" => causes.unsupported(&path.field("apiGroup"), group, &[GROUP]),
        _ => causes.unsupported(&path.field("kind"), &subject["kind"], &["ServiceAccount", "User", "Group"]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    type Validate = fn(&mut Causes, &Value, Option<&Value>);

    fn said(validate: Validate, object: &Value, old: Option<&Value>) -> Vec<String> {
        let mut causes = Causes::default();
        validate(&mut causes, object, old);
        causes.into_list().into_iter().map(|cause| cause.field).collect()
    }

    #[test]
    fn a_rule_is_about_resources_or_about_urls() {
        let of = |validate: Validate, rule: Value| said(validate, &json!({"rules": [rule]}), None);
        let resources = json!({"verbs": ["get"], "apiGroups": [""], "resources": ["pods"]});
        let urls = json!({"verbs": ["get"], "nonResourceURLs": ["/healthz"]});
        assert!(of(role, resources.clone()).is_empty() && of(cluster_role, urls.clone()).is_empty());
        assert_eq!(of(role, urls.clone()), ["rules[0].nonResourceURLs"]);
        assert_eq!(of(role, json!({})), ["rules[0].verbs", "rules[0].apiGroups", "rules[0].resources"]);
        let mut both = urls;
        both["resources"] = json!(["pods"]);
        assert_eq!(of(cluster_role, both), ["rules[0].nonResourceURLs"]);
    }

    #[test]
    fn an_aggregation_selects_roles() {
        let of = |selectors: Value| {
            let aggregation = json!({"clusterRoleSelectors": selectors});
            said(cluster_role, &json!({"aggregationRule": aggregation}), None)
        };
        assert!(of(json!([{"matchLabels": {"a": "b"}}])).is_empty());
        assert_eq!(of(json!([])), ["aggregationRule.clusterRoleSelectors"]);
        let wrong = of(json!([{"matchLabels": {"a b": "c"}}]));
        assert!(wrong[0].starts_with("aggregationRule.clusterRoleSelectors[0]"), "{wrong:?}");
        let mut causes = Causes::default();
        let rule = json!({"clusterRoleSelectors": [{"matchLabels": {"a b": "c"}}]});
        cluster_role(&mut causes, &json!({"aggregationRule": rule}), None);
        let last = causes.into_list().pop().unwrap();
        assert_eq!(last.message, "Invalid value: null: invalid label selector.");
    }

    #[test]
    fn a_binding_names_a_role_and_subjects() {
        let role = json!({"apiGroup": GROUP, "kind": "Role", "name": "r"});
        let user = json!({"apiGroup": GROUP, "kind": "User", "name": "u"});
        let account = json!({"kind": "ServiceAccount", "name": "a", "namespace": "n"});
        let good = json!({"roleRef": role, "subjects": [user, account]});
        assert!(said(binding, &good, None).is_empty());
        assert_eq!(said(cluster_binding, &good, None), ["roleRef.kind"]);
        let mut other = good.clone();
        other["roleRef"]["name"] = "s".into();
        assert_eq!(said(binding, &other, Some(&good)), ["roleRef"]);
        for (pointer, value, field) in [
            ("/roleRef/apiGroup", json!("x"), "roleRef.apiGroup"),
            ("/roleRef/name", json!(""), "roleRef.name"),
            ("/roleRef/name", json!("a/b"), "roleRef.name"),
            ("/subjects/0/kind", json!("Pod"), "subjects[0].kind"),
            ("/subjects/0/apiGroup", json!("x"), "subjects[0].apiGroup"),
            ("/subjects/0/name", json!(""), "subjects[0].name"),
        ] {
            let mut wrong = good.clone();
            *wrong.pointer_mut(pointer).unwrap() = value;
            assert_eq!(said(binding, &wrong, None), [field]);
        }
        let mut local = good.clone();
        local["subjects"][1]["namespace"] = "".into();
        assert!(said(binding, &local, None).is_empty());
        local["roleRef"]["kind"] = "ClusterRole".into();
        assert_eq!(said(cluster_binding, &local, None), ["subjects[1].namespace"]);
    }
}
