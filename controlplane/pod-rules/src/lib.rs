//! The rules of pods: decoding, defaults and validation. They are used for manifests of static pods, and by the table
//! of kinds.
//!
//! Start at [`decode`], [`apply_defaults`] and [`violations`]. The parts that pods share with other kinds are public
//! modules below [`defaults`] and [`validate`]: metadata, selectors, volumes, scheduling. Invariants: no I/O, no clock,
//! no panic on any input, no rules of other kinds, no CEL. A node without a control plane contains this crate, but not
//! the crates for other kinds.

pub mod cause;
pub mod defaults;
pub mod initialization;
mod pod_level;
pub mod qos;
pub mod validate;

use coracle_schemas::{self as schema, FieldValidation, Parsed};
use serde_json::Value;

pub use cause::Cause;
pub use coracle_schemas::SchemaError;

/// Name of the OpenAPI definition of pods.
pub const DEFINITION: &str = "io.k8s.api.core.v1.Pod";

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
    validate::create(pod)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn manifest(metadata: &Value, spec: &Value) -> Value {
        json!({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec, "unknown": 1})
    }

    #[test]
    fn a_manifest_becomes_a_pod_with_defaults() {
        let good = json!({"containers": [{"name": "c", "image": "i"}]});
        let mut pod = decode(manifest(&json!({"name": "p", "namespace": "n"}), &good)).unwrap();
        assert!(pod.get("unknown").is_none(), "{pod}");
        apply_defaults(&mut pod);
        assert_eq!(pod["spec"]["restartPolicy"], "Always");
        assert!(violations(&pod).is_empty(), "{pod}");
        for (metadata, spec, field) in [
            (json!({"name": "P_", "namespace": "n"}), &good, "metadata.name"),
            (json!({"name": "p"}), &good, "metadata.namespace"),
            (json!({"name": "p", "namespace": "n"}), &json!({"containers": []}), "spec.containers"),
        ] {
            let mut pod = decode(manifest(&metadata, spec)).unwrap();
            apply_defaults(&mut pod);
            let fields: Vec<String> = violations(&pod).into_iter().map(|cause| cause.field).collect();
            assert_eq!(fields, [field]);
        }
        let wrong = manifest(&json!({"name": "p"}), &json!({"containers": 1}));
        assert!(decode(wrong).is_err());
    }
}
