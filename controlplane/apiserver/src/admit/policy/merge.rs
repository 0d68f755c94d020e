//! Merges the apply configuration of a mutating policy into an object.

use std::sync::LazyLock;

use coracle_kinds::{Resource, kind::schema_of, ownership};
use coracle_managed_fields::{ApplyRequest, FieldSet, Managers, Schema, SingleVersion, Updater};
use serde_json::Value;

use crate::{admit::Attributes, object_meta::metadata_mut};

/// Merges fields into an object by the rules of server-side apply, without recording an owner. `kind` is the version of
/// the resource that the policy gets.
pub(super) fn merge(
    attributes: &Attributes<'_>,
    kind: &Resource,
    live: &Value,
    mut config: Value,
) -> std::result::Result<Value, String> {
    static UNKNOWN: LazyLock<Schema> = LazyLock::new(Schema::default);
    let Some(fields) = config.as_object_mut() else {
        return Err("the configuration is not an object".to_owned());
    };
    for field in ["apiVersion", "kind"] {
        fields.insert(field.to_owned(), live[field].clone());
    }
    let shown = attributes.shown_as();
    let known = match shown {
        Some(shown) => schema_of(&shown.api_version(), &shown.kind).and_then(ownership::of_schema),
        None => kind.strategy().ownership(),
    };
    let (schema, of) = known.unwrap_or_else(|| (&*UNKNOWN, Schema::deduced()));
    let own_version = shown.map(|shown| shown.api_version());
    let api_version = own_version.as_deref().unwrap_or_else(|| kind.api_version());
    let versions = SingleVersion { api_version, schema, of };
    let ignored = FieldSet::default();
    let updater = Updater { versions: &versions, api_version, subresource: "", ignored: &ignored, now: "" };
    let request = ApplyRequest { live, config: &config, manager: "admission-policy", force: true };
    let applied = updater.apply(request, Managers::default()).map_err(|error| error.to_string())?;
    let mut object = applied.object;
    // Keep the field owners: admission owns no fields.
    if let Some(metadata) = metadata_mut(&mut object) {
        match &live["metadata"]["managedFields"] {
            Value::Null => metadata.remove("managedFields"),
            owners => metadata.insert("managedFields".to_owned(), owners.clone()),
        };
    }
    Ok(object)
}
