//! Resource quotas. Source: `ValidateResourceQuota` in `pkg/apis/core/validation/validation.go`.

use std::collections::BTreeSet;

use coracle_values::Quantity;
use coracle_values::names::is_extended_resource;
use serde_json::Value;

use super::standard_resource::{is_counted, is_standard};
use super::{Causes, Path, entries, format, items, text};

const COMPUTE: &[&str] =
    &["pods", "cpu", "memory", "limits.cpu", "limits.memory", "requests.cpu", "requests.memory"];
/// Scopes, each with the resources without a domain that a quota of this scope can limit.
const SCOPES: &[(&str, &[&str])] = &[
    ("Terminating", COMPUTE),
    ("NotTerminating", COMPUTE),
    ("BestEffort", &["pods"]),
    ("NotBestEffort", COMPUTE),
    ("PriorityClass", COMPUTE),
    ("CrossNamespacePodAffinity", COMPUTE),
    ("VolumeAttributesClass", &["persistentvolumeclaims", "requests.storage"]),
];
const MUST_EXIST: &str = "must be 'Exists' when scope is any of ResourceQuotaScopeTerminating, \
    ResourceQuotaScopeNotTerminating, ResourceQuotaScopeBestEffort, ResourceQuotaScopeNotBestEffort or \
    ResourceQuotaScopeCrossNamespacePodAffinity";

/// A field, for errors.
#[derive(Clone, Copy)]
struct Field<'a> {
    path: &'a Path,
    value: &'a Value,
}

/// Checks a quota.
pub(crate) fn resource_quota(causes: &mut Causes, object: &Value, old: Option<&Value>) {
    let (path, spec) = (Path::root("spec"), &object["spec"]);
    amounts(causes, &path.field("hard"), &spec["hard"]);
    let scopes: Vec<&str> = items(&spec["scopes"]).map(|(_, scope)| text(scope)).collect();
    let here = path.field("scopes");
    // Each scope is compared with all amounts, so repeated scopes are skipped.
    for scope in BTreeSet::from_iter(scopes.iter().copied()) {
        self::scope(causes, [Field { path: &here, value: &spec["scopes"] }; 2], scope, &spec["hard"]);
    }
    conflicts(causes, &here, &scopes, &spec["scopes"]);
    selector(causes, &path.field("scopeSelector").field("matchExpressions"), spec);
    if let Some(old) = old {
        let sorted = |spec: &Value| {
            let mut list: Vec<String> =
                items(&spec["scopes"]).map(|(_, scope)| text(scope).to_owned()).collect();
            list.sort_unstable();
            list.dedup();
            list
        };
        if sorted(spec) != sorted(&old["spec"]) {
            causes.invalid(&here, &spec["scopes"], "field is immutable");
        }
    }
}

/// Checks the status of a quota.
pub(super) fn status(causes: &mut Causes, status: &Value) {
    for list in ["hard", "used"] {
        amounts(causes, &Path::root("status").field(list), &status[list]);
    }
}

fn amounts(causes: &mut Causes, path: &Path, list: &Value) {
    for (name, amount) in entries(list) {
        let here = path.key(name);
        let problems = format::qualified_name(name);
        let is_named = problems.is_empty();
        causes.format(&here, name, problems);
        if is_named && !name.contains('/') && !is_standard(name) {
            let value = Value::from(name.as_str());
            if name != "storage" {
                causes.invalid(&here, &value, "must be a standard resource type or fully qualified");
            }
            causes.invalid(&here, &value, "must be a standard resource for quota");
        }
        self::amount(causes, &here, name, amount);
    }
}

/// Checks that an amount is not negative. The amount of a counted resource must also be a whole number. Source:
/// `ValidateResourceQuantityValue`.
pub(super) fn amount(causes: &mut Causes, path: &Path, name: &str, amount: &Value) {
    let Some(quantity) = amount.as_str().and_then(|amount| Quantity::parse(amount).ok()) else { return };
    if quantity.signum() < 0 {
        causes.invalid(path, amount, "must be greater than or equal to 0");
    }
    if (is_counted(name) || is_extended_resource(name)) && !quantity.is_integer() {
        causes.invalid(path, amount, "must be an integer");
    }
}

/// Checks that a scope is known and can limit the amounts. `at` has the field of each of the two errors.
fn scope(causes: &mut Causes, at: [Field<'_>; 2], scope: &str, hard: &Value) {
    let [unknown, unfit] = at;
    let Some((_, limited)) = SCOPES.iter().find(|(known, _)| *known == scope) else {
        causes.invalid(unknown.path, unknown.value, "unsupported scope");
        return;
    };
    for (name, _) in entries(hard) {
        if is_standard(name) && !limited.contains(&name.as_str()) {
            causes.invalid(unfit.path, unfit.value, "unsupported scope applied to resource");
        }
    }
}

fn conflicts(causes: &mut Causes, path: &Path, scopes: &[&str], value: &Value) {
    for pair in [["BestEffort", "NotBestEffort"], ["Terminating", "NotTerminating"]] {
        if pair.iter().all(|scope| scopes.contains(scope)) {
            causes.invalid(path, value, "conflicting scopes");
        }
    }
}

fn selector(causes: &mut Causes, path: &Path, spec: &Value) {
    let list = &spec["scopeSelector"]["matchExpressions"];
    let mut seen = BTreeSet::new();
    for (_, requirement) in items(list) {
        let (name, operator) = (text(&requirement["scopeName"]), &requirement["operator"]);
        let here = path.field("scopeName");
        let at = [
            Field { path: &here, value: &requirement["scopeName"] },
            Field { path, value: &spec["scopeSelector"] },
        ];
        if seen.insert(name) {
            scope(causes, at, name, &spec["hard"]);
        }
        let has_values = matches!(name, "PriorityClass" | "VolumeAttributesClass");
        if !has_values && SCOPES.iter().any(|(known, _)| *known == name) && operator != "Exists" {
            causes.invalid(&path.field("operator"), operator, MUST_EXIST);
        }
        let values = &requirement["values"];
        let is_empty = items(values).next().is_none();
        match text(operator) {
            "In" | "NotIn" if is_empty => {
                let detail =
                    "must be at least one value when `operator` is 'In' or 'NotIn' for scope selector";
                causes.required(&path.field("values"), detail);
            }
            "Exists" | "DoesNotExist" if !is_empty => {
                let detail =
                    "must be no value when `operator` is 'Exist' or 'DoesNotExist' for scope selector";
                causes.invalid(&path.field("values"), values, detail);
            }
            "In" | "NotIn" | "Exists" | "DoesNotExist" => {}
            _ => causes.invalid(&path.field("operator"), operator, "not a valid selector operator"),
        }
    }
    let names: Vec<&str> = items(list).map(|(_, requirement)| text(&requirement["scopeName"])).collect();
    conflicts(causes, path, &names, &spec["scopes"]);
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_repeated_scope_is_compared_once() {
        let spec = json!({"hard": {"services": "1"}, "scopes": vec!["BestEffort"; 50_000]});
        let mut causes = Causes::default();
        resource_quota(&mut causes, &json!({"spec": spec}), None);
        assert_eq!(causes.count(), 1);
    }

    #[test]
    fn names_scopes_and_amounts_are_checked() {
        let fields = |spec: Value| {
            let mut causes = Causes::default();
            resource_quota(&mut causes, &json!({"spec": spec}), None);
            causes.into_list().into_iter().map(|cause| cause.field).collect::<Vec<_>>()
        };
        let good = json!({"hard": {"pods": "1", "requests.x.io/gpu": "1", "count/widgets.example.com": "2", "cpu": "1.5"}});
        assert_eq!(fields(good), Vec::<String>::new());
        assert_eq!(fields(json!({"hard": {"nope": "1"}})), ["spec.hard[nope]"; 2]);
        assert_eq!(
            fields(json!({"hard": {"pods": "1.5", "cpu": "-1"}})),
            ["spec.hard[cpu]", "spec.hard[pods]"]
        );
        assert_eq!(fields(json!({"hard": {"services": "1"}, "scopes": ["BestEffort"]})), ["spec.scopes"]);
        assert_eq!(fields(json!({"scopes": ["BestEffort", "NotBestEffort"]})), ["spec.scopes"]);
        let mut causes = Causes::default();
        resource_quota(&mut causes, &json!({"spec": {"scopes": ["x"]}}), None);
        assert_eq!(causes.into_list()[0].message, "Invalid value: [\"x\"]: unsupported scope");
        let expression =
            |expression: Value| fields(json!({"scopeSelector": {"matchExpressions": [expression]}}));
        assert_eq!(
            expression(json!({"scopeName": "PriorityClass", "operator": "In"})),
            ["spec.scopeSelector.matchExpressions.values"]
        );
        assert_eq!(
            expression(json!({"scopeName": "Terminating", "operator": "In", "values": ["a"]})),
            ["spec.scopeSelector.matchExpressions.operator"]
        );
    }
}
