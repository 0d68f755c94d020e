//! InitializerConfigurations. Source: `ValidateInitializerConfiguration` of `pkg/apis/admissionregistration`, v1.9 to
//! v1.13.

use serde_json::Value;

use super::{Causes, Path, fully_qualified_name, items, text};

/// Rules of an InitializerConfiguration.
pub(crate) fn check(causes: &mut Causes, object: &Value) {
    for (index, initializer) in items(&object["initializers"]) {
        let path = Path::root("initializers").index(index);
        fully_qualified_name::check(causes, &path.field("name"), text(&initializer["name"]));
        for (index, one) in items(&initializer["rules"]) {
            rule(causes, &path.field("rules").index(index), one);
        }
    }
}

fn rule(causes: &mut Causes, path: &Path, rule: &Value) {
    for (field, what) in
        [("apiGroups", "API groups"), ("apiVersions", "API versions"), ("resources", "resources")]
    {
        let (list, path) = (&rule[field], path.field(field));
        let count = items(list).count();
        if count == 0 {
            causes.required(&path, "");
        }
        if count > 1 && items(list).any(|(_, one)| one == "*") {
            causes.invalid(&path, list, &format!("if '*' is present, must not specify other {what}"));
        }
        for (index, one) in items(list).filter(|_| field != "apiGroups") {
            if text(one).is_empty() {
                causes.required(&path.index(index), "");
            }
            if field == "resources" && text(one).contains('/') {
                causes.invalid(&path.index(index), one, "must not specify subresources");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::super::{Cause, Causes};

    fn fields(list: Vec<Cause>) -> Vec<String> {
        list.into_iter().map(|cause| cause.field).collect()
    }

    #[test]
    fn rules_name_groups_versions_and_whole_resources() {
        let check = |rule: Value| {
            let mut causes = Causes::default();
            let initializer = json!({"name": "a.example.com", "rules": [rule]});
            super::check(&mut causes, &json!({"initializers": [initializer]}));
            fields(causes.into_list())
        };
        let place = |field: &str| format!("initializers[0].rules[0].{field}");
        assert!(
            check(json!({"apiGroups": ["", "apps"], "apiVersions": ["*"], "resources": ["*"]})).is_empty()
        );
        assert_eq!(check(json!({})), ["apiGroups", "apiVersions", "resources"].map(place));
        let rule = json!({"apiGroups": ["*", "apps"], "apiVersions": [""], "resources": ["pods/status"]});
        assert_eq!(check(rule), ["apiGroups", "apiVersions[0]", "resources[0]"].map(place));
        let mut causes = Causes::default();
        super::check(&mut causes, &json!({"initializers": [{"name": "short"}]}));
        assert_eq!(fields(causes.into_list()), ["initializers[0].name"]);
    }
}
