//! CEL types of schemas (`model.SchemaDeclType`).

use std::collections::BTreeMap;
use std::sync::Arc;

use coracle_cel::{Field, ObjectType, Type, UnorderedList, escape};

use crate::schema::Schema;

/// The type of a schema's values. `None` if rules cannot read them. A resource also has the fields `apiVersion`, `kind`
/// and `metadata`.
pub(crate) fn of_schema(schema: &Schema, resource: bool) -> Option<Type> {
    Reader { metadata: &metadata() }.schema(schema, resource)
}

/// The type of the objects of a custom resource. `metadata` is the type of their metadata. It may have all fields of
/// the metadata, but rules can read only `name` and `generateName`.
pub(crate) fn of_resource(schema: &Schema, metadata: &Type) -> Option<Type> {
    Reader { metadata }.schema(schema, true)
}

struct Reader<'a> {
    /// The type of the metadata of resources.
    metadata: &'a Type,
}

// === impl Reader ===

impl Reader<'_> {
    fn schema(&self, schema: &Schema, resource: bool) -> Option<Type> {
        if schema.int_or_string {
            return Some(Type::Dyn);
        }
        Some(match &*schema.kind {
            "array" => list_type(schema, self.below(schema.item()?)?),
            "object" => match schema.additional_schema() {
                Some(additional) if schema.properties.is_empty() => {
                    Type::Map(Arc::new(self.below(additional)?))
                }
                _ => self.object(schema, resource || schema.embedded),
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

    fn below(&self, schema: &Schema) -> Option<Type> {
        self.schema(schema, schema.embedded)
    }

    fn object(&self, schema: &Schema, resource: bool) -> Type {
        let mut fields = BTreeMap::new();
        let mut add = |name: &str, kind: Type| {
            if let Some(identifier) = escape::escape(name) {
                fields.insert(identifier.into_boxed_str(), Field { name: name.into(), kind });
            }
        };
        for (name, property) in &schema.properties {
            if let Some(kind) = self.below(property) {
                add(name, kind);
            }
        }
        if resource {
            add("apiVersion", Type::String);
            add("kind", Type::String);
            add("metadata", self.metadata.clone());
        }
        Type::Object(Arc::new(ObjectType::new("object", fields)))
    }
}

/// The type of a list. Sets and maps have no order.
fn list_type(schema: &Schema, item: Type) -> Type {
    let keys = match schema.list_type.as_deref() {
        Some("set") => Box::default(),
        Some("map") => schema.list_keys.iter().map(|name| identifier(name)).collect(),
        _ => return Type::list(item),
    };
    Type::Unordered(Arc::new(UnorderedList { item, keys }))
}

/// The identifier of a field in expressions. A name that has no identifier is returned unchanged: expressions cannot
/// select such a field, but equality compares it.
fn identifier(name: &str) -> Box<str> {
    escape::escape(name).unwrap_or_else(|| name.to_owned()).into_boxed_str()
}

fn metadata() -> Type {
    let field = |name: &str| (Box::from(name), Field { name: name.into(), kind: Type::String });
    let fields = BTreeMap::from([field("name"), field("generateName")]);
    Type::Object(Arc::new(ObjectType::new("object", fields)))
}

#[cfg(test)]
mod tests {
    use coracle_cel::{Environment, Program, Value};
    use serde_json::json;

    use super::*;

    #[test]
    fn objects_have_the_given_metadata_and_rules_see_names_only() {
        let schema = json!({"type": "object", "properties": {
            "metadata": {"type": "object"},
            "spec": {"type": "object", "properties": {
                "replicas": {"type": "integer"},
                "template": {"type": "object", "x-kubernetes-embedded-resource": true}}}}});
        let schema = Schema::parse(&schema).unwrap();
        let field = Field { name: "labels".into(), kind: Type::Map(Arc::new(Type::String)) };
        let fields = BTreeMap::from([(Box::from("labels"), field)]);
        let metadata = Type::Object(Arc::new(ObjectType::new("meta", fields)));
        let compiled = |kind: Option<Type>, source: &str| {
            let environment = Environment::default().variable("object", kind.unwrap());
            Program::compile(source, &environment).map(|program| program.kind().to_string())
        };
        let object = || of_resource(&schema, &metadata);
        assert_eq!(compiled(object(), "object.spec.replicas").as_deref(), Ok("int"));
        for labels in ["object.metadata.labels", "object.spec.template.metadata.labels"] {
            assert_eq!(compiled(object(), labels).as_deref(), Ok("map(string, string)"));
            assert!(compiled(of_schema(&schema, true), labels).is_err());
        }
        let error = compiled(object(), "object.spec.maxRetries").unwrap_err().to_string();
        assert!(error.contains("undefined field 'maxRetries'"), "{error}");
    }

    #[test]
    fn sets_and_maps_have_no_order() {
        let schema = json!({"type": "object", "properties": {
            "set": {"type": "array", "x-kubernetes-list-type": "set", "items": {"type": "string"}},
            "map": {"type": "array", "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["a-b"],
                "items": {"type": "object", "properties": {"a-b": {"type": "string"}}}},
            "list": {"type": "array", "items": {"type": "string"}}}});
        let kind = of_schema(&Schema::parse(&schema).unwrap(), false).unwrap();
        let environment = Environment::default().variable("self", kind.clone());
        let json = json!({"set": ["a", "b"], "map": [{"a-b": "x"}, {"a-b": "y"}], "list": ["a", "b"]});
        for (source, expected) in [
            ("self.set == ['b', 'a']", true),
            ("self.map == [self.map[1], self.map[0]]", true),
            ("self.map + [self.map[0]] == self.map", true),
            ("self.list == ['b', 'a']", false),
        ] {
            let program = Program::compile(source, &environment).unwrap();
            let (result, _) = program.evaluate(&[("self", Value::from_json(&json, &kind))]);
            assert_eq!(result, Ok(Value::Bool(expected)), "{source}");
        }
    }
}
