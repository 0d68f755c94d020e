//! Flow schemas and priority levels. Source: `pkg/apis/flowcontrol/validation/validation.go`.

use std::collections::HashSet;

use serde_json::Value;

use super::{Causes, Path, format, items, text};
use crate::flow_control;

const VERBS: &[&str] =
    &["create", "delete", "deletecollection", "get", "list", "patch", "proxy", "update", "watch"];
const MAX_PRECEDENCE: i64 = 10_000;
const MAX_QUEUES: i64 = 10_000_000;
/// Bits of the hash that chooses the queues of a flow.
const HASH_BITS: f64 = 60.0;
/// Kinds of subjects, and the field of each.
const SUBJECTS: [(&str, &str); 3] =
    [("Group", "group"), ("ServiceAccount", "serviceAccount"), ("User", "user")];

/// Checks a flow schema.
pub(crate) fn flow_schema(causes: &mut Causes, object: &Value, _old: Option<&Value>) {
    let (path, spec) = (Path::root("spec"), &object["spec"]);
    let name = text(&object["metadata"]["name"]);
    precedence(causes, &path.field("matchingPrecedence"), &spec["matchingPrecedence"], name);
    let method = &spec["distinguisherMethod"];
    if method.is_object() && !["ByNamespace", "ByUser"].contains(&text(&method["type"])) {
        let here = path.field("distinguisherMethod").field("type");
        causes.unsupported(&here, method, &["ByNamespace", "ByUser"]);
    }
    let (here, level) = (
        path.field("priorityLevelConfiguration").field("name"),
        text(&spec["priorityLevelConfiguration"]["name"]),
    );
    if level.is_empty() {
        causes.required(&here, "must reference a priority level");
    } else {
        causes.format(&here, level, format::dns1123_subdomain(level));
    }
    for (index, rule) in items(&spec["rules"]) {
        self::rule(causes, &path.field("rules").index(index), rule);
    }
    let mandatory = flow_control::mandatory_schemas();
    if mandatory.iter().any(|fixed| fixed["metadata"]["name"] == name && fixed["spec"] != *spec) {
        causes.invalid(&path, spec, &format!("spec of '{name}' must equal the fixed value"));
    }
}

fn precedence(causes: &mut Causes, path: &Path, value: &Value, name: &str) {
    match value.as_i64().unwrap_or(0) {
        ..=0 => causes.invalid(path, value, "must be a positive value"),
        1 if name != "exempt" => {
            causes.invalid(path, value, "only the schema named 'exempt' may have matchingPrecedence 1");
        }
        number if number > MAX_PRECEDENCE => {
            causes.invalid(path, value, &format!("must not be greater than {MAX_PRECEDENCE}"));
        }
        _ => {}
    }
}

fn rule(causes: &mut Causes, path: &Path, rule: &Value) {
    if items(&rule["subjects"]).next().is_none() {
        causes.required(&path.field("subjects"), "subjects must contain at least one value");
    }
    for (index, subject) in items(&rule["subjects"]) {
        self::subject(causes, &path.field("subjects").index(index), subject);
    }
    let lists = ["resourceRules", "nonResourceRules"];
    if lists.iter().all(|list| items(&rule[*list]).next().is_none()) {
        let detail = "at least one of resourceRules and nonResourceRules has to be non-empty";
        causes.required(path, detail);
    }
    for (index, rule) in items(&rule["resourceRules"]) {
        resource_rule(causes, &path.field("resourceRules").index(index), rule);
    }
    for (index, rule) in items(&rule["nonResourceRules"]) {
        let here = path.field("nonResourceRules").index(index);
        verbs(causes, &here.field("verbs"), &rule["verbs"]);
        let detail = "nonResourceURLs must contain at least one value";
        let here = here.field("nonResourceURLs");
        word_list(causes, &here, &rule["nonResourceURLs"], detail, "non-resource URLs");
        for (index, url) in items(&rule["nonResourceURLs"]).filter(|(_, url)| *url != "*") {
            non_resource_url(causes, &here.index(index), url);
        }
    }
}

fn non_resource_url(causes: &mut Causes, path: &Path, value: &Value) {
    let url = text(value);
    if url.is_empty() {
        causes.invalid(path, value, "must not be empty");
    } else if !url.starts_with('/') {
        causes.invalid(path, value, "must start with slash");
    } else if url.contains(' ') {
        causes.invalid(path, value, "must not contain white-space");
    } else if url.contains("//") {
        causes.invalid(path, value, "must not contain double slash");
    } else if url.strip_suffix("/*").unwrap_or(url).contains('*') {
        causes.invalid(path, value, "wildcard can only do suffix matching");
    }
}

fn subject(causes: &mut Causes, path: &Path, subject: &Value) {
    let Some((kind, field)) = SUBJECTS.iter().find(|(kind, _)| *kind == text(&subject["kind"])) else {
        return causes.unsupported(&path.field("kind"), &subject["kind"], &SUBJECTS.map(|(kind, _)| kind));
    };
    for (other, name) in SUBJECTS.iter().filter(|(other, name)| other != kind && !subject[*name].is_null()) {
        let detail = format!("{name} is forbidden when subject kind is not '{other}'");
        causes.forbidden(&path.field(name), &detail);
    }
    let (here, value) = (path.field(field), &subject[*field]);
    if value.is_null() {
        return causes.required(&here, &format!("{field} is required when subject kind is '{kind}'"));
    }
    let name = text(&value["name"]);
    if name.is_empty() {
        causes.required(&here.field("name"), "");
    } else if *kind == "ServiceAccount" && name != "*" {
        causes.format(&here.field("name"), name, format::dns1123_subdomain(name));
    }
    if *kind == "ServiceAccount" {
        let (here, namespace) = (here.field("namespace"), text(&value["namespace"]));
        match namespace {
            "" => causes.required(&here, "must specify namespace for service account"),
            _ => causes.format(&here, namespace, format::dns1123_label(namespace)),
        }
    }
}

fn resource_rule(causes: &mut Causes, path: &Path, rule: &Value) {
    verbs(causes, &path.field("verbs"), &rule["verbs"]);
    let detail = "resource rules must supply at least one api group";
    word_list(causes, &path.field("apiGroups"), &rule["apiGroups"], detail, "api groups");
    let detail = "resource rules must supply at least one resource";
    word_list(causes, &path.field("resources"), &rule["resources"], detail, "resources");
    let (here, namespaces) = (path.field("namespaces"), &rule["namespaces"]);
    if rule["clusterScope"] != true || items(namespaces).next().is_some() {
        let detail = "resource rules that are not cluster scoped must supply at least one namespace";
        word_list(causes, &here, namespaces, detail, "namespaces");
    }
    for (index, namespace) in items(namespaces).filter(|(_, namespace)| *namespace != "*") {
        let problems = format::dns1123_label(text(namespace));
        let intro = "each member of this list must be '*' or a DNS-1123 label; ";
        let problems = problems.into_iter().map(|problem| format!("{intro}{problem}")).collect();
        causes.format(&here.index(index), text(namespace), problems);
    }
}

fn verbs(causes: &mut Causes, path: &Path, list: &Value) {
    word_list(causes, path, list, "verbs must contain at least one value", "verbs");
    let has_all = items(list).any(|(_, verb)| verb == "*");
    if !has_all && items(list).any(|(_, verb)| !VERBS.contains(&text(verb))) {
        causes.unsupported(path, list, VERBS);
    }
}

/// Checks a list of words that may be `*` alone.
fn word_list(causes: &mut Causes, path: &Path, list: &Value, missing: &str, what: &str) {
    let count = items(list).count();
    if count == 0 {
        causes.required(path, missing);
    } else if count > 1 && items(list).any(|(_, word)| word == "*") {
        causes.invalid(path, list, &format!("if '*' is present, must not specify other {what}"));
    }
}

/// Checks a priority level.
pub(crate) fn priority_level(causes: &mut Causes, object: &Value, _old: Option<&Value>) {
    let (path, spec) = (Path::root("spec"), &object["spec"]);
    let (name, kind) = (text(&object["metadata"]["name"]), text(&spec["type"]));
    if (name == "exempt") != (kind == "Exempt") {
        let detail = "must be 'Exempt' if and only if `name` is 'exempt'";
        causes.invalid(&path.field("type"), &spec["type"], detail);
    }
    match kind {
        "Exempt" => {
            if !spec["limited"].is_null() {
                causes.forbidden(&path.field("limited"), "must be nil if the type is not Limited");
            }
            concurrency(causes, &path.field("exempt"), &spec["exempt"]);
        }
        "Limited" => {
            if !spec["exempt"].is_null() {
                causes.forbidden(&path.field("exempt"), "must be nil if the type is Limited");
            }
            if spec["limited"].is_null() {
                causes.required(&path.field("limited"), "must not be empty when type is Limited");
            } else {
                limited(causes, &path.field("limited"), &spec["limited"]);
            }
        }
        _ => causes.unsupported(&path.field("type"), &spec["type"], &["Exempt", "Limited"]),
    }
    fixed_level(causes, &path, spec, name);
}

fn fixed_level(causes: &mut Causes, path: &Path, spec: &Value, name: &str) {
    let levels = flow_control::mandatory_levels();
    let Some(fixed) = levels.iter().find(|level| level["metadata"]["name"] == name) else { return };
    let without = |spec: &Value| {
        let mut spec = spec.as_object().cloned().unwrap_or_default();
        if name == "exempt" {
            spec.remove("exempt");
        }
        spec
    };
    if without(spec) != without(&fixed["spec"]) {
        let except = if name == "exempt" { " except the 'spec.exempt' field" } else { "" };
        causes.invalid(path, spec, &format!("spec of '{name}'{except} must equal the fixed value"));
    }
}

fn concurrency(causes: &mut Causes, path: &Path, level: &Value) {
    let shares = &level["nominalConcurrencyShares"];
    if shares.as_i64().is_some_and(|shares| shares < 0) {
        causes.invalid(&path.field("nominalConcurrencyShares"), shares, "must be a non-negative integer");
    }
    causes.in_range(&path.field("lendablePercent"), &level["lendablePercent"], 0..=100);
}

fn limited(causes: &mut Causes, path: &Path, limited: &Value) {
    concurrency(causes, path, limited);
    let borrowing = &limited["borrowingLimitPercent"];
    if borrowing.as_i64().is_some_and(|percent| percent < 0) {
        let here = path.field("borrowingLimitPercent");
        causes.invalid(&here, borrowing, "if specified, must be a non-negative integer");
    }
    let (here, response) = (path.field("limitResponse"), &limited["limitResponse"]);
    let queuing = here.field("queuing");
    match text(&response["type"]) {
        "Reject" if !response["queuing"].is_null() => {
            causes.forbidden(&queuing, "must be nil if limited.limitResponse.type is not Limited");
        }
        "Queue" if response["queuing"].is_null() => {
            causes.required(&queuing, "must not be empty if limited.limitResponse.type is Limited");
        }
        "Queue" => queues(causes, &queuing, &response["queuing"]),
        "Reject" => {}
        _ => causes.unsupported(&here.field("type"), &response["type"], &["Queue", "Reject"]),
    }
}

fn queues(causes: &mut Causes, path: &Path, queuing: &Value) {
    let number = |field: &str| queuing[field].as_i64().unwrap_or(0);
    for field in ["queueLengthLimit", "queues", "handSize"] {
        if number(field) <= 0 {
            causes.invalid(&path.field(field), &queuing[field], "must be positive");
        }
    }
    let (queues, hand) = (number("queues"), number("handSize"));
    if queues > MAX_QUEUES {
        let detail = format!("must not be greater than {MAX_QUEUES}");
        causes.invalid(&path.field("queues"), &queuing["queues"], &detail);
    }
    let here = path.field("handSize");
    if hand > queues {
        let detail = format!("should not be greater than queues ({queues})");
        causes.invalid(&here, &queuing["handSize"], &detail);
    } else if entropy_bits(queues, hand) > HASH_BITS {
        let detail = format!(
            "required entropy bits of deckSize {queues} and handSize {hand} should not be greater than {HASH_BITS}"
        );
        causes.invalid(&here, &queuing["handSize"], &detail);
    }
}

/// The number of hash bits for a hand of this size. The loop ends when the sum exceeds the limit, so a large hand does
/// not take longer.
fn entropy_bits(queues: i64, hand: i64) -> f64 {
    let mut bits = 0.0;
    for taken in 0..hand.max(0) {
        let Ok(left) = u32::try_from(queues - taken) else { break };
        bits += f64::from(left).log2();
        if bits > HASH_BITS {
            break;
        }
    }
    bits.ceil()
}

/// Checks the status of a flow schema or priority level.
pub(super) fn status(causes: &mut Causes, status: &Value) {
    let path = Path::root("status").field("conditions");
    let mut seen = HashSet::new();
    for (index, condition) in items(&status["conditions"]) {
        let (here, kind) = (path.index(index).field("type"), text(&condition["type"]));
        if kind.is_empty() {
            causes.required(&here, "");
        }
        if !seen.insert(kind) {
            causes.duplicate(&here, &condition["type"]);
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn fields(check: fn(&mut Causes, &Value, Option<&Value>), name: &str, spec: Value) -> Vec<String> {
        let mut causes = Causes::default();
        check(&mut causes, &json!({"metadata": {"name": name}, "spec": spec}), None);
        causes.into_list().into_iter().map(|cause| cause.field).collect()
    }

    #[test]
    fn paths_are_absolute() {
        let message = |url: &str| {
            let mut causes = Causes::default();
            non_resource_url(&mut causes, &Path::root("u"), &url.into());
            causes.into_list().into_iter().map(|cause| cause.message).collect::<String>()
        };
        assert_eq!((&*message("/"), &*message("/a/*")), ("", ""));
        assert_eq!(message(""), "Invalid value: \"\": must not be empty");
        assert_eq!(message("a"), "Invalid value: \"a\": must start with slash");
    }

    #[test]
    fn fixed_objects_keep_their_specs_and_others_are_checked() {
        let mut spec = flow_control::mandatory_schemas()[0]["spec"].clone();
        assert_eq!(fields(flow_schema, "exempt", spec.clone()), Vec::<String>::new());
        assert_eq!(fields(flow_schema, "other", spec.clone()), ["spec.matchingPrecedence"]);
        spec["rules"] = json!([]);
        assert_eq!(fields(flow_schema, "exempt", spec), ["spec"]);
        let queue = |queues: i64, hand: i64| {
            fields(
                priority_level,
                "a",
                json!({"type": "Limited", "limited": {"limitResponse": {"type": "Queue",
                "queuing": {"queues": queues, "handSize": hand, "queueLengthLimit": 1}}}}),
            )
        };
        let here = "spec.limited.limitResponse.queuing";
        assert_eq!(queue(128, 6), Vec::<String>::new());
        assert_eq!(queue(4, 5), [format!("{here}.handSize")]);
        assert_eq!(queue(10_000_000, 9_999_999), [format!("{here}.handSize")]);
        assert_eq!(queue(i64::MAX, 1), [format!("{here}.queues")]);
        assert_eq!(fields(priority_level, "a", json!({"type": "Exempt"})), ["spec.type"]);
    }
}
