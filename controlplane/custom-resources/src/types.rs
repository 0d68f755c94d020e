//! CEL types of schemas (`model.SchemaDeclType`).

use std::collections::BTreeMap;
use std::sync::Arc;

use coracle_cel::{Field, ObjectType, Type, escape};

use crate::schema::Schema;

/// The type of a schema's values. None if rules cannot read them. A resource has type and object metadata too.
pub(crate) fn of_schema(schema: &Schema, resource: bool) -> Option<Type> {
    if schema.int_or_string {
        return Some(Type::Dyn);
    }
    Some(match &*schema.kind {
        "array" => Type::list(of_schema(schema.item()?, schema.item()?.embedded)?),
        "object" => match schema.additional_schema() {
            Some(additional) if schema.properties.is_empty() => {
                Type::Map(Arc::new(of_schema(additional, additional.embedded)?))
            }
            _ => object(schema, resource || schema.embedded),
        },
        "boolean" => Type::Bool,
        "number" => Type::Double,
        "integer" => Type::Int,
        "string" => match &*schema.format {
            "byte" => Type::Bytes,
            "duration" => Type::Duration,
            "date" | "date-time" => Type::Timestamp,
            _ => Type::String,
        },
        _ => return None,
    })
}

fn object(schema: &Schema, resource: bool) -> Type {
    let mut fields = BTreeMap::new();
    let mut add = |name: &str, kind: Type| {
        if let Some(identifier) = escape::escape(name) {
            fields.insert(identifier.into_boxed_str(), Field { name: name.into(), kind });
        }
    };
    for (name, property) in &schema.properties {
        if let Some(kind) = of_schema(property, property.embedded) {
            add(name, kind);
        }
    }
    if resource {
        add("apiVersion", Type::String);
        add("kind", Type::String);
        add("metadata", metadata());
    }
    Type::Object(Arc::new(ObjectType { name: "object".to_owned(), fields }))
}

fn metadata() -> Type {
    let field = |name: &str| (Box::from(name), Field { name: name.into(), kind: Type::String });
    let fields = BTreeMap::from([field("name"), field("generateName")]);
    Type::Object(Arc::new(ObjectType { name: "object".to_owned(), fields }))
}
