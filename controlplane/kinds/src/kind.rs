//! The table of kinds: one row per kind, with everything that the API server needs to serve it.

use serde_json::Value;

use crate::selector::Field;
use crate::validate::Causes;

mod rows;
#[cfg(test)]
mod tests;

pub use self::rows::KINDS;

/// A kind that the API server serves under a resource name.
pub struct Kind {
    /// API group, empty for the core group.
    pub group: &'static str,
    /// API version within the group.
    pub version: &'static str,
    /// Kind, as in `kind: Pod`.
    pub kind: &'static str,
    /// Resource name in paths: `pods`.
    pub plural: &'static str,
    /// Singular resource name: `pod`.
    pub singular: &'static str,
    /// Short names for clients: `po`.
    pub short_names: &'static [&'static str],
    /// Categories for clients: `all`.
    pub categories: &'static [&'static str],
    /// Whether the kind is namespaced.
    pub namespaced: bool,
    /// Verbs of the resource, without its subresources.
    pub verbs: &'static [&'static str],
    /// Subresources.
    pub subresources: &'static [Subresource],
    /// Name of the OpenAPI definition.
    pub schema: &'static str,
    /// Whether objects are stored in the store's memory tier only.
    pub volatile: bool,
    /// Time to live of an object in seconds; 0 has no limit.
    pub ttl_seconds: u32,
    /// Fields for field selectors, besides `metadata.name` and `metadata.namespace`.
    pub fields: &'static [Field],
    pub(crate) rules: Rules,
}

/// The functions that are specific to a kind.
pub(crate) struct Rules {
    /// Sets the defaults.
    pub(crate) defaults: fn(&mut Value),
    /// Validates a new object, or an update if the old object is given.
    pub(crate) validate: fn(&mut Causes, &Value, Option<&Value>),
    /// Format of the object's name.
    pub(crate) name: NameRule,
    /// Whether an update without a resourceVersion is allowed.
    pub(crate) unconditional_update: bool,
    /// How writes treat status and generation.
    pub(crate) writes: Writes,
    /// Table columns.
    pub(crate) columns: &'static [crate::table::Column],
    /// Table cells of one object.
    pub(crate) cells: fn(&Value, jiff::Timestamp) -> Vec<Value>,
}

/// How writes treat status and generation.
#[derive(Clone, Copy)]
pub(crate) struct Writes {
    /// Whether the kind has a status that only `/status` can change.
    pub(crate) status: bool,
    /// Whether `metadata.generation` increases when the spec changes.
    pub(crate) generation: bool,
    /// Prepares a new object, after its status was removed.
    pub(crate) create: fn(&mut Value),
}

/// Rule for `metadata.name`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NameRule {
    /// DNS label (RFC 1123).
    Dns1123Label,
    /// DNS subdomain (RFC 1123).
    Dns1123Subdomain,
    /// DNS label (RFC 1035), which starts with a letter.
    Dns1035Label,
    /// One segment of a URL path.
    PathSegment,
}

/// A subresource, such as `pods/{name}/log`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Subresource {
    /// Last path segment.
    pub name: &'static str,
    /// API group of its kind; empty for the core group.
    pub group: &'static str,
    /// API version of its kind.
    pub version: &'static str,
    /// Kind of its bodies.
    pub kind: &'static str,
    /// Verbs.
    pub verbs: &'static [&'static str],
}

/// The kind with this resource name.
pub fn by_resource(group: &str, version: &str, plural: &str) -> Option<&'static Kind> {
    KINDS.iter().find(|kind| kind.plural == plural && kind.group == group && kind.version == version)
}

/// The kind with this apiVersion and kind.
pub fn by_kind(api_version: &str, name: &str) -> Option<&'static Kind> {
    let (group, version) = api_version.split_once('/').unwrap_or(("", api_version));
    KINDS.iter().find(|kind| kind.kind == name && kind.group == group && kind.version == version)
}

/// Kinds that occur only as bodies of requests and responses.
const VIRTUAL: &[(&str, &str, &str)] = &[
    ("v1", "Binding", "io.k8s.api.core.v1.Binding"),
    ("v1", "Status", "io.k8s.apimachinery.pkg.apis.meta.v1.Status"),
    ("autoscaling/v1", "Scale", "io.k8s.api.autoscaling.v1.Scale"),
    ("policy/v1", "Eviction", "io.k8s.api.policy.v1.Eviction"),
    ("authentication.k8s.io/v1", "TokenRequest", "io.k8s.api.authentication.v1.TokenRequest"),
];

/// The OpenAPI definition of any kind of body, served or virtual (Scale, DeleteOptions, Binding, …).
pub fn schema_of(api_version: &str, name: &str) -> Option<&'static str> {
    if name == "DeleteOptions" {
        return Some("io.k8s.apimachinery.pkg.apis.meta.v1.DeleteOptions");
    }
    let found = VIRTUAL.iter().find(|(version, kind, _)| *version == api_version && *kind == name);
    found.map(|(_, _, schema)| *schema).or_else(|| by_kind(api_version, name).map(|kind| kind.schema))
}

/// The kinds of a group version, in the order of their resource names.
pub fn of_version(group: &str, version: &str) -> Vec<&'static Kind> {
    let mut kinds: Vec<&Kind> =
        KINDS.iter().filter(|kind| kind.group == group && kind.version == version).collect();
    kinds.sort_by_key(|kind| kind.plural);
    kinds
}

/// All group versions, the core group first.
pub fn group_versions() -> Vec<(&'static str, &'static str)> {
    let mut all: Vec<(&str, &str)> = KINDS.iter().map(|kind| (kind.group, kind.version)).collect();
    all.sort_unstable();
    all.dedup();
    all
}

// === impl Kind ===

impl Kind {
    /// `v1`, `apps/v1`.
    pub fn api_version(&self) -> String {
        match self.group {
            "" => self.version.to_owned(),
            group => format!("{group}/{}", self.version),
        }
    }

    /// The resource in error messages: `pods`, `deployments.apps`.
    pub fn qualified_resource(&self) -> String {
        match self.group {
            "" => self.plural.to_owned(),
            group => format!("{}.{group}", self.plural),
        }
    }

    /// The kind in error messages: `Pod`, `Deployment.apps`.
    pub fn qualified_kind(&self) -> String {
        match self.group {
            "" => self.kind.to_owned(),
            group => format!("{}.{group}", self.kind),
        }
    }

    /// `PodList`.
    pub fn list_kind(&self) -> String {
        format!("{}List", self.kind)
    }

    /// The subresource with this name.
    pub fn subresource(&self, name: &str) -> Option<&'static Subresource> {
        self.subresources.iter().find(|sub| sub.name == name)
    }

    /// Whether the resource itself supports the verb.
    pub fn has_verb(&self, verb: &str) -> bool {
        self.verbs.contains(&verb)
    }

    /// Whether the kind has a status that only its subresource changes.
    pub fn has_status(&self) -> bool {
        self.rules.writes.status
    }

    /// Whether an update without a resourceVersion is allowed.
    pub fn unconditional_update(&self) -> bool {
        self.rules.unconditional_update
    }

    /// Whether objects of the kind are stored. Reviews are not.
    pub fn stored(&self) -> bool {
        self.has_verb("get")
    }
}
