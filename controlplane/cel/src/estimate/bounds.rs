//! Maximum sizes of the values that an expression reads from its variables.

use std::collections::BTreeMap;

use super::size::Size;

/// Sizes of the values of a type, and of their parts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Bounds {
    /// Maximum size: characters of a text, bytes, elements of a list, entries of a map. 0 for other types.
    pub size: u64,
    /// Minimum length of a value as JSON, in bytes.
    pub min_length: u64,
    /// Fields of an object, by their identifiers.
    pub fields: BTreeMap<Box<str>, Bounds>,
    /// The fields that are not in `fields`.
    pub other_fields: Option<Box<Bounds>>,
    /// Elements of a list, or values of a map.
    pub items: Option<Box<Bounds>>,
    /// Keys of a map.
    pub keys: Option<Box<Bounds>>,
}

/// The bounds of the variables of an expression.
#[derive(Clone, Copy, Debug)]
pub struct Limits<'a> {
    /// Name of the only variable with these bounds. `None` if all variables have them.
    pub variable: Option<&'a str>,
    /// The bounds.
    pub bounds: &'a Bounds,
}

/// The origin of a value.
#[derive(Clone, Copy)]
pub(super) enum Origin<'a> {
    /// The expression computes the value.
    Computed,
    /// A part of a variable with these bounds.
    At(&'a Bounds),
    /// A part of a variable without bounds.
    Unbounded,
}

/// The way from a value to its part.
pub(super) enum Step<'s> {
    Field(&'s str),
    /// An element of a list, or the value of an entry.
    Item,
    Key,
    /// The position of an element.
    Index,
}

// === impl Bounds ===

impl Bounds {
    /// The bounds of a value without parts.
    pub fn leaf(size: u64, min_length: u64) -> Bounds {
        Bounds { size, min_length, ..Bounds::default() }
    }

    fn part(&self, step: &Step<'_>) -> Option<&Bounds> {
        match step {
            Step::Field(name) => self.fields.get(*name).or(self.other_fields.as_deref()),
            Step::Item => self.items.as_deref(),
            Step::Key => self.keys.as_deref(),
            Step::Index => None,
        }
    }
}

// === impl Limits ===

impl<'a> Limits<'a> {
    pub(super) fn variable(&self, name: &str) -> Origin<'a> {
        match self.variable {
            Some(known) if known != name => Origin::Unbounded,
            _ => Origin::At(self.bounds),
        }
    }

    /// The origin of a field or an element. Upstream's estimator for custom resources ignores the first element of a
    /// path. So in rules of custom resources, a part of a computed value has the bounds of the variable.
    pub(super) fn below(&self, origin: Origin<'a>, step: &Step<'_>) -> Origin<'a> {
        match origin {
            Origin::Computed if self.variable.is_none() => Origin::At(self.bounds),
            Origin::At(bounds) => bounds.part(step).map_or(Origin::Unbounded, Origin::At),
            Origin::Computed | Origin::Unbounded => Origin::Unbounded,
        }
    }
}

// === impl Origin ===

impl Origin<'_> {
    pub(super) fn size(self) -> Option<Size> {
        match self {
            Origin::At(bounds) => Some(Size::at_most(bounds.size)),
            Origin::Computed | Origin::Unbounded => None,
        }
    }
}
