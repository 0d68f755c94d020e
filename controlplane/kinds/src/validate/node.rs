//! Nodes.

use std::collections::HashSet;

use serde_json::Value;

use super::{Causes, Path, format, items, text};

pub(crate) fn node(causes: &mut Causes, node: &Value, old: Option<&Value>) {
    let (path, spec) = (Path::root("spec"), &node["spec"]);
    taints(causes, &path.field("taints"), &spec["taints"]);
    for (index, cidr) in items(&spec["podCIDRs"]) {
        causes.format(&path.field("podCIDRs").index(index), text(cidr), format::cidr(text(cidr)));
    }
    let Some(old) = old else { return };
    for name in ["podCIDR", "podCIDRs"] {
        if !old["spec"][name].is_null() && spec[name] != old["spec"][name] {
            let detail = "node updates may not change podCIDR except from \"\" to valid";
            causes.forbidden(&path.field(name), detail);
        }
    }
    let provider = &old["spec"]["providerID"];
    if !text(provider).is_empty() && spec["providerID"] != *provider {
        causes.forbidden(
            &path.field("providerID"),
            "node updates may not change providerID except from \"\" to valid",
        );
    }
}

fn taints(causes: &mut Causes, path: &Path, taints: &Value) {
    let mut seen = HashSet::new();
    for (index, taint) in items(taints) {
        let here = path.index(index);
        let key = text(&taint["key"]);
        causes.format(&here.field("key"), key, format::qualified_name(key));
        let value = text(&taint["value"]);
        causes.format(&here.field("value"), value, format::label_value(value));
        causes.one_of(
            &here.field("effect"),
            &taint["effect"],
            &["NoSchedule", "PreferNoSchedule", "NoExecute"],
        );
        if !seen.insert((key, text(&taint["effect"]))) {
            causes.duplicate(&here, taint);
        }
    }
}
