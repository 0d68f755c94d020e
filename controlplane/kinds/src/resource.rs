//! A resource that the API server serves: names, scope, verbs, storage and rules, as data. Resources can be added and
//! removed while the server runs.
//!
//! Built-in rows ([`crate::Kind`]) and custom resources are both converted to a [`Resource`]. The API server uses only
//! that type. One `Resource` is one version of one resource. [`Resources`] is an immutable set of them with indexes.
//!
//! To add a custom resource, implement [`Strategy`], and call [`Resource::new`] for each served version. Set its public
//! fields, and set [`Resource::storage`] of all versions except the stored version. Several versions need a
//! [`Convert`].

mod convert;
mod field;
mod set;
#[cfg(test)]
pub(crate) mod tests;

use std::borrow::Cow;
use std::sync::Arc;

use coracle_cel::Type;
use coracle_managed_fields::{Schema, TypeId};
use jiff::Timestamp;
use serde_json::Value;

pub use self::convert::{ConversionError, Convert, Converting};
pub use self::field::{FieldValue, SelectableField};
pub use self::set::{GroupVersion, Resources, Taken, version_preference};
use crate::cause::Causes;
use crate::schema::{FieldValidation, Parsed, SchemaError};
pub use coracle_pod_rules::validate::meta::NameRule;

/// A text of a built-in row, or of a custom resource.
pub type Text = Cow<'static, str>;

/// The names that identify one version of a resource.
#[derive(Clone, Debug)]
pub struct ResourceNames {
    /// API group. Empty for the core group.
    pub group: Text,
    /// API version within the group.
    pub version: Text,
    /// Kind, as in `kind: Pod`.
    pub kind: Text,
    /// Resource name in paths: `pods`.
    pub plural: Text,
}

/// One version of a resource.
///
/// Group, version, kind and plural are fixed by [`Resource::new`]. The other fields may be set until the resource is
/// shared.
#[expect(clippy::struct_excessive_bools, reason = "independent properties of a resource")]
pub struct Resource {
    /// API group. Empty for the core group.
    pub group: Text,
    /// API version within the group.
    pub version: Text,
    /// Kind, as in `kind: Pod`.
    pub kind: Text,
    /// Resource name in paths: `pods`.
    pub plural: Text,
    /// Singular resource name: `pod`.
    pub singular: Text,
    /// Kind of lists: `PodList`.
    pub list_kind: Text,
    /// Short names for clients: `po`.
    pub short_names: Vec<Text>,
    /// Categories for clients: `all`.
    pub categories: Vec<Text>,
    /// Whether the resource is namespaced.
    pub namespaced: bool,
    /// Warning about the use of a deprecated version.
    pub deprecation: Option<Text>,
    /// Verbs of the resource, without its subresources.
    pub verbs: Vec<Text>,
    /// Subresources.
    pub subresources: Vec<Subresource>,
    /// Name of the OpenAPI definition: `io.k8s.api.core.v1.Pod`, `com.example.v1.Widget`.
    pub schema: Text,
    /// The OpenAPI v3 schema to publish. `None` means the built-in definition of that name.
    pub definition: Option<Arc<Value>>,
    /// The OpenAPI v2 schema to publish. `None` if it is generated from the v3 schema.
    pub definition_v2: Option<Arc<Value>>,
    /// The version that objects are stored in. `None` means this version.
    pub storage: Option<Arc<Resource>>,
    /// Conversion between versions. `None` if only `apiVersion` differs.
    pub convert: Option<Arc<dyn Convert>>,
    /// Whether objects belong to the volatile tier of the store, which the embedded store keeps in memory only.
    pub volatile: bool,
    /// Default time to live of an object in seconds. 0 means no limit.
    pub ttl_seconds: u32,
    /// Fields for field selectors, with `metadata.name` and `metadata.namespace`.
    pub fields: Vec<SelectableField>,
    /// Format of the objects' names.
    pub name_rule: NameRule,
    /// Whether an update without a resourceVersion is allowed.
    pub unconditional_update: bool,
    /// Whether an update of an object that does not exist creates it. Source: `AllowCreateOnUpdate` of upstream's
    /// strategies.
    pub create_on_update: bool,
    /// Whether the definition of the kind is being deleted. No objects can be created then.
    pub is_terminating: bool,
    /// Whether there is a status that only `/status` can change.
    pub has_status: bool,
    /// Whether `metadata.generation` increases when the spec changes.
    pub has_generation: bool,
    /// Fields of the subresource `scale`. `None` for the built-in workloads, whose fields are fixed.
    pub scale: Option<ScalePaths>,
    /// Column definitions of tables: a JSON array.
    pub columns: Value,
    /// Whether the resource is built in.
    pub(crate) is_built_in: bool,
    api_version: String,
    strategy: Arc<dyn Strategy>,
}

/// A subresource, such as `pods/{name}/log`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Subresource {
    /// Last path segment.
    pub name: Text,
    /// API group of its kind. Empty for the core group.
    pub group: Text,
    /// API version of its kind.
    pub version: Text,
    /// Kind of its bodies.
    pub kind: Text,
    /// Verbs.
    pub verbs: Vec<Text>,
}

/// Fields of a custom resource that its `scale` reads and writes. Each path is a list of field names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScalePaths {
    /// `spec.replicas` of the Scale.
    pub spec_replicas: Vec<String>,
    /// `status.replicas` of the Scale.
    pub status_replicas: Vec<String>,
    /// `status.selector` of the Scale: a selector in text form.
    pub selector: Option<Vec<String>>,
}

/// The rules for the objects of a resource version. The methods do no I/O. They read the clock only for times that they
/// set in objects.
pub trait Strategy: Send + Sync {
    /// Checks the types of a body and makes it canonical; prunes unknown fields. Returns the object and the warnings.
    /// `apiVersion`, `kind` and `metadata` of custom resources are checked by [`crate::schema::decode_metadata`].
    ///
    /// # Errors
    /// A value has the wrong type, or a strict validation found an unknown or duplicate field.
    fn decode(
        &self,
        parsed: Parsed,
        validation: FieldValidation,
    ) -> Result<(Value, Vec<String>), SchemaError>;

    /// Does the same as [`Strategy::decode`], for the configuration of a server-side apply: fields are neither added
    /// nor omitted.
    ///
    /// # Errors
    /// The errors of [`Strategy::decode`].
    fn decode_config(
        &self,
        parsed: Parsed,
        validation: FieldValidation,
    ) -> Result<(Value, Vec<String>), SchemaError> {
        self.decode(parsed, validation)
    }

    /// Makes an object canonical: it then has exactly the fields that a Go server writes. Idempotent.
    fn canonical(&self, _object: &mut Value) {}

    /// Does the same as [`Strategy::canonical`] for a stored object, and removes fields that this version does not
    /// have. Returns whether there were such fields.
    fn canonical_stored(&self, _object: &mut Value) -> bool {
        false
    }

    /// Sets absent fields to their defaults. Idempotent.
    fn default(&self, object: &mut Value);

    /// Prepares a new object, such as removing the client's status. Metadata is prepared already.
    fn prepare_create(&self, object: &mut Value);

    /// Prepares an update of the resource itself. Metadata and the old status are restored already.
    fn prepare_update(&self, _new: &mut Value, _old: &Value) {}

    /// Validates a new object, or an update if the old object is given. Metadata is validated already.
    fn validate(&self, causes: &mut Causes, new: &Value, old: Option<&Value>);

    /// Validates an update of `/status`. Metadata is validated already.
    fn validate_status(&self, causes: &mut Causes, new: &Value, old: &Value);

    /// Whether the defaulting of an object may take long.
    fn has_long_defaults(&self, _object: &Value) -> bool {
        false
    }

    /// Whether the validation of an object may take seconds.
    fn has_long_validation(&self, _new: &Value, _old: Option<&Value>) -> bool {
        false
    }

    /// Whether stored objects may lack defaults, because the schema can change. The server adds missing defaults when
    /// it loads an object.
    fn completes_stored(&self) -> bool {
        false
    }

    /// Cells of one object, one for each of [`Resource::columns`].
    fn cells(&self, object: &Value, now: Timestamp) -> Vec<Value>;

    /// The type of the objects in CEL, for warnings about expressions. `None` if their fields are unknown.
    fn cel_type(&self) -> Option<Type> {
        None
    }

    /// Types for field ownership (server-side apply). `None` if objects are maps and lists are atomic.
    fn ownership(&self) -> Option<(&Schema, TypeId)>;
}

// === impl Resource ===

impl Resource {
    /// A namespaced resource with all verbs and without subresources, stored in this version.
    pub fn new(names: ResourceNames, schema: impl Into<Text>, strategy: Arc<dyn Strategy>) -> Resource {
        let ResourceNames { group, version, kind, plural } = names;
        let api_version =
            if group.is_empty() { version.clone().into_owned() } else { format!("{group}/{version}") };
        Resource {
            singular: kind.to_lowercase().into(),
            list_kind: format!("{kind}List").into(),
            short_names: Vec::new(),
            categories: Vec::new(),
            namespaced: true,
            deprecation: None,
            verbs: ALL_VERBS.iter().map(|verb| Text::from(*verb)).collect(),
            subresources: Vec::new(),
            schema: schema.into(),
            definition: None,
            definition_v2: None,
            storage: None,
            convert: None,
            volatile: false,
            ttl_seconds: 0,
            fields: field::common(),
            name_rule: NameRule::Dns1123Subdomain,
            unconditional_update: true,
            create_on_update: false,
            is_terminating: false,
            has_status: false,
            has_generation: false,
            scale: None,
            columns: Value::Array(Vec::new()),
            is_built_in: false,
            group,
            version,
            kind,
            plural,
            api_version,
            strategy,
        }
    }

    /// The apiVersion of objects: `v1`, `apps/v1`.
    pub fn api_version(&self) -> &str {
        &self.api_version
    }

    /// The resource in error messages: `pods`, `deployments.apps`.
    pub fn qualified_resource(&self) -> String {
        match &*self.group {
            "" => self.plural.clone().into_owned(),
            group => format!("{}.{group}", self.plural),
        }
    }

    /// The kind in error messages: `Pod`, `Deployment.apps`.
    pub fn qualified_kind(&self) -> String {
        match &*self.group {
            "" => self.kind.clone().into_owned(),
            group => format!("{}.{group}", self.kind),
        }
    }

    /// Whether this is a kind of that group, in any version.
    pub fn is(&self, group: &str, kind: &str) -> bool {
        self.group == group && self.kind == kind
    }

    /// The subresource with this name.
    pub fn subresource(&self, name: &str) -> Option<&Subresource> {
        self.subresources.iter().find(|sub| sub.name == name)
    }

    /// Whether the resource itself supports the verb.
    pub fn has_verb(&self, verb: &str) -> bool {
        self.verbs.iter().any(|known| known == verb)
    }

    /// The verbs in discovery. As upstream, a kind whose definition is being deleted does not have the verbs that
    /// write.
    pub(crate) fn discovered_verbs(&self) -> Vec<&Text> {
        let writes = |verb: &Text| matches!(&**verb, "create" | "patch" | "update");
        self.verbs.iter().filter(|verb| !(self.is_terminating && writes(verb))).collect()
    }

    /// Whether objects are stored. Reviews and metrics are not stored, so they cannot be watched.
    pub fn is_stored(&self) -> bool {
        self.has_verb("get") && self.has_verb("watch")
    }

    /// The version that objects are stored in.
    pub fn stored_as(&self) -> &Resource {
        self.storage.as_deref().unwrap_or(self)
    }

    /// Whether this version is the stored version.
    pub fn is_storage_version(&self) -> bool {
        self.storage.is_none()
    }

    /// The built-in definition with the markers of strategic merge patches. `None` if such patches are not supported.
    pub fn patch_definition(&self) -> Option<&str> {
        (self.is_built_in && self.definition.is_none()).then_some(&*self.schema)
    }

    /// Whether the resource is built in. No custom resource replaces it.
    pub fn is_built_in(&self) -> bool {
        self.is_built_in
    }

    /// Whether a DELETE returns the object instead of a Status. Source: `ReturnDeletedObject` of upstream's stores.
    pub fn returns_deleted(&self) -> bool {
        let names: &[&str] = match &*self.group {
            "" => &[
                "persistentvolumeclaims",
                "persistentvolumes",
                "pods",
                "podtemplates",
                "resourcequotas",
                "serviceaccounts",
                "services",
            ],
            "resource.k8s.io" => {
                &["deviceclasses", "resourceclaims", "resourceclaimtemplates", "resourceslices"]
            }
            "storage.k8s.io" => {
                &["csidrivers", "csinodes", "storageclasses", "volumeattachments", "volumeattributesclasses"]
            }
            _ => &[],
        };
        self.is_built_in && names.contains(&&*self.plural)
    }

    /// The rules for objects.
    pub fn strategy(&self) -> &dyn Strategy {
        &*self.strategy
    }
}

impl std::fmt::Debug for Resource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.api_version, self.plural)
    }
}

// === impl Subresource ===

impl Subresource {
    /// The apiVersion of the subresource's kind, for example `autoscaling/v1` for `scale`.
    pub fn api_version(&self) -> Text {
        match &*self.group {
            "" => self.version.clone(),
            group => format!("{group}/{}", self.version).into(),
        }
    }
}

const ALL_VERBS: &[&str] =
    &["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"];
