//! Access reviews: questions about permissions. Source: `pkg/apis/authorization/validation/validation.go`.

use serde_json::Value;

use super::selector::of_review;
use super::{Cause, Causes, Path, entries, items, text};

/// The violations of a review.
pub(super) fn causes(kind: &str, review: &Value, namespace: &str) -> Vec<Cause> {
    let mut causes = Causes::default();
    let is_own = kind == "SelfSubjectAccessReview";
    let is_local = kind == "LocalSubjectAccessReview";
    if !(is_own || is_local || kind == "SubjectAccessReview") {
        return Vec::new();
    }
    let (path, spec) = (Path::root("spec"), &review["spec"]);
    let (resource, url) = (&spec["resourceAttributes"], &spec["nonResourceAttributes"]);
    if !resource.is_null() && !url.is_null() {
        let detail = "cannot be specified in combination with resourceAttributes";
        causes.invalid(&path.field("nonResourceAttributes"), url, detail);
    }
    if resource.is_null() && url.is_null() {
        let detail = "exactly one of nonResourceAttributes or resourceAttributes must be specified";
        causes.invalid(&path.field("resourceAttributes"), &Value::Null, detail);
    }
    of_review(&mut causes, &path.field("resourceAttributes"), resource);
    metadata(&mut causes, &review["metadata"], is_local);
    if !is_own && text(&spec["user"]).is_empty() && items(&spec["groups"]).next().is_none() {
        causes.invalid(&path.field("user"), &"".into(), "at least one of user or group must be specified");
    }
    if is_local {
        let requested = text(&resource["namespace"]);
        if !resource.is_null() && requested != namespace {
            let here = path.field("resourceAttributes").field("namespace");
            causes.invalid(&here, &requested.into(), "must match metadata.namespace");
        }
        if !url.is_null() {
            causes.invalid(&path.field("nonResourceAttributes"), url, "disallowed on this kind of request");
        }
    }
    causes.into_list()
}

/// Checks that a review has no metadata. Only a local review may have a namespace. Empty values count as absent.
fn metadata(causes: &mut Causes, metadata: &Value, is_local: bool) {
    let is_empty = |value: &Value| match value {
        Value::Null => true,
        Value::String(text) => text.is_empty(),
        Value::Array(list) => list.is_empty(),
        Value::Object(map) => map.is_empty(),
        other => *other == 0,
    };
    let is_free = |name: &str| name == "managedFields" || (is_local && name == "namespace");
    if entries(metadata).any(|(name, value)| !is_free(name) && !is_empty(value)) {
        let detail = if is_local { "must be empty except for namespace" } else { "must be empty" };
        causes.invalid(&Path::root("metadata"), metadata, detail);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_review_has_exactly_one_kind_of_attributes() {
        let fields = |kind: &str, spec: Value| -> Vec<String> {
            let found = causes(kind, &json!({"spec": spec}), "n");
            found.into_iter().map(|cause| cause.field).collect()
        };
        let (pod, url) = (json!({"resource": "pods"}), json!({"path": "/"}));
        let own = "SelfSubjectAccessReview";
        assert_eq!(fields(own, json!({})), ["spec.resourceAttributes"]);
        assert_eq!(fields(own, json!({"resourceAttributes": pod})), Vec::<String>::new());
        let both = json!({"resourceAttributes": pod, "nonResourceAttributes": url});
        assert_eq!(fields("SubjectAccessReview", both), ["spec.nonResourceAttributes", "spec.user"]);
        let local = |namespace: &str| json!({"user": "u", "resourceAttributes": {"resource": "pods", "namespace": namespace}});
        assert_eq!(fields("LocalSubjectAccessReview", local("n")), Vec::<String>::new());
        assert_eq!(fields("LocalSubjectAccessReview", local("other")), ["spec.resourceAttributes.namespace"]);
        let url = json!({"groups": ["g"], "nonResourceAttributes": url});
        assert_eq!(fields("LocalSubjectAccessReview", url), ["spec.nonResourceAttributes"]);
        assert_eq!(fields("TokenReview", json!({})), Vec::<String>::new());
    }

    #[test]
    fn only_a_local_review_has_a_namespace() {
        let fields = |kind: &str, metadata: Value| -> Vec<String> {
            let review = json!({"metadata": metadata, "spec": {"user": "u", "resourceAttributes": {"namespace": "n"}}});
            causes(kind, &review, "n").into_iter().map(|cause| cause.field).collect()
        };
        let local = "LocalSubjectAccessReview";
        for (metadata, is_valid) in [
            (json!({}), true),
            (json!({"labels": {}, "name": "", "generation": 0, "managedFields": [{}]}), true),
            (json!({"namespace": "n"}), false),
            (json!({"labels": {"a": "b"}}), false),
        ] {
            assert_eq!(fields("SubjectAccessReview", metadata.clone()).is_empty(), is_valid, "{metadata}");
        }
        assert_eq!(fields(local, json!({"namespace": "n"})), Vec::<String>::new());
        assert_eq!(fields(local, json!({"namespace": "n", "name": "a"})), ["metadata"]);
    }

    #[test]
    fn a_selector_of_a_review_is_raw_or_has_requirements() {
        let fields = |name: &str, selector: Value| -> Vec<String> {
            let review = json!({"spec": {"resourceAttributes": {name: selector}}});
            let found = causes("SelfSubjectAccessReview", &review, "");
            found.into_iter().map(|cause| cause.field).collect()
        };
        let path = |end: &str| format!("spec.resourceAttributes.{end}");
        let valid = json!({"key": "a", "operator": "In", "values": ["b"]});
        let later = json!({"key": "a", "operator": "Later"});
        for name in ["fieldSelector", "labelSelector"] {
            assert_eq!(fields(name, json!({"requirements": [valid, later]})), Vec::<String>::new());
            assert_eq!(fields(name, json!({})), [path(&format!("{name}.requirements"))]);
            let both = json!({"rawSelector": "a=b", "requirements": [valid]});
            assert_eq!(fields(name, both), [path(&format!("{name}.rawSelector"))]);
            let empty = json!({"requirements": [{"key": "a", "operator": "In"}]});
            assert_eq!(fields(name, empty), [path(&format!("{name}.requirements[0].values"))]);
        }
        let bad = |key: &str| json!({"requirements": [{"key": key, "operator": "Exists"}]});
        assert_eq!(fields("fieldSelector", bad("")), [path("fieldSelector.requirements[0].key")]);
        assert_eq!(fields("fieldSelector", bad("a b")), Vec::<String>::new());
        assert_eq!(fields("labelSelector", bad("a b")), [path("labelSelector.requirements[0].key")]);
    }
}
