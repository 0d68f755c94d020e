//! The `scale` subresource of workloads.

use serde_json::Value;

use crate::Kind;
use crate::validate::Cause;

/// The `autoscaling/v1` Scale of a workload.
pub fn read(kind: &Kind, workload: &Value) -> Value {
    let _ = (kind, workload);
    Value::Null
}

/// Writes a Scale's replicas (and resourceVersion, when given) into the workload.
pub fn apply(kind: &Kind, workload: &mut Value, scale: &Value) -> Result<(), Vec<Cause>> {
    let _ = (kind, workload, scale);
    Ok(())
}
