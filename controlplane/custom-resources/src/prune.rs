//! Pruning: removes the fields that the schema does not declare (`apiserver/schema/pruning`).

use serde_json::Value;

use crate::schema::{Additional, Schema};
use crate::violation::Path;

/// Maximum number of recorded paths. One path can be as long as all keys of the object.
pub(crate) const MAX_PATHS: usize = 100;

/// Removes unknown fields of a custom resource. Returns at most [`MAX_PATHS`] of their paths, sorted. `apiVersion`,
/// `kind` and `metadata` of the object stay.
pub(crate) fn prune(object: &mut Value, schema: &Schema) -> Vec<String> {
    prune_node(object, schema, true)
}

/// Does the same as [`prune`] for a value below the root, such as a default.
pub(crate) fn prune_value(value: &mut Value, schema: &Schema) -> Vec<String> {
    prune_node(value, schema, schema.embedded)
}

fn prune_node(value: &mut Value, schema: &Schema, embedded: bool) -> Vec<String> {
    let mut pruner = Pruner { paths: Vec::new() };
    if schema.preserve_unknown {
        pruner.keep(value, schema, embedded, &Path::default());
    } else {
        pruner.value(value, Some(schema), embedded, &Path::default());
    }
    pruner.paths.sort();
    pruner.paths
}

/// Whether the field is `apiVersion`, `kind` or `metadata`.
pub(crate) fn is_meta(name: &str) -> bool {
    matches!(name, "apiVersion" | "kind" | "metadata")
}

struct Pruner {
    paths: Vec<String>,
}

impl Pruner {
    fn visit(&mut self, value: &mut Value, schema: Option<&Schema>, path: &Path) {
        match schema {
            Some(schema) if schema.preserve_unknown => self.keep(value, schema, schema.embedded, path),
            _ => self.value(value, schema, schema.is_some_and(|schema| schema.embedded), path),
        }
    }

    fn value(&mut self, value: &mut Value, schema: Option<&Schema>, embedded: bool, path: &Path) {
        match value {
            Value::Object(map) => map.retain(|name, inner| {
                if embedded && is_meta(name) {
                    return true;
                }
                let (known, next) = match schema {
                    None => (false, None),
                    Some(schema) => match (schema.properties.get(name.as_str()), &schema.additional) {
                        (Some(property), _) => (true, Some(property)),
                        (None, Some(Additional::Schema(inner))) => (true, Some(&**inner)),
                        (None, Some(Additional::Allowed(_))) => (true, None),
                        (None, None) => (false, None),
                    },
                };
                if known {
                    self.visit(inner, next, &path.field(name));
                } else if (!is_meta(name) || !path.as_str().is_empty()) && self.paths.len() < MAX_PATHS {
                    self.paths.push(path.field(name).as_str().to_owned());
                }
                known
            }),
            Value::Array(list) => {
                for (index, item) in list.iter_mut().enumerate() {
                    self.visit(item, schema.and_then(Schema::item), &path.index(index));
                }
            }
            _ => {}
        }
    }

    /// Prunes an object of a schema with `x-kubernetes-preserve-unknown-fields`. Unknown fields are kept. The values of
    /// known fields are pruned.
    fn keep(&mut self, value: &mut Value, schema: &Schema, embedded: bool, path: &Path) {
        match value {
            Value::Object(map) => {
                for (name, inner) in map.iter_mut() {
                    if embedded && is_meta(name) {
                        continue;
                    }
                    if let Some(property) = schema.properties.get(name.as_str()) {
                        self.visit(inner, Some(property), &path.field(name));
                    } else if schema.additional.is_some() {
                        self.visit(inner, schema.additional_schema(), &path.field(name));
                    }
                }
            }
            Value::Array(list) => {
                for (index, item) in list.iter_mut().enumerate() {
                    if let Some(inner) = schema.item() {
                        self.keep(item, inner, inner.embedded, &path.index(index));
                    }
                }
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn unknown_fields_are_removed_and_reported() {
        let schema = Schema::parse(&json!({"type": "object", "properties": {
            "spec": {"type": "object", "properties": {
                "a": {"type": "string"},
                "free": {"type": "object", "x-kubernetes-preserve-unknown-fields": true,
                    "properties": {"strict": {"type": "object", "properties": {"x": {"type": "string"}}}}},
                "map": {"type": "object", "additionalProperties": {"type": "object", "properties": {"k": {"type": "string"}}}},
                "list": {"type": "array", "items": {"type": "object", "properties": {"k": {"type": "string"}}}},
            }},
        }}))
        .unwrap();
        let mut object = json!({"apiVersion": "a/v1", "kind": "K", "metadata": {"name": "x", "odd": 1}, "top": 1,
            "spec": {"a": "1", "b": 2, "free": {"y": 1, "strict": {"x": "1", "z": 2}}, "map": {"m": {"k": "1", "l": 2}},
                "list": [{"k": "1"}, {"k": "1", "l": 2}]}});
        let paths = prune(&mut object, &schema);
        assert_eq!(paths, ["spec.b", "spec.free.strict.z", "spec.list[1].l", "spec.map.m.l", "top"]);
        assert_eq!(
            object,
            json!({"apiVersion": "a/v1", "kind": "K", "metadata": {"name": "x", "odd": 1},
            "spec": {"a": "1", "free": {"y": 1, "strict": {"x": "1"}}, "map": {"m": {"k": "1"}},
                "list": [{"k": "1"}, {"k": "1"}]}})
        );
    }
}
