//! Webhook configurations. Source: `pkg/apis/admissionregistration/validation/validation.go`.

use std::collections::HashSet;

use coracle_admission_policies::{Expressions, MAX_CONDITIONS, ResultType};
use coracle_values::names;
use serde_json::Value;

use super::{Causes, Path, format, fully_qualified_name, items, selector, text};

const OPERATIONS: &[&str] = &["*", "CONNECT", "CREATE", "DELETE", "UPDATE"];
const VERSIONS: [&str; 2] = ["v1", "v1beta1"];

pub(crate) fn validating(causes: &mut Causes, object: &Value, old: Option<&Value>) {
    webhooks(causes, object, old);
}

pub(crate) fn mutating(causes: &mut Causes, object: &Value, old: Option<&Value>) {
    webhooks(causes, object, old);
    for (index, hook) in items(&object["webhooks"]) {
        let path = Path::root("webhooks").index(index).field("reinvocationPolicy");
        causes.optional_word(&path, &hook["reinvocationPolicy"], &["IfNeeded", "Never"]);
    }
}

fn webhooks(causes: &mut Causes, object: &Value, old: Option<&Value>) {
    let mut names = HashSet::new();
    for (index, hook) in items(&object["webhooks"]) {
        let path = Path::root("webhooks").index(index);
        webhook(causes, &path, hook);
        let before = old.map(|old| &old["webhooks"][index]["matchConditions"]);
        if before != Some(&hook["matchConditions"]) {
            match_conditions(causes, &path.field("matchConditions"), &hook["matchConditions"], false);
        }
        let name = text(&hook["name"]);
        if !names.insert(name) && !name.is_empty() {
            causes.duplicate(&path.field("name"), &hook["name"]);
        }
    }
}

fn webhook(causes: &mut Causes, path: &Path, hook: &Value) {
    fully_qualified_name::check(causes, &path.field("name"), text(&hook["name"]));
    for (index, one) in items(&hook["rules"]) {
        rule(causes, &path.field("rules").index(index), one);
    }
    causes.optional_word(&path.field("failurePolicy"), &hook["failurePolicy"], &["Fail", "Ignore"]);
    causes.optional_word(&path.field("matchPolicy"), &hook["matchPolicy"], &["Equivalent", "Exact"]);
    match hook["sideEffects"].as_str() {
        None => causes.required(&path.field("sideEffects"), "must specify one of None, NoneOnDryRun"),
        Some("None" | "NoneOnDryRun") => {}
        Some(_) => {
            causes.unsupported(&path.field("sideEffects"), &hook["sideEffects"], &["None", "NoneOnDryRun"]);
        }
    }
    if hook["timeoutSeconds"].as_i64().is_some_and(|seconds| !(1..=30).contains(&seconds)) {
        let detail = "the timeout value must be between 1 and 30 seconds";
        causes.invalid(&path.field("timeoutSeconds"), &hook["timeoutSeconds"], detail);
    }
    for selector in ["namespaceSelector", "objectSelector"] {
        selector::label_selector(causes, &path.field(selector), &hook[selector]);
    }
    client(causes, &path.field("clientConfig"), &hook["clientConfig"]);
    review_versions(causes, &path.field("admissionReviewVersions"), &hook["admissionReviewVersions"]);
}

/// Checks names and expressions of match conditions.
pub(super) fn match_conditions(causes: &mut Causes, path: &Path, conditions: &Value, has_params: bool) {
    let count = items(conditions).count();
    if count == 0 {
        return;
    }
    if count > MAX_CONDITIONS {
        causes.too_many(path, count, MAX_CONDITIONS);
        return;
    }
    let expressions = Expressions::new(has_params);
    let mut names = Vec::new();
    for (index, condition) in items(conditions) {
        let place = path.index(index);
        let source = text(&condition["expression"]).trim();
        if source.is_empty() {
            causes.required(&place.field("expression"), "");
        } else if let Err(error) = expressions.compile(source, ResultType::Validation) {
            causes.invalid(&place.field("expression"), &source.into(), &error);
        }
        let name = text(&condition["name"]);
        if name.is_empty() {
            causes.required(&place.field("name"), "");
            continue;
        }
        for problem in names::qualified_name(name) {
            causes.invalid(&place.field("name"), &name.into(), &problem);
        }
        if names.contains(&name) {
            causes.duplicate(&place.field("name"), &condition["name"]);
        }
        names.push(name);
    }
}

/// Refuses entries that a wildcard of the list makes superfluous, as upstream.
fn resources(causes: &mut Causes, path: &Path, list: &Value) {
    let all: HashSet<&str> = items(list).map(|(_, one)| text(one)).collect();
    if all.contains("*/*") && items(list).count() > 1 {
        causes.invalid(path, list, "if '*/*' is present, must not specify other resources");
    }
    for (index, one) in items(list) {
        let one = text(one);
        let (resource, sub) = one.split_once('/').unwrap_or((one, ""));
        let place = path.index(index);
        let has = |wanted: String| all.contains(wanted.as_str());
        if one == "*/*" || sub.is_empty() {
            if one != "*/*" && one != "*" && all.contains("*") {
                let detail = "if '*' is present, must not specify other resources without subresources";
                causes.invalid(path, list, detail);
            }
            continue;
        }
        if sub != "*" && has(format!("{resource}/*")) {
            let detail = format!("if '{resource}/*' is present, must not specify {one}");
            causes.invalid(&place, &one.into(), &detail);
        }
        if resource != "*" && has(format!("*/{sub}")) {
            let detail = format!("if '*/{sub}' is present, must not specify {one}");
            causes.invalid(&place, &one.into(), &detail);
        }
    }
}

pub(super) fn rule(causes: &mut Causes, path: &Path, rule: &Value) {
    for (field, what) in [
        ("operations", "operations"),
        ("apiGroups", "API groups"),
        ("apiVersions", "API versions"),
        ("resources", "resources"),
    ] {
        let list = &rule[field];
        let count = items(list).count();
        if count == 0 {
            causes.required(&path.field(field), "");
        }
        if count > 1 && field != "resources" && items(list).any(|(_, one)| one == "*") {
            let detail = format!("if '*' is present, must not specify other {what}");
            causes.invalid(&path.field(field), list, &detail);
        }
    }
    for (index, operation) in items(&rule["operations"]) {
        if !OPERATIONS.contains(&text(operation)) {
            causes.unsupported(&path.field("operations").index(index), operation, OPERATIONS);
        }
    }
    resources(causes, &path.field("resources"), &rule["resources"]);
    for field in ["apiVersions", "resources"] {
        for (index, _) in items(&rule[field]).filter(|(_, one)| text(one).is_empty()) {
            causes.required(&path.field(field).index(index), "");
        }
    }
    causes.one_of(&path.field("scope"), &rule["scope"], &["*", "Cluster", "Namespaced"]);
}

fn client(causes: &mut Causes, path: &Path, config: &Value) {
    match (config["url"].as_str(), config["service"].is_object()) {
        (Some(address), false) => url(causes, &path.field("url"), address),
        (None, true) => service(causes, &path.field("service"), &config["service"]),
        _ => causes.required(path, "exactly one of url or service is required"),
    }
}

fn url(causes: &mut Causes, path: &Path, address: &str) {
    const FORM: &str = "; desired format: https://host[/path]";
    let (scheme, rest) = address.split_once("://").unwrap_or(("", address));
    let authority = rest.split(['/', '?', '#']).next().unwrap_or_default();
    if scheme != "https" {
        let detail = format!("'https' is the only allowed URL scheme{FORM}");
        causes.invalid(path, &scheme.into(), &detail);
    }
    if authority.is_empty() {
        causes.invalid(path, &"".into(), &format!("host must be specified{FORM}"));
    }
    for (sign, place, detail) in [
        ('@', authority, "user information is not permitted in the URL"),
        ('#', rest, "fragments are not permitted in the URL"),
        ('?', rest, "query parameters are not permitted in the URL"),
    ] {
        if place.contains(sign) {
            causes.invalid(path, &address.into(), detail);
        }
    }
}

fn service(causes: &mut Causes, path: &Path, service: &Value) {
    for field in ["name", "namespace"] {
        if text(&service[field]).is_empty() {
            causes.required(&path.field(field), "");
        }
    }
    for problem in format::port_number(service["port"].as_i64().unwrap_or(443)) {
        causes.invalid(&path.field("port"), &service["port"], &format!("port is not valid: {problem}"));
    }
    let url_path = text(&service["path"]);
    if url_path.is_empty() || url_path == "/" {
        return;
    }
    let here = path.field("path");
    if !url_path.starts_with('/') {
        causes.invalid(&here, &url_path.into(), "must start with a '/'");
    }
    // Upstream skips the first character, even if it is not a slash.
    let steps = url_path.get(1..).unwrap_or_default();
    for (index, step) in steps.strip_suffix('/').unwrap_or(steps).split('/').enumerate() {
        if step.is_empty() {
            causes.invalid(&here, &url_path.into(), &format!("segment[{index}] may not be empty"));
            continue;
        }
        for problem in format::dns1123_subdomain(step) {
            causes.invalid(&here, &url_path.into(), &format!("segment[{index}]: {problem}"));
        }
    }
}

fn review_versions(causes: &mut Causes, path: &Path, versions: &Value) {
    let mut seen = HashSet::new();
    for (index, version) in items(versions) {
        let name = text(version);
        if !seen.insert(name) {
            causes.invalid(&path.index(index), version, "duplicate version");
            continue;
        }
        causes.format(&path.index(index), name, format::dns1035_label(name));
    }
    if seen.is_empty() {
        causes.required(path, "must specify one of v1, v1beta1");
    } else if !seen.iter().any(|version| VERSIONS.contains(version)) {
        causes.invalid(path, versions, "must include at least one of v1, v1beta1");
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn each_segment_of_a_path_is_a_subdomain() {
        let problems = |path: &str| {
            let mut causes = Causes::default();
            service(&mut causes, &Path::root("s"), &json!({"name": "n", "namespace": "n", "path": path}));
            causes.into_list().into_iter().map(|cause| cause.message).collect::<Vec<_>>()
        };
        for good in ["", "/", "/a", "/a/b.c/"] {
            assert_eq!(problems(good), Vec::<String>::new(), "{good}");
        }
        assert_eq!(problems("//"), ["Invalid value: \"//\": segment[0] may not be empty"]);
        let relative = "Invalid value: \"1\": must start with a '/'";
        assert_eq!(problems("1"), [relative, "Invalid value: \"1\": segment[0] may not be empty"]);
        assert_eq!(problems("-a").len(), 1, "upstream checks the text behind the first character");
        assert_eq!(problems("a.b").len(), 2);
    }

    #[test]
    fn long_lists_of_webhooks_are_checked_in_linear_time() {
        // A comparison of each element with all earlier elements would take hours.
        let many = |text: &str| (0..300_000).map(|at| format!("{text}{at}").into()).collect::<Vec<Value>>();
        let mut causes = Causes::default();
        resources(&mut causes, &Path::root("resources"), &many("a/").into());
        review_versions(
            &mut causes,
            &Path::root("versions"),
            &[vec!["v1".into()], many("v")].concat().into(),
        );
        assert_eq!(causes.into_list().len(), 1, "only v1 is a duplicate");
        let mut causes = Causes::default();
        resources(&mut causes, &Path::root("r"), &json!(["a/*", "a/b", "*/c", "d/c", "e", "*"]));
        let problems: Vec<String> = causes.into_list().into_iter().map(|cause| cause.message).collect();
        assert_eq!(problems.len(), 3, "{problems:?}");
    }
}
