//! The format of a row: a kind and its rules.

use serde_json::Value;

use crate::cause::Causes;
use crate::fields::Field;
use crate::resource::NameRule;

/// A kind that the API server serves under a resource name.
pub struct Kind {
    /// API group. Empty for the core group.
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
    /// Warning about the use of a deprecated version.
    pub deprecation: Option<&'static str>,
    /// Whether the kind is namespaced.
    pub namespaced: bool,
    /// Verbs of the resource, without its subresources.
    pub verbs: &'static [&'static str],
    /// Subresources.
    pub subresources: &'static [Subresource],
    /// Name of the OpenAPI definition.
    pub schema: &'static str,
    /// Whether objects belong to the volatile tier of the store, which the embedded store keeps in memory only.
    pub volatile: bool,
    /// Default time to live of an object in seconds. 0 means no limit.
    pub ttl_seconds: u32,
    /// Fields for field selectors, besides `metadata.name` and `metadata.namespace`.
    pub fields: &'static [Field],
    /// The row of the version in which objects are stored. `None` if objects are stored in this version.
    pub stored_as: Option<StoredAs>,
    pub(crate) rules: Rules,
}

/// The version in which the objects of a row are stored.
#[derive(Clone, Copy)]
pub struct StoredAs {
    /// API group of the stored version.
    pub group: &'static str,
    /// Name of the stored version.
    pub version: &'static str,
    /// Resource name in the stored version.
    pub plural: &'static str,
    /// Converts an object to the stored version. The caller sets apiVersion and kind.
    pub to_storage: RowConversion,
    /// Converts a stored object. The caller sets apiVersion and kind.
    pub from_storage: RowConversion,
    /// Names of selectable fields in this version and in the stored version.
    pub fields: &'static [(&'static str, &'static str)],
}

/// Converts an object; an error is the reason for the client.
pub type RowConversion = fn(Value) -> Result<Value, String>;

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
    /// Whether an update of an object that does not exist creates it.
    pub(crate) create_on_update: bool,
    /// The handling of status and generation in writes.
    pub(crate) writes: Writes,
    /// Table columns.
    pub(crate) columns: &'static [crate::table::Column],
    /// Table cells of one object.
    pub(crate) cells: fn(&Value, jiff::Timestamp) -> Vec<Value>,
}

/// The handling of status and generation in writes.
#[derive(Clone, Copy)]
pub(crate) struct Writes {
    /// Whether the kind has a status that only `/status` can change.
    pub(crate) status: bool,
    /// Whether `metadata.generation` increases when the spec changes.
    pub(crate) generation: bool,
    /// Prepares a new object, after its status was removed.
    pub(crate) create: fn(&mut Value),
    /// Prepares an update of the resource itself, after its status was restored.
    pub(crate) update: fn(&mut Value),
}

/// A subresource, such as `pods/{name}/log`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Subresource {
    /// Last path segment.
    pub name: &'static str,
    /// API group of the subresource's kind. Empty for the core group.
    pub group: &'static str,
    /// API version of the subresource's kind.
    pub version: &'static str,
    /// Kind of the subresource's bodies.
    pub kind: &'static str,
    /// Verbs.
    pub verbs: &'static [&'static str],
}

// === impl Kind ===

impl Kind {
    /// The apiVersion of objects: `v1`, `apps/v1`.
    pub fn api_version(&self) -> String {
        match self.group {
            "" => self.version.to_owned(),
            group => format!("{group}/{}", self.version),
        }
    }
}
