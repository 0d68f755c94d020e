//! Validation of values against their schema, with the messages of `kube-openapi/pkg/validation/validate`.
//!
//! An update is ratcheted: an invalid value that the old object already has at the same place is accepted
//! (`CRDValidationRatcheting`). Elements of a list are matched by their keys; in a list without keys no old element
//! matches.

mod number;

use serde_json::{Map, Value};

use crate::format;
use crate::schema::{Additional, Checks, Schema};
use crate::violation::{Path, Violation, Violations, extended};
use crate::work::{MAX_WORDS, comparison};

/// Maximum work of the checks of one object; a unit is about a nanosecond. A schema can check the same value many
/// times, with patterns of any size.
const MAX_WORK: u64 = 2_000_000_000;

/// Work for the check of one value against one node of the schema. Checks of texts and lists add work.
const NODE: usize = 50;

/// Work of one violation, without its texts. Violations that are not reported cost the same.
const VIOLATION: usize = 500;

/// Maximum violations of one value. A definition can list very many required fields, and each can be a violation.
const MAX_ERRORS: usize = 1000;

/// Validates an object, or a part of it that the path names.
pub(crate) fn check(
    value: &Value,
    old: Option<&Value>,
    schema: &Schema,
    prefix: &str,
    violations: &mut Violations,
) {
    let mut checker = Checker { prefix, left: MAX_WORK };
    let outcome = checker.node(value, old, schema, "");
    for violation in outcome.errors {
        violations.push(violation);
    }
    if checker.left == 0 {
        let place = if prefix.is_empty() { Path::default() } else { Path::root(prefix) };
        violations.forbidden(&place, "the schema needs too many checks of this object");
    }
}

struct Checker<'a> {
    /// Path of the checked value: the prefix of the paths of violations.
    prefix: &'a str,
    /// The remaining part of [`MAX_WORK`]. At zero the check ends, and the object is refused.
    left: u64,
}

/// Violations and the number of checks that were done. If all alternatives fail, the violations of the alternative with
/// the most checks are reported.
#[derive(Default)]
struct Outcome {
    errors: Vec<Violation>,
    matches: usize,
}

impl Outcome {
    fn merge(&mut self, other: Outcome) {
        self.matches += other.matches;
        if self.errors.len() < MAX_ERRORS {
            self.errors.extend(other.errors);
        }
    }

    fn failed(&self) -> bool {
        !self.errors.is_empty()
    }
}

/// A list or an object, and the old state at the same place.
struct Compared<'a, T: ?Sized> {
    value: &'a T,
    old: Option<&'a Value>,
}

impl Checker<'_> {
    /// Subtracts `count` times `each` from the remaining work. Returns false if none is left.
    fn charge(&mut self, count: usize, each: usize) -> bool {
        let work = u64::try_from(count.saturating_mul(each)).unwrap_or(u64::MAX);
        self.left = self.left.saturating_sub(work);
        self.left > 0
    }

    fn node(&mut self, value: &Value, old: Option<&Value>, schema: &Schema, path: &str) -> Outcome {
        let outcome = self.check_node(value, old, schema, path);
        if outcome.failed() && old == Some(value) {
            return Outcome { errors: Vec::new(), matches: outcome.matches };
        }
        outcome
    }

    fn check_node(&mut self, value: &Value, old: Option<&Value>, schema: &Schema, path: &str) -> Outcome {
        let mut outcome = Outcome { errors: Vec::new(), matches: 1 };
        if !self.charge(1, NODE) {
            return outcome;
        }
        self.check_type(value, schema, path, &mut outcome);
        if value.is_null() {
            self.check_enum(value, schema, path, &mut outcome);
            return outcome;
        }
        if let Some(checks) = &schema.checks {
            self.check_junctors(value, checks, path, &mut outcome);
        }
        match value {
            Value::String(text) => self.check_text(text, schema, path, &mut outcome),
            Value::Number(number) => number::check(self, number, schema, path, &mut outcome),
            Value::Array(list) => {
                self.check_list(Compared { value: list.as_slice(), old }, schema, path, &mut outcome)
            }
            Value::Object(map) => self.check_object(Compared { value: map, old }, schema, path, &mut outcome),
            _ => {}
        }
        self.check_enum(value, schema, path, &mut outcome);
        outcome
    }

    fn check_type(&mut self, value: &Value, schema: &Schema, path: &str, outcome: &mut Outcome) {
        let one = [&*schema.kind];
        let expected: &[&str] = if schema.int_or_string { &["integer", "string"] } else { &one };
        if expected == [""] {
            return;
        }
        outcome.matches += 1;
        if value.is_null() {
            if !schema.nullable {
                self.wrong_type(path, &expected.join(","), &Value::String("null".into()), outcome);
            }
            return;
        }
        let actual = json_type(value);
        let whole = value.as_f64().is_some_and(|number| number.fract() == 0.0);
        let fits = expected.contains(&actual)
            || (actual == "number" && whole && expected.contains(&"integer"))
            || (actual == "integer" && expected.contains(&"number"));
        if !fits {
            self.wrong_type(path, &expected.join(","), &Value::String(actual.into()), outcome);
        }
    }

    fn wrong_type(&mut self, path: &str, expected: &str, actual: &Value, outcome: &mut Outcome) {
        let detail = format!("{path} in body must be of type {expected}: {actual}");
        self.report(outcome, path, |violations, place| violations.type_invalid(place, actual, &detail));
    }

    fn check_text(&mut self, text: &str, schema: &Schema, path: &str, outcome: &mut Outcome) {
        if let Some(checks) = &schema.checks {
            if !self.charge(text.len(), 1) {
                return;
            }
            let value = Value::String(text.to_owned());
            let length = || i64::try_from(text.chars().count()).unwrap_or(i64::MAX);
            if let Some(max) = checks.max_length
                && length() > max
            {
                self.report(outcome, path, |violations, place| violations.too_long(place, max));
            }
            if let Some(min) = checks.min_length
                && length() < min
            {
                let detail = format!("{path} in body should be at least {min} chars long");
                self.report(outcome, path, |violations, place| violations.invalid(place, &value, &detail));
            }
            if let Some(pattern) = &checks.pattern
                && self.charge(text.len(), pattern.work)
            {
                let problem = match &pattern.regex {
                    Ok(regex) if regex.is_match(text) => None,
                    Ok(_) => Some(pattern.text.to_string()),
                    Err(error) => Some(format!("{}, but pattern is invalid: {error}", pattern.text)),
                };
                if let Some(problem) = problem {
                    let detail = format!("{path} in body should match '{problem}'");
                    self.report(outcome, path, |violations, place| {
                        violations.invalid(place, &value, &detail)
                    });
                }
            }
        }
        let has_format = !schema.format.is_empty() && matches!(&*schema.kind, "" | "string");
        if has_format && self.charge(text.len(), 20) && !format::fits(&schema.format, text) {
            let value = Value::String(text.to_owned());
            self.wrong_type(path, &schema.format, &value, outcome);
        }
    }

    fn check_list(
        &mut self,
        compared: Compared<'_, [Value]>,
        schema: &Schema,
        path: &str,
        outcome: &mut Outcome,
    ) {
        let Compared { value: list, old } = compared;
        if let Some(item) = schema.item() {
            let index = OldItems::new(old, schema);
            for (position, inner) in list.iter().enumerate() {
                let place = extended(path, &["[", &position.to_string(), "]"]);
                outcome.merge(self.node(inner, index.find(inner), item, &place));
            }
        }
        let Some(checks) = &schema.checks else { return };
        let count = i64::try_from(list.len()).unwrap_or(i64::MAX);
        if let Some(min) = checks.min_items
            && count < min
        {
            let detail = format!("{path} in body should have at least {min} items");
            self.report(outcome, path, |violations, place| violations.invalid(place, &count.into(), &detail));
        }
        if let Some(max) = checks.max_items
            && count > max
        {
            self.report(outcome, path, |violations, place| violations.too_many(place, list.len(), max));
        }
        if checks.unique_items {
            let mut seen = std::collections::HashSet::new();
            let mut is_new = |item: &Value| {
                let text = item.to_string();
                self.charge(text.len(), 10);
                seen.insert(text)
            };
            if !list.iter().all(&mut is_new) {
                let detail = format!("{path} in body shouldn't contain duplicates");
                self.report(outcome, path, |violations, place| {
                    violations.invalid(place, &"".into(), &detail)
                });
            }
        }
    }

    fn check_object(
        &mut self,
        compared: Compared<'_, Map<String, Value>>,
        schema: &Schema,
        path: &str,
        outcome: &mut Outcome,
    ) {
        let Compared { value: map, old } = compared;
        self.charge(map.len(), 20);
        if let Some(checks) = &schema.checks {
            self.check_counts(map.len(), checks, path, outcome);
        }
        let correlated = old.filter(|old| old.is_object());
        for (name, inner) in map {
            let place = join(path, name);
            let field = match (schema.properties.get(name.as_str()), &schema.additional) {
                (Some(property), _) => property,
                (None, Some(Additional::Schema(additional))) => additional,
                (None, Some(Additional::Allowed(false))) if !schema.properties.is_empty() => {
                    let detail = format!("{path}.{name} in body is a forbidden property");
                    let named = Value::String(name.clone());
                    self.report(outcome, path, |violations, place| {
                        violations.invalid(place, &named, &detail)
                    });
                    continue;
                }
                _ => continue,
            };
            // apiVersion and kind are never ratcheted: both objects are converted to the same type.
            let before =
                correlated.and_then(|old| old.get(name)).filter(|_| !(path.is_empty() && is_type_meta(name)));
            outcome.merge(self.node(inner, before, field, &place));
        }
        let Some(checks) = &schema.checks else { return };
        if !self.charge(checks.required.len(), 20) {
            return;
        }
        for name in checks.required.iter().filter(|name| !map.contains_key(&***name)) {
            if outcome.errors.len() >= MAX_ERRORS || self.left == 0 {
                return;
            }
            self.report(outcome, &join(path, name), |violations, place| violations.required(place, ""));
        }
    }

    fn check_counts(&mut self, len: usize, checks: &Checks, path: &str, outcome: &mut Outcome) {
        let count = i64::try_from(len).unwrap_or(i64::MAX);
        if let Some(min) = checks.min_properties
            && count < min
        {
            let detail = format!("{path} in body should have at least {min} properties");
            self.report(outcome, path, |violations, place| violations.invalid(place, &count.into(), &detail));
        }
        if let Some(max) = checks.max_properties
            && count > max
        {
            self.report(outcome, path, |violations, place| violations.too_many(place, len, max));
        }
    }

    fn check_enum(&mut self, value: &Value, schema: &Schema, path: &str, outcome: &mut Outcome) {
        let Some(known) = schema.checks.as_ref().and_then(|checks| checks.one_of_values.as_ref()) else {
            return;
        };
        let size = comparison(value);
        if !self.charge(size, 5) || !self.charge(known.len(), size.saturating_mul(5)) {
            return;
        }
        if known.iter().any(|allowed| number::equal(allowed, value)) {
            return;
        }
        // The work includes the value, because the message quotes it.
        if !self.charge(value.to_string().len(), 20) {
            return;
        }
        // The message lists the first values only.
        let mut buffer = [0; MAX_WORDS];
        let mut left = MAX_WORDS;
        let mut words = Vec::new();
        for allowed in known {
            if left == 0 {
                break;
            }
            let word = beginning(allowed, &mut buffer[..left]);
            left = left.saturating_sub(word.len());
            words.push(word);
        }
        self.charge(MAX_WORDS - left, 2);
        self.report(outcome, path, |violations, place| violations.unsupported(place, value, &words));
    }

    fn check_junctors(&mut self, value: &Value, checks: &Checks, path: &str, outcome: &mut Outcome) {
        if !checks.any_of.is_empty() {
            self.any_of(value, &checks.any_of, path, outcome);
        }
        if !checks.one_of.is_empty() {
            self.one_of(value, &checks.one_of, path, outcome);
        }
        let total = checks.all_of.len();
        let mut passed = 0;
        for schema in &checks.all_of {
            let result = self.check_node(value, None, schema, path);
            passed += usize::from(!result.failed());
            outcome.merge(result);
        }
        if passed != total {
            let none = if passed == 0 { ". None validated" } else { "" };
            self.whole(outcome, &format!("{path:?} must validate all the schemas (allOf){none}"));
        }
        if let Some(not) = &checks.not
            && !self.check_node(value, None, not, path).failed()
        {
            self.whole(outcome, &format!("{path:?} must not validate the schema (not)"));
        }
    }

    fn any_of(&mut self, value: &Value, schemas: &[Schema], path: &str, outcome: &mut Outcome) {
        let mut best: Option<Outcome> = None;
        for schema in schemas {
            let result = self.check_node(value, None, schema, path);
            if !result.failed() {
                outcome.merge(result);
                return;
            }
            if best.as_ref().is_none_or(|best| result.matches > best.matches) {
                best = Some(result);
            }
        }
        self.whole(outcome, &format!("{path:?} must validate at least one schema (anyOf)"));
        outcome.merge(best.unwrap_or_default());
    }

    fn one_of(&mut self, value: &Value, schemas: &[Schema], path: &str, outcome: &mut Outcome) {
        let mut best: Option<Outcome> = None;
        let mut first = None;
        let mut passed = 0;
        for schema in schemas {
            let result = self.check_node(value, None, schema, path);
            if !result.failed() {
                passed += 1;
                first.get_or_insert(result);
            } else if best.as_ref().is_none_or(|best| result.matches > best.matches) {
                best = Some(result);
            }
        }
        match passed {
            1 => outcome.merge(first.unwrap_or_default()),
            0 => {
                let text =
                    format!("{path:?} must validate one and only one schema (oneOf). Found none valid");
                self.whole(outcome, &text);
                outcome.merge(best.unwrap_or_default());
            }
            count => self.whole(
                outcome,
                &format!(
                    "{path:?} must validate one and only one schema (oneOf). Found {count} valid alternatives"
                ),
            ),
        }
    }

    /// Reports a violation of the object as a whole, as upstream does for `allOf`, `anyOf`, `oneOf` and `not`.
    fn whole(&mut self, outcome: &mut Outcome, detail: &str) {
        self.report(outcome, "", |violations, place| violations.invalid(place, &"".into(), detail));
    }

    fn report(&mut self, outcome: &mut Outcome, path: &str, add: impl FnOnce(&mut Violations, &Path)) {
        let place = match (self.prefix, path) {
            ("", "") => Path::default(),
            ("", path) => Path::root(path),
            (prefix, "") => Path::root(prefix),
            (prefix, path) => Path::root(prefix).field(path),
        };
        let mut one = Violations::default();
        add(&mut one, &place);
        for violation in one.as_slice() {
            self.charge(1, VIOLATION + violation.field.len() + violation.message.len());
        }
        outcome.errors.extend(one.into_list());
    }
}

/// The old elements of a list with keys.
struct OldItems<'a> {
    keys: &'a [Box<str>],
    items: std::collections::HashMap<String, &'a Value>,
}

impl<'a> OldItems<'a> {
    fn new(old: Option<&'a Value>, schema: &'a Schema) -> OldItems<'a> {
        let keys = schema.list_keys.as_slice();
        let list = match (old, schema.list_type.as_deref()) {
            (Some(Value::Array(list)), Some("map")) => list.as_slice(),
            _ => &[],
        };
        OldItems { keys, items: list.iter().map(|item| (key_of(item, keys), item)).collect() }
    }

    fn find(&self, item: &Value) -> Option<&'a Value> {
        if self.items.is_empty() { None } else { self.items.get(&key_of(item, self.keys)).copied() }
    }
}

/// The values of the keys as one text.
pub(crate) fn key_of(item: &Value, keys: &[Box<str>]) -> String {
    let values: Vec<&Value> = keys.iter().map(|key| item.get(&**key).unwrap_or(&Value::Null)).collect();
    serde_json::to_string(&values).unwrap_or_default()
}

/// The text of an allowed value, cut at the length of the buffer. A value can be as long as a definition.
fn beginning(value: &Value, buffer: &mut [u8]) -> String {
    let max = buffer.len();
    if let Some(text) = value.as_str() {
        return text[..text.floor_char_boundary(max)].to_owned();
    }
    let mut rest = &mut buffer[..];
    // Writing fails when the buffer is full.
    let _ = serde_json::to_writer(&mut rest, value);
    let len = max - rest.len();
    String::from_utf8_lossy(&buffer[..len]).into_owned()
}

fn is_type_meta(name: &str) -> bool {
    matches!(name, "apiVersion" | "kind")
}

fn join(path: &str, name: &str) -> String {
    extended(path, &[if path.is_empty() { "" } else { "." }, name])
}

fn json_type(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(number) if number.is_f64() => "number",
        Value::Number(_) => "integer",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}

#[cfg(test)]
mod tests;
