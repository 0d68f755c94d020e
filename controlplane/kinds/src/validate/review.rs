//! Access reviews: questions about permissions. Source: `pkg/apis/authorization/validation/validation.go`.

use serde_json::Value;

use super::{Cause, Causes, Path, items, text};

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
    if !is_own && text(&spec["user"]).is_empty() && items(&spec["groups"]).next().is_none() {
        causes.invalid(&path.field("user"), &"".into(), "at least one of user or group must be specified");
    }
    if is_local {
        let asked = text(&resource["namespace"]);
        if !resource.is_null() && asked != namespace {
            let here = path.field("resourceAttributes").field("namespace");
            causes.invalid(&here, &asked.into(), "must match metadata.namespace");
        }
        if !url.is_null() {
            causes.invalid(&path.field("nonResourceAttributes"), url, "disallowed on this kind of request");
        }
    }
    causes.into_list()
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
}
