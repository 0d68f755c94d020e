//! The schema for field ownership: the values that are owned as a whole, and the keys of list elements.

use std::collections::BTreeMap;

use crate::path::{PathElement, Scalar};

/// The types of one or more kinds. Types refer to each other by index, so that they can be recursive.
#[derive(Clone, Debug, Default)]
pub struct Schema {
    types: Vec<Type>,
}

/// Index of a type in its [`Schema`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TypeId(u32);

/// The type of a value, which determines its ownership and its merge.
#[derive(Clone, Debug)]
pub enum Type {
    /// A value without parts.
    Scalar,
    /// A list or object that has one owner as a whole (`x-kubernetes-list-type: atomic`,
    /// `x-kubernetes-map-type: atomic`).
    Atomic,
    /// An object with declared fields, a map, or both.
    Map {
        /// Declared fields.
        fields: BTreeMap<Box<str>, Field>,
        /// The type of all other entries. None if there are no others.
        other: Option<TypeId>,
    },
    /// A list of distinct scalars (`x-kubernetes-list-type: set`).
    Set,
    /// A list of objects. Key fields identify each object (`x-kubernetes-list-type: map`).
    Keyed {
        /// The key fields.
        keys: Box<[Key]>,
        /// The type of the elements.
        element: TypeId,
    },
    /// A value without schema: objects are maps, lists are atomic.
    Deduced,
}

/// A declared field of an object.
#[derive(Clone, Copy, Debug)]
pub struct Field {
    /// Type of the field.
    pub of: TypeId,
    /// Whether an absent field is the same as an empty object: in Go the field is a struct and not a pointer.
    pub absent_is_empty: bool,
}

/// A key field of a keyed list.
#[derive(Clone, Debug)]
pub struct Key {
    /// The field's name.
    pub name: Box<str>,
    /// The default value of the key field, for an element that omits the field.
    pub default: Option<Scalar>,
}

/// The id of [`Type::Deduced`], the type of values that no schema declares. It has no entry in `types`.
const DEDUCED: TypeId = TypeId(u32::MAX);

// === impl Schema ===

impl Schema {
    /// Adds a type and returns its index.
    pub fn add(&mut self, of: Type) -> TypeId {
        let id = TypeId(u32::try_from(self.types.len()).unwrap_or(u32::MAX));
        self.types.push(of);
        id
    }

    /// Replaces a type. For a recursive type, first add a placeholder, then replace it when its parts are known.
    pub fn replace(&mut self, id: TypeId, of: Type) {
        if let Some(slot) = usize::try_from(id.0).ok().and_then(|at| self.types.get_mut(at)) {
            *slot = of;
        }
    }

    /// The type of values without schema.
    pub fn deduced() -> TypeId {
        DEDUCED
    }

    /// The type of an index.
    pub fn get(&self, id: TypeId) -> &Type {
        usize::try_from(id.0).ok().and_then(|at| self.types.get(at)).unwrap_or(&Type::Deduced)
    }

    /// The type of a part of a value.
    pub(crate) fn below(&self, of: TypeId, element: &PathElement) -> TypeId {
        match (self.get(of), element) {
            (_, PathElement::Field(name)) => self.field(of, name),
            (Type::Keyed { element, .. }, PathElement::Key(_)) => *element,
            _ => DEDUCED,
        }
    }

    /// The type of a field of an object, or of an entry of a map.
    pub(crate) fn field(&self, of: TypeId, name: &str) -> TypeId {
        match self.get(of) {
            Type::Map { fields, other } => {
                fields.get(name).map(|field| field.of).or(*other).unwrap_or(DEDUCED)
            }
            _ => DEDUCED,
        }
    }

    /// Whether an absent field of a type is the same as an empty object.
    pub(crate) fn absent_is_empty(&self, of: TypeId, field: &str) -> bool {
        matches!(self.get(of), Type::Map { fields, .. } if fields.get(field).is_some_and(|field| field.absent_is_empty))
    }

    /// Whether a type declares a field by name. Entries of a map are not declared.
    pub(crate) fn declares(&self, of: TypeId, field: &str) -> bool {
        matches!(self.get(of), Type::Map { fields, .. } if fields.contains_key(field))
    }
}
