//! Resources of the built-in rows.

use std::sync::{Arc, LazyLock};

use coracle_cel::Type;
use coracle_managed_fields::{Schema, TypeId};
use jiff::Timestamp;
use serde_json::Value;

use super::definition::{Kind, StoredAs};
use super::metrics;
use super::rows::KINDS;
use crate::cel_type::cel_type;
use crate::resource::{
    ConversionError, Convert, Converting, Resource, ResourceNames, Resources, SelectableField, Strategy,
    Subresource, Text,
};
use crate::schema::{self, FieldValidation, Parsed, SchemaError};
use crate::validate::{self, Causes};
use crate::{ownership, table};

static BUILT_IN: LazyLock<Arc<Resources>> = LazyLock::new(|| Arc::new(Resources::of_kinds()));

/// The built-in resources.
pub fn built_in() -> &'static Arc<Resources> {
    &BUILT_IN
}

/// The built-in resource with this name.
pub fn by_resource(group: &str, version: &str, plural: &str) -> Option<&'static Arc<Resource>> {
    BUILT_IN.find(group, version, plural)
}

/// The built-in resource with this apiVersion and kind.
pub fn by_kind(api_version: &str, name: &str) -> Option<&'static Arc<Resource>> {
    let (group, version) = api_version.split_once('/').unwrap_or(("", api_version));
    BUILT_IN.find_kind(group, version, name)
}

/// The rules of a row.
struct BuiltIn(&'static Kind);

/// The conversion between the version of a row and the version in which its objects are stored.
struct BetweenRows(StoredAs);

// === impl Resources ===

impl Resources {
    fn of_kinds() -> Resources {
        let (stored, others): (Vec<&'static Kind>, Vec<&'static Kind>) =
            KINDS.iter().partition(|kind| kind.stored_as.is_none());
        let mut resources: Vec<Arc<Resource>> =
            stored.into_iter().map(|kind| Arc::new(of_kind(kind))).collect();
        for (kind, of) in others.into_iter().filter_map(|kind| Some((kind, kind.stored_as?))) {
            let storage = resources.iter().find(|resource| {
                resource.group == of.group && resource.version == of.version && resource.plural == of.plural
            });
            let mut resource = of_kind(kind);
            resource.fields.extend(of.fields.iter().map(|(name, stored)| SelectableField {
                stored: (*stored).into(),
                ..SelectableField::at_path(name)
            }));
            resource.storage = storage.cloned();
            resource.convert = Some(Arc::new(BetweenRows(of)));
            resources.push(Arc::new(resource));
        }
        resources.extend(metrics::resources().map(|mut resource| {
            resource.is_built_in = true;
            Arc::new(resource)
        }));
        Resources::new(resources)
    }
}

fn of_kind(kind: &'static Kind) -> Resource {
    let names = ResourceNames {
        group: kind.group.into(),
        version: kind.version.into(),
        kind: kind.kind.into(),
        plural: kind.plural.into(),
    };
    let mut resource = Resource::new(names, kind.schema, Arc::new(BuiltIn(kind)));
    resource.is_built_in = true;
    resource.singular = kind.singular.into();
    resource.short_names = texts(kind.short_names);
    resource.categories = texts(kind.categories);
    resource.namespaced = kind.namespaced;
    resource.deprecation = kind.deprecation.map(Text::from);
    resource.verbs = texts(kind.verbs);
    resource.subresources = kind
        .subresources
        .iter()
        .map(|sub| Subresource {
            name: sub.name.into(),
            group: sub.group.into(),
            version: sub.version.into(),
            kind: sub.kind.into(),
            verbs: texts(sub.verbs),
        })
        .collect();
    resource.volatile = kind.volatile;
    resource.ttl_seconds = kind.ttl_seconds;
    resource.fields.extend(kind.fields.iter().map(SelectableField::from));
    resource.name_rule = kind.rules.name;
    resource.unconditional_update = kind.rules.unconditional_update;
    resource.create_on_update = kind.rules.create_on_update;
    resource.has_status = kind.rules.writes.status;
    resource.has_generation = kind.rules.writes.generation;
    resource.columns = kind.rules.columns.iter().map(table::Column::definition).collect::<Vec<_>>().into();
    resource
}

fn texts(list: &[&'static str]) -> Vec<Text> {
    list.iter().map(|text| Text::from(*text)).collect()
}

// === impl BuiltIn ===

impl Strategy for BuiltIn {
    fn decode(
        &self,
        parsed: Parsed,
        validation: FieldValidation,
    ) -> Result<(Value, Vec<String>), SchemaError> {
        schema::decode(self.0.schema, parsed, validation)
    }

    fn decode_config(
        &self,
        parsed: Parsed,
        validation: FieldValidation,
    ) -> Result<(Value, Vec<String>), SchemaError> {
        schema::decode_config(self.0.schema, parsed, validation)
    }

    fn canonical(&self, object: &mut Value) {
        schema::canonical(self.0.schema, object);
    }

    fn canonical_stored(&self, object: &mut Value) -> bool {
        schema::canonical_stored(self.0.schema, object)
    }

    fn default(&self, object: &mut Value) {
        (self.0.rules.defaults)(object);
    }

    fn prepare_create(&self, object: &mut Value) {
        (self.0.rules.writes.create)(object);
    }

    fn prepare_update(&self, new: &mut Value, _old: &Value) {
        (self.0.rules.writes.update)(new);
    }

    fn validate(&self, causes: &mut Causes, new: &Value, old: Option<&Value>) {
        (self.0.rules.validate)(causes, new, old);
    }

    fn validate_status(&self, causes: &mut Causes, new: &Value, old: &Value) {
        validate::built_in_status(causes, self.0.group, self.0.kind, new, old);
    }

    fn cells(&self, object: &Value, now: Timestamp) -> Vec<Value> {
        (self.0.rules.cells)(object, now)
    }

    fn cel_type(&self) -> Option<Type> {
        cel_type(self.0.schema)
    }

    fn ownership(&self) -> Option<(&Schema, TypeId)> {
        ownership::of_schema(self.0.schema)
    }
}

// === impl BetweenRows ===

impl Convert for BetweenRows {
    fn convert<'a>(&'a self, objects: Vec<Value>, to: &'a Resource) -> Converting<'a> {
        let to_storage = to.group == self.0.group && to.version == self.0.version;
        let convert = if to_storage { self.0.to_storage } else { self.0.from_storage };
        let converted = objects.into_iter().map(|object| {
            if object["apiVersion"] == to.api_version() {
                return Ok(object);
            }
            let mut object = convert(object)
                .map_err(|reason| ConversionError { to: to.api_version().to_owned(), reason })?;
            object["apiVersion"] = to.api_version().into();
            object["kind"] = to.kind.as_ref().into();
            Ok(object)
        });
        Box::pin(std::future::ready(converted.collect()))
    }

    fn is_immediate(&self) -> bool {
        true
    }
}
