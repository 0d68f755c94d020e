//! The version of the API, for `/version` and the metrics.

use coracle_values::go::architecture;
use serde_json::{Value, json};

/// The Kubernetes minor version whose behaviour the server has. The schemas, the conformance suite, and the servers
/// that this server is compared with have this version.
const MINOR: &str = "36";
/// The oldest Kubernetes version whose servers may use the same store.
const MIN_COMPATIBILITY_MINOR: &str = "35";

/// The version of the API, with upstream's fields.
pub(crate) fn version() -> Value {
    json!({
        "major": "1", "minor": MINOR, "emulationMajor": "1", "emulationMinor": MINOR,
        "minCompatibilityMajor": "1", "minCompatibilityMinor": MIN_COMPATIBILITY_MINOR,
        "gitVersion": format!("v1.{MINOR}.0+coracle"),
        "gitCommit": "", "gitTreeState": "clean", "buildDate": "1970-01-01T00:00:00Z",
        "goVersion": "", "compiler": "rustc", "platform": format!("linux/{}", architecture()),
    })
}

/// The version of this server, for `/statusz`.
pub(crate) fn own() -> String {
    format!("1.{MINOR}.0+coracle")
}

/// The Kubernetes version of the API, for `/statusz`.
pub(crate) fn emulated() -> String {
    format!("1.{MINOR}")
}
