//! Label selectors.

use serde_json::Value;

use super::{Causes, Path, format, items, meta, text};
use coracle_values::label_selector::LabelSelector;

/// Checks a LabelSelector. Returns whether it is valid.
pub fn is_label_selector(causes: &mut Causes, path: &Path, selector: &Value) -> bool {
    let before = causes.count();
    label_selector(causes, path, selector);
    causes.count() == before && LabelSelector::from_object(selector).is_ok()
}

/// Checks a LabelSelector.
pub fn label_selector(causes: &mut Causes, path: &Path, selector: &Value) {
    meta::labels(causes, &path.field("matchLabels"), &selector["matchLabels"]);
    for (index, expression) in items(&selector["matchExpressions"]) {
        let here = path.field("matchExpressions").index(index);
        if !values(causes, &here, expression) {
            let operator = &expression["operator"];
            causes.invalid(&here.field("operator"), operator, "not a valid selector operator");
        }
        key_and_labels(causes, &here, expression);
    }
}

/// Checks the field selector and the label selector in the resource attributes of an access review. Unknown operators
/// are accepted, because later versions may have more operators.
pub fn of_review(causes: &mut Causes, path: &Path, resource: &Value) {
    for name in ["fieldSelector", "labelSelector"] {
        let (path, selector) = (path.field(name), &resource[name]);
        let has_requirements = items(&selector["requirements"]).next().is_some();
        match (selector.is_null(), text(&selector["rawSelector"]), has_requirements) {
            (true, ..) => continue,
            (_, "", false) => {
                let detail = format!("when {path} is specified, requirements or rawSelector is required");
                causes.required(&path.field("requirements"), &detail);
            }
            (_, "", true) | (_, _, false) => {}
            (_, _, true) => {
                let detail = "may not specified at the same time as requirements";
                causes.invalid(&path.field("rawSelector"), &selector["rawSelector"], detail);
            }
        }
        for (index, requirement) in items(&selector["requirements"]) {
            let here = path.field("requirements").index(index);
            if name == "fieldSelector" && text(&requirement["key"]).is_empty() {
                causes.required(&here.field("key"), "must be specified");
            }
            values(causes, &here, requirement);
            if name == "labelSelector" {
                key_and_labels(causes, &here, requirement);
            }
        }
    }
}

/// Checks whether an expression has values. Returns whether its operator is known.
fn values(causes: &mut Causes, path: &Path, expression: &Value) -> bool {
    let (here, has_values) = (path.field("values"), items(&expression["values"]).next().is_some());
    match text(&expression["operator"]) {
        "In" | "NotIn" if !has_values => {
            causes.required(&here, "must be specified when `operator` is 'In' or 'NotIn'");
        }
        "Exists" | "DoesNotExist" if has_values => {
            let detail = "may not be specified when `operator` is 'Exists' or 'DoesNotExist'";
            causes.forbidden(&here, detail);
        }
        "In" | "NotIn" | "Exists" | "DoesNotExist" => {}
        _ => return false,
    }
    true
}

fn key_and_labels(causes: &mut Causes, path: &Path, expression: &Value) {
    let key = text(&expression["key"]);
    causes.format(&path.field("key"), key, format::qualified_name(key));
    for (at, value) in items(&expression["values"]) {
        causes.format(&path.field("values").index(at), text(value), format::label_value(text(value)));
    }
}
