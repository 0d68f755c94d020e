//! The schema of one version of a custom resource, compiled once from its JSON form (`JSONSchemaProps`).
//!
//! Upstream has two forms, `JSONSchemaProps` and `Structural`. Here one node holds both: its structure, and the
//! checks of values. [`crate::structural`] checks the rules that make a schema structural.

mod parse;

use std::collections::BTreeMap;

use regex::Regex;
use serde_json::{Number, Value};

pub use parse::SchemaError;

/// A property with a default.
pub(crate) struct DefaultedProperty<'a> {
    pub(crate) name: &'a str,
    pub(crate) default: &'a Value,
    pub(crate) schema: &'a Schema,
}

/// One node of a schema.
#[derive(Clone, Debug, Default)]
#[expect(clippy::struct_excessive_bools, reason = "each is a field of its own in the JSON form")]
pub struct Schema {
    /// `type`; empty if absent.
    pub kind: Box<str>,
    /// `format`; empty if absent.
    pub format: Box<str>,
    /// `nullable`.
    pub nullable: bool,
    /// `default`. Null is the same as absent.
    pub default: Option<Value>,
    /// `properties`.
    pub properties: BTreeMap<Box<str>, Schema>,
    /// The names of the properties with a default. With this list, defaulting does not visit all properties of the
    /// schema for each value.
    pub defaulted: Vec<Box<str>>,
    /// `additionalProperties`.
    pub additional: Option<Additional>,
    /// `items`.
    pub items: Option<Box<Schema>>,
    /// `x-kubernetes-preserve-unknown-fields`.
    pub preserve_unknown: bool,
    /// `x-kubernetes-embedded-resource`.
    pub embedded: bool,
    /// `x-kubernetes-int-or-string`.
    pub int_or_string: bool,
    /// `x-kubernetes-list-type`.
    pub list_type: Option<Box<str>>,
    /// `x-kubernetes-list-map-keys`.
    pub list_keys: Vec<Box<str>>,
    /// `x-kubernetes-map-type`.
    pub map_type: Option<Box<str>>,
    /// `x-kubernetes-validations`.
    pub rules: Vec<RuleText>,
    /// Checks of the value. Most nodes have none.
    pub checks: Option<Box<Checks>>,
    /// Fields that only the structural rules read. They do not affect the validation of values.
    pub marks: Marks,
}

/// `additionalProperties`.
#[derive(Clone, Debug)]
pub enum Additional {
    /// `true` or `false`.
    Allowed(bool),
    /// The schema of each value.
    Schema(Box<Schema>),
}

/// Checks of a value (`ValueValidation`).
#[derive(Clone, Debug, Default)]
pub struct Checks {
    /// `maximum`.
    pub maximum: Option<Number>,
    /// `exclusiveMaximum`.
    pub exclusive_maximum: bool,
    /// `minimum`.
    pub minimum: Option<Number>,
    /// `exclusiveMinimum`.
    pub exclusive_minimum: bool,
    /// `multipleOf`.
    pub multiple_of: Option<Number>,
    /// `maxLength`, in characters.
    pub max_length: Option<i64>,
    /// `minLength`, in characters.
    pub min_length: Option<i64>,
    /// `pattern`.
    pub pattern: Option<Pattern>,
    /// `maxItems`.
    pub max_items: Option<i64>,
    /// `minItems`.
    pub min_items: Option<i64>,
    /// `uniqueItems`.
    pub unique_items: bool,
    /// `maxProperties`.
    pub max_properties: Option<i64>,
    /// `minProperties`.
    pub min_properties: Option<i64>,
    /// `enum`.
    pub one_of_values: Option<Vec<Value>>,
    /// `required`.
    pub required: Vec<Box<str>>,
    /// `allOf`.
    pub all_of: Vec<Schema>,
    /// `anyOf`.
    pub any_of: Vec<Schema>,
    /// `oneOf`.
    pub one_of: Vec<Schema>,
    /// `not`.
    pub not: Option<Box<Schema>>,
}

/// A regular expression and its text.
#[derive(Clone, Debug)]
pub struct Pattern {
    /// The text in the schema.
    pub text: Box<str>,
    /// The compiled expression, or the reason why it cannot be compiled.
    pub regex: Result<Regex, Box<str>>,
    /// Maximum work of a search for each byte of the searched text. It grows with the size of the compiled expression.
    pub work: usize,
}

/// One entry of `x-kubernetes-validations`.
#[derive(Clone, Debug, Default)]
pub struct RuleText {
    /// The expression.
    pub rule: String,
    /// `message`; empty if absent.
    pub message: String,
    /// `messageExpression`; empty if absent.
    pub message_expression: String,
    /// `reason`.
    pub reason: Option<String>,
    /// `fieldPath`; empty if absent.
    pub field_path: String,
    /// `optionalOldSelf`.
    pub optional_old_self: Option<bool>,
}

/// Presence of fields that only the rules for definitions read.
#[derive(Clone, Debug, Default)]
#[expect(clippy::struct_excessive_bools, reason = "each is a field of its own in the JSON form")]
pub struct Marks {
    /// Names of fields that no schema of a custom resource may have, such as `$ref`.
    pub unsupported: Vec<&'static str>,
    /// `items` is a list of schemas.
    pub items_is_list: bool,
    /// `x-kubernetes-preserve-unknown-fields: false`.
    pub preserve_unknown_false: bool,
    /// `title` is set.
    pub title: bool,
    /// `description` is set.
    pub description: bool,
}

// === impl Schema ===

impl Schema {
    /// The schema of a field: its property, or the schema of additional properties.
    pub fn field(&self, name: &str) -> Option<&Schema> {
        self.properties.get(name).or_else(|| self.additional_schema())
    }

    /// The schema of additional properties.
    pub fn additional_schema(&self) -> Option<&Schema> {
        match &self.additional {
            Some(Additional::Schema(schema)) => Some(schema),
            _ => None,
        }
    }

    /// The schema of list elements.
    pub fn item(&self) -> Option<&Schema> {
        self.items.as_deref()
    }

    /// The properties with a default.
    pub(crate) fn properties_with_default(&self) -> impl Iterator<Item = DefaultedProperty<'_>> {
        self.defaulted.iter().filter_map(|name| {
            let schema = self.properties.get(name)?;
            Some(DefaultedProperty { name, default: schema.default.as_ref()?, schema })
        })
    }

    /// Whether the node or a node below it has rules.
    pub fn has_rules(&self) -> bool {
        !self.rules.is_empty()
            || self.item().is_some_and(Schema::has_rules)
            || self.additional_schema().is_some_and(Schema::has_rules)
            || self.properties.values().any(Schema::has_rules)
    }

    /// Whether the node or a node below it has a default.
    pub fn has_defaults(&self) -> bool {
        self.default.is_some()
            || self.item().is_some_and(Schema::has_defaults)
            || self.additional_schema().is_some_and(Schema::has_defaults)
            || self.properties.values().any(Schema::has_defaults)
    }
}
