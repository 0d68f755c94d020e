//! Device classes, claims, claim templates, slices. Source: `pkg/apis/resource/validation/validation.go`.

mod policy;
mod selector;
mod slice;
mod status;

use std::collections::{HashMap, HashSet};

use serde_json::Value;

use selector::Problem;

pub(crate) use self::status::status;
use super::{Causes, Path, entries, format, items, meta, scheduling, text};

const MAX_REQUESTS: usize = 32;
const MAX_CONSTRAINTS: usize = 32;
const MAX_CONFIGS: usize = 32;
const MAX_SELECTORS: usize = 32;
const MAX_ALTERNATIVES: usize = 8;
/// Maximum size of the CEL expression of a selector, in bytes.
const MAX_EXPRESSION: usize = 10 << 10;
/// Maximum size of the name of a driver, in bytes.
const MAX_DRIVER: usize = 63;
/// Maximum size of the name of a pool, in bytes.
const MAX_POOL: usize = 253;
/// Maximum size of the opaque parameters of a configuration, as JSON, in bytes.
const MAX_PARAMETERS: usize = 10 << 10;
const ONE_REQUEST: &str = "exactly one of `exactly` or `firstAvailable` is required";
const ONE_ATTRIBUTE: &str = "exactly one of \"matchAttribute\" or \"distinctAttribute\" is required, but multiple \
    fields are set";
const ONE_PLACE: &str =
    "exactly one of `nodeName`, `nodeSelector`, `allNodes`, `perDeviceNodeSelection` is required";
/// Metadata that a claim template may have.
const TEMPLATE_METADATA: [&str; 2] = ["annotations", "labels"];
const REQUEST_REFERENCE: &str =
    "must be the name of a request in the claim or the name of a request and a subrequest separated by '/'";

/// Checks a device class.
pub(crate) fn class(causes: &mut Causes, object: &Value, _old: Option<&Value>) {
    let (path, spec) = (Path::root("spec"), &object["spec"]);
    selectors(causes, &path.field("selectors"), &spec["selectors"]);
    if limit(causes, &path.field("config"), &spec["config"], MAX_CONFIGS) {
        for (index, config) in items(&spec["config"]) {
            self::config(causes, &path.field("config").index(index), config);
        }
    }
    let extended = &spec["extendedResourceName"];
    let is_extended = |name: &str| {
        name.contains('/')
            && !name.contains("kubernetes.io/")
            && !name.starts_with("requests.")
            && format::qualified_name(&format!("requests.{name}")).is_empty()
    };
    if extended.as_str().is_some_and(|name| !is_extended(name)) {
        let here = path.field("extendedResourceName");
        causes.invalid(&here, extended, "must be a valid extended resource name");
    }
}

/// Checks a claim.
pub(crate) fn claim(causes: &mut Causes, object: &Value, old: Option<&Value>) {
    let path = Path::root("spec");
    match old {
        Some(old) => immutable(causes, &path, &object["spec"], &old["spec"]),
        None => claim_spec(causes, &path, &object["spec"]),
    }
}

/// Checks a claim template.
pub(crate) fn template(causes: &mut Causes, object: &Value, old: Option<&Value>) {
    let path = Path::root("spec");
    template_metadata(causes, &path.field("metadata"), &object["spec"]["metadata"]);
    claim_spec(causes, &path.field("spec"), &object["spec"]["spec"]);
    if let Some(old) = old {
        immutable(causes, &path, &object["spec"], &old["spec"]);
    }
}

/// Checks the metadata of the claims of a template. Source: `ValidateTemplateObjectMeta`.
fn template_metadata(causes: &mut Causes, path: &Path, metadata: &Value) {
    meta::annotations(causes, &path.field("annotations"), &metadata["annotations"]);
    meta::labels(causes, &path.field("labels"), &metadata["labels"]);
    let is_empty = |value: &Value| value.is_null() || *value == 0 || *value == "";
    for (name, value) in entries(metadata) {
        if !TEMPLATE_METADATA.contains(&name.as_str()) && !is_empty(value) {
            // Upstream makes this name from the name of its Go field.
            let shown = if name == "uid" { "uID" } else { name };
            causes.forbidden(&path.field(shown), "cannot be set");
        }
    }
}

fn immutable(causes: &mut Causes, path: &Path, new: &Value, old: &Value) {
    if new != old {
        causes.invalid(path, new, "field is immutable");
    }
}

fn claim_spec(causes: &mut Causes, path: &Path, spec: &Value) {
    let (path, devices) = (path.field("devices"), &spec["devices"]);
    let names = request_names(devices);
    let here = path.field("requests");
    if limit(causes, &here, &devices["requests"], MAX_REQUESTS) {
        for (index, request) in items(&devices["requests"]) {
            self::request(causes, &here.index(index), request);
        }
        unique(causes, &here, &devices["requests"], |request| &request["name"]);
    }
    let here = path.field("constraints");
    if limit(causes, &here, &devices["constraints"], MAX_CONSTRAINTS) {
        for (index, constraint) in items(&devices["constraints"]) {
            self::constraint(causes, &here.index(index), constraint, &names);
        }
    }
    let here = path.field("config");
    if limit(causes, &here, &devices["config"], MAX_CONFIGS) {
        for (index, config) in items(&devices["config"]) {
            let here = here.index(index);
            references(causes, &here.field("requests"), &config["requests"], &names);
            self::config(causes, &here, config);
        }
    }
}

fn constraint(causes: &mut Causes, path: &Path, constraint: &Value, names: &RequestNames<'_>) {
    references(causes, &path.field("requests"), &constraint["requests"], names);
    let attribute = |field: &'static str| constraint[field].as_str().map(|name| (field, name));
    match attribute("matchAttribute").or_else(|| attribute("distinctAttribute")) {
        Some((field, name)) => slice::fully_qualified(causes, &path.field(field), name),
        None => causes.required(path, ONE_ATTRIBUTE),
    }
}

/// The names of the requests, each with the names of its alternatives.
type RequestNames<'a> = HashMap<&'a str, HashSet<&'a str>>;

fn request_names(devices: &Value) -> RequestNames<'_> {
    let mut names = RequestNames::new();
    for (_, request) in items(&devices["requests"]) {
        let alternatives = items(&request["firstAvailable"]).map(|(_, one)| text(&one["name"]));
        names.entry(text(&request["name"])).or_default().extend(alternatives);
    }
    names
}

/// Whether a reference, `request` or `request/alternative`, names a request.
fn names_request(names: &RequestNames<'_>, reference: &Value) -> bool {
    let reference = text(reference);
    match reference.split_once('/') {
        Some((request, alternative)) => names.get(request).is_some_and(|known| known.contains(alternative)),
        None => names.contains_key(reference),
    }
}

fn references(causes: &mut Causes, path: &Path, list: &Value, names: &RequestNames<'_>) {
    if limit(causes, path, list, MAX_REQUESTS) {
        for (index, name) in items(list) {
            request_reference(causes, &path.index(index), name, names);
        }
        unique(causes, path, list, |name| name);
    }
}

fn request_reference(causes: &mut Causes, path: &Path, name: &Value, names: &RequestNames<'_>) {
    if text(name).matches('/').count() < 2 {
        for part in text(name).split('/') {
            causes.format(path, part, format::dns1123_label(part));
        }
    }
    if !names_request(names, name) {
        causes.invalid(path, name, REQUEST_REFERENCE);
    }
}

fn request(causes: &mut Causes, path: &Path, request: &Value) {
    name_of(causes, path, request);
    let alternatives = &request["firstAvailable"];
    match (request["exactly"].is_object(), items(alternatives).next().is_some()) {
        (false, false) => causes.required(path, ONE_REQUEST),
        (true, true) => {
            causes.invalid(path, &Value::Null, &format!("{ONE_REQUEST}, but multiple fields are set"));
        }
        (true, false) => one_request(causes, &path.field("exactly"), &request["exactly"]),
        (false, true) => {
            let here = path.field("firstAvailable");
            if limit(causes, &here, alternatives, MAX_ALTERNATIVES) {
                for (index, one) in items(alternatives) {
                    name_of(causes, &here.index(index), one);
                    one_request(causes, &here.index(index), one);
                }
                unique(causes, &here, alternatives, |one| &one["name"]);
            }
        }
    }
}

fn one_request(causes: &mut Causes, path: &Path, request: &Value) {
    let (here, class) = (path.field("deviceClassName"), text(&request["deviceClassName"]));
    match class {
        "" => causes.required(&here, ""),
        _ => causes.format(&here, class, format::dns1123_subdomain(class)),
    }
    selectors(causes, &path.field("selectors"), &request["selectors"]);
    let (mode, count) = (&request["allocationMode"], &request["count"]);
    let number = count.as_i64().unwrap_or(0);
    match text(mode) {
        "All" if number != 0 => {
            causes.invalid(&path.field("count"), count, "must not be specified when allocationMode is 'All'");
        }
        "ExactCount" if number <= 0 => {
            causes.invalid(&path.field("count"), count, "must be greater than zero");
        }
        "All" | "ExactCount" => {}
        _ => causes.unsupported(&path.field("allocationMode"), mode, &["All", "ExactCount"]),
    }
    for (index, one) in items(&request["tolerations"]) {
        toleration(causes, &path.field("tolerations").index(index), one);
    }
}

/// Checks a toleration of taints of devices.
fn toleration(causes: &mut Causes, path: &Path, toleration: &Value) {
    let key = text(&toleration["key"]);
    if !key.is_empty() {
        causes.format(&path.field("key"), key, format::qualified_name(key));
    }
    let value = &toleration["value"];
    match text(&toleration["operator"]) {
        "Exists" if !text(value).is_empty() => {
            causes.invalid(&path.field("value"), value, "must be empty for operator `Exists`");
        }
        "Exists" => {}
        "Equal" => causes.format(&path.field("value"), text(value), format::label_value(text(value))),
        _ => causes.one_of(&path.field("operator"), &toleration["operator"], &["Equal", "Exists"]),
    }
    if !text(&toleration["effect"]).is_empty() {
        causes.one_of(&path.field("effect"), &toleration["effect"], slice::EFFECTS);
    }
}

fn selectors(causes: &mut Causes, path: &Path, list: &Value) {
    if !limit(causes, path, list, MAX_SELECTORS) {
        return;
    }
    for (index, selector) in items(list) {
        let here = path.index(index).field("cel");
        let expression = text(&selector["cel"]["expression"]);
        if !selector["cel"].is_object() {
            causes.required(&here, "");
        } else if expression.len() > MAX_EXPRESSION {
            causes.too_long(&here.field("expression"), MAX_EXPRESSION);
        } else {
            let here = here.field("expression");
            match selector::problem(expression) {
                None => {}
                Some(Problem::Invalid(detail)) => causes.invalid(&here, &expression.into(), &detail),
                Some(Problem::TooCostly) => causes.forbidden(&here, "too complex, exceeds cost limit"),
            }
        }
    }
}

fn config(causes: &mut Causes, path: &Path, config: &Value) {
    let (path, opaque) = (path.field("opaque"), &config["opaque"]);
    if !opaque.is_object() {
        return causes.required(&path, "");
    }
    driver(causes, &path.field("driver"), &opaque["driver"]);
    let (here, parameters) = (path.field("parameters"), &opaque["parameters"]);
    match parameters {
        Value::Null => causes.required(&here, ""),
        Value::Object(_) if parameters.to_string().len() > MAX_PARAMETERS => {
            causes.too_long(&here, MAX_PARAMETERS);
        }
        Value::Object(_) => {}
        _ => causes.invalid(&here, &"<value omitted>".into(), "must be a valid JSON object"),
    }
}

/// Checks a slice.
pub(crate) fn slice(causes: &mut Causes, object: &Value, old: Option<&Value>) {
    let (path, spec) = (Path::root("spec"), &object["spec"]);
    driver(causes, &path.field("driver"), &spec["driver"]);
    pool(causes, &path.field("pool"), &spec["pool"]);
    if let Some(old) = old.map(|old| &old["spec"]) {
        immutable(causes, &path.field("pool").field("name"), &spec["pool"]["name"], &old["pool"]["name"]);
        immutable(causes, &path.field("driver"), &spec["driver"], &old["driver"]);
        immutable(causes, &path.field("nodeName"), &spec["nodeName"], &old["nodeName"]);
    }
    node_selection(causes, &path, spec);
    if !spec["sharedCounters"].is_null() && !spec["devices"].is_null() {
        causes.invalid(&path, &"".into(), "only one of `sharedCounters` or `devices` is allowed");
    }
    slice::devices(causes, &path, spec);
}

fn pool(causes: &mut Causes, path: &Path, pool: &Value) {
    pool_name(causes, &path.field("name"), text(&pool["name"]));
    if pool["resourceSliceCount"].as_i64().unwrap_or(0) <= 0 {
        let here = path.field("resourceSliceCount");
        causes.invalid(&here, &pool["resourceSliceCount"], "must be greater than zero");
    }
    if pool["generation"].as_i64().is_some_and(|generation| generation < 0) {
        let here = path.field("generation");
        causes.invalid(&here, &pool["generation"], "must be greater than or equal to zero");
    }
}

/// Checks the name of a pool: subdomains with slashes between them.
fn pool_name(causes: &mut Causes, path: &Path, name: &str) {
    if name.is_empty() {
        return causes.required(path, "");
    }
    if name.len() > MAX_POOL {
        causes.too_long(path, MAX_POOL);
    }
    for part in name.split('/') {
        causes.format(path, part, format::dns1123_subdomain(part));
    }
}

/// Checks that the slice selects the nodes of its devices in exactly one way.
fn node_selection(causes: &mut Causes, path: &Path, spec: &Value) {
    let mut set = Vec::new();
    match spec["nodeName"].as_str() {
        None => {}
        Some("") => {
            let detail = "must be either unset or set to a non-empty string";
            causes.invalid(&path.field("nodeName"), &spec["nodeName"], detail);
        }
        Some(name) => {
            set.push("`nodeName`");
            causes.format(&path.field("nodeName"), name, format::dns1123_subdomain(name));
        }
    }
    if spec["nodeSelector"].is_object() {
        set.push("`nodeSelector`");
        scheduling::node_terms(causes, &path.field("nodeSelector"), &spec["nodeSelector"]);
        let terms = &spec["nodeSelector"]["nodeSelectorTerms"];
        if items(terms).count() != 1 {
            let here = path.field("nodeSelector").field("nodeSelectorTerms");
            causes.invalid(&here, terms, "must have exactly one node selector term");
        }
    }
    for (field, quoted) in
        [("allNodes", "`allNodes`"), ("perDeviceNodeSelection", "`perDeviceNodeSelection`")]
    {
        match spec[field].as_bool() {
            Some(true) => set.push(quoted),
            Some(false) => {
                causes.invalid(&path.field(field), &spec[field], "must be either unset or set to true");
            }
            None => {}
        }
    }
    match set.len() {
        0 => causes.required(path, ONE_PLACE),
        1 => {}
        _ => {
            let value = format!("{{{}}}", set.join(", "));
            causes.invalid(path, &value.into(), &format!("{ONE_PLACE}, but multiple fields are set"));
        }
    }
}

fn driver(causes: &mut Causes, path: &Path, value: &Value) {
    let name = text(value);
    if name.is_empty() {
        return causes.required(path, "");
    }
    if name.len() > MAX_DRIVER {
        causes.too_long(path, MAX_DRIVER);
    }
    causes.format(path, name, format::dns1123_subdomain(&name.to_ascii_lowercase()));
}

/// Checks the name of a request or device. As upstream, an empty name is invalid, not missing.
fn name_of(causes: &mut Causes, path: &Path, object: &Value) {
    let name = text(&object["name"]);
    causes.format(&path.field("name"), name, format::dns1123_label(name));
}

fn label(causes: &mut Causes, path: &Path, value: &Value) {
    match text(value) {
        "" => causes.required(path, ""),
        name => causes.format(path, name, format::dns1123_label(name)),
    }
}

/// Checks the length of a list. Returns false if the list is too long. Then its elements are not checked.
fn limit(causes: &mut Causes, path: &Path, list: &Value, max: usize) -> bool {
    let count = items(list).count();
    if count > max {
        causes.too_many(path, count, max);
    }
    count <= max
}

fn unique(causes: &mut Causes, path: &Path, list: &Value, key: fn(&Value) -> &Value) {
    let mut seen = std::collections::HashSet::new();
    for (index, item) in items(list) {
        if !seen.insert(text(key(item))) {
            causes.duplicate(&path.index(index), key(item));
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn fields(check: fn(&mut Causes, &Value, Option<&Value>), spec: Value) -> Vec<String> {
        let mut causes = Causes::default();
        check(&mut causes, &json!({"spec": spec}), None);
        causes.into_list().into_iter().map(|cause| cause.field).collect()
    }

    #[test]
    fn claims_and_slices_are_checked() {
        let exactly = json!({"deviceClassName": "gpu", "allocationMode": "ExactCount", "count": 1});
        let requests = |more: Value| json!({"devices": {"requests": more}});
        assert_eq!(fields(claim, requests(json!([{"name": "a", "exactly": exactly}]))), Vec::<String>::new());
        assert_eq!(fields(claim, requests(json!([{"name": "a"}]))), ["spec.devices.requests[0]"]);
        let both = json!([{"name": "A", "exactly": {"allocationMode": "All", "count": 1}}]);
        let here = "spec.devices.requests[0]";
        assert_eq!(
            fields(claim, requests(both)),
            [
                format!("{here}.name"),
                format!("{here}.exactly.deviceClassName"),
                format!("{here}.exactly.count")
            ]
        );
        let pool = json!({"name": "p", "resourceSliceCount": 1});
        assert_eq!(
            fields(slice, json!({"driver": "d.example.com", "pool": pool, "nodeName": "n"})),
            Vec::<String>::new()
        );
        assert_eq!(fields(slice, json!({"driver": "", "pool": pool})), ["spec.driver", "spec"]);
        let config = json!([{"opaque": {"driver": "d", "parameters": {}}}, {}]);
        assert_eq!(fields(class, json!({"config": config})), ["spec.config[1].opaque"]);
    }

    #[test]
    fn a_template_has_labels_and_annotations_only() {
        let problems = |metadata: Value| {
            let request = json!({"name": "a", "exactly": {"deviceClassName": "c", "allocationMode": "All"}});
            fields(template, json!({"metadata": metadata, "spec": {"devices": {"requests": [request]}}}))
        };
        let good = json!({"labels": {"a": "b"}, "annotations": {"c": "d"}, "name": "", "generation": 0});
        assert_eq!(problems(good), Vec::<String>::new());
        let bad = json!({"name": "n", "uid": "u", "annotations": {"a b": ""}});
        assert_eq!(problems(bad), ["spec.metadata.annotations", "spec.metadata.name", "spec.metadata.uID"]);
    }

    #[test]
    fn long_lists_are_not_checked() {
        let selectors = json!(vec![json!({"cel": {"expression": "("}}); MAX_SELECTORS + 1]);
        assert_eq!(fields(class, json!({"selectors": selectors})), ["spec.selectors"]);
        let requests = json!(vec![json!({}); MAX_REQUESTS + 1]);
        assert_eq!(fields(claim, json!({"devices": {"requests": requests}})), ["spec.devices.requests"]);
    }

    #[test]
    fn a_reference_names_a_request_or_one_of_its_alternatives() {
        let alternatives: Vec<Value> =
            (0..20_000).map(|number| json!({"name": format!("{number}")})).collect();
        let long = "x".repeat(1 << 20);
        let devices = json!({"requests": [{"name": "a"}, {"name": long, "firstAvailable": alternatives}]});
        // The long name is not copied for each alternative.
        let names = request_names(&devices);
        for (reference, expected) in
            [("a", true), ("a/1", false), ("b", false), (&*format!("{long}/1"), true)]
        {
            assert_eq!(names_request(&names, &reference.into()), expected);
        }
    }

    #[test]
    fn constraints_and_tolerations_are_checked() {
        let exactly = json!({"deviceClassName": "gpu", "allocationMode": "ExactCount", "count": 1,
            "tolerations": [{"key": "a", "operator": "Exists", "value": "b"}, {"operator": "Is"}, {"operator": "Equal", "effect": "X"}]});
        let constraints = json!([{"requests": ["a"], "matchAttribute": "d.example.com/x"}, {"requests": ["b"], "distinctAttribute": "x"}, {}]);
        let devices = json!({"requests": [{"name": "a", "exactly": exactly}], "constraints": constraints});
        let (request, constraint) = ("spec.devices.requests[0].exactly", "spec.devices.constraints");
        assert_eq!(
            fields(claim, json!({"devices": devices})),
            [
                format!("{request}.tolerations[0].value"),
                format!("{request}.tolerations[1].operator"),
                format!("{request}.tolerations[2].effect"),
                format!("{constraint}[1].requests[0]"),
                format!("{constraint}[1].distinctAttribute"),
                format!("{constraint}[2]"),
            ]
        );
    }
}
