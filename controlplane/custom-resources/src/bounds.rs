//! Maximum sizes of the values of a schema, for the estimated cost of its rules.
//!
//! Source: `apiserver/pkg/cel/common/schemas.go` and `limits.go`. The numbers must be upstream's, because they
//! determine the accepted definitions.

use std::collections::BTreeMap;

use coracle_cel::{Bounds, escape};

use crate::schema::{Checks, Schema};

/// Size of the largest request in bytes (`MaxRequestSizeBytes`).
const MAX_REQUEST: u64 = 3 * 1024 * 1024;

/// Maximum length of a duration or a time in JSON, in bytes.
const MAX_TIME: u64 = 32;

/// Minimum length of a duration in JSON, in bytes.
const MIN_DURATION: u64 = 3;

/// Length of a date in JSON, in bytes.
const DATE: u64 = 12;

/// Minimum length of a date with a time in JSON, in bytes.
const MIN_DATE_TIME: u64 = 21;

/// Length of an empty text, list or object in JSON, in bytes.
const EMPTY: u64 = 2;

/// The sizes of a schema's values. `None` if rules cannot read them, as in [`crate::types::of_schema`].
pub(crate) fn of_schema(schema: &Schema, resource: bool) -> Option<Bounds> {
    let checks = schema.checks.as_deref();
    if schema.int_or_string {
        return Some(Bounds::leaf(max_characters(checks).unwrap_or(MAX_REQUEST - EMPTY), 1));
    }
    Some(match &*schema.kind {
        "array" => {
            let items = below(schema.item()?)?;
            let size = limit(checks.and_then(|checks| checks.max_items));
            let size = size.unwrap_or((MAX_REQUEST - EMPTY) / (items.min_length + 1));
            Bounds { items: Some(Box::new(items)), ..Bounds::leaf(size, EMPTY) }
        }
        "object" => match schema.additional_schema() {
            Some(additional) if schema.properties.is_empty() => map(checks, below(additional)?),
            _ => object(schema, resource || schema.embedded),
        },
        "boolean" => Bounds::leaf(0, 4),
        "number" | "integer" => Bounds::leaf(0, 1),
        "string" => text(schema, checks),
        _ => return None,
    })
}

/// Maximum number of values with this minimum length in one request. Each value needs a comma as well.
pub(crate) fn max_values(min_length: u64) -> u64 {
    MAX_REQUEST / min_length.saturating_add(1)
}

/// Maximum number of elements of a list or map, 1 for other types. `None` if the schema has no limit.
pub(crate) fn max_elements(schema: &Schema) -> Option<u64> {
    let checks = schema.checks.as_deref();
    match &*schema.kind {
        "object" if schema.additional.is_some() => limit(checks.and_then(|checks| checks.max_properties)),
        "array" => limit(checks.and_then(|checks| checks.max_items)),
        _ => Some(1),
    }
}

fn below(schema: &Schema) -> Option<Bounds> {
    of_schema(schema, schema.embedded)
}

fn map(checks: Option<&Checks>, value: Bounds) -> Bounds {
    let size = limit(checks.and_then(|checks| checks.max_properties));
    // An entry has at least six further bytes: quotation marks, a colon, a comma and a key of two characters.
    let size = size.unwrap_or((MAX_REQUEST - EMPTY) / (value.min_length + 6));
    let keys = Some(Box::new(Bounds::leaf(0, EMPTY)));
    Bounds { items: Some(Box::new(value)), keys, ..Bounds::leaf(size, EMPTY) }
}

fn object(schema: &Schema, resource: bool) -> Bounds {
    let mut parts = BTreeMap::new();
    for (name, property) in &schema.properties {
        if let Some(bounds) = below(property) {
            parts.insert(&**name, (bounds, property.default.is_some()));
        }
    }
    if resource && !has_metadata(schema) {
        let name = || Bounds::leaf(MAX_REQUEST - EMPTY, EMPTY);
        let fields = ["name", "generateName"].map(|field| (Box::<str>::from(field), name()));
        parts.insert("kind", (name(), false));
        parts.insert("apiVersion", (name(), false));
        let metadata = Bounds { fields: fields.into(), ..Bounds::leaf(0, EMPTY) };
        parts.insert("metadata", (metadata, false));
    }
    let required = schema.checks.as_ref().map_or(&[][..], |checks| &checks.required);
    let required: std::collections::HashSet<&str> = required.iter().map(|name| &**name).collect();
    let mut bounds = Bounds::leaf(0, EMPTY);
    for (name, (part, has_default)) in parts {
        if required.contains(name) && !has_default {
            let length = u64::try_from(name.len()).unwrap_or(u64::MAX);
            bounds.min_length = bounds.min_length.saturating_add(length + part.min_length + 4);
        }
        if let Some(identifier) = escape::escape(name) {
            bounds.fields.insert(identifier.into_boxed_str(), part);
        }
    }
    bounds
}

/// Whether the schema itself describes `apiVersion`, `kind` and the names in `metadata`.
fn has_metadata(schema: &Schema) -> bool {
    let is = |schema: &Schema, name: &str, kind: &str| {
        schema.properties.get(name).is_some_and(|property| &*property.kind == kind)
    };
    let metadata = schema.properties.get("metadata").filter(|metadata| &*metadata.kind == "object");
    is(schema, "kind", "string")
        && is(schema, "apiVersion", "string")
        && metadata
            .is_some_and(|metadata| is(metadata, "name", "string") && is(metadata, "generateName", "string"))
}

fn text(schema: &Schema, checks: Option<&Checks>) -> Bounds {
    let longest = MAX_REQUEST - EMPTY;
    match &*schema.format {
        "byte" => {
            let size = limit(checks.and_then(|checks| checks.max_length));
            Bounds::leaf(size.unwrap_or(longest), EMPTY)
        }
        "duration" => Bounds::leaf(MAX_TIME, MIN_DURATION),
        "date" => Bounds::leaf(DATE, DATE),
        "date-time" => Bounds::leaf(MAX_TIME, MIN_DATE_TIME),
        _ => {
            let size = max_characters(checks).or_else(|| longest_value(checks)).unwrap_or(longest);
            Bounds::leaf(size, EMPTY)
        }
    }
}

/// The limit `maxLength` in bytes: a character has up to four bytes.
fn max_characters(checks: Option<&Checks>) -> Option<u64> {
    limit(checks.and_then(|checks| checks.max_length)).map(|length| length.saturating_mul(4))
}

/// The length of the longest text of an `enum`, in bytes.
fn longest_value(checks: Option<&Checks>) -> Option<u64> {
    let values = checks?.one_of_values.as_ref().filter(|values| !values.is_empty())?;
    let lengths = values.iter().filter_map(|value| value.as_str()).map(str::len);
    Some(u64::try_from(lengths.max().unwrap_or(0)).unwrap_or(u64::MAX))
}

/// A limit. A negative limit counts as zero.
fn limit(limit: Option<i64>) -> Option<u64> {
    limit.map(|limit| u64::try_from(limit).unwrap_or(0))
}

#[cfg(test)]
mod tests;
