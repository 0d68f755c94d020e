//! The rules for new pods without the table of kinds, for manifests of static pods.
//!
//! The table refers to the rules of all kinds and to CEL. A node needs only the rules of pods. The linker omits all
//! other rules while the node uses only this module.

use serde_json::Value;

pub use crate::cause::Cause;
pub use crate::schema::SchemaError;
use crate::schema::{self, FieldValidation, Parsed};
use crate::{defaults, validate};

/// Name of the OpenAPI definition of pods.
const DEFINITION: &str = "io.k8s.api.core.v1.Pod";

/// Checks the types of a pod, removes unknown fields and makes the pod canonical.
///
/// # Errors
/// A value has the wrong type.
pub fn decode(value: Value) -> Result<Value, SchemaError> {
    let parsed = Parsed { value, duplicates: Vec::new(), keys: Vec::new() };
    let (pod, _warnings) = schema::decode(DEFINITION, parsed, FieldValidation::Ignore)?;
    Ok(pod)
}

/// Sets the defaults of a pod. Idempotent.
pub fn apply_defaults(pod: &mut Value) {
    defaults::pod::pod(pod);
}

/// Validates a new pod, after defaulting.
pub fn violations(pod: &Value) -> Vec<Cause> {
    validate::new_pod(pod)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::kind;

    fn manifest(metadata: &Value, spec: &Value) -> Value {
        json!({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec, "unknown": 1})
    }

    #[test]
    fn pods_have_the_results_of_the_table_of_kinds() {
        let kind = kind::by_kind("v1", "Pod").unwrap();
        assert_eq!(kind::schema_of("v1", "Pod"), Some(DEFINITION));
        let good = json!({"containers": [{"name": "c", "image": "i"}]});
        let cases = [
            (json!({"name": "p", "namespace": "n"}), good.clone(), true),
            (json!({"name": "P_", "namespace": "n"}), good.clone(), false),
            (json!({"name": "p", "namespace": "n", "finalizers": ["plain"]}), good.clone(), false),
            (json!({"name": "p"}), good, false),
            (json!({"name": "p", "namespace": "n"}), json!({"containers": []}), false),
        ];
        for (metadata, spec, is_valid) in cases {
            let mut pod = decode(manifest(&metadata, &spec)).unwrap();
            assert!(pod.get("unknown").is_none(), "{pod}");
            let mut by_table = pod.clone();
            apply_defaults(&mut pod);
            defaults::apply(kind, &mut by_table);
            assert_eq!(pod, by_table);
            assert_eq!(violations(&pod), validate::create(kind, &pod));
            assert_eq!(violations(&pod).is_empty(), is_valid, "{pod}");
        }
        let wrong = manifest(&json!({"name": "p"}), &json!({"containers": 1}));
        assert!(decode(wrong).is_err());
    }
}
