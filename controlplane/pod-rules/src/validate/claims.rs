//! Resource claims of a pod and of its containers. Sources: `validatePodResourceClaims` and
//! `validateResourceClaimNames` of `pkg/apis/core/validation`.

use std::collections::{BTreeSet, HashMap, HashSet};

use serde_json::Value;

use super::{Causes, Path, format, items, text};

/// Checks the claims of a spec.
pub(super) fn all(causes: &mut Causes, path: &Path, spec: &Value) {
    let mut seen = HashSet::new();
    for (index, claim) in items(&spec["resourceClaims"]) {
        of_pod(causes, &path.field("resourceClaims").index(index), claim, &mut seen);
    }
    let names: BTreeSet<&str> = items(&spec["resourceClaims"])
        .map(|(_, claim)| text(&claim["name"]))
        .filter(|name| !name.is_empty())
        .collect();
    for list in ["containers", "initContainers", "ephemeralContainers"] {
        for (index, container) in items(&spec[list]) {
            let here = path.field(list).index(index).field("resources").field("claims");
            of_container(causes, &here, &container["resources"]["claims"], &names);
        }
    }
}

fn of_pod<'a>(causes: &mut Causes, path: &Path, claim: &'a Value, seen: &mut HashSet<&'a str>) {
    const REFERENCES: [&str; 2] = ["resourceClaimName", "resourceClaimTemplateName"];
    match text(&claim["name"]) {
        "" => causes.required(&path.field("name"), ""),
        name if seen.contains(name) => causes.duplicate(&path.field("name"), &name.into()),
        name => {
            causes.format(&path.field("name"), name, format::dns1123_label(name));
            seen.insert(name);
        }
    }
    match REFERENCES.map(|field| claim[field].is_null()) {
        [false, false] => {
            let detail = "at most one of `resourceClaimName` or `resourceClaimTemplateName` may be specified";
            causes.invalid(path, claim, detail);
        }
        [true, true] => {
            let detail = "must specify one of: `resourceClaimName`, `resourceClaimTemplateName`";
            causes.invalid(path, claim, detail);
        }
        _ => {}
    }
    for field in REFERENCES {
        if let Some(name) = claim[field].as_str() {
            causes.format(&path.field(field), name, format::dns1123_subdomain(name));
        }
    }
}

/// Checks the claims that a container uses. `names` has the claims of the pod.
fn of_container(causes: &mut Causes, path: &Path, claims: &Value, names: &BTreeSet<&str>) {
    // `whole` has the claims that are used without a request. `requests` has the used requests of each claim.
    let (mut whole, mut requests) = (HashSet::new(), HashMap::<&str, HashSet<&str>>::new());
    for (index, claim) in items(claims) {
        let here = path.index(index);
        let (name, request) = (text(&claim["name"]), text(&claim["request"]));
        if name.is_empty() {
            causes.required(&here, "");
            continue;
        }
        if whole.contains(name) {
            causes.duplicate(&here, &name.into());
        } else if request.is_empty() {
            for _ in requests.get(name).into_iter().flatten() {
                causes.duplicate(&here, &name.into());
            }
            whole.insert(name);
        } else {
            causes.format(&here.field("request"), request, format::dns1123_label(request));
            if !requests.entry(name).or_default().insert(request) {
                causes.duplicate(&here, &format!("{name}/{request}").into());
            }
        }
        if !names.contains(name) {
            causes.not_found_because(&here, &name.into(), || missing(names));
        }
    }
}

fn missing(names: &BTreeSet<&str>) -> String {
    let known = names.iter().copied().collect::<Vec<_>>().join(", ");
    let text = "must be one of the names in pod.spec.resourceClaims";
    if known.is_empty() { format!("{text} which is empty") } else { format!("{text}: {known}") }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::tests::found;
    use super::*;

    fn said(claims: Value, used: Value) -> Vec<String> {
        let spec = json!({"resourceClaims": claims, "containers": [{"resources": {"claims": used}}]});
        found(|causes| all(causes, &Path::root("spec"), &spec))
    }

    #[test]
    fn a_claim_of_a_pod_has_a_name_and_one_reference() {
        let claim = |name: &str| json!({"name": name, "resourceClaimName": "c"});
        assert!(said(json!([claim("a"), claim("b")]), Value::Null).is_empty());
        let at = "spec.resourceClaims[0]";
        for (claims, expect) in [
            (json!([{"name": "a"}]), format!("{at}: Invalid value: {{\"name\":\"a\"}}: must specify one of")),
            (
                json!([{"name": "a", "resourceClaimName": "c", "resourceClaimTemplateName": "d"}]),
                format!("{at}: Invalid value"),
            ),
            (json!([claim("")]), format!("{at}.name: Required value")),
            (json!([claim("A")]), format!("{at}.name: Invalid value: \"A\"")),
            (
                json!([claim("a"), claim("a")]),
                "spec.resourceClaims[1].name: Duplicate value: \"a\"".to_owned(),
            ),
            (
                json!([{"name": "a", "resourceClaimTemplateName": "A b"}]),
                format!("{at}.resourceClaimTemplateName: Invalid value: \"A b\""),
            ),
        ] {
            let causes = said(claims, Value::Null);
            assert!(causes.len() == 1 && causes[0].starts_with(&expect), "{expect}: {causes:?}");
        }
    }

    #[test]
    fn a_container_uses_claims_of_its_pod_once() {
        let claims =
            || json!([{"name": "a", "resourceClaimName": "c"}, {"name": "b", "resourceClaimName": "c"}]);
        let of = |used: Value| said(claims(), used);
        let (a, request) = (json!({"name": "a"}), json!({"name": "a", "request": "r"}));
        assert!(of(json!([a, {"name": "b", "request": "r"}])).is_empty());
        let at = "spec.containers[0].resources.claims";
        for used in [json!([a, a]), json!([a, request]), json!([request, a])] {
            assert_eq!(of(used), [format!("{at}[1]: Duplicate value: \"a\"")]);
        }
        assert_eq!(of(json!([request, request])), [format!("{at}[1]: Duplicate value: \"a/r\"")]);
        assert_eq!(of(json!([{}])), [format!("{at}[0]: Required value")]);
        let missing = "must be one of the names in pod.spec.resourceClaims";
        assert_eq!(of(json!([{"name": "x"}])), [format!("{at}[0]: Not found: \"x\": {missing}: a, b")]);
        let none = said(Value::Null, json!([{"name": "x"}]));
        assert_eq!(none, [format!("{at}[0]: Not found: \"x\": {missing} which is empty")]);
    }
}
