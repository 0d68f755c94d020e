//! Initializers: `metadata.initializers` of any object, and the kind InitializerConfiguration.
//!
//! Kubernetes 1.7 to 1.13 had initializers. No generated definition has them. Only a server with the admission plugin
//! `Initializers` uses this module. For all other servers the field is unknown.

use std::sync::Arc;

use coracle_managed_fields::{Schema, TypeId};
use jiff::Timestamp;
use serde_json::{Value, json};

use crate::resource::{Strategy, Text};
use crate::schema::shape::{self, Shape};
use crate::schema::{self, FieldValidation, Parsed, SchemaError};
use crate::table;
use crate::validate::{self, Causes};
use crate::{Resource, ResourceNames};

pub use crate::initialization::{failure, is_pending, is_uninitialized};

/// API group of [`configurations`].
pub const GROUP: &str = "admissionregistration.k8s.io";
/// API version of [`configurations`].
pub const VERSION: &str = "v1alpha1";
/// Resource name of [`configurations`].
pub const PLURAL: &str = "initializerconfigurations";

const KIND: &str = "InitializerConfiguration";

const TEXTS: Shape = Shape::List(&Shape::Text);

static METADATA_SHAPE: Shape = Shape::Struct(&[
    ("pending", Shape::List(&Shape::Struct(&[("name", Shape::Text)]))),
    ("result", Shape::Definition("io.k8s.apimachinery.pkg.apis.meta.v1.Status")),
]);

static INITIALIZERS_SHAPE: Shape = Shape::List(&Shape::Struct(&[
    ("name", Shape::Text),
    (
        "rules",
        Shape::List(&Shape::Struct(&[("apiGroups", TEXTS), ("apiVersions", TEXTS), ("resources", TEXTS)])),
    ),
]));

/// Takes `metadata.initializers` out of an object, because the definitions do not have it. Returns the checked value
/// and warnings about unknown fields.
///
/// # Errors
/// A value has the wrong type.
pub fn take(object: &mut Value) -> Result<(Option<Value>, Vec<String>), String> {
    let metadata = object.get_mut("metadata").and_then(Value::as_object_mut);
    let Some(mut field) = metadata.and_then(|metadata| metadata.remove("initializers")) else {
        return Ok((None, Vec::new()));
    };
    let mut notes = Vec::new();
    if field.is_null() {
        return Ok((None, notes));
    }
    shape::conform(&METADATA_SHAPE, "metadata.initializers", &mut field, &mut notes)?;
    Ok((Some(field), notes))
}

/// Sets `metadata.initializers`. `None` removes it.
pub fn set(object: &mut Value, initializers: Option<Value>) {
    let Some(metadata) = object.get_mut("metadata").and_then(Value::as_object_mut) else { return };
    match initializers {
        Some(value) => metadata.insert("initializers".to_owned(), value),
        None => metadata.remove("initializers"),
    };
}

/// The resource of the kind InitializerConfiguration. It is not part of the built-in set.
pub fn configurations() -> Resource {
    let schema = format!("io.k8s.api.admissionregistration.{VERSION}.{KIND}");
    let names = ResourceNames {
        group: GROUP.into(),
        version: VERSION.into(),
        kind: KIND.into(),
        plural: PLURAL.into(),
    };
    let mut resource = Resource::new(names, schema, Arc::new(Configuration));
    let meta = "#/components/schemas/io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta";
    let texts = json!({"type": "array", "items": {"type": "string"}});
    let rule = json!({
        "type": "object",
        "properties": {"apiGroups": texts, "apiVersions": texts, "resources": texts},
    });
    let initializer = json!({
        "type": "object",
        "required": ["name"],
        "properties": {"name": {"type": "string"}, "rules": {"type": "array", "items": rule}},
    });
    resource.definition = Some(Arc::new(json!({
        "type": "object",
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"allOf": [{"$ref": meta}], "default": {}},
            "initializers": {
                "type": "array",
                "items": initializer,
                "x-kubernetes-list-type": "map",
                "x-kubernetes-list-map-keys": ["name"],
            },
        },
        "x-kubernetes-group-version-kind": [{"group": GROUP, "version": VERSION, "kind": KIND}],
    })));
    resource.is_built_in = true;
    resource.singular = Text::from("initializerconfiguration");
    resource.namespaced = false;
    resource.unconditional_update = false;
    resource.columns = table::CREATED_AT.iter().map(table::Column::definition).collect::<Vec<_>>().into();
    resource
}

/// The rules of InitializerConfigurations.
struct Configuration;

// === impl Configuration ===

impl Strategy for Configuration {
    fn decode(
        &self,
        parsed: Parsed,
        validation: FieldValidation,
    ) -> Result<(Value, Vec<String>), SchemaError> {
        let problem = |problem: String| SchemaError::Decode {
            kind: KIND.to_owned(),
            version: VERSION.to_owned(),
            problem,
        };
        let Parsed { mut value, duplicates, .. } = parsed;
        let mut notes = duplicates;
        notes.extend(schema::decode_metadata(&mut value).map_err(problem)?);
        let Some(map) = value.as_object_mut() else {
            return Err(problem("json: cannot unmarshal a value that is not an object".to_owned()));
        };
        map.retain(|name, _| {
            let is_known = matches!(name.as_str(), "apiVersion" | "kind" | "metadata" | "initializers");
            if !is_known {
                notes.push(format!("unknown field \"{name}\""));
            }
            is_known
        });
        match map.get_mut("initializers") {
            Some(Value::Null) => drop(map.remove("initializers")),
            Some(list) => {
                shape::conform(&INITIALIZERS_SHAPE, "initializers", list, &mut notes).map_err(problem)?
            }
            None => {}
        }
        match validation {
            FieldValidation::Ignore => Ok((value, Vec::new())),
            FieldValidation::Strict if !notes.is_empty() => {
                Err(problem(format!("strict decoding error: {}", notes.join(", "))))
            }
            FieldValidation::Warn | FieldValidation::Strict => Ok((value, notes)),
        }
    }

    fn default(&self, _object: &mut Value) {}

    fn prepare_create(&self, _object: &mut Value) {}

    fn validate(&self, causes: &mut Causes, new: &Value, _old: Option<&Value>) {
        validate::initializer_configuration::check(causes, new);
    }

    fn validate_status(&self, _causes: &mut Causes, _new: &Value, _old: &Value) {}

    fn cells(&self, object: &Value, now: Timestamp) -> Vec<Value> {
        table::created_at(object, now)
    }

    fn ownership(&self) -> Option<(&Schema, TypeId)> {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_field_of_an_object_is_checked() {
        let mut object = json!({"metadata": {"name": "a", "initializers": {
            "pending": [{"name": "a.b.c", "extra": 1}], "result": null, "more": {}}}});
        let (field, notes) = take(&mut object).unwrap();
        assert_eq!(field, Some(json!({"pending": [{"name": "a.b.c"}]})));
        assert_eq!(
            notes,
            [
                "unknown field \"metadata.initializers.more\"",
                "unknown field \"metadata.initializers.pending[0].extra\""
            ]
        );
        assert_eq!(object, json!({"metadata": {"name": "a"}}));
        for wrong in
            [json!([]), json!({"pending": {}}), json!({"pending": [{"name": 1}]}), json!({"result": "x"})]
        {
            let error = take(&mut json!({"metadata": {"initializers": wrong}})).unwrap_err();
            assert!(error.starts_with("json: cannot unmarshal"), "{error}");
        }
        assert_eq!(take(&mut json!({"metadata": {"initializers": {}}})).unwrap().0, Some(json!({})));
    }

    #[test]
    fn a_configuration_is_decoded_and_validated() {
        let resource = configurations();
        let rule = json!({"apiGroups": [""], "apiVersions": ["v1"], "resources": ["pods"], "x": 1});
        let object =
            json!({"metadata": {"name": "c"}, "initializers": [{"name": "a.example.com", "rules": [rule]}]});
        let parsed =
            |value: &Value| Parsed { value: value.clone(), duplicates: Vec::new(), keys: Vec::new() };
        let (value, notes) = resource.strategy().decode(parsed(&object), FieldValidation::Warn).unwrap();
        assert_eq!(notes, ["unknown field \"initializers[0].rules[0].x\""]);
        assert!(resource.strategy().decode(parsed(&object), FieldValidation::Strict).is_err());
        assert!(validate::create(&resource, &value).is_empty());
        let text = json!({"metadata": {"name": "c"}, "initializers": "all"});
        assert!(resource.strategy().decode(parsed(&text), FieldValidation::Warn).is_err());
    }
}
