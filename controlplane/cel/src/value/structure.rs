//! Objects that an expression makes: `Object.spec{…}` for apply configurations, `JSONPatch{…}` for patches.
//!
//! Source: `admission/plugin/cel/mutation`. The type of a nested object is named by the path of its field.

use serde_json::{Map, Value as Json};

use crate::types::Type;
use crate::value::Value;

/// The root type of apply configurations.
const OBJECT: &str = "Object";
/// The type of one operation of a patch.
const PATCH: &str = "JSONPatch";

/// An object with its type.
#[derive(Clone, Debug)]
pub struct Structure<'a> {
    name: &'a str,
    fields: Vec<(&'a str, Value<'a>)>,
}

/// Whether a type of this name exists.
pub(crate) fn is_known(name: &str) -> bool {
    name == OBJECT || name == PATCH || name.strip_prefix(OBJECT).is_some_and(|path| path.starts_with('.'))
}

/// The type of a field. None if the type has no such field.
pub(crate) fn field(name: &str, field: &str) -> Option<Type> {
    match (name, field) {
        (PATCH, "op" | "path" | "from") => Some(Type::String),
        (PATCH, "value") => Some(Type::Dyn),
        (PATCH, _) => None,
        _ => Some(Type::Dyn),
    }
}

impl<'a> Structure<'a> {
    pub(crate) fn new(name: &'a str) -> Structure<'a> {
        Structure { name, fields: Vec::new() }
    }

    pub(crate) fn set(&mut self, field: &'a str, value: Value<'a>) {
        self.fields.retain(|(known, _)| *known != field);
        self.fields.push((field, value));
    }

    /// The name of the type.
    pub fn name(&self) -> &str {
        self.name
    }

    /// The value of a field.
    pub fn get(&self, field: &str) -> Option<&Value<'a>> {
        self.fields.iter().find(|(known, _)| *known == field).map(|(_, value)| value)
    }

    pub(crate) fn equals(
        &self,
        other: &Structure<'a>,
        mut same: impl FnMut(&Value<'a>, &Value<'a>) -> Option<bool>,
    ) -> Option<bool> {
        if self.name != other.name || self.fields.len() != other.fields.len() {
            return Some(false);
        }
        for (field, value) in &self.fields {
            match other.get(field) {
                Some(found) if same(value, found)? => {}
                _ => return Some(false),
            }
        }
        Some(true)
    }

    /// Subtracts the size of the fields as JSON from `left`. None if they are larger than `left` or nested too deep.
    pub(crate) fn weigh(&self, left: &mut usize, depth: usize) -> Option<()> {
        self.fields.iter().try_for_each(|(name, value)| {
            *left = left.checked_sub(name.len())?;
            value.weigh(left, depth)
        })
    }

    /// The fields as JSON. The names are unescaped.
    pub(crate) fn to_json(&self) -> Json {
        let fields = self.fields.iter().map(|(name, value)| (crate::escape::unescape(name), value.to_json()));
        Json::Object(fields.collect::<Map<_, _>>())
    }

    /// Checks that the type of each nested object is named by the path of its field.
    ///
    /// # Errors
    /// The name of a type does not match its path. The error text contains both.
    pub fn check_names(&self) -> Result<(), String> {
        for (field, value) in &self.fields {
            check_names(value, &format!("{}.{field}", self.name))?;
        }
        Ok(())
    }
}

fn check_names(value: &Value<'_>, path: &str) -> Result<(), String> {
    match value {
        Value::Structure(inner) if inner.name != path => Err(format!(
            "unexpected type name {:?}, expected {path:?}, which must match field name path from root Object type",
            inner.name
        )),
        Value::Structure(inner) => inner.check_names(),
        Value::List(items) => items.iter().try_for_each(|item| check_names(item, path)),
        Value::Map(entries) => entries.values().try_for_each(|inner| check_names(inner, path)),
        Value::Optional(Some(inner)) => check_names(inner, path),
        _ => Ok(()),
    }
}
