//! JSONPath as printer columns use it (`client-go/util/jsonpath`): one path without text around it.
//!
//! A path selects at most [`MAX_RESULTS`] values and visits at most [`MAX_VISITS`].

use std::cell::Cell;

use serde_json::Value;

/// Maximum number of selected values.
const MAX_RESULTS: usize = 1000;

/// A path with this number of steps or more is invalid.
const MAX_STEPS: usize = 64;

/// Maximum length of a path in bytes.
pub const MAX_LENGTH: usize = 4096;

/// Maximum depth of filters within filters.
pub const MAX_DEPTH: usize = 8;

/// Maximum number of values that one search visits.
const MAX_VISITS: usize = 100_000;

/// A parsed path.
#[derive(Clone, Debug, PartialEq)]
pub struct JsonPath {
    steps: Vec<Step>,
}

#[derive(Clone, Debug, PartialEq)]
enum Step {
    Field(String),
    Wildcard,
    Descend,
    Slice { start: Option<i64>, end: Option<i64>, step: Option<i64> },
    Index(i64),
    Filter { path: JsonPath, comparison: Option<Comparison> },
}

/// The comparison of a field with another value.
#[derive(Clone, Debug, PartialEq)]
struct Comparison {
    operator: Operator,
    operand: Operand,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Operator {
    Equal,
    NotEqual,
    Less,
    LessOrEqual,
    Greater,
    GreaterOrEqual,
}

#[derive(Clone, Debug, PartialEq)]
enum Operand {
    Literal(Value),
    Path(JsonPath),
}

// === impl JsonPath ===

impl JsonPath {
    /// Parses a path such as `.status.conditions[?(@.type=="Ready")].status`.
    pub fn parse(text: &str) -> Option<JsonPath> {
        if text.len() > MAX_LENGTH {
            return None;
        }
        let mut reader = Reader { rest: text, depth: 0, too_deep: false };
        let path = reader.path()?;
        reader.rest.is_empty().then_some(path)
    }

    /// Whether a path exceeds [`MAX_LENGTH`] or [`MAX_DEPTH`].
    pub fn exceeds_limits(text: &str) -> bool {
        if text.len() > MAX_LENGTH {
            return true;
        }
        let mut reader = Reader { rest: text, depth: 0, too_deep: false };
        reader.path();
        reader.too_deep
    }

    /// The selected values. A missing field selects nothing.
    pub fn find<'a>(&self, root: &'a Value) -> Vec<&'a Value> {
        self.search(root, &Cell::new(MAX_VISITS))
    }

    fn search<'a>(&self, root: &'a Value, visits: &Cell<usize>) -> Vec<&'a Value> {
        let mut current = vec![root];
        for step in &self.steps {
            let mut next = Vec::new();
            for value in current {
                if !visit(visits) {
                    break;
                }
                step.select(value, visits, &mut next);
                if next.len() >= MAX_RESULTS {
                    next.truncate(MAX_RESULTS);
                    break;
                }
            }
            current = next;
        }
        current
    }

    /// The first selected value.
    pub fn first<'a>(&self, root: &'a Value) -> Option<&'a Value> {
        self.find(root).first().copied()
    }

    /// The field names, if the path has only fields.
    pub fn fields(&self) -> Option<Vec<&str>> {
        self.steps
            .iter()
            .map(|step| match step {
                Step::Field(name) => Some(name.as_str()),
                _ => None,
            })
            .collect()
    }
}

// === impl Step ===

impl Step {
    fn select<'a>(&self, value: &'a Value, visits: &Cell<usize>, out: &mut Vec<&'a Value>) {
        match (self, value) {
            (Step::Field(name), Value::Object(map)) => out.extend(map.get(name)),
            (Step::Wildcard, Value::Object(map)) => out.extend(map.values().take(MAX_RESULTS)),
            (Step::Wildcard, Value::Array(list)) => out.extend(list.iter().take(MAX_RESULTS)),
            (Step::Descend, _) => descend(value, visits, out),
            (Step::Index(index), Value::Array(list)) => out.extend(at(list, *index)),
            (Step::Slice { start, end, step }, Value::Array(list)) => {
                let length = i64::try_from(list.len()).unwrap_or(i64::MAX);
                let clamp = |index: i64| (if index < 0 { index + length } else { index }).clamp(0, length);
                let (start, end) = (clamp(start.unwrap_or(0)), clamp(end.unwrap_or(length)));
                let stride = usize::try_from(step.unwrap_or(1)).unwrap_or(1).max(1);
                let range = usize::try_from(start).unwrap_or(0)..usize::try_from(end.max(start)).unwrap_or(0);
                out.extend(list[range].iter().step_by(stride));
            }
            (Step::Filter { path, comparison }, Value::Array(list)) => {
                let items = list.iter().take_while(|_| visit(visits));
                out.extend(items.filter(|item| matches_filter(path, comparison.as_ref(), item, visits)));
            }
            _ => {}
        }
    }
}

fn at(list: &[Value], index: i64) -> Option<&Value> {
    let length = i64::try_from(list.len()).ok()?;
    let index = if index < 0 { index + length } else { index };
    list.get(usize::try_from(index).ok()?)
}

/// Counts a visit. Returns false if there is none left.
fn visit(visits: &Cell<usize>) -> bool {
    let left = visits.get();
    visits.set(left.saturating_sub(1));
    left > 0
}

fn descend<'a>(value: &'a Value, visits: &Cell<usize>, out: &mut Vec<&'a Value>) {
    if out.len() >= MAX_RESULTS || !visit(visits) {
        return;
    }
    out.push(value);
    match value {
        Value::Object(map) => map.values().for_each(|inner| descend(inner, visits, out)),
        Value::Array(list) => list.iter().for_each(|inner| descend(inner, visits, out)),
        _ => {}
    }
}

fn matches_filter(
    path: &JsonPath,
    comparison: Option<&Comparison>,
    item: &Value,
    visits: &Cell<usize>,
) -> bool {
    let first = |path: &JsonPath| path.search(item, visits).first().copied();
    let Some(left) = first(path) else { return false };
    let Some(Comparison { operator, operand }) = comparison else { return true };
    let right = match operand {
        Operand::Literal(value) => value,
        Operand::Path(path) => match first(path) {
            Some(value) => value,
            None => return false,
        },
    };
    let order = match (left, right) {
        (Value::String(left), Value::String(right)) => Some(left.cmp(right)),
        (Value::Bool(left), Value::Bool(right)) => Some(left.cmp(right)),
        (Value::Number(left), Value::Number(right)) => {
            left.as_f64().zip(right.as_f64()).and_then(|(left, right)| left.partial_cmp(&right))
        }
        _ => None,
    };
    match operator {
        Operator::Equal => order.is_some_and(std::cmp::Ordering::is_eq),
        Operator::NotEqual => order.is_none_or(std::cmp::Ordering::is_ne),
        Operator::Less => order.is_some_and(std::cmp::Ordering::is_lt),
        Operator::LessOrEqual => order.is_some_and(std::cmp::Ordering::is_le),
        Operator::Greater => order.is_some_and(std::cmp::Ordering::is_gt),
        Operator::GreaterOrEqual => order.is_some_and(std::cmp::Ordering::is_ge),
    }
}

struct Reader<'a> {
    rest: &'a str,
    /// Number of filters around the current position.
    depth: usize,
    /// Whether the depth exceeds its limit.
    too_deep: bool,
}

impl Reader<'_> {
    fn accept(&mut self, text: &str) -> bool {
        match self.rest.strip_prefix(text) {
            Some(rest) => {
                self.rest = rest;
                true
            }
            None => false,
        }
    }

    fn path(&mut self) -> Option<JsonPath> {
        let mut steps = Vec::new();
        while steps.len() < MAX_STEPS {
            if self.accept("..") {
                steps.push(Step::Descend);
                self.name(&mut steps)?;
            } else if self.accept(".") {
                if self.rest.is_empty() || self.rest.starts_with('[') {
                    continue;
                }
                self.name(&mut steps)?;
            } else if self.accept("[") {
                steps.push(self.bracket()?);
            } else {
                return Some(JsonPath { steps });
            }
        }
        None
    }

    /// A field after a dot. A backslash escapes a dot in its name.
    fn name(&mut self, steps: &mut Vec<Step>) -> Option<()> {
        if self.accept("*") {
            steps.push(Step::Wildcard);
            return Some(());
        }
        let mut name = String::new();
        let mut chars = self.rest.char_indices();
        let mut end = self.rest.len();
        while let Some((at, c)) = chars.next() {
            match c {
                '\\' => name.push(chars.next()?.1),
                '.' | '[' | ']' | ' ' | '|' | '\t' | ',' | '(' | ')' | '"' | '<' | '>' | '!' | '=' => {
                    end = at;
                    break;
                }
                c => name.push(c),
            }
        }
        self.rest = &self.rest[end..];
        if name.is_empty() {
            return None;
        }
        steps.push(Step::Field(name));
        Some(())
    }

    fn bracket(&mut self) -> Option<Step> {
        if self.accept("?(") {
            if self.depth == MAX_DEPTH {
                self.too_deep = true;
                return None;
            }
            self.depth += 1;
            let filter = self.filter();
            self.depth -= 1;
            return filter;
        }
        if self.rest.starts_with(['\'', '"']) {
            let name = self.quoted()?;
            return self.accept("]").then_some(Step::Field(name));
        }
        let (inside, rest) = self.rest.split_once(']')?;
        self.rest = rest;
        if inside == "*" {
            return Some(Step::Wildcard);
        }
        if !inside.contains(':') {
            return inside.trim().parse().ok().map(Step::Index);
        }
        let mut parts = inside.split(':').map(|part| match part.trim() {
            "" => Some(None),
            part => part.parse::<i64>().ok().map(Some),
        });
        let mut next = || parts.next().unwrap_or(Some(None));
        Some(Step::Slice { start: next()?, end: next()?, step: next()? })
    }

    fn filter(&mut self) -> Option<Step> {
        self.spaces();
        if !self.accept("@") {
            return None;
        }
        let path = self.path()?;
        self.spaces();
        const OPERATORS: &[(&str, Operator)] = &[
            ("==", Operator::Equal),
            ("!=", Operator::NotEqual),
            ("<=", Operator::LessOrEqual),
            (">=", Operator::GreaterOrEqual),
            ("<", Operator::Less),
            (">", Operator::Greater),
        ];
        let found = OPERATORS.iter().find(|(text, _)| self.accept(text)).map(|(_, operator)| *operator);
        let comparison = match found {
            Some(operator) => Some(Comparison { operator, operand: self.operand()? }),
            None => None,
        };
        self.spaces();
        self.accept(")]").then_some(Step::Filter { path, comparison })
    }

    fn operand(&mut self) -> Option<Operand> {
        self.spaces();
        if self.rest.starts_with(['\'', '"']) {
            return self.quoted().map(|text| Operand::Literal(Value::String(text)));
        }
        if self.accept("@") {
            return self.path().map(Operand::Path);
        }
        let end = self.rest.find([')', ' '])?;
        let (word, rest) = self.rest.split_at(end);
        self.rest = rest;
        serde_json::from_str(word).ok().map(Operand::Literal)
    }

    fn quoted(&mut self) -> Option<String> {
        let mut chars = self.rest.char_indices();
        let quote = chars.next()?.1;
        let mut text = String::new();
        while let Some((at, c)) = chars.next() {
            if c == quote {
                self.rest = &self.rest[at + 1..];
                return Some(text);
            }
            text.push(if c == '\\' { chars.next()?.1 } else { c });
        }
        None
    }

    fn spaces(&mut self) {
        self.rest = self.rest.trim_start();
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_path_of_a_printer_column_finds_the_first_value() {
        let object = json!({"spec": {"a": 1, "list": [{"n": "x", "v": 1}, {"n": "y", "v": 2}]},
            "metadata": {"annotations": {"a.b/c": "yes"}}});
        for (path, expected) in [
            (".spec.a", json!(1)),
            ("spec.a", Value::Null),
            (r#".spec.list[?(@.n=="y")].v"#, json!(2)),
            (".spec.list[?(@.v > 1)].n", json!("y")),
            (".spec.list[0].n", json!("x")),
            (".spec.list[-1].n", json!("y")),
            (".spec.list[*].n", json!("x")),
            (".spec.list[1:].n", json!("y")),
            (r".metadata.annotations.a\.b/c", json!("yes")),
            (".metadata.annotations['a.b/c']", json!("yes")),
            ("..n", json!("x")),
            (".spec.missing.deep", Value::Null),
        ] {
            let found =
                JsonPath::parse(path).and_then(|path| path.first(&object).cloned()).unwrap_or_default();
            assert_eq!(found, expected, "{path}");
        }
        for bad in [".spec[", ".spec[?(x)]", ".a b", ".spec[?(@.a==)]"] {
            assert_eq!(JsonPath::parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn long_and_deep_paths_are_refused() {
        let nested = |depth: usize| format!(".a{}.b{}", "[?(@".repeat(depth), ")]".repeat(depth));
        assert!(JsonPath::parse(&nested(MAX_DEPTH)).is_some());
        assert!(!JsonPath::exceeds_limits(&nested(MAX_DEPTH)));
        for text in [nested(MAX_DEPTH + 1), "[?(@".repeat(1000), format!(".{}", "a".repeat(MAX_LENGTH))] {
            assert_eq!(JsonPath::parse(&text), None);
            assert!(JsonPath::exceeds_limits(&text));
        }
        let unlimited = "[?(@".repeat(1_000_000);
        assert!(JsonPath::parse(&unlimited).is_none() && JsonPath::exceeds_limits(&unlimited));
        assert!(!JsonPath::exceeds_limits(".spec["), "a malformed path exceeds no limit");
    }

    #[test]
    fn a_search_visits_a_limited_number_of_values() {
        let list = |inner: &Value| Value::Array(vec![inner.clone(); 30]);
        let object = list(&list(&list(&json!({"a": 1}))));
        let visits = Cell::new(MAX_VISITS);
        let text = "[?(@..a[?(@..b)])]".repeat(8);
        let path = JsonPath::parse(&format!("..*{text}")).unwrap();
        assert!(path.search(&object, &visits).is_empty());
    }
}
