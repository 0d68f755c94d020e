//! Values. Objects and lists of a request stay JSON; an element is converted when an expression reads it.

mod json;
mod key;
pub(crate) mod offset_time;
pub(crate) mod structure;
mod unknown;
mod unordered;

use std::borrow::Cow;
use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use base64::Engine;
use coracle_values::Quantity;
use ipnetwork::IpNetwork;
use serde_json::{Map, Value as Json};

use crate::access::{Access, AccessDecision};
use crate::duration;
use crate::go_url::GoUrl;
use crate::types::{DYN, ObjectType, Type, UnorderedList};

pub use self::key::Key;
pub use self::offset_time::OffsetTime;
pub use self::structure::Structure;
pub(crate) use self::unordered::union;

/// A value.
#[derive(Clone, Debug)]
pub enum Value<'a> {
    /// Null.
    Null,
    /// `bool`.
    Bool(bool),
    /// `int`.
    Int(i64),
    /// `uint`.
    Uint(u64),
    /// `double`.
    Double(f64),
    /// `string`.
    String(Cow<'a, str>),
    /// `bytes`.
    Bytes(Arc<[u8]>),
    /// A list that an expression made.
    List(Arc<Vec<Value<'a>>>),
    /// A list in JSON and the type of its elements. The third value is present for a list without order.
    JsonList(&'a [Json], &'a Type, Option<&'a UnorderedList>),
    /// A map that an expression made.
    Map(Arc<BTreeMap<Key, Value<'a>>>),
    /// An object in JSON, and the type of its values.
    JsonMap(&'a Map<String, Json>, &'a Type),
    /// An object in JSON with known fields.
    JsonObject(&'a Map<String, Json>, &'a ObjectType),
    /// A duration in nanoseconds.
    Duration(i64),
    /// A point in time.
    Timestamp(OffsetTime),
    /// A type, by name.
    Type(&'static str),
    /// An optional value.
    Optional(Option<Arc<Value<'a>>>),
    /// A quantity.
    Quantity(Quantity),
    /// A URL.
    Url(Arc<GoUrl>),
    /// An IP address.
    Ip(IpAddr),
    /// A network.
    Cidr(IpNetwork),
    /// A semantic version.
    Semver(Arc<semver::Version>),
    /// A named format.
    Format(&'static str),
    /// An object that an expression made.
    Structure(Arc<Structure<'a>>),
    /// A partial authorization check.
    Access(Access<'a>),
    /// The result of an authorization check.
    Decision(Arc<AccessDecision>),
}

/// Maximum depth of comparisons.
const MAX_DEPTH: usize = 200;

// === impl Value ===

impl<'a> Value<'a> {
    /// A JSON value of the type `kind`. A value that does not have this type is converted by its JSON type.
    pub fn from_json(json: &'a Json, kind: &'a Type) -> Value<'a> {
        match (json, kind) {
            (Json::Null, _) => Value::Null,
            (Json::Bool(flag), _) => Value::Bool(*flag),
            (Json::Number(number), Type::Double) => Value::Double(number.as_f64().unwrap_or(f64::NAN)),
            (Json::Number(number), Type::Int) => match (number.as_i64(), number.as_f64()) {
                (Some(whole), _) => Value::Int(whole),
                #[expect(clippy::cast_possible_truncation, reason = "the number is whole and in range")]
                (None, Some(float)) if float.fract() == 0.0 && float.abs() < 9e18 => Value::Int(float as i64),
                (None, float) => Value::Double(float.unwrap_or(f64::NAN)),
            },
            (Json::Number(number), _) => number
                .as_i64()
                .map(Value::Int)
                .unwrap_or_else(|| Value::Double(number.as_f64().unwrap_or(f64::NAN))),
            (Json::String(text), kind) => from_text(text, kind),
            (Json::Array(list), Type::List(item)) => Value::JsonList(list, item, None),
            (Json::Array(list), Type::Unordered(of)) => Value::JsonList(list, &of.item, Some(&**of)),
            (Json::Array(list), _) => Value::JsonList(list, &DYN, None),
            (Json::Object(map), Type::Object(object)) => Value::JsonObject(map, object),
            (Json::Object(map), Type::Map(inner)) => Value::JsonMap(map, inner),
            (Json::Object(map), _) => Value::JsonMap(map, &DYN),
        }
    }

    /// An owned text.
    pub fn text(text: impl Into<String>) -> Value<'a> {
        Value::String(Cow::Owned(text.into()))
    }

    pub(crate) fn list(items: Vec<Value<'a>>) -> Value<'a> {
        Value::List(Arc::new(items))
    }

    pub(crate) fn optional(value: Option<Value<'a>>) -> Value<'a> {
        Value::Optional(value.map(Arc::new))
    }

    /// The name of the value's type.
    pub(crate) fn type_name(&self) -> &'static str {
        match self {
            Value::Null => "null_type",
            Value::Bool(_) => "bool",
            Value::Int(_) => "int",
            Value::Uint(_) => "uint",
            Value::Double(_) => "double",
            Value::String(_) => "string",
            Value::Bytes(_) => "bytes",
            Value::List(_) | Value::JsonList(..) => "list",
            Value::Map(_) | Value::JsonMap(..) | Value::JsonObject(..) => "map",
            Value::Duration(_) => "google.protobuf.Duration",
            Value::Timestamp(_) => "google.protobuf.Timestamp",
            Value::Type(_) => "type",
            Value::Optional(_) => "optional_type",
            Value::Quantity(_) => "kubernetes.Quantity",
            Value::Url(_) => "kubernetes.URL",
            Value::Ip(_) => "net.IP",
            Value::Cidr(_) => "net.CIDR",
            Value::Semver(_) => "kubernetes.Semver",
            Value::Format(_) => "kubernetes.NamedFormat",
            Value::Structure(_) => "object",
            Value::Access(access) => access.type_name(),
            Value::Decision(_) => "kubernetes.authorization.Decision",
        }
    }

    /// Number of elements, characters or bytes.
    pub(crate) fn size(&self) -> Option<usize> {
        Some(match self {
            Value::String(text) => text.chars().count(),
            Value::Bytes(bytes) => bytes.len(),
            Value::List(list) => list.len(),
            Value::JsonList(list, ..) => list.len(),
            Value::Map(map) => map.len(),
            Value::JsonMap(map, _) => map.len(),
            Value::JsonObject(map, _) => map.len(),
            _ => return None,
        })
    }

    /// The size that costs depend on, found in constant time.
    pub(crate) fn cost_size(&self) -> u64 {
        let size = match self {
            Value::String(text) => text.len(),
            Value::Url(url) => url.size(),
            Value::Semver(version) => version.pre.len() + version.build.len(),
            other => other.size().unwrap_or(1),
        };
        u64::try_from(size).unwrap_or(u64::MAX)
    }

    /// The cost of a copy: texts and bytes by their length, as a copy of them takes memory. JSON texts are not copied.
    pub(crate) fn copy_cost(&self) -> u64 {
        match self {
            Value::String(Cow::Owned(_)) | Value::Bytes(_) => self.cost_size() / 10,
            Value::Optional(Some(inner)) => inner.copy_cost(),
            _ => 0,
        }
    }

    /// The cost of collecting the keys of a map. For an object all fields of its type are looked up.
    pub(crate) fn keys_cost(&self) -> u64 {
        if let Value::JsonObject(_, object) = self {
            return u64::try_from(object.fields.len()).unwrap_or(u64::MAX) / 10;
        }
        let texts: usize = match self {
            Value::Map(map) => map
                .keys()
                .map(|key| match key {
                    Key::String(text) => text.len(),
                    _ => 0,
                })
                .sum(),
            _ => 0,
        };
        (self.cost_size() + u64::try_from(texts).unwrap_or(u64::MAX)) / 10
    }

    /// The element of a list.
    pub(crate) fn at(&self, index: usize) -> Option<Value<'a>> {
        match self {
            Value::List(list) => list.get(index).cloned(),
            Value::JsonList(list, kind, _) => list.get(index).map(|item| Value::from_json(item, kind)),
            _ => None,
        }
    }

    /// The elements of a list. `None` if the value is not a list.
    pub(crate) fn items(&self) -> Option<Vec<Value<'a>>> {
        match self {
            Value::List(list) => Some(list.to_vec()),
            Value::JsonList(list, kind, _) => {
                Some(list.iter().map(|item| Value::from_json(item, kind)).collect())
            }
            _ => None,
        }
    }

    /// The keys of a map. `None` if the value is not a map.
    pub(crate) fn keys(&self) -> Option<Vec<Value<'a>>> {
        Some(match self {
            Value::Map(map) => map.keys().map(Key::to_value).collect(),
            Value::JsonMap(map, _) => map.keys().map(|key| Value::String(Cow::Borrowed(key))).collect(),
            Value::JsonObject(map, object) => object
                .fields
                .iter()
                .filter(|(_, field)| present(map, &field.name).is_some())
                .map(|(name, _)| Value::String(Cow::Borrowed(&**name)))
                .collect(),
            _ => return None,
        })
    }

    /// The value of a key.
    pub(crate) fn get(&self, key: &Value<'a>) -> Option<Value<'a>> {
        match (self, key) {
            (Value::Map(map), key) => map.get(&Key::of(key)?).cloned(),
            (Value::JsonMap(map, kind), Value::String(name)) => {
                map.get(&**name).map(|value| Value::from_json(value, kind))
            }
            (Value::JsonObject(map, object), Value::String(name)) => member(map, object, name),
            _ => None,
        }
    }

    /// The field of a map or an object.
    pub(crate) fn field(&self, name: &str) -> Option<Value<'a>> {
        match self {
            Value::Map(map) => map.get(&Key::String(name.to_owned())).cloned(),
            Value::JsonMap(map, kind) => map.get(name).map(|value| Value::from_json(value, kind)),
            Value::JsonObject(map, object) => member(map, object, name),
            Value::Structure(structure) => structure.get(name).cloned(),
            Value::Access(access) if name == "requestResource" => Some(Value::Access(access.of_request())),
            _ => None,
        }
    }

    /// Whether a map or an object has a field. Its value is not converted.
    pub(crate) fn has_field(&self, name: &str) -> bool {
        match self {
            Value::JsonMap(map, _) => map.contains_key(name),
            Value::JsonObject(map, object) => {
                object.fields.get(name).is_some_and(|field| present(map, &field.name).is_some())
            }
            Value::Map(map) => map.contains_key(&Key::String(name.to_owned())),
            other => other.field(name).is_some(),
        }
    }

    /// Whether the value is a map or an object.
    pub(crate) fn is_map(&self) -> bool {
        matches!(self, Value::Map(_) | Value::JsonMap(..) | Value::JsonObject(..))
    }

    /// Whether both values are equal. Numbers of different types are equal if they are the same number. `left` is the
    /// maximum cost of the comparison; it is reduced by the actual cost. `None` if the cost exceeds it.
    pub(crate) fn equals(&self, other: &Value<'a>, left: &mut u64) -> Option<bool> {
        self.equals_at(other, left, 0)
    }

    fn equals_at(&self, other: &Value<'a>, work: &mut u64, depth: usize) -> Option<bool> {
        *work = work.checked_sub(1)?;
        if depth > MAX_DEPTH {
            return Some(false);
        }
        if matches!(self, Value::Bytes(_) | Value::Url(_) | Value::Semver(_)) {
            *work = work.checked_sub(self.cost_size() / 16)?;
        }
        Some(match (self, other) {
            (Value::Null, Value::Null) => true,
            (Value::Bool(left), Value::Bool(right)) => left == right,
            (Value::String(left), Value::String(right)) => {
                *work = work.checked_sub(u64::try_from(left.len().min(right.len()) / 16).unwrap_or(0))?;
                left == right
            }
            (Value::Bytes(left), Value::Bytes(right)) => left == right,
            (Value::Duration(left), Value::Duration(right)) => left == right,
            (Value::Timestamp(left), Value::Timestamp(right)) => left == right,
            (Value::Type(left), Value::Type(right)) | (Value::Format(left), Value::Format(right)) => {
                left == right
            }
            (Value::Quantity(left), Value::Quantity(right)) => left == right,
            (Value::Url(left), Value::Url(right)) => left == right,
            (Value::Ip(left), Value::Ip(right)) => left == right,
            (Value::Cidr(left), Value::Cidr(right)) => left == right,
            (Value::Semver(left), Value::Semver(right)) => left.cmp_precedence(right).is_eq(),
            (Value::Structure(left), Value::Structure(right)) => {
                left.equals(right, |left, right| left.equals_at(right, work, depth + 1))?
            }
            (Value::Optional(left), Value::Optional(right)) => match (left, right) {
                (None, None) => true,
                (Some(left), Some(right)) => left.equals_at(right, work, depth + 1)?,
                _ => false,
            },
            _ => match self.number_order(other) {
                Some(order) => order.is_eq(),
                None => self.equal_collections(other, work, depth)?,
            },
        })
    }

    fn equal_collections(&self, other: &Value<'a>, work: &mut u64, depth: usize) -> Option<bool> {
        if self.size() != other.size() {
            return Some(false);
        }
        if let (Value::List(_) | Value::JsonList(..), Value::List(_) | Value::JsonList(..)) = (self, other) {
            if let Some(of) = self.unordered().or_else(|| other.unordered())
                && let Some(equal) = self.equals_unordered(other, of, work, depth)?
            {
                return Some(equal);
            }
            let mut index = 0;
            while let (Some(left), Some(right)) = (self.at(index), other.at(index)) {
                *work = work.checked_sub(left.copy_cost() + right.copy_cost())?;
                if !left.equals_at(&right, work, depth + 1)? {
                    return Some(false);
                }
                index += 1;
            }
            return Some(true);
        }
        if !self.is_map() || !other.is_map() {
            return Some(false);
        }
        // Charges the collection of the keys.
        *work = work.checked_sub(self.keys_cost().saturating_add(other.keys_cost()))?;
        if let (Value::JsonObject(left, of), Value::JsonObject(right, of_right)) = (self, other)
            && (unknown::has_unknown(left, of) || unknown::has_unknown(right, of_right))
        {
            return unknown::equal_maps(left, right, work);
        }
        let keys = self.keys()?;
        // A null field has no key, so objects of the same size can have different numbers of keys.
        if keys.len() != other.keys()?.len() {
            return Some(false);
        }
        for key in keys {
            let (Some(left), Some(right)) = (self.get(&key), other.get(&key)) else { return Some(false) };
            *work = work.checked_sub(left.copy_cost() + right.copy_cost() + key.cost_size() / 10)?;
            if !left.equals_at(&right, work, depth + 1)? {
                return Some(false);
            }
        }
        Some(true)
    }

    /// The order of two numbers. `None` if one of the values is not a number or is NaN.
    pub(crate) fn number_order(&self, other: &Value<'a>) -> Option<Ordering> {
        #[expect(clippy::cast_precision_loss, reason = "as cel-go compares integers with doubles")]
        match (self, other) {
            (Value::Int(left), Value::Int(right)) => Some(left.cmp(right)),
            (Value::Uint(left), Value::Uint(right)) => Some(left.cmp(right)),
            (Value::Double(left), Value::Double(right)) => left.partial_cmp(right),
            (Value::Int(left), Value::Uint(right)) => Some(i128::from(*left).cmp(&i128::from(*right))),
            (Value::Uint(left), Value::Int(right)) => Some(i128::from(*left).cmp(&i128::from(*right))),
            (Value::Int(left), Value::Double(right)) => (*left as f64).partial_cmp(right),
            (Value::Double(left), Value::Int(right)) => left.partial_cmp(&(*right as f64)),
            (Value::Uint(left), Value::Double(right)) => (*left as f64).partial_cmp(right),
            (Value::Double(left), Value::Uint(right)) => left.partial_cmp(&(*right as f64)),
            _ => None,
        }
    }

    /// The order of two values of the same type, or of two numbers. `None` for other values.
    pub(crate) fn order(&self, other: &Value<'a>) -> Option<Ordering> {
        match (self, other) {
            (Value::Bool(left), Value::Bool(right)) => Some(left.cmp(right)),
            (Value::String(left), Value::String(right)) => Some(left.cmp(right)),
            (Value::Bytes(left), Value::Bytes(right)) => Some(left.cmp(right)),
            (Value::Duration(left), Value::Duration(right)) => Some(left.cmp(right)),
            (Value::Timestamp(left), Value::Timestamp(right)) => Some(left.at().cmp(&right.at())),
            _ => self.number_order(other),
        }
    }

    /// Whether the value is the zero value of its type.
    pub(crate) fn is_zero(&self) -> bool {
        match self {
            Value::Null => true,
            Value::Bool(flag) => !flag,
            Value::Int(number) => *number == 0,
            Value::Uint(number) => *number == 0,
            Value::Double(number) => *number == 0.0,
            Value::Duration(nanoseconds) => *nanoseconds == 0,
            Value::Timestamp(time) => time.is_zero(),
            Value::Optional(inner) => inner.is_none(),
            other => other.size() == Some(0),
        }
    }
}

/// The field of an object with known fields.
fn member<'a>(map: &'a Map<String, Json>, object: &'a ObjectType, name: &str) -> Option<Value<'a>> {
    let field = object.fields.get(name)?;
    present(map, &field.name).map(|value| Value::from_json(value, &field.kind))
}

/// The value of a field. Null is the same as absent.
fn present<'a>(map: &'a Map<String, Json>, name: &str) -> Option<&'a Json> {
    map.get(name).filter(|value| !value.is_null())
}

fn from_text<'a>(text: &'a str, kind: &Type) -> Value<'a> {
    let converted = match kind {
        Type::Bytes => base64::engine::general_purpose::STANDARD
            .decode(text)
            .ok()
            .map(|bytes| Value::Bytes(bytes.into())),
        Type::Duration => duration::parse(text).map(Value::Duration),
        Type::Timestamp => OffsetTime::parse(text).map(Value::Timestamp),
        _ => None,
    };
    converted.unwrap_or(Value::String(Cow::Borrowed(text)))
}
