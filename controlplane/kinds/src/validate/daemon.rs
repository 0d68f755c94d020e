//! Daemon sets.

use serde_json::{Value, json};

use super::selector::is_label_selector;
use super::workload::{
    check_selector_unchanged, collisions, int_or_percent, is_zero, percent, selected_template, template_of,
};
use super::{Causes, Path, text};

pub(crate) fn daemon_set(causes: &mut Causes, object: &Value, old: Option<&Value>) {
    let (path, spec) = (Path::root("spec"), &object["spec"]);
    check_selector_unchanged(causes, spec, old);
    let (here, selector) = (path.field("selector"), &spec["selector"]);
    if selector.is_null() {
        selected_template(causes, &path, spec);
    } else {
        if is_label_selector(causes, &here, selector) {
            selected_template(causes, &path, spec);
        }
        let empty = |name: &str| {
            selector[name].is_null() || selector[name] == json!({}) || selector[name] == json!([])
        };
        if empty("matchLabels") && empty("matchExpressions") {
            causes.invalid(&here, selector, "empty selector is invalid for daemonset");
        }
    }
    template_of(causes, &path.field("template"), &spec["template"], "DaemonSet");
    causes.not_negative(&path.field("minReadySeconds"), &spec["minReadySeconds"]);
    strategy(causes, &path.field("updateStrategy"), &spec["updateStrategy"]);
    causes.not_negative(&path.field("revisionHistoryLimit"), &spec["revisionHistoryLimit"]);
}

/// Checks the counts in a status.
pub(super) fn status(causes: &mut Causes, status: &Value, old: &Value) {
    let path = Path::root("status");
    for name in [
        "currentNumberScheduled",
        "numberMisscheduled",
        "desiredNumberScheduled",
        "numberReady",
        "observedGeneration",
        "updatedNumberScheduled",
        "numberAvailable",
        "numberUnavailable",
    ] {
        causes.not_negative(&path.field(name), &status[name]);
    }
    collisions(causes, &path, status, old);
}

fn strategy(causes: &mut Causes, path: &Path, strategy: &Value) {
    let (here, rolling) = (path.field("rollingUpdate"), &strategy["rollingUpdate"]);
    match text(&strategy["type"]) {
        "OnDelete" => {}
        "RollingUpdate" if rolling.is_null() => causes.required(&here, ""),
        "RollingUpdate" => {
            for name in ["maxUnavailable", "maxSurge"] {
                let (here, value) = (here.field(name), &rolling[name]);
                int_or_percent(causes, &here, value);
                if percent(value).is_some_and(|percent| percent > 100) {
                    causes.invalid(&here, value, "must not be greater than 100%");
                }
            }
            match (is_zero(&rolling["maxUnavailable"]), is_zero(&rolling["maxSurge"])) {
                (false, false) => {
                    let detail = "may not be set when maxUnavailable is non-zero";
                    causes.invalid(&here.field("maxSurge"), &rolling["maxSurge"], detail);
                }
                (true, true) => {
                    causes.required(&here.field("maxUnavailable"), "cannot be 0 when maxSurge is 0");
                }
                (true, false) | (false, true) => {}
            }
        }
        _ => causes.unsupported(path, strategy, &["RollingUpdate", "OnDelete"]),
    }
}
