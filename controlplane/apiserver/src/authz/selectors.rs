//! The selectors of lists, watches and deletions of collections, as attributes for authorizers.
//!
//! Source: the feature `AuthorizeWithSelectors`. A selector only narrows a request, so a part that cannot be parsed is
//! omitted: the authorizers then decide on a broader request.

use coracle_values::{
    field_selector,
    label_selector::{LabelSelector, Requirement},
    string_list,
};
use serde_json::{Map, Value, json};

use crate::request::{Query, RequestInfo};

/// Adds the selectors of a request to the resource attributes of a review.
pub(super) fn add(info: &RequestInfo, attributes: &mut Map<String, Value>) {
    // The verb is empty for an access review and for a check in CEL.
    if !matches!(info.verb, "" | "list" | "watch" | "deletecollection") {
        return;
    }
    let fields = field_selector::parse(info.query.get("fieldSelector")).unwrap_or_default().into_iter();
    let fields: Vec<Value> = fields
        .map(|one| {
            let operator = if one.equal { "In" } else { "NotIn" };
            json!({"key": one.field, "operator": operator, "values": [one.value]})
        })
        .collect();
    let labels = LabelSelector::parse(info.query.get("labelSelector")).unwrap_or_default();
    let labels: Vec<Value> = labels.requirements.iter().filter_map(label_requirement).collect();
    for (name, requirements) in [("fieldSelector", fields), ("labelSelector", labels)] {
        if !requirements.is_empty() {
            attributes.insert(name.to_owned(), json!({"requirements": requirements}));
        }
    }
}

/// A requirement in the format of a review. `None` for the comparisons of numbers, which reviews do not have.
fn label_requirement(requirement: &Requirement) -> Option<Value> {
    match requirement {
        Requirement::Equal(key, value) => Some(json!({"key": key, "operator": "In", "values": [value]})),
        Requirement::NotEqual(key, value) => {
            Some(json!({"key": key, "operator": "NotIn", "values": [value]}))
        }
        Requirement::In(key, values) => Some(json!({"key": key, "operator": "In", "values": values})),
        Requirement::NotIn(key, values) => Some(json!({"key": key, "operator": "NotIn", "values": values})),
        Requirement::Exists(key) => Some(json!({"key": key, "operator": "Exists"})),
        Requirement::DoesNotExist(key) => Some(json!({"key": key, "operator": "DoesNotExist"})),
        Requirement::GreaterThan(..) | Requirement::LessThan(..) => None,
    }
}

/// The query with the selectors of a review's `resourceAttributes`.
pub(crate) fn of_review(attributes: &Value) -> Query {
    let text = |name: &str, of: fn(&Value) -> Option<String>| {
        let selector = &attributes[name];
        match selector["rawSelector"].as_str().unwrap_or_default() {
            "" => {
                let requirements = selector["requirements"].as_array().into_iter().flatten();
                requirements.filter_map(of).collect::<Vec<_>>().join(",")
            }
            raw => raw.to_owned(),
        }
    };
    Query::of_selectors(text("fieldSelector", field_text), text("labelSelector", label_text))
}

/// The fields of a requirement in a review.
struct RequirementFields<'a> {
    key: &'a str,
    operator: &'a str,
    values: Vec<&'a str>,
}

fn fields(requirement: &Value) -> RequirementFields<'_> {
    let text = |name: &str| requirement[name].as_str().unwrap_or_default();
    let values = string_list::texts(&requirement["values"]);
    RequirementFields { key: text("key"), operator: text("operator"), values: values.collect() }
}

/// A requirement on a field as text. Field selectors have no requirement with several values.
fn field_text(requirement: &Value) -> Option<String> {
    let RequirementFields { key, operator, values } = fields(requirement);
    let operator = match operator {
        "In" => "=",
        "NotIn" => "!=",
        _ => return None,
    };
    let [value] = values.as_slice() else { return None };
    if key.is_empty() || key.contains(['=', '!', ',', '\\']) {
        return None;
    }
    let value = value.replace('\\', "\\\\").replace(',', "\\,").replace('=', "\\=");
    Some(format!("{key}{operator}{value}"))
}

/// A requirement on a label as text. Validation has checked the key and the values.
fn label_text(requirement: &Value) -> Option<String> {
    let RequirementFields { key, operator, values } = fields(requirement);
    match (operator, values.as_slice()) {
        ("In", [value]) => Some(format!("{key}={value}")),
        ("NotIn", [value]) => Some(format!("{key}!={value}")),
        ("In", values) => Some(format!("{key} in ({})", values.join(","))),
        ("NotIn", values) => Some(format!("{key} notin ({})", values.join(","))),
        ("Exists", _) => Some(key.to_owned()),
        ("DoesNotExist", _) => Some(format!("!{key}")),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use http::Method;

    use super::*;

    fn added(info: &RequestInfo) -> Value {
        let mut attributes = Map::new();
        add(info, &mut attributes);
        attributes.into()
    }

    #[test]
    fn selectors_of_requests_are_requirements() {
        let query = "fieldSelector=spec.nodeName%3Dn,a!%3Db&labelSelector=c,!d,e%20in%20(f,g),h%3E1";
        let of = |method: Method, path: &str| {
            added(&RequestInfo::parse(&method, &format!("{path}?{query}").parse().unwrap()))
        };
        let expect = json!({
            "fieldSelector": {"requirements": [
                {"key": "spec.nodeName", "operator": "In", "values": ["n"]},
                {"key": "a", "operator": "NotIn", "values": ["b"]}]},
            "labelSelector": {"requirements": [
                {"key": "c", "operator": "Exists"},
                {"key": "d", "operator": "DoesNotExist"},
                {"key": "e", "operator": "In", "values": ["f", "g"]}]},
        });
        assert_eq!(of(Method::GET, "/api/v1/pods"), expect);
        assert_eq!(of(Method::DELETE, "/api/v1/namespaces/a/pods"), expect);
        assert_eq!(of(Method::GET, "/api/v1/namespaces/a/pods/p"), json!({}), "a get has no selectors");
    }

    #[test]
    fn selectors_of_reviews_reach_the_authorizers() {
        let of = |attributes: Value| {
            let query = of_review(&attributes);
            let info = RequestInfo { verb: "", path: String::new(), query, resource: None };
            added(&info)
        };
        let field = |operator: &str, values: &[&str]| json!({"fieldSelector": {"requirements": [{"key": "a", "operator": operator, "values": values}]}});
        assert_eq!(of(field("In", &["b,c=d\\"])), field("In", &["b,c=d\\"]));
        assert_eq!(of(field("In", &["b", "c"])), json!({}));
        let labels = json!({"labelSelector": {"requirements": [
            {"key": "a", "operator": "In", "values": ["b"]},
            {"key": "c", "operator": "NotIn", "values": ["d", "e"]},
            {"key": "f", "operator": "DoesNotExist"}]}});
        assert_eq!(of(labels.clone()), labels);
        let raw = json!({"labelSelector": {"rawSelector": "f"}});
        let parsed = json!({"labelSelector": {"requirements": [{"key": "f", "operator": "Exists"}]}});
        assert_eq!(of(raw), parsed);
        assert_eq!(of(json!({"fieldSelector": {"rawSelector": "no selector"}})), json!({}));
    }
}
