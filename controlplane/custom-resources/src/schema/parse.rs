//! Reads a schema from its JSON form.

use serde_json::{Map, Value};

use super::{Additional, Checks, Marks, Pattern, RuleText, Schema};
use coracle_cel::pattern;

/// Maximum depth of a schema. Recursive code over schemas and objects relies on it.
const MAX_DEPTH: usize = 100;

/// Maximum number of nodes of one schema.
const MAX_NODES: usize = 50_000;

/// Maximum number of rules in CEL of one schema. Each one is parsed in its own thread, one after another.
const MAX_RULES: usize = 1000;

/// Maximum memory of all compiled patterns of one schema, in bytes.
const MAX_PATTERN_BYTES: usize = 16 << 20;

/// Maximum number of case-folded characters in all patterns of one schema. Compiling them takes about half a second.
const MAX_FOLDED: u64 = 16 << 20;

/// A schema that cannot be compiled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SchemaError {
    /// The schema is nested too deeply.
    TooDeep,
    /// The schema has too many nodes.
    TooLarge,
    /// The schema has too many rules in CEL.
    TooManyRules,
    /// A schema is not an object.
    NotAnObject,
}

/// Fields of `JSONSchemaProps` that definitions of custom resources must not have.
const UNSUPPORTED: &[&str] =
    &["id", "additionalItems", "patternProperties", "definitions", "dependencies", "$ref"];

impl std::fmt::Display for SchemaError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            SchemaError::TooDeep => write!(f, "the schema is nested more than {MAX_DEPTH} levels deep"),
            SchemaError::TooLarge => write!(f, "the schema has more than {MAX_NODES} nodes"),
            SchemaError::TooManyRules => write!(f, "the schema has more than {MAX_RULES} validation rules"),
            SchemaError::NotAnObject => f.write_str("a schema must be an object"),
        }
    }
}

impl std::error::Error for SchemaError {}

struct Reader {
    nodes: usize,
    rules: usize,
    pattern_bytes: usize,
    folded: u64,
}

impl Schema {
    /// Compiles a schema from its JSON form. Unknown fields are ignored.
    pub fn parse(value: &Value) -> Result<Schema, SchemaError> {
        Reader { nodes: 0, rules: 0, pattern_bytes: 0, folded: 0 }.node(value, 0)
    }
}

impl Reader {
    fn node(&mut self, value: &Value, depth: usize) -> Result<Schema, SchemaError> {
        let Value::Object(map) = value else { return Err(SchemaError::NotAnObject) };
        self.nodes += 1;
        if depth > MAX_DEPTH {
            return Err(SchemaError::TooDeep);
        }
        if self.nodes > MAX_NODES {
            return Err(SchemaError::TooLarge);
        }
        self.rules += list(map, "x-kubernetes-validations").len();
        if self.rules > MAX_RULES {
            return Err(SchemaError::TooManyRules);
        }
        let mut schema = Schema {
            kind: text(map, "type"),
            format: text(map, "format"),
            nullable: flag(map, "nullable"),
            default: map.get("default").filter(|value| !value.is_null()).cloned(),
            preserve_unknown: flag(map, "x-kubernetes-preserve-unknown-fields"),
            embedded: flag(map, "x-kubernetes-embedded-resource"),
            int_or_string: flag(map, "x-kubernetes-int-or-string"),
            list_type: optional_text(map, "x-kubernetes-list-type"),
            list_keys: texts(map, "x-kubernetes-list-map-keys"),
            map_type: optional_text(map, "x-kubernetes-map-type"),
            rules: list(map, "x-kubernetes-validations").iter().map(rule).collect(),
            marks: marks(map),
            ..Schema::default()
        };
        if let Some(Value::Object(properties)) = map.get("properties") {
            for (name, property) in properties {
                schema.properties.insert(Box::from(name.as_str()), self.node(property, depth + 1)?);
            }
        }
        let with_default = schema.properties.iter().filter(|(_name, property)| property.default.is_some());
        schema.defaulted = with_default.map(|(name, _property)| name.clone()).collect();
        schema.additional = match map.get("additionalProperties") {
            Some(Value::Bool(allowed)) => Some(Additional::Allowed(*allowed)),
            Some(inner @ Value::Object(_)) => {
                Some(Additional::Schema(Box::new(self.node(inner, depth + 1)?)))
            }
            _ => None,
        };
        if let Some(items @ Value::Object(_)) = map.get("items") {
            schema.items = Some(Box::new(self.node(items, depth + 1)?));
        }
        schema.checks = self.checks(map, depth)?.map(Box::new);
        Ok(schema)
    }

    fn checks(&mut self, map: &Map<String, Value>, depth: usize) -> Result<Option<Checks>, SchemaError> {
        const FIELDS: &[&str] = &[
            "maximum",
            "minimum",
            "multipleOf",
            "maxLength",
            "minLength",
            "pattern",
            "maxItems",
            "minItems",
            "uniqueItems",
            "maxProperties",
            "minProperties",
            "enum",
            "required",
            "allOf",
            "anyOf",
            "oneOf",
            "not",
            "exclusiveMaximum",
            "exclusiveMinimum",
        ];
        if !FIELDS.iter().any(|field| map.contains_key(*field)) {
            return Ok(None);
        }
        let not = match map.get("not") {
            Some(inner @ Value::Object(_)) => Some(Box::new(self.node(inner, depth + 1)?)),
            _ => None,
        };
        Ok(Some(Checks {
            maximum: number(map, "maximum"),
            exclusive_maximum: flag(map, "exclusiveMaximum"),
            minimum: number(map, "minimum"),
            exclusive_minimum: flag(map, "exclusiveMinimum"),
            multiple_of: number(map, "multipleOf"),
            max_length: integer(map, "maxLength"),
            min_length: integer(map, "minLength"),
            pattern: map.get("pattern").and_then(Value::as_str).and_then(|text| self.pattern(text)),
            max_items: integer(map, "maxItems"),
            min_items: integer(map, "minItems"),
            unique_items: flag(map, "uniqueItems"),
            max_properties: integer(map, "maxProperties"),
            min_properties: integer(map, "minProperties"),
            one_of_values: map.get("enum").and_then(Value::as_array).cloned(),
            required: texts(map, "required"),
            all_of: self.nodes(map, "allOf", depth)?,
            any_of: self.nodes(map, "anyOf", depth)?,
            one_of: self.nodes(map, "oneOf", depth)?,
            not,
        }))
    }

    fn nodes(
        &mut self,
        map: &Map<String, Value>,
        name: &str,
        depth: usize,
    ) -> Result<Vec<Schema>, SchemaError> {
        list(map, name).iter().map(|item| self.node(item, depth + 1)).collect()
    }

    fn pattern(&mut self, text: &str) -> Option<Pattern> {
        if text.is_empty() {
            return None;
        }
        self.folded = self.folded.saturating_add(pattern::folded(text));
        let is_too_much = self.folded > MAX_FOLDED;
        let left = if is_too_much { 0 } else { MAX_PATTERN_BYTES.saturating_sub(self.pattern_bytes) };
        let mut regex = Err(pattern::TOO_LARGE.to_owned());
        // The crate `regex` does not report the size of an expression. So the smallest limit with which the expression
        // compiles counts as its size.
        let mut work = 0;
        for (limit, steps) in [(4 << 10, 30), (64 << 10, 500), (pattern::MAX_BYTES, 8000)] {
            let limit = limit.min(left);
            if limit == 0 {
                break;
            }
            work = steps;
            regex = pattern::compile(text, limit);
            if regex.is_ok() {
                self.pattern_bytes += limit;
                break;
            }
        }
        let regex = regex.map_err(String::into_boxed_str);
        Some(Pattern { text: text.into(), regex, work })
    }
}

fn marks(map: &Map<String, Value>) -> Marks {
    let set = |name: &str| map.get(name).and_then(Value::as_str).is_some_and(|text| !text.is_empty());
    Marks {
        unsupported: UNSUPPORTED.iter().copied().filter(|name| is_set(map.get(*name))).collect(),
        items_is_list: map.get("items").is_some_and(Value::is_array),
        preserve_unknown_false: map.get("x-kubernetes-preserve-unknown-fields") == Some(&Value::Bool(false)),
        title: set("title"),
        description: set("description"),
    }
}

fn is_set(value: Option<&Value>) -> bool {
    match value {
        None | Some(Value::Null) => false,
        Some(Value::String(text)) => !text.is_empty(),
        Some(Value::Object(map)) => !map.is_empty(),
        Some(_) => true,
    }
}

fn rule(value: &Value) -> RuleText {
    let text = |name: &str| value[name].as_str().unwrap_or_default().to_owned();
    RuleText {
        rule: text("rule"),
        message: text("message"),
        message_expression: text("messageExpression"),
        reason: value["reason"].as_str().map(str::to_owned),
        field_path: text("fieldPath"),
        optional_old_self: value["optionalOldSelf"].as_bool(),
    }
}

fn text(map: &Map<String, Value>, name: &str) -> Box<str> {
    map.get(name).and_then(Value::as_str).unwrap_or_default().into()
}

fn optional_text(map: &Map<String, Value>, name: &str) -> Option<Box<str>> {
    map.get(name).and_then(Value::as_str).map(Box::from)
}

fn flag(map: &Map<String, Value>, name: &str) -> bool {
    map.get(name).and_then(Value::as_bool).unwrap_or(false)
}

fn integer(map: &Map<String, Value>, name: &str) -> Option<i64> {
    map.get(name).and_then(Value::as_i64)
}

fn number(map: &Map<String, Value>, name: &str) -> Option<serde_json::Number> {
    match map.get(name) {
        Some(Value::Number(number)) => Some(number.clone()),
        _ => None,
    }
}

fn list<'a>(map: &'a Map<String, Value>, name: &str) -> &'a [Value] {
    map.get(name).and_then(Value::as_array).map_or(&[], Vec::as_slice)
}

fn texts(map: &Map<String, Value>, name: &str) -> Vec<Box<str>> {
    list(map, name).iter().filter_map(Value::as_str).map(Box::from).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_number_of_rules_is_limited() {
        let schema = |count: usize| json!({"type": "object", "x-kubernetes-validations": vec![json!({"rule": "true"}); count]});
        assert!(Schema::parse(&schema(MAX_RULES)).is_ok());
        assert_eq!(Schema::parse(&schema(MAX_RULES + 1)).err(), Some(SchemaError::TooManyRules));
    }

    #[test]
    fn properties_with_a_default_are_known_apart() {
        let properties = json!({"a": {"type": "string"}, "b": {"default": 1}, "c": {"default": null}});
        let schema = Schema::parse(&json!({"type": "object", "properties": properties})).unwrap();
        let found: Vec<_> =
            schema.properties_with_default().map(|property| (property.name, property.default)).collect();
        assert_eq!(found, [("b", &json!(1))]);
    }

    #[test]
    fn large_patterns_use_up_the_memory_of_a_schema() {
        let mut reader = Reader { nodes: 0, rules: 0, pattern_bytes: 0, folded: 0 };
        let results: Vec<bool> = (0..40)
            .filter_map(|_| reader.pattern("^(?:[a-z]{60}){40}$"))
            .map(|pattern| pattern.regex.is_ok())
            .collect();
        assert!(results[0] && !results[39] && reader.pattern_bytes <= MAX_PATTERN_BYTES);
    }

    #[test]
    fn patterns_that_fold_the_case_of_many_characters_use_up_the_time_of_a_schema() {
        let mut reader = Reader { nodes: 0, rules: 0, pattern_bytes: 0, folded: MAX_FOLDED - 40 };
        let mut is_compiled = || reader.pattern("(?i)^[a-z]$").is_some_and(|pattern| pattern.regex.is_ok());
        assert!(is_compiled() && !is_compiled());
    }
}
