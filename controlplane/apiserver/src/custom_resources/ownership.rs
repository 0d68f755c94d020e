//! Types for field ownership, derived from the schema of a custom resource.

use coracle_custom_resources::schema::{Additional, Schema as Node};
use coracle_kinds::ownership;
use coracle_managed_fields::{Field, Key, Scalar, Schema, Type, TypeId};
use coracle_values::CollectMap;

const METADATA: &str = "io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta";

/// The types of a schema, and the type of the whole object. Metadata has the same types as in built-in resources.
pub(super) fn of_schema(root: &Node) -> (Schema, TypeId) {
    let (mut schema, metadata) = match ownership::of_schema(METADATA) {
        Some((schema, of)) => (schema.clone(), of),
        None => (Schema::default(), Schema::deduced()),
    };
    let scalar = schema.add(Type::Scalar);
    let mut fields: std::collections::BTreeMap<Box<str>, Field> = root
        .properties
        .iter()
        .map(|(name, node)| {
            (name.clone(), Field { of: of_node(&mut schema, node, scalar), absent_is_empty: false })
        })
        .collect_map();
    fields.insert("metadata".into(), Field { of: metadata, absent_is_empty: false });
    for name in ["apiVersion", "kind"] {
        fields.insert(name.into(), Field { of: scalar, absent_is_empty: false });
    }
    let other = root.preserve_unknown.then(Schema::deduced);
    let whole = schema.add(Type::Map { fields, other });
    (schema, whole)
}

fn of_node(schema: &mut Schema, node: &Node, scalar: TypeId) -> TypeId {
    let of = match &*node.kind {
        "object" if node.map_type.as_deref() == Some("atomic") => Type::Atomic,
        "object" => {
            let other = match &node.additional {
                Some(Additional::Schema(inner)) => Some(of_node(schema, inner, scalar)),
                Some(Additional::Allowed(true)) => Some(Schema::deduced()),
                _ if node.preserve_unknown || node.embedded => Some(Schema::deduced()),
                _ => None,
            };
            if node.properties.is_empty() && other.is_none() {
                return Schema::deduced();
            }
            let fields = node.properties.iter();
            let fields = fields.map(|(name, inner)| {
                (name.clone(), Field { of: of_node(schema, inner, scalar), absent_is_empty: false })
            });
            Type::Map { fields: fields.collect_map(), other }
        }
        "array" => match (node.list_type.as_deref(), &node.items) {
            (Some("set"), _) => Type::Set,
            (Some("map"), Some(item)) => {
                let element = of_node(schema, item, scalar);
                Type::Keyed { keys: node.list_keys.iter().map(|name| key(item, name)).collect(), element }
            }
            _ => Type::Atomic,
        },
        "" if node.preserve_unknown => return Schema::deduced(),
        _ => return scalar,
    };
    schema.add(of)
}

fn key(item: &Node, name: &str) -> Key {
    let default = item.properties.get(name).and_then(|property| property.default.as_ref());
    Key { name: name.into(), default: default.and_then(Scalar::of) }
}
