//! The status of a custom resource definition during a migration: the condition `StorageMigrating`, and the versions in
//! which objects may be stored. No I/O. Source: `migrationrunner.go`.

use jiff::Timestamp;
use serde_json::{Value, json};

use super::plan::time;

const CONDITION: &str = "StorageMigrating";

/// The apply configuration of the status at the start of a migration.
pub(super) fn begin(definition: &Value, migration: &str, now: Timestamp) -> Value {
    let message = format!("Migration {migration} is running");
    configuration(definition, "True", "MigrationRunning", &message, now)
}

/// The apply configuration of the status at the end. After a success, `storedVersions` has only the version in which
/// objects are stored now, unless the definition has changed meanwhile.
pub(super) fn finish(definition: &Value, succeeded: bool, now: Timestamp) -> Value {
    let mut conditions = definition["status"]["conditions"].as_array().into_iter().flatten();
    let began = conditions.find(|condition| condition["type"] == CONDITION);
    let generation = &definition["metadata"]["generation"];
    let is_same = began.is_some_and(|condition| condition["observedGeneration"] == *generation);
    let (reason, message) = match (succeeded, is_same) {
        (true, true) => {
            ("MigrationSucceeded", "The migration has succeeded and the stored versions have been updated")
        }
        (true, false) => (
            "MigrationSucceeded",
            "The migration has succeeded but the stored versions have not been updated due to a generation mismatch",
        ),
        (false, _) => ("MigrationFailed", "The migration has failed"),
    };
    let mut configuration = configuration(definition, "False", reason, message, now);
    let mut versions = definition["spec"]["versions"].as_array().into_iter().flatten();
    let stored = versions.find(|version| version["storage"] == true);
    if let (true, true, Some(stored)) = (succeeded, is_same, stored) {
        configuration["status"]["storedVersions"] = json!([stored["name"]]);
    }
    configuration
}

fn configuration(definition: &Value, status: &str, reason: &str, message: &str, now: Timestamp) -> Value {
    let metadata = &definition["metadata"];
    let condition = json!({
        "type": CONDITION,
        "status": status,
        "reason": reason,
        "message": message,
        "lastTransitionTime": time(now),
        "observedGeneration": metadata["generation"],
    });
    json!({
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        // The definition must not change between the read and the write.
        "metadata": {"name": metadata["name"], "resourceVersion": metadata["resourceVersion"]},
        // Each configuration contains the list, because an apply removes owned fields that it omits.
        "status": {"conditions": [condition], "storedVersions": definition["status"]["storedVersions"]},
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn definition(observed: i64) -> Value {
        let condition = json!({"type": CONDITION, "status": "True", "observedGeneration": observed});
        json!({
            "metadata": {"name": "w.e.com", "resourceVersion": "8", "generation": 3},
            "spec": {"versions": [{"name": "v1", "storage": false}, {"name": "v2", "storage": true}]},
            "status": {"conditions": [condition], "storedVersions": ["v1", "v2"]},
        })
    }

    #[test]
    fn earlier_stored_versions_are_removed_after_a_success_without_a_change() {
        let now = Timestamp::from_second(0).unwrap();
        let began = begin(&definition(1), "m", now);
        let condition = &began["status"]["conditions"][0];
        assert_eq!((&condition["status"], &condition["observedGeneration"]), (&json!("True"), &json!(3)));
        assert_eq!(began["metadata"], json!({"name": "w.e.com", "resourceVersion": "8"}));
        assert_eq!(began["status"]["storedVersions"], json!(["v1", "v2"]));
        let of = |observed, succeeded| {
            let configuration = finish(&definition(observed), succeeded, now);
            let condition = configuration["status"]["conditions"][0].clone();
            (condition["reason"].clone(), configuration["status"]["storedVersions"].clone())
        };
        assert_eq!(of(3, true), (json!("MigrationSucceeded"), json!(["v2"])));
        assert_eq!(of(2, true), (json!("MigrationSucceeded"), json!(["v1", "v2"])));
        assert_eq!(of(3, false), (json!("MigrationFailed"), json!(["v1", "v2"])));
    }
}
