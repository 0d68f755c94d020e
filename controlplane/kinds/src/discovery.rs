//! Discovery documents, plain and aggregated, from the table of kinds.

use serde_json::{Value, json};

/// `/api`: the core group's versions; `server` is the `host:port` that clients should use.
pub fn api_versions(server: &str) -> Value {
    json!({"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": [{"clientCIDR": "0.0.0.0/0", "serverAddress": server}]})
}

/// `/apis`: every named group.
pub fn api_group_list() -> Value {
    json!({})
}

/// `/apis/<group>`.
pub fn api_group(_group: &str) -> Option<Value> {
    None
}

/// `/api/v1` (group empty) and `/apis/<group>/<version>`.
pub fn resource_list(_group: &str, _version: &str) -> Option<Value> {
    None
}

/// `/api` as `APIGroupDiscoveryList`.
pub fn aggregated_core() -> Value {
    json!({})
}

/// `/apis` as `APIGroupDiscoveryList`.
pub fn aggregated_groups() -> Value {
    json!({})
}
