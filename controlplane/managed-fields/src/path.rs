//! Elements of field paths, their order, and their two text forms: `fieldsV1` keys and conflict messages.

use std::{cmp::Ordering, fmt, sync::Arc};

use serde_json::{Map, Number, Value};

/// One step from a value to a part of it.
///
/// The order of the variants is the order in `fieldsV1`. Texts are shared (`Arc`): a key can have a megabyte, and the
/// path of each field below the key contains it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum PathElement {
    /// A field of an object or a key of a map.
    Field(Arc<str>),
    /// An element of a keyed list: its key fields, sorted by name.
    Key(Box<[(Box<str>, Scalar)]>),
    /// An element of a set.
    Value(Scalar),
    /// An element of an atomic list. Only old `managedFields` contain it.
    Index(i64),
}

/// A value without parts.
#[derive(Clone, Debug)]
pub enum Scalar {
    /// Any JSON number. `1` and `1.0` are equal.
    Number(Number),
    /// A string.
    Text(Arc<str>),
    /// A boolean.
    Bool(bool),
}

/// The steps from an object to a field.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Path(pub Vec<PathElement>);

/// Maximum length of a path in messages, in bytes.
const MAX_TEXT: usize = 1024;

// === impl PathElement ===

impl PathElement {
    /// The element of a field name.
    pub fn field(name: &str) -> PathElement {
        PathElement::Field(name.into())
    }

    /// Reads a key of `fieldsV1`: `f:NAME`, `k:{…}`, `v:JSON`, `i:NUMBER`. Returns None for anything else.
    pub(crate) fn parse(text: &str) -> Option<PathElement> {
        let (kind, rest) = text.split_once(':')?;
        match kind {
            "f" => Some(PathElement::field(rest)),
            "k" => {
                let fields: Map<String, Value> = serde_json::from_str(rest).ok()?;
                let mut key = Vec::with_capacity(fields.len());
                for (name, value) in fields {
                    key.push((name.into_boxed_str(), Scalar::of(&value)?));
                }
                key.sort_unstable();
                Some(PathElement::Key(key.into()))
            }
            "v" => Some(PathElement::Value(Scalar::of(&serde_json::from_str(rest).ok()?)?)),
            "i" => Some(PathElement::Index(rest.parse().ok()?)),
            _ => None,
        }
    }

    /// The key of `fieldsV1` for this element.
    pub(crate) fn encode(&self) -> String {
        match self {
            PathElement::Field(name) => ["f:", name].concat(),
            PathElement::Key(fields) => {
                let object: Map<String, Value> =
                    fields.iter().map(|(name, value)| (name.to_string(), value.to_json())).collect();
                format!("k:{}", Value::Object(object))
            }
            PathElement::Value(value) => format!("v:{}", value.to_json()),
            PathElement::Index(index) => format!("i:{index}"),
        }
    }
}

impl fmt::Display for PathElement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PathElement::Field(name) => write!(f, ".{name}"),
            PathElement::Key(fields) => {
                f.write_str("[")?;
                for (at, (name, value)) in fields.iter().enumerate() {
                    let separator = if at == 0 { "" } else { "," };
                    write!(f, "{separator}{name}={}", value.to_json())?;
                }
                f.write_str("]")
            }
            PathElement::Value(value) => write!(f, "[={}]", value.to_json()),
            PathElement::Index(index) => write!(f, "[{index}]"),
        }
    }
}

impl fmt::Display for Path {
    /// Prints the path, cut at [`MAX_TEXT`] bytes.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut left = MAX_TEXT;
        for element in &self.0 {
            let text = element.to_string();
            let end = text.floor_char_boundary(left);
            f.write_str(&text[..end])?;
            if end < text.len() {
                return f.write_str("...");
            }
            left -= end;
        }
        Ok(())
    }
}

// === impl Scalar ===

impl Scalar {
    /// The scalar of a JSON value. Returns None for null, lists and objects.
    pub fn of(value: &Value) -> Option<Scalar> {
        match value {
            Value::Bool(value) => Some(Scalar::Bool(*value)),
            Value::Number(value) => Some(Scalar::Number(value.clone())),
            Value::String(value) => Some(Scalar::Text(value.as_str().into())),
            Value::Null | Value::Array(_) | Value::Object(_) => None,
        }
    }

    fn to_json(&self) -> Value {
        match self {
            Scalar::Number(value) => Value::Number(value.clone()),
            Scalar::Text(value) => Value::String(value.to_string()),
            Scalar::Bool(value) => Value::Bool(*value),
        }
    }

    fn rank(&self) -> u8 {
        match self {
            Scalar::Number(_) => 0,
            Scalar::Text(_) => 1,
            Scalar::Bool(_) => 2,
        }
    }
}

impl Ord for Scalar {
    fn cmp(&self, other: &Scalar) -> Ordering {
        match (self, other) {
            (Scalar::Number(a), Scalar::Number(b)) => compare_numbers(a, b),
            (Scalar::Text(a), Scalar::Text(b)) => a.cmp(b),
            (Scalar::Bool(a), Scalar::Bool(b)) => a.cmp(b),
            _ => self.rank().cmp(&other.rank()),
        }
    }
}

impl PartialOrd for Scalar {
    fn partial_cmp(&self, other: &Scalar) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Scalar {
    fn eq(&self, other: &Scalar) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Scalar {}

/// Compares integers exactly, and anything else as floating point.
fn compare_numbers(a: &Number, b: &Number) -> Ordering {
    match (as_integer(a), as_integer(b)) {
        (Some(a), Some(b)) => a.cmp(&b),
        _ => a.as_f64().unwrap_or_default().total_cmp(&b.as_f64().unwrap_or_default()),
    }
}

fn as_integer(number: &Number) -> Option<i128> {
    number.as_i64().map(i128::from).or_else(|| number.as_u64().map(i128::from))
}

/// Whether two JSON values are equal. `1` and `1.0` are equal.
pub(crate) fn equal(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Number(a), Value::Number(b)) => compare_numbers(a, b).is_eq(),
        (Value::Array(a), Value::Array(b)) => a.len() == b.len() && a.iter().zip(b).all(|(a, b)| equal(a, b)),
        (Value::Object(a), Value::Object(b)) => {
            a.len() == b.len() && a.iter().all(|(name, a)| b.get(name).is_some_and(|b| equal(a, b)))
        }
        _ => a == b,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_of_element_survives_its_encoding() {
        for text in [
            "f:spec",
            "f:a:b",
            r#"k:{"containerPort":80,"protocol":"TCP"}"#,
            r#"v:"x""#,
            "v:3",
            "v:true",
            "i:7",
        ] {
            let element = PathElement::parse(text).unwrap();
            assert_eq!(element.encode(), text);
        }
    }

    #[test]
    fn malformed_elements_are_refused() {
        for text in ["", "spec", "x:1", "k:[]", "k:{", r#"k:{"a":{}}"#, "v:{}", "v:null", "i:x"] {
            assert_eq!(PathElement::parse(text), None, "{text}");
        }
    }

    #[test]
    fn paths_read_as_in_conflict_messages() {
        let elements =
            ["f:spec", "f:containers", r#"k:{"name":"a","port":80}"#, "f:args", r#"v:"-x""#, "i:2"];
        let path = Path(elements.iter().map(|text| PathElement::parse(text).unwrap()).collect());
        assert_eq!(path.to_string(), r#".spec.containers[name="a",port=80].args[="-x"][2]"#);
    }

    #[test]
    fn integers_and_floats_of_the_same_value_are_equal() {
        assert_eq!(PathElement::parse("v:1"), PathElement::parse("v:1.0"));
        assert_ne!(PathElement::parse("v:9007199254740993"), PathElement::parse("v:9007199254740992"));
    }
}
