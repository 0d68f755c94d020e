//! Initializers of objects. Source: `ValidateInitializers` of `apimachinery/pkg/api/validation`, v1.9 to v1.13.

use serde_json::Value;

use super::{Cause, Causes, Path, fully_qualified_name, items, text};
use crate::initialization::{failure, is_uninitialized};

/// Rules for `metadata.initializers` of every write.
pub(super) fn of_object(causes: &mut Causes, path: &Path, object: &Value) {
    if !is_uninitialized(object) {
        return;
    }
    for (index, initializer) in items(&object["metadata"]["initializers"]["pending"]) {
        let path = path.field("pending").index(index).field("name");
        fully_qualified_name::check(causes, &path, text(&initializer["name"]));
    }
    if let Some(failure) = failure(object) {
        result(causes, path, failure);
    }
}

/// Rules for changes of `metadata.initializers`.
pub fn update(causes: &mut Causes, path: &Path, new: &Value, old: &Value) {
    if !is_uninitialized(new) {
        return;
    }
    if !is_uninitialized(old) {
        let detail = "field is immutable once initialization has completed";
        causes.invalid(path, &Value::Null, detail);
        return;
    }
    // A failure cannot be changed or removed.
    if let Some(before) = failure(old)
        && failure(new) != Some(before)
    {
        let value = failure(new).unwrap_or(&Value::Null);
        causes.invalid(&path.field("result"), value, "field is immutable");
    }
}

/// The violation of a new object whose initialization has already failed. Such an object would be stored, but would
/// never be visible.
pub fn creation(object: &Value) -> Vec<Cause> {
    let mut causes = Causes::default();
    if failure(object).is_some() {
        let path = Path::root("metadata").field("initializers").field("result");
        causes.forbidden(&path, "must not be set on a new object");
    }
    causes.into_list()
}

/// The violations of a change of `metadata.initializers`, for admission.
pub fn change(new: &Value, old: &Value) -> Vec<Cause> {
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

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn fields(list: Vec<Cause>) -> Vec<String> {
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
    fn a_new_object_must_not_have_a_failed_initialization() {
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
}
