//! Functions over a value and its schema: owned fields, comparison, merge, removal, validation.

pub(crate) mod compare;
pub(crate) mod merge;
pub(crate) mod owned;
pub(crate) mod reconcile;
pub(crate) mod remove;
pub(crate) mod validate;

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use crate::{
    path::{PathElement, Scalar},
    schema::{Key, Schema, Type, TypeId},
};

/// A value interpreted by its type.
#[derive(Clone, Copy)]
pub(crate) enum TypedValue<'a> {
    /// The value is owned as a whole. This includes a value that does not fit its type.
    Leaf,
    /// An object with parts. None for null.
    Map(Option<&'a Map<String, Value>>),
    /// A list with elements that can be identified. Empty for null.
    List(&'a [Value]),
}

impl<'a> TypedValue<'a> {
    pub(crate) fn new(schema: &Schema, of: TypeId, value: &'a Value) -> TypedValue<'a> {
        match (schema.get(of), value) {
            (Type::Map { .. } | Type::Deduced, Value::Object(object)) => TypedValue::Map(Some(object)),
            (Type::Map { .. }, Value::Null) => TypedValue::Map(None),
            (Type::Set | Type::Keyed { .. }, Value::Array(items)) => TypedValue::List(items),
            (Type::Set | Type::Keyed { .. }, Value::Null) => TypedValue::List(&[]),
            _ => TypedValue::Leaf,
        }
    }

    /// Whether an object or list has no parts.
    fn is_empty(self) -> bool {
        match self {
            TypedValue::Leaf => false,
            TypedValue::Map(object) => object.is_none_or(Map::is_empty),
            TypedValue::List(items) => items.is_empty(),
        }
    }
}

/// Two states of a value, interpreted as leaves, objects or lists. One of them can be absent.
pub(crate) enum Pair<'a> {
    /// Two values that are compared and merged as a whole.
    Leaf,
    /// Two objects.
    Maps(Option<&'a Map<String, Value>>, Option<&'a Map<String, Value>>),
    /// Two lists.
    Lists(&'a [Value], &'a [Value]),
}

impl<'a> Pair<'a> {
    /// Two empty containers count as a leaf: null, `{}` and an absent field are different values.
    pub(crate) fn new(
        schema: &Schema,
        of: TypeId,
        old: Option<&'a Value>,
        new: Option<&'a Value>,
    ) -> Pair<'a> {
        let old = old.map(|value| TypedValue::new(schema, of, value));
        let new = new.map(|value| TypedValue::new(schema, of, value));
        if old.is_none_or(TypedValue::is_empty) && new.is_none_or(TypedValue::is_empty) {
            return Pair::Leaf;
        }
        match (old, new) {
            (Some(TypedValue::Map(old)), Some(TypedValue::Map(new))) => Pair::Maps(old, new),
            (Some(TypedValue::Map(old)), None) => Pair::Maps(old, None),
            (None, Some(TypedValue::Map(new))) => Pair::Maps(None, new),
            (Some(TypedValue::List(old)), Some(TypedValue::List(new))) => Pair::Lists(old, new),
            (Some(TypedValue::List(old)), None) => Pair::Lists(old, &[]),
            (None, Some(TypedValue::List(new))) => Pair::Lists(&[], new),
            _ => Pair::Leaf,
        }
    }
}

/// The reason why an element of a set or keyed list cannot be identified.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum NoIdentity {
    /// An element of a keyed list is null.
    NullElement,
    /// An element of a keyed list is not an object.
    NotAnObject,
    /// An element has none of the key fields.
    NoKey(Vec<String>),
    /// A key field is an object, a list or null.
    KeyNotScalar(String),
    /// An element of a set is not a scalar.
    NotScalar,
}

/// The path element of a list's element.
pub(crate) fn identity(schema: &Schema, of: TypeId, item: &Value) -> Result<PathElement, NoIdentity> {
    match schema.get(of) {
        Type::Keyed { keys, .. } => key_of(keys, item),
        _ => Scalar::of(item).map(PathElement::Value).ok_or(NoIdentity::NotScalar),
    }
}

fn key_of(keys: &[Key], item: &Value) -> Result<PathElement, NoIdentity> {
    let object = match item {
        Value::Object(object) => object,
        Value::Null => return Err(NoIdentity::NullElement),
        _ => return Err(NoIdentity::NotAnObject),
    };
    let mut fields = Vec::with_capacity(keys.len());
    for key in keys {
        let value = match object.get(&*key.name) {
            Some(value) => {
                Some(Scalar::of(value).ok_or_else(|| NoIdentity::KeyNotScalar(key.name.to_string()))?)
            }
            None => key.default.clone(),
        };
        fields.extend(value.map(|value| (key.name.clone(), value)));
    }
    if fields.is_empty() {
        return Err(NoIdentity::NoKey(keys.iter().map(|key| key.name.to_string()).collect()));
    }
    fields.sort_unstable();
    Ok(PathElement::Key(fields.into()))
}

/// The elements of a list, indexed by their path elements.
pub(crate) struct Elements<'a> {
    /// Path elements in the list's order. The path element of an element without identity is its index.
    pub(crate) order: Vec<PathElement>,
    /// The elements of each identity. Duplicates have the same identity.
    pub(crate) by_identity: BTreeMap<PathElement, Vec<&'a Value>>,
}

impl<'a> Elements<'a> {
    pub(crate) fn new(schema: &Schema, of: TypeId, items: &'a [Value]) -> Elements<'a> {
        let mut elements = Elements { order: Vec::with_capacity(items.len()), by_identity: BTreeMap::new() };
        for (index, item) in (0..).zip(items) {
            let element = identity(schema, of, item).unwrap_or(PathElement::Index(index));
            elements.by_identity.entry(element.clone()).or_default().push(item);
            elements.order.push(element);
        }
        elements
    }

    /// All elements of an identity.
    pub(crate) fn all(&self, element: &PathElement) -> &[&'a Value] {
        self.by_identity.get(element).map_or(&[], Vec::as_slice)
    }

    /// The only element of an identity. None if no element, or more than one, has the identity.
    pub(crate) fn only(&self, element: &PathElement) -> Option<&'a Value> {
        match self.all(element) {
            [item] => Some(item),
            _ => None,
        }
    }
}
