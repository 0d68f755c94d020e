//! Decoding of metadata without `managedFields`.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference, Time};
use serde::{Deserialize, Deserializer};

/// The fields of [`ObjectMeta`] except `managedFields`. A decoder skips fields that a type does not have.
#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct ReadMetadata {
    annotations: Option<BTreeMap<String, String>>,
    creation_timestamp: Option<Time>,
    deletion_grace_period_seconds: Option<i64>,
    deletion_timestamp: Option<Time>,
    finalizers: Option<Vec<String>>,
    generate_name: Option<String>,
    generation: Option<i64>,
    labels: Option<BTreeMap<String, String>>,
    name: Option<String>,
    namespace: Option<String>,
    owner_references: Option<Vec<OwnerReference>>,
    resource_version: Option<String>,
    self_link: Option<String>,
    uid: Option<String>,
}

/// Decodes metadata without `managedFields`, for `#[serde(deserialize_with)]`.
///
/// The managed fields are a third of the text of a pod. In decoded form they contain more maps than the rest of the
/// pod.
///
/// # Errors
/// A field has the wrong type.
pub fn without_managed_fields<'de, D: Deserializer<'de>>(deserializer: D) -> Result<ObjectMeta, D::Error> {
    let read = ReadMetadata::deserialize(deserializer)?;
    Ok(ObjectMeta {
        annotations: read.annotations,
        creation_timestamp: read.creation_timestamp,
        deletion_grace_period_seconds: read.deletion_grace_period_seconds,
        deletion_timestamp: read.deletion_timestamp,
        finalizers: read.finalizers,
        generate_name: read.generate_name,
        generation: read.generation,
        labels: read.labels,
        managed_fields: None,
        name: read.name,
        namespace: read.namespace,
        owner_references: read.owner_references,
        resource_version: read.resource_version,
        self_link: read.self_link,
        uid: read.uid,
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn all_fields_but_managed_fields_are_read() {
        let mut metadata = json!({
            "annotations": {"a": "1"}, "creationTimestamp": "2026-11-27T10:00:00Z", "deletionGracePeriodSeconds": 30,
            "deletionTimestamp": "2026-11-27T11:00:00Z", "finalizers": ["f"], "generateName": "g-", "generation": 2,
            "labels": {"l": "2"}, "name": "g-1", "namespace": "n", "resourceVersion": "7", "selfLink": "s", "uid": "u",
            "ownerReferences": [{"apiVersion": "v1", "kind": "K", "name": "o", "uid": "w", "controller": true}],
        });
        let whole: ObjectMeta = serde_json::from_value(metadata.clone()).unwrap();
        // The test sets all 14 fields. An unset field would be equal even if it was not read.
        let count = serde_json::to_value(&whole).unwrap().as_object().unwrap().len();
        assert_eq!(count, 14);
        // The entry is invalid: decoding would fail, so success shows that it is skipped.
        metadata["managedFields"] = json!([{"manager": 1, "fieldsV1": {"f:metadata": {}}}]);
        assert_eq!(without_managed_fields(metadata).unwrap(), whole);
        assert_eq!(without_managed_fields(json!({"labels": null})).unwrap(), ObjectMeta::default());
        assert!(without_managed_fields(json!({"labels": ["wrong"]})).is_err());
    }
}
