//! Causes: violations with their field paths.

use std::fmt;

use serde_json::Value;

/// One violation, as in `details.causes` of a Status.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cause {
    /// `FieldValueRequired`, `FieldValueInvalid`, …
    pub reason: &'static str,
    /// `spec.containers[0].image`.
    pub field: String,
    /// `Required value`, `Invalid value: "x": …`.
    pub message: String,
}

/// The path of a value: `spec.containers[0].resources.limits[cpu]`. It is cut at [`MAX_PATH`] bytes.
#[derive(Clone, Debug)]
pub struct Path(String);

/// Maximum length of a path in bytes. Each element below a key has its own path, and a key can be a megabyte long.
const MAX_PATH: usize = 2048;

/// The value that messages show for an absent text.
static EMPTY: Value = Value::String(String::new());

/// Collects violations, at most [`MAX_CAUSES`] and about [`MAX_BYTES`]. Further violations are only counted.
#[derive(Debug, Default)]
pub struct Causes {
    list: Vec<Cause>,
    bytes: usize,
    count: usize,
}

/// Maximum number of violations of one object. A request can have a million violations, and the response contains each
/// violation twice.
const MAX_CAUSES: usize = 300;
/// Bytes of violations after which no more violations are added. Each violation can quote a value of any size.
const MAX_BYTES: usize = 1 << 20;

/// Whether violations of the object may be missing in this list, because the list has reached a limit.
pub fn are_cut(causes: &[Cause]) -> bool {
    causes.len() >= MAX_CAUSES || causes.iter().map(Cause::size).sum::<usize>() >= MAX_BYTES
}

// === impl Cause ===

impl Cause {
    fn size(&self) -> usize {
        self.field.len() + self.message.len()
    }
}

// === impl Path ===

impl Path {
    /// The path of a top-level field.
    pub fn root(name: &str) -> Path {
        Path(name.to_owned())
    }

    /// The path of the whole object, as upstream writes it.
    pub fn whole() -> Path {
        Path("[]".to_owned())
    }

    /// The path of a field of this object.
    #[must_use]
    pub fn field(&self, name: &str) -> Path {
        self.with([".", name, ""])
    }

    /// The path of an element of this list.
    #[must_use]
    pub fn index(&self, index: usize) -> Path {
        self.with(["[", &index.to_string(), "]"])
    }

    /// The path of an entry of this map.
    #[must_use]
    pub fn key(&self, key: &str) -> Path {
        self.with(["[", key, "]"])
    }

    /// The path with these parts appended. Validation makes hundreds of paths, so formatting is too slow.
    fn with(&self, parts: [&str; 3]) -> Path {
        let length = self.0.len() + parts.iter().map(|part| part.len()).sum::<usize>();
        let mut text = String::with_capacity(length.min(MAX_PATH));
        text.push_str(&self.0);
        for part in parts {
            let room = MAX_PATH.saturating_sub(text.len());
            text.push_str(&part[..part.floor_char_boundary(room)]);
        }
        Path(text)
    }
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

// === impl Causes ===

impl Causes {
    /// Adds a violation.
    pub fn push(&mut self, cause: Cause) {
        self.count += 1;
        if self.has_room() {
            self.bytes += cause.size();
            self.list.push(cause);
        }
    }

    /// Whether there are no violations.
    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// Number of violations, including violations that are only counted.
    pub fn count(&self) -> usize {
        self.count
    }

    /// The violations in the order of their discovery.
    pub fn into_list(self) -> Vec<Cause> {
        self.list
    }

    /// Reports that a required value is missing.
    pub fn required(&mut self, path: &Path, detail: &str) {
        self.add("FieldValueRequired", path, || with("Required value".to_owned(), detail));
    }

    /// Reports that a value is invalid.
    pub fn invalid(&mut self, path: &Path, value: &Value, detail: &str) {
        self.add("FieldValueInvalid", path, || with(format!("Invalid value: {value}"), detail));
    }

    /// Reports that a value is invalid; the message does not show it.
    pub fn invalid_without_value(&mut self, path: &Path, detail: &str) {
        self.add("FieldValueInvalid", path, || format!("Invalid value: {detail}"));
    }

    /// Reports that a label selector is invalid. The message shows its fields in upstream's order.
    pub fn invalid_selector(&mut self, path: &Path, selector: &Value, detail: &str) {
        self.add("FieldValueInvalid", path, || {
            let parts = ["matchLabels", "matchExpressions"].into_iter().filter_map(|name| {
                let part = selector.get(name).filter(|part| !part.is_null())?;
                Some(format!("\"{name}\":{part}"))
            });
            let shown = match selector {
                Value::Object(_) => format!("{{{}}}", parts.collect::<Vec<_>>().join(",")),
                other => other.to_string(),
            };
            with(format!("Invalid value: {shown}"), detail)
        });
    }

    /// Reports that a value is forbidden here.
    pub fn forbidden(&mut self, path: &Path, detail: &str) {
        self.add("FieldValueForbidden", path, || with("Forbidden".to_owned(), detail));
    }

    /// Reports that a value is not one of the supported values.
    pub fn unsupported(&mut self, path: &Path, value: &Value, supported: &[&str]) {
        let value = if value.is_null() { &EMPTY } else { value };
        self.add("FieldValueNotSupported", path, || {
            let known: Vec<String> = supported.iter().map(|word| format!("{word:?}")).collect();
            format!("Unsupported value: {value}: supported values: {}", known.join(", "))
        });
    }

    /// Reports that a map is not supported. The message shows an absent map as `null`.
    pub fn unsupported_map(&mut self, path: &Path, value: &Value, supported: &str) {
        self.add("FieldValueNotSupported", path, || {
            format!("Unsupported value: {value}: supported values: {supported:?}")
        });
    }

    /// Reports that a value is duplicate. `detail` is the rule that the value violates.
    pub fn duplicate_because(&mut self, path: &Path, value: &Value, detail: &str) {
        self.add("FieldValueDuplicate", path, || format!("Duplicate value: {value}: {detail}"));
    }

    /// Reports that a value is duplicate.
    pub fn duplicate(&mut self, path: &Path, value: &Value) {
        self.add("FieldValueDuplicate", path, || format!("Duplicate value: {value}"));
    }

    /// Reports that a value refers to an object that does not exist.
    pub fn not_found(&mut self, path: &Path, value: &Value) {
        self.add("FieldValueNotFound", path, || format!("Not found: {value}"));
    }

    /// Reports that a value refers to an object that does not exist. `detail` is the rule that the value violates.
    pub fn not_found_because(&mut self, path: &Path, value: &Value, detail: impl FnOnce() -> String) {
        self.add("FieldValueNotFound", path, || format!("Not found: {value}: {}", detail()));
    }

    /// Reports that a value is too long.
    pub fn too_long(&mut self, path: &Path, max: usize) {
        self.add("FieldValueTooLong", path, || format!("Too long: may not be more than {max} bytes"));
    }

    /// Reports that a list has too many elements.
    pub fn too_many(&mut self, path: &Path, count: usize, max: usize) {
        self.add("FieldValueTooMany", path, || format!("Too many: {count}: must have at most {max} items"));
    }

    /// Checks that a value is one of the supported words. An empty value counts as missing.
    pub fn one_of(&mut self, path: &Path, value: &Value, supported: &[&str]) {
        match value.as_str() {
            None | Some("") => self.required(path, ""),
            Some(word) if supported.contains(&word) => {}
            Some(_) => self.unsupported(path, value, supported),
        }
    }

    /// Checks that a value is one of the supported words, if it is present. An empty value is not supported.
    pub fn optional_word(&mut self, path: &Path, value: &Value, supported: &[&str]) {
        if value.as_str().is_some_and(|word| !supported.contains(&word)) {
            self.unsupported(path, value, supported);
        }
    }

    /// Checks that a number is not negative. It may be absent.
    pub fn not_negative(&mut self, path: &Path, value: &Value) {
        if value.as_i64().is_some_and(|number| number < 0) {
            self.invalid(path, value, "must be greater than or equal to 0");
        }
    }

    /// Checks that a number is within bounds. It may be absent.
    pub fn in_range(&mut self, path: &Path, value: &Value, bounds: std::ops::RangeInclusive<i64>) {
        if value.as_i64().is_some_and(|number| !bounds.contains(&number)) {
            let detail = format!("must be between {} and {}, inclusive", bounds.start(), bounds.end());
            self.invalid(path, value, &detail);
        }
    }

    /// Adds one violation for each problem of a format.
    pub fn format(&mut self, path: &Path, value: &str, problems: Vec<String>) {
        for problem in problems {
            self.invalid(path, &value.into(), &problem);
        }
    }

    /// Adds a violation. The message is made only if the violation is kept.
    fn add(&mut self, reason: &'static str, path: &Path, message: impl FnOnce() -> String) {
        if self.has_room() {
            self.push(Cause { reason, field: path.to_string(), message: message() });
        } else {
            self.count += 1;
        }
    }

    fn has_room(&self) -> bool {
        self.list.len() < MAX_CAUSES && self.bytes < MAX_BYTES
    }
}

fn with(head: String, detail: &str) -> String {
    if detail.is_empty() { head } else { format!("{head}: {detail}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_violations_are_cut_and_counted() {
        let mut causes = Causes::default();
        for index in 0..100_000 {
            causes.unsupported(&Path::root("a").index(index), &"x".into(), &["b"]);
        }
        assert_eq!(causes.count(), 100_000);
        let list = causes.into_list();
        assert_eq!((list.len(), list[0].field.as_str()), (MAX_CAUSES, "a[0]"));
        assert!(are_cut(&list) && !are_cut(&list[1..]));
    }

    #[test]
    fn a_selector_is_shown_in_upstreams_order() {
        let message = |selector: Value| {
            let mut causes = Causes::default();
            causes.invalid_selector(&Path::root("s"), &selector, "x");
            causes.into_list().remove(0).message
        };
        let whole = serde_json::json!({"matchExpressions": [{"key": "k"}], "matchLabels": {"a": "b"}});
        let expect = r#"Invalid value: {"matchLabels":{"a":"b"},"matchExpressions":[{"key":"k"}]}: x"#;
        assert_eq!(message(whole), expect);
        assert_eq!(message(serde_json::json!({})), "Invalid value: {}: x");
        assert_eq!(message(Value::Null), "Invalid value: null: x");
    }

    #[test]
    fn a_path_is_cut_between_characters() {
        let path = Path::root("ab").key(&"é".repeat(MAX_PATH)).index(7).to_string();
        assert!(path.len() == MAX_PATH && path.ends_with("é]"), "each é has two bytes");
        assert_eq!(Path::root("a").key("b").field("c").index(7).to_string(), "a[b].c[7]");
    }

    #[test]
    fn a_large_value_is_not_repeated_for_each_violation() {
        let (mut causes, large) = (Causes::default(), Value::from("x".repeat(MAX_BYTES)));
        for _ in 0..100_000 {
            causes.invalid(&Path::root("a"), &large, "b");
        }
        let list = causes.into_list();
        assert!(list.len() == 1 && are_cut(&list));
    }
}
