//! Label selectors: as text (`a=b,c in (d,e),!f`) and as LabelSelector objects.

use std::collections::BTreeMap;
use std::fmt;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{
    LabelSelector as ApiLabelSelector, LabelSelectorRequirement,
};
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

/// Whether labels meet a LabelSelector object. The result is the same as [`LabelSelector::matches`] of the parsed
/// object. The function copies nothing, because a selector can have megabytes of values. Controllers compare each
/// changed pod with the selectors of all budgets of its namespace. An object with an unknown operator selects nothing.
pub fn selects(selector: &ApiLabelSelector, labels: Option<&Labels>) -> bool {
    let mut expressions = selector.match_expressions.iter().flatten();
    has_all(labels, selector.match_labels.as_ref()) && expressions.all(|one| meets(one, labels))
}

/// Whether a LabelSelector object has a requirement. Without one it selects every object.
pub fn has_requirements(selector: &ApiLabelSelector) -> bool {
    selector.match_labels.as_ref().is_some_and(|labels| !labels.is_empty())
        || selector.match_expressions.as_ref().is_some_and(|expressions| !expressions.is_empty())
}

/// Whether a LabelSelector object has more than 100 requirements or values. A comparison with such a selector can take
/// long. The time of this function does not depend on the number of values.
pub fn has_many_values(selector: &ApiLabelSelector) -> bool {
    const MANY: usize = 100;
    let labels = selector.match_labels.as_ref().map_or(0, BTreeMap::len);
    let expressions = selector.match_expressions.as_deref().unwrap_or_default();
    let values = || expressions.iter().map(|one| one.values.as_ref().map_or(0, Vec::len)).sum::<usize>();
    labels + expressions.len() > MANY || values() > MANY
}

fn meets(expression: &LabelSelectorRequirement, labels: Option<&Labels>) -> bool {
    let label = labels.and_then(|labels| labels.get(&expression.key));
    let is_value = |label: &String| expression.values.iter().flatten().any(|value| value == label);
    match expression.operator.as_str() {
        "In" => label.is_some_and(is_value),
        "NotIn" => label.is_none_or(|label| !is_value(label)),
        "Exists" => label.is_some(),
        "DoesNotExist" => label.is_none(),
        _ => false,
    }
}

/// One requirement on labels. Its values are sorted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Requirement {
    /// `k=a`.
    Equal(String, String),
    /// `k!=a`. An object without the label matches.
    NotEqual(String, String),
    /// `k in (a,b)`.
    In(String, Vec<String>),
    /// `k notin (a,b)`. An object without the label matches.
    NotIn(String, Vec<String>),
    /// `k`.
    Exists(String),
    /// `!k`.
    DoesNotExist(String),
    /// `k>n`: the label is an integer above the number.
    GreaterThan(String, i64),
    /// `k<n`: the label is an integer below the number.
    LessThan(String, i64),
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
        let requirements = Parser { rest: text }.selector()?;
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
            Requirement::Equal(key.clone(), value.as_str().unwrap_or_default().to_owned())
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

    /// Whether labels meet all requirements. `value` returns the value of the label with a key.
    pub fn matches_by<'a>(&self, value: impl Fn(&str) -> Option<&'a str>) -> bool {
        self.requirements.iter().all(|requirement| match requirement {
            Requirement::Equal(key, wanted) => value(key).is_some_and(|value| value == wanted),
            Requirement::NotEqual(key, other) => value(key).is_none_or(|value| value != other),
            Requirement::In(key, values) => value(key).is_some_and(|value| contains(values, value)),
            Requirement::NotIn(key, values) => value(key).is_none_or(|value| !contains(values, value)),
            Requirement::Exists(key) => value(key).is_some(),
            Requirement::DoesNotExist(key) => value(key).is_none(),
            Requirement::GreaterThan(key, bound) => number(value(key)).is_some_and(|number| number > *bound),
            Requirement::LessThan(key, bound) => number(value(key)).is_some_and(|number| number < *bound),
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
            labels.map(|(key, value)| Requirement::Equal(key.clone(), value.clone())).collect();
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
            Requirement::Equal(key, value) => (key, format!("{key}={value}")),
            Requirement::NotEqual(key, value) => (key, format!("{key}!={value}")),
            Requirement::In(key, values) => (key, format!("{key} in ({})", values.join(","))),
            Requirement::NotIn(key, values) => (key, format!("{key} notin ({})", values.join(","))),
            Requirement::Exists(key) => (key, key.clone()),
            Requirement::DoesNotExist(key) => (key, format!("!{key}")),
            Requirement::GreaterThan(key, bound) => (key, format!("{key}>{bound}")),
            Requirement::LessThan(key, bound) => (key, format!("{key}<{bound}")),
        }
    }
}

/// Whether sorted values contain this one. A selector can have very many values.
fn contains(values: &[String], wanted: &str) -> bool {
    values.binary_search_by(|value| value.as_str().cmp(wanted)).is_ok()
}

/// The label as an integer.
fn number(label: Option<&str>) -> Option<i64> {
    label?.parse().ok()
}

/// A parser of the text form, with the tokens and the errors of upstream. Source: `pkg/labels/selector.go`.
struct Parser<'a> {
    rest: &'a str,
}

impl<'a> Parser<'a> {
    fn selector(&mut self) -> Result<Vec<Requirement>, SelectorError> {
        let mut requirements = Vec::new();
        loop {
            match self.peek() {
                "" if requirements.is_empty() => return Ok(requirements),
                token if token == "!" || is_word(token) => {}
                found if requirements.is_empty() => {
                    return Err(syntax(found, "!, identifier, or 'end of string'"));
                }
                found => return Err(syntax(found, "identifier after ','")),
            }
            requirements.push(self.requirement()?);
            check_count(requirements.len())?;
            match self.next() {
                "" => return Ok(requirements),
                "," => {}
                found => return Err(syntax(found, "',' or 'end of string'")),
            }
        }
    }

    fn requirement(&mut self) -> Result<Requirement, SelectorError> {
        let is_negated = self.peek() == "!";
        if is_negated {
            self.next();
        }
        let key = self.key()?;
        if is_negated {
            return Ok(Requirement::DoesNotExist(key));
        }
        if matches!(self.peek(), "" | ",") {
            return Ok(Requirement::Exists(key));
        }
        match self.next() {
            "=" | "==" => Ok(Requirement::Equal(key.clone(), self.checked_value(&key)?)),
            "!=" => Ok(Requirement::NotEqual(key.clone(), self.checked_value(&key)?)),
            "in" => checked(&key, &self.values()?).map(|values| Requirement::In(key, values)),
            "notin" => checked(&key, &self.values()?).map(|values| Requirement::NotIn(key, values)),
            ">" => Ok(Requirement::GreaterThan(key, self.number()?)),
            "<" => Ok(Requirement::LessThan(key, self.number()?)),
            found => Err(expected(found, "in, notin, =, ==, !=, gt, lt")),
        }
    }

    fn key(&mut self) -> Result<String, SelectorError> {
        let word = self.next();
        if !is_word(word) {
            return Err(expected(word, "identifier"));
        }
        match names::qualified_name(word).into_iter().next() {
            None => Ok(word.to_owned()),
            Some(problem) => Err(SelectorError::Label(format!("<nil>: Invalid value: {word:?}: {problem}"))),
        }
    }

    /// The value after `=`; empty if there is none.
    fn value(&mut self) -> Result<&'a str, SelectorError> {
        match self.peek() {
            "" | "," => Ok(""),
            token if is_word(token) => Ok(self.next()),
            found => Err(expected(found, "identifier")),
        }
    }

    /// The value after `=` or `!=` of a key, if it is the value of a label.
    fn checked_value(&mut self, key: &str) -> Result<String, SelectorError> {
        let value = self.value()?;
        checked(key, &[value])?;
        Ok(value.to_owned())
    }

    /// The number behind `>` and `<`.
    fn number(&mut self) -> Result<i64, SelectorError> {
        let value = self.value()?;
        let detail = "for 'Gt', 'Lt' operators, the value must be an integer";
        let wrong = |_| SelectorError::Label(format!("values[0]: Invalid value: {value:?}: {detail}"));
        value.parse().map_err(wrong)
    }

    /// The values in parentheses. A missing value is empty.
    fn values(&mut self) -> Result<Vec<&'a str>, SelectorError> {
        match self.next() {
            "(" => {}
            found => return Err(SelectorError::Label(format!("found '{found}' expected: '('"))),
        }
        let first = self.peek();
        if !matches!(first, ")" | ",") && !is_word(first) {
            return Err(expected(first, "',', ')' or identifier"));
        }
        let mut values = Vec::new();
        loop {
            let value = if is_word(self.peek()) { self.next() } else { "" };
            values.push(value);
            match self.next() {
                "," => {}
                ")" => return Ok(values),
                found if value.is_empty() => return Err(expected(found, "',', or identifier")),
                found => return Err(expected(found, "',' or ')'")),
            }
        }
    }

    /// The next token, without consuming it. Empty at the end.
    fn peek(&self) -> &'a str {
        Parser { rest: self.rest }.next()
    }

    /// Consumes the next token: a symbol, or the characters up to the next symbol or blank. Empty at the end.
    fn next(&mut self) -> &'a str {
        self.rest = self.rest.trim_start();
        let end = match self.rest.chars().next() {
            None => 0,
            Some(first) if !is_symbol(first) => {
                self.rest.find(|c: char| c.is_whitespace() || is_symbol(c)).unwrap_or(self.rest.len())
            }
            Some(_) if self.rest.starts_with("==") || self.rest.starts_with("!=") => 2,
            Some(_) => 1,
        };
        let (token, rest) = self.rest.split_at(end);
        self.rest = rest;
        token
    }
}

fn is_symbol(c: char) -> bool {
    matches!(c, '=' | '!' | '(' | ')' | ',' | '<' | '>')
}

/// Whether a token is a key, a value, or an operator in letters.
fn is_word(token: &str) -> bool {
    token.chars().next().is_some_and(|first| !is_symbol(first))
}

/// The values of a requirement in order, each once.
fn checked(key: &str, values: &[&str]) -> Result<Vec<String>, SelectorError> {
    let mut values: Vec<String> = values.iter().copied().map(str::to_owned).collect();
    values.sort();
    values.dedup();
    for (index, value) in values.iter().enumerate() {
        if let Some(problem) = names::label_value(value).into_iter().next() {
            let place = format!("values[{index}][{key}]");
            return Err(SelectorError::Label(format!("{place}: Invalid value: {value:?}: {problem}")));
        }
    }
    Ok(values)
}

fn expected(found: &str, what: &str) -> SelectorError {
    SelectorError::Label(format!("found '{found}', expected: {what}"))
}

fn syntax(found: &str, what: &str) -> SelectorError {
    SelectorError::Syntax(format!("found '{found}', expected: {what}"))
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
    fn a_selector_with_more_than_a_hundred_values_has_many() {
        let is_large = |selector: Value| has_many_values(&serde_json::from_value(selector).unwrap());
        let names = |count: usize| (0..count).map(|number| format!("n{number}"));
        let values = |count: usize| json!({"matchExpressions": [{"key": "a", "operator": "In", "values": names(count).collect::<Vec<_>>()}]});
        let labels = |count: usize| {
            let labels: serde_json::Map<String, Value> =
                names(count).map(|name| (name, "x".into())).collect();
            json!({"matchLabels": labels})
        };
        let absent = |count: usize| {
            let absent = json!({"key": "a", "operator": "DoesNotExist"});
            json!({"matchExpressions": vec![absent; count]})
        };
        for selector in [json!({}), values(100), labels(100), absent(100)] {
            assert!(!is_large(selector));
        }
        for selector in [values(101), labels(101), absent(101)] {
            assert!(is_large(selector));
        }
    }

    #[test]
    fn texts_match_labels() {
        let object =
            json!({"metadata": {"labels": {"app": "web", "tier": "front", "example.com/x": "", "n": "5"}}});
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
            ("n>4,n<6", true),
            ("n > 5", false),
            ("n<5", false),
            ("app>1", false),
            ("other<1", false),
            ("app in ()", false),
            ("example.com/x in (a,)", true),
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
    fn invalid_texts_are_refused_in_the_words_of_upstream() {
        for (text, why) in [
            ("a b", "unable to parse requirement: found 'b', expected: in, notin, =, ==, !=, gt, lt"),
            ("a=b,", "found '', expected: identifier after ','"),
            ("a,,b", "found ',', expected: identifier after ','"),
            (",", "found ',', expected: !, identifier, or 'end of string'"),
            ("=a", "found '=', expected: !, identifier, or 'end of string'"),
            ("a=b c", "found 'c', expected: ',' or 'end of string'"),
            ("a=b=c", "found '=', expected: ',' or 'end of string'"),
            ("!a=b", "found '=', expected: ',' or 'end of string'"),
            ("a in ()x", "found 'x', expected: ',' or 'end of string'"),
            ("!", "unable to parse requirement: found '', expected: identifier"),
            ("a!", "unable to parse requirement: found '!', expected: in, notin, =, ==, !=, gt, lt"),
            ("a<=b", "unable to parse requirement: found '=', expected: identifier"),
            ("a in b", "unable to parse requirement: found 'b' expected: '('"),
            ("a in (", "unable to parse requirement: found '', expected: ',', ')' or identifier"),
            ("a in (b", "unable to parse requirement: found '', expected: ',' or ')'"),
            ("a in (b,(", "unable to parse requirement: found '(', expected: ',', or identifier"),
            (
                "a>x",
                "unable to parse requirement: values[0]: Invalid value: \"x\": for 'Gt', 'Lt' operators, the \
                     value must be an integer",
            ),
        ] {
            assert_eq!(LabelSelector::parse(text).unwrap_err().to_string(), why, "for {text}");
        }
        for (text, start) in [
            ("-a=b", "unable to parse requirement: <nil>: Invalid value: \"-a\": "),
            ("a=-", "unable to parse requirement: values[0][a]: Invalid value: \"-\": "),
        ] {
            let error = LabelSelector::parse(text).unwrap_err().to_string();
            assert!(error.starts_with(start), "{error}");
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
        let one = |operator: &str| json!({"matchExpressions": [{"key": "a", "operator": operator, "values": ["b"]}]});
        for (operator, expect) in [("In", "a in (b)"), ("NotIn", "a notin (b)")] {
            assert_eq!(LabelSelector::from_object(&one(operator)).unwrap().to_string(), expect);
        }
        assert_eq!(LabelSelector::parse("b!=c,a=b").unwrap().to_string(), "a=b,b!=c");
        assert!(
            LabelSelector::from_object(&json!({"matchExpressions": [{"key": "a", "operator": "Is"}]}))
                .is_err()
        );
    }

    #[test]
    fn an_object_selects_as_its_parsed_form() {
        let labels: Labels = serde_json::from_value(json!({"app": "web", "tier": "front"})).unwrap();
        let many: Vec<String> = (0..1000).rev().map(|number| format!("v{number}")).collect();
        let with_web = [many.clone(), vec!["web".to_owned(), "a".to_owned()]].concat();
        let expression = |key: &str, operator: &str, values: &[String]| json!({"key": key, "operator": operator, "values": values});
        for (selector, expect) in [
            (json!({}), true),
            (json!({"matchLabels": {"app": "web"}}), true),
            (json!({"matchLabels": {"app": "web", "tier": "back"}}), false),
            (json!({"matchExpressions": [expression("app", "In", &with_web)]}), true),
            (json!({"matchExpressions": [expression("app", "In", &many)]}), false),
            (json!({"matchExpressions": [expression("other", "In", &many)]}), false),
            (json!({"matchExpressions": [expression("app", "NotIn", &with_web)]}), false),
            (json!({"matchExpressions": [expression("app", "NotIn", &many)]}), true),
            (json!({"matchExpressions": [expression("other", "NotIn", &many)]}), true),
            (json!({"matchExpressions": [expression("app", "Exists", &[])]}), true),
            (json!({"matchExpressions": [expression("other", "Exists", &[])]}), false),
            (json!({"matchExpressions": [expression("app", "DoesNotExist", &[])]}), false),
            (json!({"matchExpressions": [expression("other", "DoesNotExist", &[])]}), true),
            (
                json!({"matchLabels": {"tier": "front"}, "matchExpressions": [expression("app", "In", &many)]}),
                false,
            ),
        ] {
            let typed: ApiLabelSelector = serde_json::from_value(selector.clone()).unwrap();
            let parsed = LabelSelector::try_from(&typed).unwrap();
            assert_eq!(selects(&typed, Some(&labels)), expect, "{selector}");
            assert_eq!(parsed.matches(Some(&labels)), expect, "{selector}");
            assert_eq!(selects(&typed, None), parsed.matches(None), "{selector}");
            assert_eq!(has_requirements(&typed), !parsed.is_empty(), "{selector}");
        }
        let unknown = json!({"matchExpressions": [{"key": "app", "operator": "Is"}]});
        assert!(!selects(&serde_json::from_value(unknown).unwrap(), Some(&labels)));
    }
}
