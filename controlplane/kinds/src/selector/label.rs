//! Label selectors, as text and as objects.

use std::fmt;

use serde_json::Value;

use super::{Facets, SelectorError, check_count, check_size};

/// One requirement on labels.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Requirement {
    /// `k in (a,b)`, `k=a`.
    In(String, Vec<String>),
    /// `k notin (a,b)`, `k!=a`: also true without the label.
    NotIn(String, Vec<String>),
    /// `k`.
    Exists(String),
    /// `!k`.
    Absent(String),
}

/// All of the requirements on labels.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LabelSelector {
    /// All must hold.
    pub requirements: Vec<Requirement>,
}

// === impl LabelSelector ===

impl LabelSelector {
    /// `a=b,c in (d,e),!f`.
    pub fn parse(text: &str) -> Result<LabelSelector, SelectorError> {
        check_size(text)?;
        let mut parser = Parser { rest: text.trim() };
        let mut requirements = Vec::new();
        while !parser.rest.is_empty() {
            requirements.push(parser.requirement()?);
            check_count(requirements.len())?;
            if parser.rest.is_empty() {
                break;
            }
            parser.expect(',')?;
            if parser.rest.is_empty() {
                return Err(SelectorError::Label("found '', expected: identifier after ','".to_owned()));
            }
        }
        Ok(LabelSelector { requirements })
    }

    /// `{matchLabels: …, matchExpressions: …}`. What null selects (all or nothing) is for the caller to say.
    pub fn from_object(object: &Value) -> Result<LabelSelector, SelectorError> {
        let mut requirements = Vec::new();
        for (key, value) in object["matchLabels"].as_object().into_iter().flatten() {
            let value = value.as_str().unwrap_or_default().to_owned();
            requirements.push(Requirement::In(key.clone(), vec![value]));
        }
        for expression in object["matchExpressions"].as_array().into_iter().flatten() {
            let key = expression["key"].as_str().unwrap_or_default().to_owned();
            let values = expression["values"].as_array().into_iter().flatten();
            let mut values: Vec<String> = values.filter_map(Value::as_str).map(str::to_owned).collect();
            values.sort();
            requirements.push(match expression["operator"].as_str().unwrap_or_default() {
                "In" => Requirement::In(key, values),
                "NotIn" => Requirement::NotIn(key, values),
                "Exists" => Requirement::Exists(key),
                "DoesNotExist" => Requirement::Absent(key),
                other => return Err(SelectorError::Operator(other.to_owned())),
            });
        }
        Ok(LabelSelector { requirements })
    }

    /// A plain map of labels, as Services have it.
    pub fn from_map(map: &Value) -> LabelSelector {
        let entries = map.as_object().into_iter().flatten();
        let one = |(key, value): (&String, &Value)| {
            Requirement::In(key.clone(), vec![value.as_str().unwrap_or_default().to_owned()])
        };
        LabelSelector { requirements: entries.map(one).collect() }
    }

    /// Whether nothing is required.
    pub fn is_empty(&self) -> bool {
        self.requirements.is_empty()
    }

    /// Whether a `labels` map (or null) meets all requirements.
    pub fn matches(&self, labels: &Value) -> bool {
        self.matches_by(|key| labels.get(key).and_then(Value::as_str))
    }

    /// Whether the labels among an object's facets meet all requirements.
    pub fn matches_facets(&self, facets: &Facets) -> bool {
        self.matches_by(|key| facets.label(key))
    }

    fn matches_by<'a>(&self, value: impl Fn(&str) -> Option<&'a str>) -> bool {
        self.requirements.iter().all(|requirement| match requirement {
            Requirement::In(key, values) => value(key).is_some_and(|value| values.iter().any(|v| v == value)),
            Requirement::NotIn(key, values) => {
                value(key).is_none_or(|value| values.iter().all(|v| v != value))
            }
            Requirement::Exists(key) => value(key).is_some(),
            Requirement::Absent(key) => value(key).is_none(),
        })
    }

    /// Whether an object's labels meet all requirements.
    pub fn matches_object(&self, object: &Value) -> bool {
        self.matches(&object["metadata"]["labels"])
    }
}

impl fmt::Display for LabelSelector {
    /// The text form, ordered by key, as Scale and tables show it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut texts: Vec<(&str, String)> = self.requirements.iter().map(Requirement::text).collect();
        texts.sort();
        let texts: Vec<String> = texts.into_iter().map(|(_, text)| text).collect();
        f.write_str(&texts.join(","))
    }
}

impl Requirement {
    fn text(&self) -> (&str, String) {
        match self {
            Requirement::In(key, values) => match values.as_slice() {
                [value] => (key, format!("{key}={value}")),
                values => (key, format!("{key} in ({})", values.join(","))),
            },
            Requirement::NotIn(key, values) => match values.as_slice() {
                [value] => (key, format!("{key}!={value}")),
                values => (key, format!("{key} notin ({})", values.join(","))),
            },
            Requirement::Exists(key) => (key, key.clone()),
            Requirement::Absent(key) => (key, format!("!{key}")),
        }
    }
}

/// Reads the text form from left to right.
struct Parser<'a> {
    rest: &'a str,
}

impl<'a> Parser<'a> {
    fn requirement(&mut self) -> Result<Requirement, SelectorError> {
        if self.eat("!") {
            return Ok(Requirement::Absent(self.key()?));
        }
        let key = self.key()?;
        if self.rest.is_empty() || self.rest.starts_with(',') {
            return Ok(Requirement::Exists(key));
        }
        if self.eat("!=") {
            return Ok(Requirement::NotIn(key, vec![self.value()?]));
        }
        if self.eat("==") || self.eat("=") {
            return Ok(Requirement::In(key, vec![self.value()?]));
        }
        match self.word() {
            "in" => Ok(Requirement::In(key, self.values()?)),
            "notin" => Ok(Requirement::NotIn(key, self.values()?)),
            other => {
                let wrong = format!("found '{other}', expected: in, notin, =, ==, !=, gt, lt");
                Err(SelectorError::Label(wrong))
            }
        }
    }

    fn values(&mut self) -> Result<Vec<String>, SelectorError> {
        self.expect('(')?;
        let mut values = vec![self.value()?];
        while self.eat(",") {
            values.push(self.value()?);
        }
        self.expect(')')?;
        values.sort();
        values.dedup();
        Ok(values)
    }

    fn key(&mut self) -> Result<String, SelectorError> {
        let word = self.word();
        match crate::validate::format::qualified_name(word).into_iter().next() {
            None => Ok(word.to_owned()),
            Some(problem) if word.is_empty() => {
                let found = self.rest.chars().next().map(String::from).unwrap_or_default();
                let _ = problem;
                Err(SelectorError::Label(format!(
                    "found '{found}', expected: !, identifier, or 'end of string'"
                )))
            }
            Some(problem) => Err(SelectorError::Label(format!("<nil>: Invalid value: {word:?}: {problem}"))),
        }
    }

    fn value(&mut self) -> Result<String, SelectorError> {
        let word = self.word();
        match crate::validate::format::label_value(word).into_iter().next() {
            None => Ok(word.to_owned()),
            Some(problem) => {
                Err(SelectorError::Label(format!("values[0][]: Invalid value: {word:?}: {problem}")))
            }
        }
    }

    /// The characters up to the next separator, and the blanks after them.
    fn word(&mut self) -> &'a str {
        self.rest = self.rest.trim_start();
        let special = |c: char| c.is_whitespace() || matches!(c, '=' | '!' | '(' | ')' | ',' | '<' | '>');
        let end = self.rest.find(special).unwrap_or(self.rest.len());
        let (word, rest) = self.rest.split_at(end);
        self.rest = rest.trim_start();
        word
    }

    fn eat(&mut self, token: &str) -> bool {
        match self.rest.strip_prefix(token) {
            Some(rest) => {
                self.rest = rest.trim_start();
                true
            }
            None => false,
        }
    }

    fn expect(&mut self, token: char) -> Result<(), SelectorError> {
        if self.eat(token.encode_utf8(&mut [0; 4])) {
            return Ok(());
        }
        let found = self.rest.chars().next().map(String::from).unwrap_or_default();
        Err(SelectorError::Label(format!("found '{found}', expected: '{token}'")))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn texts_match_labels() {
        let labels = json!({"app": "web", "tier": "front", "example.com/x": ""});
        let cases = [
            ("", true),
            ("app=web", true),
            ("app==web,tier=front", true),
            (" app = web , tier != back ", true),
            ("app in (db, web)", true),
            ("app notin (db,web)", false),
            ("app", true),
            ("!app", false),
            ("!other", true),
            ("other!=x", true),
            ("other notin (a)", true),
            ("other in (a)", false),
            ("example.com/x=", true),
            ("example.com/x in (,a)", true),
            ("in in (a)", false),
            ("notin=a", false),
        ];
        for (text, expect) in cases {
            let selector = LabelSelector::parse(text).unwrap_or_else(|error| panic!("{text}: {error}"));
            assert_eq!(selector.matches(&labels), expect, "for {text}");
        }
    }

    #[test]
    fn broken_texts_are_refused() {
        for text in [
            "a b", "a=b,", "a in b", "a in (b", "=a", "a=b=c", "a,,b", "!", "a=b c", "-a=b", "a=-",
            "a in ()x", "a!",
        ] {
            assert!(LabelSelector::parse(text).is_err(), "for {text}");
        }
    }

    #[test]
    fn objects_print_as_texts() {
        let selector = json!({"matchLabels": {"b": "1", "a": "2"}, "matchExpressions": [
            {"key": "c", "operator": "In", "values": ["z", "y"]}, {"key": "d", "operator": "DoesNotExist"}]});
        let selector = LabelSelector::from_object(&selector).unwrap();
        assert_eq!(selector.to_string(), "a=2,b=1,c in (y,z),!d");
        assert!(
            LabelSelector::from_object(&json!({"matchExpressions": [{"key": "a", "operator": "Is"}]}))
                .is_err()
        );
    }
}
