//! The allocatable processors of a node.

use std::collections::BTreeMap;

use coracle_values::quantity::millis_of;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use serde::{Deserialize, Deserializer};
use serde_json::Value;

/// Reads a node's allocatable resources. Returns its processors in thousandths. 0 if the node reports no processors.
pub(super) fn processors<'de, D: Deserializer<'de>>(deserializer: D) -> Result<i64, D::Error> {
    let all = Option::<BTreeMap<String, Value>>::deserialize(deserializer)?.unwrap_or_default();
    let text = match all.get("cpu") {
        Some(Value::String(text)) => text.clone(),
        Some(number) => number.to_string(),
        None => return Ok(0),
    };
    Ok(millis_of(&Quantity(text)))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn processors_are_read_in_thousandths() {
        let of = |allocatable: Value| processors(allocatable).unwrap();
        assert_eq!(of(json!({"cpu": "1500m", "memory": "1Gi"})), 1500);
        assert_eq!(of(json!({"cpu": 2})), 2000);
        assert_eq!([of(json!(null)), of(json!({})), of(json!({"cpu": "x"}))], [0; 3]);
    }
}
