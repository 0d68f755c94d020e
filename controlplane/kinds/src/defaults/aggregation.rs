//! API services.

use serde_json::Value;

use super::{child, fill, present};

/// Sets the defaults of an APIService.
pub(crate) fn api_service(object: &mut Value) {
    let Some(spec) = child(object, "spec") else { return };
    if let Some(service) = present(spec, "service") {
        fill(service, "port", 443);
    }
}
