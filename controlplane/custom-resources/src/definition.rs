//! A CustomResourceDefinition as Rust types. Unknown fields are ignored: the API's schema has checked them.

use serde::Deserialize;
use serde_json::Value;

/// A CustomResourceDefinition of `apiextensions.k8s.io/v1`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Definition {
    /// Name, annotations and deletion of the definition.
    pub metadata: Metadata,
    /// Desired state.
    pub spec: Spec,
    /// Observed state.
    pub status: Status,
}

/// The fields of the metadata that this crate reads.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Metadata {
    /// `<plural>.<group>`.
    pub name: String,
    /// Unique id.
    pub uid: String,
    /// Annotations.
    pub annotations: std::collections::BTreeMap<String, String>,
    /// Time of the deletion request. `None` if the definition is not being deleted.
    pub deletion_timestamp: Option<String>,
    /// Finalizers.
    pub finalizers: Vec<String>,
}

/// Desired state of a definition.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Spec {
    /// API group.
    pub group: String,
    /// Names of the resource.
    pub names: Names,
    /// `Cluster` or `Namespaced`.
    pub scope: String,
    /// Versions.
    pub versions: Vec<Version>,
    /// Conversion between versions.
    pub conversion: Option<Conversion>,
    /// Whether unknown fields are kept in all versions. No new definition may set it.
    pub preserve_unknown_fields: bool,
}

/// Names of a custom resource.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(default, rename_all = "camelCase")]
pub struct Names {
    /// Resource name in URLs.
    pub plural: String,
    /// Singular name.
    pub singular: String,
    /// Short names.
    pub short_names: Vec<String>,
    /// Kind.
    pub kind: String,
    /// Kind of lists.
    pub list_kind: String,
    /// Groups of resources, such as `all`.
    pub categories: Vec<String>,
}

/// One version of a custom resource.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Version {
    /// Name, such as `v1`.
    pub name: String,
    /// Whether the API serves it.
    pub served: bool,
    /// Whether objects are stored in it.
    pub storage: bool,
    /// Whether requests get a warning.
    pub deprecated: bool,
    /// Text of the warning.
    pub deprecation_warning: Option<String>,
    /// Schema.
    pub schema: Option<Validation>,
    /// Subresources.
    pub subresources: Option<Subresources>,
    /// Printer columns.
    pub additional_printer_columns: Vec<Column>,
    /// Fields for field selectors.
    pub selectable_fields: Vec<SelectableField>,
}

/// The schema of a version.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Validation {
    /// The schema in its JSON form.
    #[serde(rename = "openAPIV3Schema")]
    pub open_api_v3_schema: Option<Value>,
}

/// Subresources of a version.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Subresources {
    /// The status subresource. Present if `/status` is served.
    pub status: Option<Value>,
    /// The scale subresource. Present if `/scale` is served.
    pub scale: Option<Scale>,
}

/// Paths of the scale subresource.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Scale {
    /// Path of the desired number, below `.spec`.
    pub spec_replicas_path: String,
    /// Path of the observed number, below `.status`.
    pub status_replicas_path: String,
    /// Path of the label selector as text.
    pub label_selector_path: Option<String>,
}

/// A printer column.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Column {
    /// Heading.
    pub name: String,
    /// Type of the cells.
    #[serde(rename = "type")]
    pub kind: String,
    /// Format of the cells.
    pub format: String,
    /// Help text.
    pub description: String,
    /// Columns above zero are shown only in wide output.
    pub priority: i64,
    /// Path of the value.
    pub json_path: String,
}

/// A field for field selectors.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct SelectableField {
    /// Path of the field.
    pub json_path: String,
}

/// Conversion between versions.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Conversion {
    /// Strategy of the conversion: the text `None` or `Webhook`.
    pub strategy: String,
    /// The conversion webhook.
    pub webhook: Option<Webhook>,
}

/// The address and the versions of a conversion webhook.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Webhook {
    /// Address.
    pub client_config: Option<Value>,
    /// Versions of ConversionReview that the webhook understands.
    pub conversion_review_versions: Vec<String>,
}

/// Observed state of a definition.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Status {
    /// Conditions.
    pub conditions: Vec<Condition>,
    /// The names that the API serves.
    pub accepted_names: Names,
    /// Versions in which objects may be stored.
    pub stored_versions: Vec<String>,
}

/// A condition of a definition.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(default, rename_all = "camelCase")]
pub struct Condition {
    /// `Established`, `NamesAccepted`, `Terminating`, …
    #[serde(rename = "type")]
    pub kind: String,
    /// `True`, `False` or `Unknown`.
    pub status: String,
    /// Reason in one word.
    pub reason: String,
    /// Message for users.
    pub message: String,
}

// === impl Definition ===

impl Definition {
    /// Reads a definition. A field with a value of the wrong type is an error.
    pub fn parse(object: &Value) -> Result<Definition, serde_json::Error> {
        Definition::deserialize(object)
    }

    /// Whether the condition is true.
    pub fn is_condition_true(&self, kind: &str) -> bool {
        self.status.conditions.iter().any(|condition| condition.kind == kind && condition.status == "True")
    }

    /// Whether objects have a namespace.
    pub fn namespaced(&self) -> bool {
        self.spec.scope == "Namespaced"
    }

    /// The version in which objects are stored.
    pub fn storage_version(&self) -> Option<&Version> {
        self.spec.versions.iter().find(|version| version.storage)
    }

    /// The version with this name.
    pub fn version(&self, name: &str) -> Option<&Version> {
        self.spec.versions.iter().find(|version| version.name == name)
    }

    /// Whether the definition is being deleted.
    pub fn is_terminating(&self) -> bool {
        self.metadata.deletion_timestamp.is_some()
    }
}

// === impl Version ===

impl Version {
    /// The schema in its JSON form.
    pub fn schema(&self) -> Option<&Value> {
        self.schema.as_ref().and_then(|schema| schema.open_api_v3_schema.as_ref())
    }

    /// Whether `/status` is served.
    pub fn has_status(&self) -> bool {
        self.subresources.as_ref().is_some_and(|subresources| subresources.status.is_some())
    }

    /// The paths of `/scale`.
    pub fn scale(&self) -> Option<&Scale> {
        self.subresources.as_ref().and_then(|subresources| subresources.scale.as_ref())
    }

    /// The text of the deprecation warning.
    pub fn warning(&self, group: &str, kind: &str) -> Option<String> {
        let text = || format!("{group}/{} {kind} is deprecated", self.name);
        self.deprecated.then(|| self.deprecation_warning.clone().unwrap_or_else(text))
    }
}
