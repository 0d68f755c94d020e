//! Types of variables and fields.

use std::collections::BTreeMap;
use std::fmt;
use std::hash::{BuildHasher as _, Hash, Hasher, RandomState};
use std::sync::{Arc, LazyLock};

/// A type.
#[derive(Clone, Debug, PartialEq, Hash)]
pub enum Type {
    /// Any value. Operations are checked when they are evaluated.
    Dyn,
    /// Null.
    Null,
    /// `bool`.
    Bool,
    /// `int`.
    Int,
    /// `uint`.
    Uint,
    /// `double`.
    Double,
    /// `string`.
    String,
    /// `bytes`. In JSON a text in base64.
    Bytes,
    /// `google.protobuf.Duration`. In JSON a text such as `1m`.
    Duration,
    /// `google.protobuf.Timestamp`. In JSON a text, a date with or without time.
    Timestamp,
    /// A list.
    List(Arc<Type>),
    /// A list without order. Static checks treat it as a list.
    Unordered(Arc<UnorderedList>),
    /// A map with texts as keys.
    Map(Arc<Type>),
    /// A map with keys of another type, made by an expression.
    KeyedMap(Arc<Type>, Arc<Type>),
    /// An object with known fields.
    Object(Arc<ObjectType>),
    /// A value that may be absent.
    Optional(Arc<Type>),
    /// A type of a library, by name: `kubernetes.Quantity`.
    Opaque(&'static str),
    /// An object that an expression makes: `Object.spec`, `JSONPatch`.
    Structure(Arc<str>),
    /// A type as a value.
    Type,
}

/// A list without order: a set, or a map by key fields (`x-kubernetes-list-type`).
#[derive(Debug, PartialEq, Hash)]
pub struct UnorderedList {
    /// Type of the elements.
    pub item: Type,
    /// Identifiers of the fields that identify an element. Empty for a set.
    pub keys: Box<[Box<str>]>,
}

/// An object type.
#[derive(Debug)]
pub struct ObjectType {
    /// Name for messages.
    pub(crate) name: String,
    /// Fields by their identifiers.
    pub(crate) fields: BTreeMap<Box<str>, Field>,
    /// Two hashes of the name and the fields, with secret keys.
    digest: [u64; 2],
}

/// A field of an object type.
#[derive(Clone, Debug, PartialEq, Hash)]
pub struct Field {
    /// Name in JSON.
    pub name: Box<str>,
    /// Type.
    pub kind: Type,
}

/// The type of values whose type is unknown.
pub(crate) static DYN: Type = Type::Dyn;

pub(crate) const QUANTITY: Type = Type::Opaque("kubernetes.Quantity");
pub(crate) const URL: Type = Type::Opaque("kubernetes.URL");
pub(crate) const IP: Type = Type::Opaque("net.IP");
pub(crate) const CIDR: Type = Type::Opaque("net.CIDR");
pub(crate) const SEMVER: Type = Type::Opaque("kubernetes.Semver");
pub(crate) const FORMAT: Type = Type::Opaque("kubernetes.NamedFormat");

/// A type of a library.
pub(crate) const fn opaque(name: &'static str) -> Type {
    Type::Opaque(name)
}

/// Maximum depth of a type in messages, and of the type of a shared value.
const MAX_DEPTH: usize = 16;

// === impl ObjectType ===

impl ObjectType {
    /// A type with this name for messages, and these fields by their identifiers.
    pub fn new(name: impl Into<String>, fields: BTreeMap<Box<str>, Field>) -> ObjectType {
        static KEYS: LazyLock<[RandomState; 2]> = LazyLock::new(|| [RandomState::new(), RandomState::new()]);
        let name = name.into();
        let digest = KEYS.each_ref().map(|key| key.hash_one((&name, &fields)));
        ObjectType { name, fields, digest }
    }
}

// A schema's type has up to 50,000 fields, and an expression can compare two equal types with a few bytes of text. So
// digests of 128 bits are compared instead of the fields. A type's digest covers the digests of its fields' types.
impl PartialEq for ObjectType {
    fn eq(&self, other: &ObjectType) -> bool {
        self.digest == other.digest
    }
}

impl Hash for ObjectType {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.digest.hash(state);
    }
}

// === impl Type ===

impl Type {
    /// A list of elements of a type.
    pub fn list(item: Type) -> Type {
        Type::List(Arc::new(item))
    }

    /// The type that static checks use: a list instead of a list without order.
    pub(crate) fn checked(&self) -> Type {
        match self {
            Type::Unordered(list) => Type::list(list.item.clone()),
            other => other.clone(),
        }
    }

    /// The type, or `dyn` if it is deeper than the limit: a chain of shared values could nest types without end.
    pub(crate) fn limited(self) -> Type {
        if self.is_deeper_than(MAX_DEPTH) { Type::Dyn } else { self }
    }

    fn is_deeper_than(&self, limit: usize) -> bool {
        match self {
            _ if limit == 0 => true,
            Type::List(inner) | Type::Map(inner) | Type::Optional(inner) => inner.is_deeper_than(limit - 1),
            Type::Unordered(list) => list.item.is_deeper_than(limit - 1),
            Type::KeyedMap(key, value) => key.is_deeper_than(limit - 1) || value.is_deeper_than(limit - 1),
            _ => false,
        }
    }

    /// Whether a value of this type may be used where the other is expected.
    pub(crate) fn fits(&self, expected: &Type) -> bool {
        match (self, expected) {
            (Type::Dyn, _) | (_, Type::Dyn) => true,
            (Type::Unordered(_), _) => self.checked().fits(expected),
            (_, Type::Unordered(_)) => self.fits(&expected.checked()),
            // In upstream's type system these types are messages and wrappers, which may be null.
            (
                Type::Null,
                Type::Object(_) | Type::Optional(_) | Type::Opaque(_) | Type::Timestamp | Type::Duration,
            ) => true,
            (Type::Object(_) | Type::Timestamp | Type::Duration, Type::Null) => true,
            (Type::List(left), Type::List(right))
            | (Type::Map(left), Type::Map(right))
            | (Type::Optional(left), Type::Optional(right)) => left.fits(right),
            (Type::KeyedMap(_, left), Type::Map(right)) | (Type::Map(left), Type::KeyedMap(_, right)) => {
                left.fits(right)
            }
            (Type::KeyedMap(_, left), Type::KeyedMap(_, right)) => left.fits(right),
            _ => self == expected,
        }
    }
}

impl fmt::Display for Type {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.print(f, MAX_DEPTH)
    }
}

impl Type {
    /// Prints the type. Parts below the maximum depth are printed as `...`.
    fn print(&self, f: &mut fmt::Formatter<'_>, depth: usize) -> fmt::Result {
        let Some(below) = depth.checked_sub(1) else { return f.write_str("...") };
        let inner = |f: &mut fmt::Formatter<'_>, (open, inner): (&str, &Type)| {
            f.write_str(open)?;
            inner.print(f, below)?;
            f.write_str(")")
        };
        match self {
            Type::Dyn => f.write_str("dyn"),
            Type::Null => f.write_str("null"),
            Type::Bool => f.write_str("bool"),
            Type::Int => f.write_str("int"),
            Type::Uint => f.write_str("uint"),
            Type::Double => f.write_str("double"),
            Type::String => f.write_str("string"),
            Type::Bytes => f.write_str("bytes"),
            Type::Duration => f.write_str("google.protobuf.Duration"),
            Type::Timestamp => f.write_str("google.protobuf.Timestamp"),
            Type::List(item) => inner(f, ("list(", item)),
            Type::Unordered(list) => inner(f, ("list(", &list.item)),
            Type::Map(value) => inner(f, ("map(string, ", value)),
            Type::KeyedMap(key, value) => {
                f.write_str("map(")?;
                key.print(f, below)?;
                inner(f, (", ", value))
            }
            Type::Object(object) => f.write_str(&object.name),
            Type::Optional(value) => inner(f, ("optional_type(", value)),
            Type::Opaque(name) => f.write_str(name),
            Type::Structure(name) => f.write_str(name),
            Type::Type => f.write_str("type"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A type with 2^64 paths: on each of 64 levels, two fields have the type of the next level.
    fn nested(innermost: Type) -> Type {
        (0..64).fold(innermost, |inner, _| {
            let field = |name: &str| (name.into(), Field { name: name.into(), kind: inner.clone() });
            Type::Object(Arc::new(ObjectType::new("object", BTreeMap::from([field("a"), field("b")]))))
        })
    }

    #[test]
    fn types_are_compared_without_a_walk_through_their_fields() {
        let (one, same, other) = (nested(Type::Int), nested(Type::Int), nested(Type::String));
        assert!(one == same && one.fits(&same));
        assert!(one != other && !one.fits(&other));
        assert!(Type::list(one) == Type::list(same));
    }
}
