//! The schema of field ownership, made from the definitions of the built-in kinds.

use std::sync::LazyLock;

use coracle_managed_fields::{Field, Key, Scalar, Schema, Type, TypeId};
use coracle_values::CollectMap;

use crate::schema::model::{Definition, ListType, OwnershipMarkers, Property, ValueType, schemas};

static OWNERSHIP: LazyLock<Ownership> = LazyLock::new(Ownership::load);

/// The types of all definitions.
struct Ownership {
    schema: Schema,
    /// Type of each definition, in the order of the definitions.
    definitions: Vec<TypeId>,
    scalar: TypeId,
    atomic: TypeId,
}

/// The schema and the type of a kind's definition (see [`crate::kind::schema_of`]). `None` for an unknown definition.
pub fn of_schema(name: &str) -> Option<(&'static Schema, TypeId)> {
    let id = schemas().id(name)?;
    let ownership: &'static Ownership = &OWNERSHIP;
    ownership.definitions.get(id.index()).map(|of| (&ownership.schema, *of))
}

// === impl Ownership ===

impl Ownership {
    fn load() -> Ownership {
        let definitions = schemas().all();
        let mut schema = Schema::default();
        let (scalar, atomic) = (schema.add(Type::Scalar), schema.add(Type::Atomic));
        // Definitions refer to each other, even in circles. So each definition has its type before any of them is
        // filled in.
        let types: Vec<TypeId> = definitions.iter().map(|_| schema.add(Type::Atomic)).collect();
        let mut ownership = Ownership { schema, definitions: types, scalar, atomic };
        for (position, definition) in definitions.iter().enumerate() {
            let of = ownership.object(definition);
            if let Some(id) = ownership.definitions.get(position) {
                ownership.schema.replace(*id, of);
            }
        }
        ownership
    }

    fn object(&mut self, definition: &Definition) -> Type {
        if definition.atomic {
            return Type::Atomic;
        }
        let fields =
            definition.properties.iter().map(|property| (property.name.clone(), self.field(property)));
        Type::Map { fields: fields.collect_map(), other: None }
    }

    fn field(&mut self, property: &Property) -> Field {
        let absent_is_empty = property.ownership.default.as_ref().is_some_and(serde_json::Value::is_object);
        Field { of: self.of(&property.value_type, &property.ownership), absent_is_empty }
    }

    fn of(&mut self, value_type: &ValueType, markers: &OwnershipMarkers) -> TypeId {
        match value_type {
            ValueType::Any | ValueType::Choice(_) => Schema::deduced(),
            ValueType::Object(_) | ValueType::Map(_) if markers.atomic_map => self.atomic,
            ValueType::Object(id) => {
                self.definitions.get(id.index()).copied().unwrap_or_else(Schema::deduced)
            }
            ValueType::Map(values) => {
                let values = self.of(values, &OwnershipMarkers::default());
                self.schema.add(Type::Map { fields: [].into(), other: Some(values) })
            }
            ValueType::List(items) => self.list(items, &markers.list),
            ValueType::Bool
            | ValueType::Int32
            | ValueType::Int64
            | ValueType::Number
            | ValueType::Text
            | ValueType::Bytes
            | ValueType::Time
            | ValueType::MicroTime
            | ValueType::IntOrString
            | ValueType::Quantity => self.scalar,
        }
    }

    fn list(&mut self, items: &ValueType, of: &ListType) -> TypeId {
        match of {
            ListType::Atomic => self.atomic,
            ListType::Set => self.schema.add(Type::Set),
            ListType::Map(names) => {
                let element = self.of(items, &OwnershipMarkers::default());
                let keys = names.iter().map(|name| key(items, name)).collect();
                self.schema.add(Type::Keyed { keys, element })
            }
        }
    }
}

/// A key field of a list, with the default that its definition has.
fn key(items: &ValueType, name: &str) -> Key {
    let default = match items {
        ValueType::Object(id) => {
            schemas().get(*id).property(name).and_then(|property| property.ownership.default.as_ref())
        }
        _ => None,
    };
    Key { name: name.into(), default: default.and_then(Scalar::of) }
}

#[cfg(test)]
mod tests {
    use coracle_managed_fields::validate;
    use serde_json::json;

    use super::*;
    use crate::kind::KINDS;

    #[test]
    fn every_kind_has_a_type_with_fields() {
        for kind in KINDS {
            let (schema, of) = of_schema(kind.schema).unwrap();
            assert!(
                matches!(schema.get(of), Type::Map { fields, .. } if !fields.is_empty()),
                "{}",
                kind.kind
            );
        }
    }

    #[test]
    fn ports_are_identified_by_number_and_protocol() {
        let (schema, of) = of_schema("io.k8s.api.core.v1.Pod").unwrap();
        let pod = |ports| json!({"spec": {"containers": [{"name": "a", "ports": ports}]}});
        let distinct = pod(json!([{"containerPort": 53}, {"containerPort": 53, "protocol": "UDP"}]));
        assert_eq!(validate(schema, of, &distinct), Ok(()));
        let twice = pod(json!([{"containerPort": 53}, {"containerPort": 53, "protocol": "TCP"}]));
        let invalid = validate(schema, of, &twice).unwrap_err();
        assert_eq!(invalid[0].path.to_string(), r#".spec.containers[name="a"].ports"#);
    }
}
