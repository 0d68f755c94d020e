//! Label selectors.

use serde_json::Value;

use super::{Causes, Path, format, items, meta, text};
use coracle_values::label_selector::LabelSelector;

/// Checks a LabelSelector. Returns whether it is valid.
pub(super) fn is_label_selector(causes: &mut Causes, path: &Path, selector: &Value) -> bool {
    let before = causes.count();
    label_selector(causes, path, selector);
    causes.count() == before && LabelSelector::from_object(selector).is_ok()
}

/// Checks a LabelSelector.
pub(super) fn label_selector(causes: &mut Causes, path: &Path, selector: &Value) {
    meta::labels(causes, &path.field("matchLabels"), &selector["matchLabels"]);
    for (index, expression) in items(&selector["matchExpressions"]) {
        let here = path.field("matchExpressions").index(index);
        let has_values = items(&expression["values"]).next().is_some();
        match text(&expression["operator"]) {
            "In" | "NotIn" if !has_values => {
                causes
                    .required(&here.field("values"), "must be specified when `operator` is 'In' or 'NotIn'");
            }
            "Exists" | "DoesNotExist" if has_values => {
                let detail = "may not be specified when `operator` is 'Exists' or 'DoesNotExist'";
                causes.forbidden(&here.field("values"), detail);
            }
            "In" | "NotIn" | "Exists" | "DoesNotExist" => {}
            _ => causes.invalid(
                &here.field("operator"),
                &expression["operator"],
                "not a valid selector operator",
            ),
        }
        let key = text(&expression["key"]);
        causes.format(&here.field("key"), key, format::qualified_name(key));
        for (at, value) in items(&expression["values"]) {
            causes.format(&here.field("values").index(at), text(value), format::label_value(text(value)));
        }
    }
}
