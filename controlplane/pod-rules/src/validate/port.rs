//! Numbers and names of ports.

use serde_json::Value;

use super::{Causes, Path, format};

/// Checks the number or name of a port.
pub fn target(causes: &mut Causes, path: &Path, value: &Value) {
    match value {
        Value::String(name) => causes.format(path, name, format::port_name(name)),
        Value::Null => {}
        _ => number(causes, path, value),
    }
}

/// Checks the number of a port. An absent number is 0.
pub fn number(causes: &mut Causes, path: &Path, value: &Value) {
    for problem in format::port_number(value.as_i64().unwrap_or(0)) {
        causes.invalid(path, &value.as_i64().unwrap_or(0).into(), &problem);
    }
}
