//! The table of kinds: one row per kind, naming everything that the API does for it.

use serde_json::Value;

use crate::selector::Field;
use crate::validate::Causes;

mod rows;
#[cfg(test)]
mod tests;

pub use self::rows::KINDS;

/// What the API serves under one resource name.
pub struct Kind {
    /// API group, empty for the core group.
    pub group: &'static str,
    /// API version within the group.
    pub version: &'static str,
    /// Kind, as in `kind: Pod`.
    pub kind: &'static str,
    /// Resource name in paths, as in `pods`.
    pub plural: &'static str,
    /// Resource name for one object, as in `pod`.
    pub singular: &'static str,
    /// Abbreviations that clients accept.
    pub short_names: &'static [&'static str],
    /// Groups of resources that clients can name at once, as in `all`.
    pub categories: &'static [&'static str],
    /// Whether objects live in a namespace.
    pub namespaced: bool,
    /// Verbs served on the resource itself.
    pub verbs: &'static [&'static str],
    /// What is served under an object's path.
    pub subresources: &'static [Subresource],
    /// Name of the OpenAPI definition.
    pub schema: &'static str,
    /// Whether objects are kept in the memory tier of the store only.
    pub volatile: bool,
    /// How long an object lives without being deleted, in seconds; 0 means for ever.
    pub ttl_seconds: u32,
    /// Field selectors beyond `metadata.name` and `metadata.namespace`.
    pub fields: &'static [Field],
    pub(crate) rules: Rules,
}

/// What a kind does beyond the generic machinery.
pub(crate) struct Rules {
    /// Fills absent fields.
    pub(crate) defaults: fn(&mut Value),
    /// Rules for a new object, or for an update when the old object is given.
    pub(crate) validate: fn(&mut Causes, &Value, Option<&Value>),
    /// Shape of an object's name.
    pub(crate) name: NameRule,
    /// Whether an update without a resourceVersion may overwrite.
    pub(crate) unconditional_update: bool,
    /// Where the kind has a status, what a new object's is, and when its generation grows.
    pub(crate) writes: Writes,
    /// Table columns.
    pub(crate) columns: &'static [crate::table::Column],
    /// Table cells of one object.
    pub(crate) cells: fn(&Value, jiff::Timestamp) -> Vec<Value>,
}

/// How writes treat status and generation.
#[derive(Clone, Copy)]
pub(crate) struct Writes {
    /// Whether there is a status that only `/status` may change.
    pub(crate) status: bool,
    /// Whether `metadata.generation` counts changes of the spec.
    pub(crate) generation: bool,
    /// What is special for a new object, after its status was dropped.
    pub(crate) create: fn(&mut Value),
}

/// Rule for `metadata.name`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NameRule {
    /// Lower-case letters, digits, `-`; at most 63.
    Dns1123Label,
    /// Labels joined by dots; at most 253.
    Dns1123Subdomain,
    /// A label that starts with a letter.
    Dns1035Label,
    /// Anything that can stand between two slashes of a path.
    PathSegment,
}

/// What is served under an object's path, such as `pods/{name}/log`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Subresource {
    /// Last path segment.
    pub name: &'static str,
    /// Group of the kind that it speaks; empty means core.
    pub group: &'static str,
    /// Version of that kind.
    pub version: &'static str,
    /// Kind that it speaks.
    pub kind: &'static str,
    /// Verbs.
    pub verbs: &'static [&'static str],
}

/// The kind served under a resource name.
pub fn by_resource(group: &str, version: &str, plural: &str) -> Option<&'static Kind> {
    KINDS.iter().find(|kind| kind.plural == plural && kind.group == group && kind.version == version)
}

/// The kind that an object names.
pub fn by_kind(api_version: &str, name: &str) -> Option<&'static Kind> {
    let (group, version) = api_version.split_once('/').unwrap_or(("", api_version));
    KINDS.iter().find(|kind| kind.kind == name && kind.group == group && kind.version == version)
}

/// Kinds that are only bodies of requests and answers.
const VIRTUAL: &[(&str, &str, &str)] = &[
    ("v1", "Binding", "io.k8s.api.core.v1.Binding"),
    ("v1", "Status", "io.k8s.apimachinery.pkg.apis.meta.v1.Status"),
    ("autoscaling/v1", "Scale", "io.k8s.api.autoscaling.v1.Scale"),
    ("policy/v1", "Eviction", "io.k8s.api.policy.v1.Eviction"),
    ("authentication.k8s.io/v1", "TokenRequest", "io.k8s.api.authentication.v1.TokenRequest"),
];

/// The OpenAPI definition of any kind that bodies may have, served or virtual (Scale, DeleteOptions, Binding, …).
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

    /// `pods`, `deployments.apps`: as error messages name the resource.
    pub fn qualified_resource(&self) -> String {
        match self.group {
            "" => self.plural.to_owned(),
            group => format!("{}.{group}", self.plural),
        }
    }

    /// `Pod`, `Deployment.apps`: as error messages name the kind.
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

    /// The subresource of that name.
    pub fn subresource(&self, name: &str) -> Option<&'static Subresource> {
        self.subresources.iter().find(|sub| sub.name == name)
    }

    /// Whether the verb is served on the resource itself.
    pub fn has_verb(&self, verb: &str) -> bool {
        self.verbs.contains(&verb)
    }

    /// Whether the kind has a status that only its subresource changes.
    pub fn has_status(&self) -> bool {
        self.rules.writes.status
    }

    /// Whether an update without a resourceVersion may overwrite.
    pub fn unconditional_update(&self) -> bool {
        self.rules.unconditional_update
    }

    /// Whether objects of the kind are stored at all (reviews are only answered).
    pub fn stored(&self) -> bool {
        self.has_verb("get")
    }
}
