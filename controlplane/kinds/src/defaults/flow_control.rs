//! Flow schemas and priority levels. Source: `pkg/apis/flowcontrol/v1/defaults.go`.

use serde_json::{Map, Value};

use super::{child, fill, present};

/// Sets the defaults of a FlowSchema.
pub(crate) fn flow_schema(object: &mut Value) {
    if let Some(spec) = child(object, "spec") {
        fill_number(spec, "matchingPrecedence", 1000);
    }
}

/// Sets the defaults of a PriorityLevelConfiguration.
pub(crate) fn priority_level(object: &mut Value) {
    let Some(spec) = child(object, "spec") else { return };
    if let Some(exempt) = present(spec, "exempt") {
        fill(exempt, "nominalConcurrencyShares", 0);
        fill(exempt, "lendablePercent", 0);
    }
    let Some(limited) = present(spec, "limited") else { return };
    fill(limited, "nominalConcurrencyShares", 30);
    fill(limited, "lendablePercent", 0);
    let queuing = present(limited, "limitResponse").and_then(|response| present(response, "queuing"));
    if let Some(queuing) = queuing {
        fill_number(queuing, "handSize", 8);
        fill_number(queuing, "queues", 64);
        fill_number(queuing, "queueLengthLimit", 50);
    }
}

/// Sets a number that is absent or zero.
fn fill_number(map: &mut Map<String, Value>, name: &str, value: i64) {
    if map.get(name).and_then(Value::as_i64).unwrap_or(0) == 0 {
        map.insert(name.to_owned(), value.into());
    }
}
