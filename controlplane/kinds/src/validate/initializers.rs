//! Initializers of objects and their configurations. Source: `ValidateInitializers` of `apimachinery/pkg/api/validation`
//! and `ValidateInitializerConfiguration` of `pkg/apis/admissionregistration`, v1.9 to v1.13.

use serde_json::Value;

use super::{Causes, Path, admission, items, text};
use crate::initializers::{failure, is_uninitialized};

/// Rules for `metadata.initializers` of every write.
pub(super) fn of_object(causes: &mut Causes, path: &Path, object: &Value) {
    if !is_uninitialized(object) {
        return;
    }
    for (index, initializer) in items(&object["metadata"]["initializers"]["pending"]) {
        let path = path.field("pending").index(index).field("name");
        admission::name(causes, &path, text(&initializer["name"]));
    }
    if let Some(failure) = failure(object) {
        result(causes, path, failure);
    }
}

/// Rules for changes of `metadata.initializers`.
pub(super) fn update(causes: &mut Causes, path: &Path, new: &Value, old: &Value) {
    if !is_uninitialized(new) {
        return;
    }
    if !is_uninitialized(old) {
        let detail = "field is immutable once initialization has completed";
        causes.invalid(path, &Value::Null, detail);
        return;
    }
    // A failure is permanent.
    if let Some(before) = failure(old)
        && failure(new) != Some(before)
    {
        let value = failure(new).unwrap_or(&Value::Null);
        causes.invalid(&path.field("result"), value, "field is immutable");
    }
}

/// The violation of a new object that is rejected already: it would be stored, and never be seen.
pub fn creation(object: &Value) -> Vec<super::Cause> {
    let mut causes = Causes::default();
    if failure(object).is_some() {
        let path = Path::root("metadata").field("initializers").field("result");
        causes.forbidden(&path, "must not be set on a new object");
    }
    causes.into_list()
}

/// The violations of a change of `metadata.initializers`, for admission.
pub fn change(new: &Value, old: &Value) -> Vec<super::Cause> {
    let mut causes = Causes::default();
    let path = Path::root("metadata").field("initializers");
    update(&mut causes, &path, new, old);
    if let (None, Some(failure)) = (failure(old), failure(new)) {
        result(&mut causes, &path, failure);
    }
    causes.into_list()
}

fn result(causes: &mut Causes, path: &Path, failure: &Value) {
    if failure["status"] != "Failure" {
        let status = text(&failure["status"]);
        causes.invalid(&path.field("result").field("status"), &status.into(), "must be 'Failure'");
    }
}

/// Rules of an InitializerConfiguration.
pub(crate) fn configuration(causes: &mut Causes, object: &Value) {
    for (index, initializer) in items(&object["initializers"]) {
        let path = Path::root("initializers").index(index);
        admission::name(causes, &path.field("name"), text(&initializer["name"]));
        for (index, one) in items(&initializer["rules"]) {
            rule(causes, &path.field("rules").index(index), one);
        }
    }
}

fn rule(causes: &mut Causes, path: &Path, rule: &Value) {
    for (field, what) in
        [("apiGroups", "API groups"), ("apiVersions", "API versions"), ("resources", "resources")]
    {
        let (list, path) = (&rule[field], path.field(field));
        let count = items(list).count();
        if count == 0 {
            causes.required(&path, "");
        }
        if count > 1 && items(list).any(|(_, one)| one == "*") {
            causes.invalid(&path, list, &format!("if '*' is present, must not specify other {what}"));
        }
        for (index, one) in items(list).filter(|_| field != "apiGroups") {
            if text(one).is_empty() {
                causes.required(&path.index(index), "");
            }
            if field == "resources" && text(one).contains('/') {
                causes.invalid(&path.index(index), one, "must not specify subresources");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn fields(list: Vec<super::super::Cause>) -> Vec<String> {
        list.into_iter().map(|cause| cause.field).collect()
    }

    fn object(initializers: Value) -> Value {
        json!({"metadata": {"initializers": initializers}})
    }

    #[test]
    fn names_and_results_of_objects_are_checked() {
        let check = |initializers: Value| {
            let mut causes = Causes::default();
            of_object(&mut causes, &Path::root("metadata").field("initializers"), &object(initializers));
            fields(causes.into_list())
        };
        assert!(check(json!({"pending": [{"name": "a.example.com"}]})).is_empty());
        assert_eq!(check(json!({"pending": [{"name": "short"}]})), ["metadata.initializers.pending[0].name"]);
        assert_eq!(check(json!({"result": {"status": "Success"}})), ["metadata.initializers.result.status"]);
        assert!(check(json!({"result": {"status": "Failure"}})).is_empty());
    }

    #[test]
    fn a_new_object_is_not_rejected_already() {
        let check = |initializers: Value| fields(creation(&object(initializers)));
        assert!(check(json!({"pending": [{"name": "a.example.com"}]})).is_empty());
        let rejected = json!({"pending": [{"name": "a.example.com"}], "result": {"status": "Failure"}});
        assert_eq!(check(rejected), ["metadata.initializers.result"]);
    }

    #[test]
    fn initialization_ends_once_and_a_failure_stays() {
        let (pending, failed) = (
            json!({"pending": [{"name": "a.example.com"}]}),
            json!({"result": {"status": "Failure", "code": 403}}),
        );
        let check = |new: &Value, old: &Value| fields(change(&object(new.clone()), &object(old.clone())));
        assert!(check(&pending, &pending).is_empty());
        assert!(check(&Value::Null, &pending).is_empty());
        assert!(check(&failed, &pending).is_empty());
        assert_eq!(check(&pending, &Value::Null), ["metadata.initializers"]);
        assert_eq!(check(&pending, &failed), ["metadata.initializers.result"]);
        assert_eq!(
            check(&json!({"result": {"status": "Success"}}), &pending),
            ["metadata.initializers.result.status"]
        );
    }

    #[test]
    fn rules_name_groups_versions_and_whole_resources() {
        let check = |rule: Value| {
            let mut causes = Causes::default();
            let initializer = json!({"name": "a.example.com", "rules": [rule]});
            configuration(&mut causes, &json!({"initializers": [initializer]}));
            fields(causes.into_list())
        };
        let place = |field: &str| format!("initializers[0].rules[0].{field}");
        assert!(
            check(json!({"apiGroups": ["", "apps"], "apiVersions": ["*"], "resources": ["*"]})).is_empty()
        );
        assert_eq!(check(json!({})), ["apiGroups", "apiVersions", "resources"].map(place));
        let rule = json!({"apiGroups": ["*", "apps"], "apiVersions": [""], "resources": ["pods/status"]});
        assert_eq!(check(rule), ["apiGroups", "apiVersions[0]", "resources[0]"].map(place));
        let mut causes = Causes::default();
        configuration(&mut causes, &json!({"initializers": [{"name": "short"}]}));
        assert_eq!(fields(causes.into_list()), ["initializers[0].name"]);
    }
}
