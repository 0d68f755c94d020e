//! Checks values whose types no generated definition has: fields of former API versions.

use coracle_values::go;
use serde_json::Value;

use super::{canonical, check, model};

/// Maximum number of recorded unknown fields.
const MAX_NOTES: usize = 100;

/// The type of a value.
pub enum Shape {
    /// A string.
    Text,
    /// A list of values of this type.
    List(&'static Shape),
    /// A struct: its fields and their types.
    Struct(&'static [(&'static str, Shape)]),
    /// An object with a generated definition.
    Definition(&'static str),
}

/// Checks a value and removes nulls. Unknown fields are removed and recorded in `notes`.
///
/// # Errors
/// A value has the wrong type.
pub fn conform(
    shape: &'static Shape,
    path: &str,
    value: &mut Value,
    notes: &mut Vec<String>,
) -> Result<(), String> {
    match (shape, &mut *value) {
        (Shape::Text, Value::String(_)) => Ok(()),
        (Shape::List(item), Value::Array(list)) => {
            for (index, element) in list.iter_mut().enumerate() {
                conform(item, &format!("{path}[{index}]"), element, notes)?;
            }
            Ok(())
        }
        (Shape::Struct(fields), Value::Object(map)) => {
            let names: Vec<String> = map.keys().cloned().collect();
            for name in names {
                let below = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
                let known = fields.iter().find(|(known, _)| *known == name);
                match (known, map.get_mut(&name)) {
                    (Some((_, shape)), Some(field)) if !field.is_null() => {
                        conform(shape, &below, field, notes)?;
                    }
                    (Some(_), _) => drop(map.remove(&name)),
                    (None, _) => {
                        if notes.len() < MAX_NOTES {
                            notes.push(format!("unknown field \"{below}\""));
                        }
                        map.remove(&name);
                    }
                }
            }
            Ok(())
        }
        (Shape::Definition(name), value) => {
            let definition = model::schemas().find(name).ok_or_else(|| format!("no definition {name}"))?;
            notes.extend(check::conform_field(definition, path, value)?);
            if let Value::Object(map) = value {
                canonical::object(model::schemas(), definition, map, canonical::UnknownFields::Keep);
            }
            Ok(())
        }
        (shape, value) => Err(format!(
            "json: cannot unmarshal {} into Go struct field {path} of type {}",
            go::json_kind(value),
            shape.go_type()
        )),
    }
}

// === impl Shape ===

impl Shape {
    fn go_type(&self) -> String {
        match self {
            Self::Text => "string".to_owned(),
            Self::List(item) => format!("[]{}", item.go_type()),
            Self::Struct(_) | Self::Definition(_) => "struct".to_owned(),
        }
    }
}
