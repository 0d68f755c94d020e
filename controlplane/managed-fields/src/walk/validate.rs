//! Checks that each element of an applied list can be identified, and that the list has no duplicates.

use std::collections::BTreeSet;

use serde_json::Value;

use super::{NoIdentity, TypedValue, identity};
use crate::{
    path::{Path, PathElement},
    schema::{Schema, TypeId},
};

/// The error of a list element that cannot be applied. The texts are upstream's.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("{path}: {reason}")]
pub struct InvalidElement {
    /// The path of the list.
    pub path: Path,
    /// The defect, in upstream's text.
    pub reason: String,
}

/// Maximum number of elements that are reported.
const MAX_INVALID: usize = 100;

/// Checks an applied configuration.
///
/// # Errors
/// The first [`MAX_INVALID`] elements without identity, and duplicates.
pub fn validate(schema: &Schema, of: TypeId, config: &Value) -> Result<(), Vec<InvalidElement>> {
    let mut invalid = Vec::new();
    walk(schema, of, config, &mut Vec::new(), &mut invalid);
    if invalid.is_empty() { Ok(()) } else { Err(invalid) }
}

fn walk(
    schema: &Schema,
    of: TypeId,
    value: &Value,
    path: &mut Vec<PathElement>,
    invalid: &mut Vec<InvalidElement>,
) {
    match TypedValue::new(schema, of, value) {
        TypedValue::Leaf | TypedValue::Map(None) => {}
        TypedValue::Map(Some(object)) => {
            for (name, part) in object {
                let element = PathElement::field(name);
                let below = schema.below(of, &element);
                path.push(element);
                walk(schema, below, part, path, invalid);
                path.pop();
            }
        }
        TypedValue::List(items) => {
            let mut known = BTreeSet::new();
            for item in items {
                if invalid.len() >= MAX_INVALID {
                    return;
                }
                match identity(schema, of, item) {
                    Err(reason) => {
                        invalid.push(InvalidElement { path: Path(path.clone()), reason: text(&reason) });
                    }
                    Ok(element) => {
                        if !known.insert(element.clone()) {
                            let reason = format!("duplicate entries for key {element}");
                            invalid.push(InvalidElement { path: Path(path.clone()), reason });
                        }
                        let below = schema.below(of, &element);
                        path.push(element);
                        walk(schema, below, item, path, invalid);
                        path.pop();
                    }
                }
            }
        }
    }
}

fn text(reason: &NoIdentity) -> String {
    match reason {
        NoIdentity::NullElement => "associative list with keys may not have a null element".to_owned(),
        NoIdentity::NotAnObject => "associative list with keys may not have non-map elements".to_owned(),
        NoIdentity::NoKey(keys) => format!(
            "associative list with keys has an element that omits all key fields {keys:?} \
             (and doesn't have default values for any key fields)"
        ),
        NoIdentity::KeyNotScalar(key) => format!("key field {key:?} of an associative list is not a scalar"),
        NoIdentity::NotScalar => {
            "associative list without keys has an element that is not a scalar".to_owned()
        }
    }
}
