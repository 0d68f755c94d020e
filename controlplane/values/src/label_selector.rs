//! Label selectors: as text (`a=b,c in (d,e),!f`) and as LabelSelector objects.

use std::collections::BTreeMap;
use std::fmt;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector as ApiLabelSelector;
use serde_json::Value;

use crate::names;
use crate::selector_error::{SelectorError, check_count, check_size};

/// The labels of an object.
pub type Labels = BTreeMap<String, String>;

/// Whether the labels have every entry of the map, as `spec.nodeSelector` of pods and `spec.selector` of services
/// require. An empty or absent map matches all labels.
pub fn has_all(labels: Option<&Labels>, map: Option<&Labels>) -> bool {
    let has = |key, value| labels.and_then(|labels| labels.get(key)) == Some(value);
    map.into_iter().flatten().all(|(key, value)| has(key, value))
}

/// One requirement on labels.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Requirement {
    /// `k in (a,b)` or `k=a`.
    In(String, Vec<String>),
    /// `k notin (a,b)` or `k!=a`. An object without the label matches.
    NotIn(String, Vec<String>),
    /// `k`.
    Exists(String),
    /// `!k`.
    DoesNotExist(String),
}

/// A label selector. An object matches if it meets all requirements, so an empty selector matches every object.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LabelSelector {
    /// The requirements.
    pub requirements: Vec<Requirement>,
}

// === impl LabelSelector ===

impl LabelSelector {
    /// Parses the text form.
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

    /// Reads a LabelSelector from a JSON tree. The meaning of null differs between kinds: the caller decides.
    pub fn from_object(object: &Value) -> Result<LabelSelector, SelectorError> {
        let mut requirements = LabelSelector::from_map(&object["matchLabels"]).requirements;
        for expression in object["matchExpressions"].as_array().into_iter().flatten() {
            let text = |name: &str| expression[name].as_str().unwrap_or_default();
            let values = expression["values"].as_array().into_iter().flatten();
            let values = values.filter_map(Value::as_str).map(str::to_owned).collect();
            requirements.push(Requirement::from_expression(text("key"), text("operator"), values)?);
        }
        Ok(LabelSelector { requirements })
    }

    /// Reads a map of labels from a JSON tree, as Services have it in `spec.selector`.
    pub fn from_map(map: &Value) -> LabelSelector {
        let entries = map.as_object().into_iter().flatten();
        let one = |(key, value): (&String, &Value)| {
            Requirement::In(key.clone(), vec![value.as_str().unwrap_or_default().to_owned()])
        };
        LabelSelector { requirements: entries.map(one).collect() }
    }

    /// Whether the selector has no requirements and so matches every object.
    pub fn is_empty(&self) -> bool {
        self.requirements.is_empty()
    }

    /// Whether labels meet all requirements. `None` counts as an empty map.
    pub fn matches(&self, labels: Option<&Labels>) -> bool {
        self.matches_by(|key| labels?.get(key).map(String::as_str))
    }

    /// Whether labels meet all requirements. The function returns the value of a label.
    pub fn matches_by<'a>(&self, value: impl Fn(&str) -> Option<&'a str>) -> bool {
        self.requirements.iter().all(|requirement| match requirement {
            Requirement::In(key, values) => value(key).is_some_and(|value| values.iter().any(|v| v == value)),
            Requirement::NotIn(key, values) => {
                value(key).is_none_or(|value| values.iter().all(|v| v != value))
            }
            Requirement::Exists(key) => value(key).is_some(),
            Requirement::DoesNotExist(key) => value(key).is_none(),
        })
    }

    /// Whether the labels of an object, given as a JSON tree, meet all requirements.
    pub fn matches_object(&self, object: &Value) -> bool {
        let labels = &object["metadata"]["labels"];
        self.matches_by(|key| labels.get(key).and_then(Value::as_str))
    }
}

impl TryFrom<&ApiLabelSelector> for LabelSelector {
    type Error = SelectorError;

    fn try_from(object: &ApiLabelSelector) -> Result<Self, Self::Error> {
        let labels = object.match_labels.iter().flatten();
        let mut requirements: Vec<Requirement> =
            labels.map(|(key, value)| Requirement::In(key.clone(), vec![value.clone()])).collect();
        for one in object.match_expressions.iter().flatten() {
            let values = one.values.clone().unwrap_or_default();
            requirements.push(Requirement::from_expression(&one.key, &one.operator, values)?);
        }
        Ok(LabelSelector { requirements })
    }
}

impl fmt::Display for LabelSelector {
    /// The text form, ordered by key, as Scale objects and tables show it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut texts: Vec<(&str, String)> = self.requirements.iter().map(Requirement::text).collect();
        texts.sort();
        let texts: Vec<String> = texts.into_iter().map(|(_, text)| text).collect();
        f.write_str(&texts.join(","))
    }
}

impl Requirement {
    /// A requirement of `matchExpressions`.
    fn from_expression(key: &str, operator: &str, mut values: Vec<String>) -> Result<Self, SelectorError> {
        values.sort();
        let key = key.to_owned();
        Ok(match operator {
            "In" => Requirement::In(key, values),
            "NotIn" => Requirement::NotIn(key, values),
            "Exists" => Requirement::Exists(key),
            "DoesNotExist" => Requirement::DoesNotExist(key),
            other => return Err(SelectorError::Operator(other.to_owned())),
        })
    }

    /// Key and text form.
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
            Requirement::DoesNotExist(key) => (key, format!("!{key}")),
        }
    }
}

/// A parser of the text form. Its methods consume blanks behind what they read.
struct Parser<'a> {
    rest: &'a str,
}

impl<'a> Parser<'a> {
    fn requirement(&mut self) -> Result<Requirement, SelectorError> {
        if self.eat("!") {
            return Ok(Requirement::DoesNotExist(self.key()?));
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
        match names::qualified_name(word).into_iter().next() {
            None => Ok(word.to_owned()),
            Some(_) if word.is_empty() => {
                let found = self.rest.chars().next().map(String::from).unwrap_or_default();
                Err(SelectorError::Label(format!(
                    "found '{found}', expected: !, identifier, or 'end of string'"
                )))
            }
            Some(problem) => Err(SelectorError::Label(format!("<nil>: Invalid value: {word:?}: {problem}"))),
        }
    }

    fn value(&mut self) -> Result<String, SelectorError> {
        let word = self.word();
        match names::label_value(word).into_iter().next() {
            None => Ok(word.to_owned()),
            Some(problem) => {
                Err(SelectorError::Label(format!("values[0][]: Invalid value: {word:?}: {problem}")))
            }
        }
    }

    /// Consumes the characters up to the next separator.
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
    fn a_map_selects_by_all_of_its_entries() {
        let map = |value: Value| serde_json::from_value::<Labels>(value).unwrap();
        let labels = map(json!({"disk": "ssd", "cores": "8"}));
        assert!(has_all(Some(&labels), None) && has_all(None, None));
        assert!(has_all(Some(&labels), Some(&map(json!({"disk": "ssd"})))));
        assert!(!has_all(Some(&labels), Some(&map(json!({"disk": "ssd", "zone": "x"})))));
        assert!(!has_all(None, Some(&map(json!({"disk": "ssd"})))));
    }

    #[test]
    fn texts_match_labels() {
        let object = json!({"metadata": {"labels": {"app": "web", "tier": "front", "example.com/x": ""}}});
        let labels = serde_json::from_value(object["metadata"]["labels"].clone()).unwrap();
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
            assert_eq!(selector.matches_object(&object), expect, "for {text}");
            assert_eq!(selector.matches(Some(&labels)), expect, "for {text}");
        }
    }

    #[test]
    fn invalid_texts_are_refused() {
        for text in [
            "a b", "a=b,", "a in b", "a in (b", "=a", "a=b=c", "a,,b", "!", "a=b c", "-a=b", "a=-",
            "a in ()x", "a!",
        ] {
            assert!(LabelSelector::parse(text).is_err(), "for {text}");
        }
    }

    #[test]
    fn the_size_is_limited() {
        let error = LabelSelector::parse(&vec!["!a"; 257].join(",")).unwrap_err();
        assert_eq!(error.to_string(), "the selector has too many requirements: 257, the limit is 256");
        let long = format!("a in ({})", "b,".repeat(64 << 10));
        assert!(LabelSelector::parse(&long).unwrap_err().to_string().contains("too many bytes"));
    }

    #[test]
    fn objects_print_as_texts() {
        let selector = json!({"matchLabels": {"b": "1", "a": "2"}, "matchExpressions": [
            {"key": "c", "operator": "In", "values": ["z", "y"]}, {"key": "d", "operator": "DoesNotExist"}]});
        let typed: ApiLabelSelector = serde_json::from_value(selector.clone()).unwrap();
        let selector = LabelSelector::from_object(&selector).unwrap();
        assert_eq!(selector.to_string(), "a=2,b=1,c in (y,z),!d");
        assert_eq!(LabelSelector::try_from(&typed), Ok(selector));
        assert!(
            LabelSelector::from_object(&json!({"matchExpressions": [{"key": "a", "operator": "Is"}]}))
                .is_err()
        );
    }
}
