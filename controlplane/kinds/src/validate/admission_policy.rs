//! Validates admission policies and their bindings. Source: `pkg/apis/admissionregistration/validation/validation.go`.

use std::collections::HashSet;

use coracle_admission_policies::{Expressions, MAX_EXPRESSIONS, ResultType};
use coracle_values::names;
use serde_json::Value;

use super::admission::{match_conditions, rule};
use super::{Causes, Path, format, items, selector, text};

/// Maximum number of audit annotations.
const MAX_ANNOTATIONS: usize = 20;
/// Maximum length of the expression of an audit annotation in bytes.
const MAX_ANNOTATION_EXPRESSION: usize = 5 * 1024;
/// Values of the field `reason` of a validation.
const REASONS: &[&str] = &["Forbidden", "Invalid", "RequestEntityTooLarge"];
/// Values of the field `validationActions` of a binding.
const ACTIONS: &[&str] = &["Audit", "Deny", "Warn"];
/// Operations of requests that a mutating policy may match.
const MUTABLE: &[&str] = &["*", "CONNECT", "CREATE", "UPDATE"];

/// Validates a ValidatingAdmissionPolicy.
pub(crate) fn validating(causes: &mut Causes, object: &Value, old: Option<&Value>) {
    let (path, spec) = (Path::root("spec"), &object["spec"]);
    let Some(expressions) = common(causes, spec, old) else { return };
    let (validations, annotations) = (&spec["validations"], &spec["auditAnnotations"]);
    if items(validations).next().is_none() && items(annotations).next().is_none() {
        let detail = "validations or auditAnnotations must contain at least one item";
        causes.required(&path.field("validations"), detail);
        causes.required(&path.field("auditAnnotations"), detail);
    }
    if is_too_long(causes, &path.field("validations"), validations) {
        return;
    }
    for (index, one) in items(validations) {
        validation(causes, &path.field("validations").index(index), one, &expressions);
    }
    let place = path.field("auditAnnotations");
    let count = items(annotations).count();
    if count > MAX_ANNOTATIONS {
        let detail = format!("must not have more than {MAX_ANNOTATIONS} auditAnnotations");
        causes.invalid(&place, annotations, &detail);
        return;
    }
    let policy = text(&object["metadata"]["name"]);
    let mut keys = Vec::new();
    for (index, one) in items(annotations) {
        annotation(causes, &place.index(index), policy, one, &expressions);
        if keys.contains(&&one["key"]) {
            causes.duplicate(&place.index(index).field("key"), &one["key"]);
        }
        keys.push(&one["key"]);
    }
}

/// Validates a MutatingAdmissionPolicy.
pub(crate) fn mutating(causes: &mut Causes, object: &Value, old: Option<&Value>) {
    let (path, spec) = (Path::root("spec"), &object["spec"]);
    let constraints = &spec["matchConstraints"];
    mutable(causes, &path.field("matchConstraints"), constraints);
    let place = path.field("reinvocationPolicy");
    if text(&spec["reinvocationPolicy"]).is_empty() {
        causes.required(&place, "");
    } else {
        causes.one_of(&place, &spec["reinvocationPolicy"], &["IfNeeded", "Never"]);
    }
    let Some(expressions) = common(causes, spec, old) else { return };
    let mutations = &spec["mutations"];
    if items(mutations).next().is_none() {
        causes.required(&path.field("mutations"), "mutations must contain at least one item");
    }
    if is_too_long(causes, &path.field("mutations"), mutations) {
        return;
    }
    for (index, one) in items(mutations) {
        mutation(causes, &path.field("mutations").index(index), one, &expressions);
    }
}

/// Validates a ValidatingAdmissionPolicyBinding.
pub(crate) fn validating_binding(causes: &mut Causes, object: &Value, _old: Option<&Value>) {
    binding(causes, object);
    let (path, actions) =
        (Path::root("spec").field("validationActions"), &object["spec"]["validationActions"]);
    let mut seen = HashSet::new();
    for (index, action) in items(actions) {
        if !ACTIONS.contains(&text(action)) {
            causes.unsupported(&path.index(index), action, ACTIONS);
        }
        if !seen.insert(text(action)) {
            causes.duplicate(&path.index(index), action);
        }
    }
    if seen.contains("Deny") && seen.contains("Warn") {
        let detail = "must not contain both Deny and Warn (repeating the same validation failure information in the API \
                      response and headers serves no purpose)";
        causes.invalid(&path, actions, detail);
    }
    if seen.is_empty() {
        causes.required(&path, "at least one validation action is required");
    }
}

/// Validates a MutatingAdmissionPolicyBinding.
pub(crate) fn mutating_binding(causes: &mut Causes, object: &Value, _old: Option<&Value>) {
    binding(causes, object);
    mutable(causes, &Path::root("spec").field("matchResources"), &object["spec"]["matchResources"]);
}

/// Checks the fields that both kinds of policies have. Returns the environment of the policy's expressions. `None` if
/// there are too many variables.
fn common(causes: &mut Causes, spec: &Value, old: Option<&Value>) -> Option<Expressions> {
    let path = Path::root("spec");
    causes.optional_word(&path.field("failurePolicy"), &spec["failurePolicy"], &["Fail", "Ignore"]);
    let has_params = spec["paramKind"].is_object();
    if has_params {
        param_kind(causes, &path.field("paramKind"), &spec["paramKind"]);
    }
    let place = path.field("matchConstraints");
    let constraints = &spec["matchConstraints"];
    if constraints.is_object() {
        match_resources(causes, &place, constraints);
        if items(&constraints["resourceRules"]).next().is_none() {
            causes.required(&place.field("resourceRules"), "");
        }
    } else {
        causes.required(&place, "");
    }
    if old.map(|old| &old["spec"]["matchConditions"]) != Some(&spec["matchConditions"]) {
        match_conditions(causes, &path.field("matchConditions"), &spec["matchConditions"], has_params);
    }
    let place = path.field("variables");
    if is_too_long(causes, &place, &spec["variables"]) {
        return None;
    }
    let mut expressions = Expressions::with_variables(has_params);
    for (index, variable) in items(&spec["variables"]) {
        self::variable(causes, &place.index(index), variable, &mut expressions);
    }
    Some(expressions)
}

/// Adds a cause if a list has more than [`MAX_EXPRESSIONS`] elements.
fn is_too_long(causes: &mut Causes, path: &Path, list: &Value) -> bool {
    let count = items(list).count();
    if count > MAX_EXPRESSIONS {
        causes.too_many(path, count, MAX_EXPRESSIONS);
    }
    count > MAX_EXPRESSIONS
}

fn variable(causes: &mut Causes, path: &Path, variable: &Value, expressions: &mut Expressions) {
    let (name, source) = (text(&variable["name"]), text(&variable["expression"]));
    if name.trim().is_empty() {
        causes.required(&path.field("name"), "name is not specified");
    } else if !is_identifier(name) {
        causes.invalid(&path.field("name"), &name.into(), "must be a valid CEL identifier");
    }
    if source.trim().is_empty() {
        causes.required(&path.field("expression"), "expression is not specified");
    } else if let Err(error) = expressions.add_variable(name, source) {
        causes.invalid(&path.field("expression"), &source.into(), &error);
    }
}

/// Whether the name of a variable is a CEL identifier.
fn is_identifier(name: &str) -> bool {
    let starts = name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_');
    starts
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
        && coracle_admission_policies::is_identifier(name)
}

fn validation(causes: &mut Causes, path: &Path, validation: &Value, expressions: &Expressions) {
    let source = text(&validation["expression"]);
    if source.trim().is_empty() {
        causes.required(&path.field("expression"), "expression is not specified");
    } else if let Err(error) = expressions.compile(source, ResultType::Validation) {
        causes.invalid(&path.field("expression"), &source.into(), &error);
    }
    let source = text(&validation["messageExpression"]);
    let place = path.field("messageExpression");
    if !source.is_empty() && source.trim().is_empty() {
        causes.invalid(&place, &source.into(), "must be non-empty if specified");
    } else if !source.is_empty()
        && let Err(error) = expressions.compile(source, ResultType::Message)
    {
        causes.invalid(&place, &source.into(), &error);
    }
    let message = text(&validation["message"]);
    if !message.is_empty() && message.trim().is_empty() {
        causes.invalid(&path.field("message"), &message.into(), "must be non-empty if specified");
    } else if message.trim().contains(['\n', '\r']) {
        causes.invalid(&path.field("message"), &message.into(), "must not contain line breaks");
    }
    causes.optional_word(&path.field("reason"), &validation["reason"], REASONS);
}

fn annotation(causes: &mut Causes, path: &Path, policy: &str, one: &Value, expressions: &Expressions) {
    let key = text(&one["key"]);
    for problem in names::qualified_name(&format!("{policy}/{key}")) {
        causes.invalid(&path.field("key"), &format!("{policy}/{key}").into(), &problem);
    }
    let source = text(&one["valueExpression"]).trim();
    let place = path.field("valueExpression");
    if source.is_empty() {
        causes.required(&place, "valueExpression is not specified");
    } else if source.len() > MAX_ANNOTATION_EXPRESSION {
        let detail = format!("must not exceed {MAX_ANNOTATION_EXPRESSION} bytes in length");
        causes.required(&place, &detail);
    } else if let Err(error) = expressions.compile(source, ResultType::Annotation) {
        causes.invalid(&place, &source.into(), &error);
    }
}

fn mutation(causes: &mut Causes, path: &Path, mutation: &Value, expressions: &Expressions) {
    let known = ["ApplyConfiguration", "JSONPatch"];
    let (own, other, want) = match mutation["patchType"].as_str() {
        Some("ApplyConfiguration") => ("applyConfiguration", "jsonPatch", ResultType::ApplyConfiguration),
        Some("JSONPatch") => ("jsonPatch", "applyConfiguration", ResultType::JsonPatch),
        None | Some("") => return causes.required(&path.field("patchType"), ""),
        Some(_) => return causes.unsupported(&path.field("patchType"), &mutation["patchType"], &known),
    };
    let patch_type = text(&mutation["patchType"]);
    if mutation[other].is_object() {
        let detail = format!("must not be specified when patchType is {patch_type}");
        causes.invalid(&path.field(other), &format!("{{{other}}}").into(), &detail);
    }
    let place = path.field(own);
    if !mutation[own].is_object() {
        causes.required(&place, &format!("must be specified when patchType is {patch_type}"));
        return;
    }
    let source = text(&mutation[own]["expression"]).trim();
    if source.is_empty() {
        causes.required(&place.field("expression"), "");
    } else if let Err(error) = expressions.compile(source, want) {
        causes.invalid(&place.field("expression"), &source.into(), &error);
    }
}

/// Checks that the rules match only operations in [`MUTABLE`].
fn mutable(causes: &mut Causes, path: &Path, resources: &Value) {
    for (_, rule) in items(&resources["resourceRules"]) {
        for (_, operation) in items(&rule["operations"]) {
            if !MUTABLE.contains(&text(operation)) {
                causes.unsupported(&path.field("resourceRules").field("operations"), operation, MUTABLE);
            }
        }
    }
}

fn param_kind(causes: &mut Causes, path: &Path, kind: &Value) {
    let (api_version, name) = (text(&kind["apiVersion"]), text(&kind["kind"]));
    let place = path.field("apiVersion");
    let (group, version) = api_version.split_once('/').unwrap_or(("", api_version));
    if api_version.is_empty() {
        causes.required(&place, "");
    } else {
        if !group.is_empty() {
            for problem in format::dns1123_subdomain(group) {
                causes.invalid(&place, &group.into(), &problem);
            }
        }
        for problem in format::dns1035_label(version) {
            causes.invalid(&place, &version.into(), &problem);
        }
    }
    if name.is_empty() {
        causes.required(&path.field("kind"), "");
    }
    for problem in if name.is_empty() { Vec::new() } else { format::dns1035_label(&name.to_lowercase()) } {
        let detail = format!("may have mixed case, but should otherwise match: {problem}");
        causes.invalid(&path.field("kind"), &name.into(), &detail);
    }
}

fn match_resources(causes: &mut Causes, path: &Path, resources: &Value) {
    causes.one_of(&path.field("matchPolicy"), &resources["matchPolicy"], &["Equivalent", "Exact"]);
    for selector in ["namespaceSelector", "objectSelector"] {
        if resources[selector].is_null() {
            causes.required(&path.field(selector), "");
        } else {
            selector::label_selector(causes, &path.field(selector), &resources[selector]);
        }
    }
    for list in ["resourceRules", "excludeResourceRules"] {
        for (index, one) in items(&resources[list]) {
            let place = path.field(list).index(index);
            let mut seen = HashSet::new();
            for (index, name) in items(&one["resourceNames"]) {
                path_segment(causes, &place.field("resourceNames").index(index), name);
                if !seen.insert(name) {
                    causes.duplicate(&place.field("resourceNames").index(index), name);
                }
            }
            rule(causes, &place, one);
        }
    }
}

fn path_segment(causes: &mut Causes, path: &Path, name: &Value) {
    let segment = text(name);
    if matches!(segment, "." | "..") {
        causes.invalid(path, name, &format!("may not be '{segment}'"));
    }
    for sign in ["/", "%"].into_iter().filter(|sign| segment.contains(sign)) {
        causes.invalid(path, name, &format!("may not contain '{sign}'"));
    }
}

fn binding(causes: &mut Causes, object: &Value) {
    let (path, spec) = (Path::root("spec"), &object["spec"]);
    let policy = text(&spec["policyName"]);
    if policy.is_empty() {
        causes.required(&path.field("policyName"), "");
    } else {
        causes.format(&path.field("policyName"), policy, format::dns1123_subdomain(policy));
    }
    if spec["paramRef"].is_object() {
        param_ref(causes, &path.field("paramRef"), &spec["paramRef"]);
    }
    if spec["matchResources"].is_object() {
        match_resources(causes, &path.field("matchResources"), &spec["matchResources"]);
    }
}

fn param_ref(causes: &mut Causes, path: &Path, reference: &Value) {
    let has_name = !text(&reference["name"]).is_empty();
    let has_selector = reference["selector"].is_object();
    if has_name {
        path_segment(causes, &path.field("name"), &reference["name"]);
    }
    if has_selector {
        selector::label_selector(causes, &path.field("selector"), &reference["selector"]);
    }
    match (has_name, has_selector) {
        (true, true) => {
            for field in ["name", "selector"] {
                causes.forbidden(&path.field(field), "name and selector are mutually exclusive");
            }
        }
        (false, false) => causes.required(path, "one of name or selector must be specified"),
        _ => {}
    }
    let action = &reference["parameterNotFoundAction"];
    causes.one_of(&path.field("parameterNotFoundAction"), action, &["Deny", "Allow"]);
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_variable_that_does_not_compile_is_one_cause() {
        let (mut causes, mut expressions) = (Causes::default(), Expressions::with_variables(false));
        let broken = json!({"name": "v", "expression": "nothing"});
        variable(&mut causes, &Path::root("variables"), &broken, &mut expressions);
        for name in ["v", "w"] {
            let rule = json!({"expression": format!("variables.{name} < 5")});
            validation(&mut causes, &Path::root(name), &rule, &expressions);
        }
        let fields: Vec<String> = causes.into_list().into_iter().map(|cause| cause.field).collect();
        assert_eq!(fields, ["variables.expression", "w.expression"]);
    }

    #[test]
    fn reasons_and_values_of_annotations_have_upstreams_causes() {
        let (mut causes, expressions) = (Causes::default(), Expressions::new(false));
        let rule = json!({"expression": "true", "reason": ""});
        validation(&mut causes, &Path::root("v"), &rule, &expressions);
        let note = json!({"key": "k", "valueExpression": "1"});
        annotation(&mut causes, &Path::root("a"), "p", &note, &expressions);
        let found = causes.into_list().into_iter().map(|cause| format!("{}: {}", cause.field, cause.message));
        assert_eq!(
            found.collect::<Vec<_>>(),
            [
                "v.reason: Unsupported value: \"\": supported values: \"Forbidden\", \"Invalid\", \"RequestEntityTooLarge\"",
                "a.valueExpression: Invalid value: \"1\": must evaluate to one of [string null_type] but got int",
            ]
        );
    }
}
