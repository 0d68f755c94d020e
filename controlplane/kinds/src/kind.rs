//! The table of kinds: one row per kind, with everything that the API server needs to serve it.

mod built_in;
pub(crate) mod definition;
mod metrics;
pub(crate) mod rows;
mod runtime_config;
#[cfg(test)]
mod tests;

pub use self::built_in::{built_in, by_kind, by_resource};
pub use self::definition::{Kind, RowConversion, StoredAs, Subresource};
pub use self::rows::KINDS;
pub use self::runtime_config::{RuntimeConfig, RuntimeConfigError};
pub use crate::resource::NameRule;

/// Kinds that occur only as bodies of requests and responses.
const VIRTUAL: &[(&str, &str, &str)] = &[
    ("v1", "Status", "io.k8s.apimachinery.pkg.apis.meta.v1.Status"),
    ("autoscaling/v1", "Scale", "io.k8s.api.autoscaling.v1.Scale"),
    ("policy/v1", "Eviction", "io.k8s.api.policy.v1.Eviction"),
    ("authentication.k8s.io/v1", "TokenRequest", "io.k8s.api.authentication.v1.TokenRequest"),
];

/// The name of the OpenAPI definition of a kind in a request or a response body. Such a kind is served, or is a kind
/// such as Scale or DeleteOptions.
pub fn schema_of(api_version: &str, name: &str) -> Option<&'static str> {
    if name == "DeleteOptions" {
        return Some("io.k8s.apimachinery.pkg.apis.meta.v1.DeleteOptions");
    }
    let found = VIRTUAL.iter().find(|(version, kind, _)| *version == api_version && *kind == name);
    found
        .map(|(_, _, schema)| *schema)
        .or_else(|| by_kind(api_version, name).map(|kind| kind.schema.as_ref()))
}
