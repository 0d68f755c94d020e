//! Parts of a pod's status: conditions, claims, users and devices of containers. Source: `ValidatePodStatusUpdate` of
//! `pkg/apis/core/validation`.

use std::collections::{HashMap, HashSet};

use serde_json::Value;

use super::{Causes, Path, format, items, text};

/// Largest valid user id and group id.
const MAX_ID: i64 = i32::MAX as i64;
/// Maximum length of the message about the health of a device in bytes.
const MAX_HEALTH_MESSAGE: usize = 1024;
const HEALTH: &[&str] = &["Healthy", "Unhealthy", "Unknown"];

/// Checks conditions and claims in a pod's status, and users and devices of its containers. `path` is the path of the
/// status.
pub(super) fn all(causes: &mut Causes, path: &Path, pod: &Value) {
    let (spec, status) = (&pod["spec"], &pod["status"]);
    conditions(causes, &path.field("conditions"), &status["conditions"]);
    claims(causes, &path.field("resourceClaimStatuses"), &status["resourceClaimStatuses"], spec);
    let extended = "extendedResourceClaimStatus";
    if !status[extended].is_null() {
        self::extended(causes, &path.field(extended), &status[extended], spec);
    }
    let lists = [
        ("containerStatuses", "containers"),
        ("initContainerStatuses", "initContainers"),
        ("ephemeralContainerStatuses", "ephemeralContainers"),
    ];
    for (list, _) in lists {
        for (index, container) in items(&status[list]) {
            user(causes, &path.field(list).index(index).field("user").field("linux"), container, spec);
        }
    }
    for (list, containers) in lists {
        let by_name: HashMap<&str, Resources<'_>> = items(&spec[containers])
            .map(|(_, container)| (text(&container["name"]), Resources::of(container)))
            .collect();
        for (index, container) in items(&status[list]) {
            let here = path.field(list).index(index).field("allocatedResourcesStatus");
            let resources = &container["allocatedResourcesStatus"];
            if containers == "ephemeralContainers" {
                if items(resources).next().is_some() {
                    causes.forbidden(&here, "must not be specified in container status");
                }
                continue;
            }
            let own = by_name.get(text(&container["name"]));
            for (at, resource) in items(resources) {
                allocated(causes, &here.index(at), resource, own);
            }
        }
    }
}

/// The requested resources of a container by name, and its claims, each with the name of its request.
struct Resources<'a> {
    requests: &'a Value,
    claims: HashSet<(&'a str, &'a str)>,
}

// === impl Resources ===

impl<'a> Resources<'a> {
    fn of(container: &'a Value) -> Self {
        let resources = &container["resources"];
        let claims =
            items(&resources["claims"]).map(|(_, claim)| (text(&claim["name"]), text(&claim["request"])));
        Resources { requests: &resources["requests"], claims: claims.collect() }
    }

    /// The error of a resource name that is neither a requested resource of the container nor one of the container's
    /// claims.
    fn problem(&self, name: &str) -> Option<&'static str> {
        let Some(claim) = name.strip_prefix("claim:") else {
            let is_known = self.requests.get(name).is_some();
            return (!is_known).then_some("must match one of the container's resource requests");
        };
        let claim = claim.split_once('/').unwrap_or((claim, ""));
        (!self.claims.contains(&claim)).then_some(
            "must match one of the container's resource claims in a format 'claim:<claimName>/<request>' or \
             'claim:<claimName>' if request is empty",
        )
    }
}

fn conditions(causes: &mut Causes, path: &Path, conditions: &Value) {
    for (index, condition) in items(conditions) {
        let here = path.index(index);
        let generation = &condition["observedGeneration"];
        if generation.as_i64().is_some_and(|generation| generation < 0) {
            causes.invalid(&here.field("observedGeneration"), generation, "must be a non-negative integer");
        }
        let kind = text(&condition["type"]);
        if !matches!(kind, "PodScheduled" | "Ready" | "Initialized") {
            causes.format(&here.field("Type"), kind, format::qualified_name(kind));
        }
    }
}

fn claims(causes: &mut Causes, path: &Path, statuses: &Value, spec: &Value) {
    let known: HashSet<&str> =
        items(&spec["resourceClaims"]).map(|(_, claim)| text(&claim["name"])).collect();
    let mut seen = HashSet::new();
    for (index, status) in items(statuses) {
        let (here, name) = (path.index(index), text(&status["name"]));
        if !known.contains(name) {
            let detail = "must match the name of an entry in `spec.resourceClaims`";
            causes.invalid(&here.field("name"), &name.into(), detail);
        }
        if !seen.insert(name) {
            causes.duplicate(&here.field("name"), &name.into());
        }
        if let Some(claim) = status["resourceClaimName"].as_str() {
            causes.format(&here.field("resourceClaimName"), claim, format::dns1123_subdomain(claim));
        }
    }
}

/// Checks the claim for the extended resources of a pod.
fn extended(causes: &mut Causes, path: &Path, status: &Value, spec: &Value) {
    let containers: HashMap<&str, &Value> = ["initContainers", "containers"]
        .iter()
        .flat_map(|list| items(&spec[*list]))
        .map(|(_, container)| (text(&container["name"]), container))
        .collect();
    let (list, mut seen) = (path.field("requestMappings"), HashSet::new());
    if items(&status["requestMappings"]).next().is_none() {
        causes.required(&list, "at least one request mapping is required");
    }
    for (index, mapping) in items(&status["requestMappings"]) {
        let here = list.index(index);
        let ids =
            ["containerName", "resourceName", "requestName"].map(|field| (field, text(&mapping[field])));
        let [(_, container), (_, resource), (_, request)] = ids;
        match containers.get(container) {
            None => {
                let detail =
                    "must match the name of an entry in spec.initContainers.name or spec.containers.name";
                causes.invalid(&here.field("containerName"), &container.into(), detail);
            }
            Some(container) if container["resources"]["requests"].get(resource).is_none() => {
                let detail = "must match the extended resource name of an entry in \
                    spec.initContainers.resources.requests or spec.containers.resources.requests";
                causes.invalid(&here.field("resourceName"), &resource.into(), detail);
            }
            Some(_) => {}
        }
        // As upstream, the path of the error lacks the mapping: it is `requestName` below `path`.
        causes.format(&path.field("requestName"), request, format::dns1123_label(request));
        if !seen.insert(ids) {
            for (field, value) in ids {
                causes.duplicate(&here.field(field), &value.into());
            }
        }
    }
    match text(&status["resourceClaimName"]) {
        "" => causes.required(&path.field("resourceClaimName"), ""),
        name => causes.format(&path.field("resourceClaimName"), name, format::dns1123_subdomain(name)),
    }
}

fn user(causes: &mut Causes, path: &Path, container: &Value, spec: &Value) {
    let user = &container["user"]["linux"];
    if user.is_null() {
        return;
    }
    match text(&spec["os"]["name"]) {
        "windows" => causes.forbidden(path, "cannot be set for a windows pod"),
        "" | "linux" => {
            for field in ["uid", "gid"] {
                causes.in_range(&path.field(field), &user[field], 0..=MAX_ID);
            }
            for (index, group) in items(&user["supplementalGroups"]) {
                causes.in_range(&path.field("supplementalGroups").index(index), group, 0..=MAX_ID);
            }
        }
        _ => {}
    }
}

/// Checks the devices of a resource that a container has. The spec may lack the container.
fn allocated(causes: &mut Causes, path: &Path, resource: &Value, container: Option<&Resources<'_>>) {
    let name = text(&resource["name"]);
    if let Some(problem) = container.and_then(|container| container.problem(name)) {
        causes.invalid(&path.field("name"), &name.into(), problem);
    }
    let mut seen = HashSet::new();
    for (index, device) in items(&resource["resources"]) {
        let here = path.field("resources").index(index);
        if !HEALTH.contains(&text(&device["health"])) {
            causes.unsupported(&here.field("health"), &device["health"], HEALTH);
        }
        match device["message"].as_str().map(str::len) {
            Some(0) => causes.required(&here.field("message"), "must be non-empty if specified"),
            Some(length) if length > MAX_HEALTH_MESSAGE => {
                causes.too_long(&here.field("message"), MAX_HEALTH_MESSAGE);
            }
            _ => {}
        }
        let id = text(&device["resourceID"]);
        if !seen.insert(id) {
            causes.duplicate(&here.field("resourceID"), &id.into());
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::tests::found;
    use super::*;

    fn said(status: Value) -> Vec<String> {
        let resources = json!({"requests": {"a.b/c": "1"}, "claims": [{"name": "k", "request": "r"}]});
        let spec =
            json!({"resourceClaims": [{"name": "k"}], "containers": [{"name": "c", "resources": resources}]});
        found(|causes| all(causes, &Path::root("status"), &json!({"spec": spec, "status": status})))
    }

    #[test]
    fn conditions_have_qualified_types() {
        assert!(said(json!({"conditions": [{"type": "Ready"}, {"type": "a.b/c"}]})).is_empty());
        let wrong = said(json!({"conditions": [{"type": "a b", "observedGeneration": -1}]}));
        assert_eq!(
            wrong[0],
            "status.conditions[0].observedGeneration: Invalid value: -1: must be a non-negative integer"
        );
        assert!(wrong[1].starts_with("status.conditions[0].Type: Invalid value: \"a b\""), "{wrong:?}");
    }

    #[test]
    fn statuses_of_claims_name_claims_of_the_pod() {
        let status = |name: &str| json!({"name": name, "resourceClaimName": "c"});
        assert!(said(json!({"resourceClaimStatuses": [status("k")]})).is_empty());
        let wrong = said(json!({"resourceClaimStatuses": [status("k"), status("k"), status("x")]}));
        assert_eq!(wrong[0], "status.resourceClaimStatuses[1].name: Duplicate value: \"k\"");
        assert!(
            wrong[1].starts_with("status.resourceClaimStatuses[2].name: Invalid value: \"x\""),
            "{wrong:?}"
        );
        let mapping =
            |resource: &str| json!({"containerName": "c", "resourceName": resource, "requestName": "r"});
        let extended = |mappings: Value| {
            said(
                json!({"extendedResourceClaimStatus": {"requestMappings": mappings, "resourceClaimName": "c"}}),
            )
        };
        assert!(extended(json!([mapping("a.b/c")])).is_empty());
        assert_eq!(extended(json!([mapping("a.b/c"), mapping("a.b/c")])).len(), 3, "a duplicate");
        let at = "status.extendedResourceClaimStatus.requestMappings";
        assert!(
            extended(json!([mapping("x")]))[0].starts_with(&format!("{at}[0].resourceName: Invalid value"))
        );
        assert!(extended(json!([]))[0].starts_with(&format!("{at}: Required value")));
    }

    #[test]
    fn devices_belong_to_requests_and_claims_of_the_container() {
        let of = |resource: Value| {
            said(json!({"containerStatuses": [{"name": "c", "allocatedResourcesStatus": [resource]}]}))
        };
        let device = json!({"resourceID": "d", "health": "Healthy"});
        for name in ["a.b/c", "claim:k/r"] {
            assert!(of(json!({"name": name, "resources": [device]})).is_empty(), "{name}");
        }
        let at = "status.containerStatuses[0].allocatedResourcesStatus[0]";
        for (resource, expect) in [
            (json!({"name": "x"}), format!("{at}.name: Invalid value: \"x\"")),
            (json!({"name": "claim:k"}), format!("{at}.name: Invalid value: \"claim:k\"")),
            (
                json!({"name": "a.b/c", "resources": [device, device]}),
                format!("{at}.resources[1].resourceID: Dup"),
            ),
            (
                json!({"name": "a.b/c", "resources": [{"resourceID": "d", "health": "x"}]}),
                format!("{at}.resources[0].health: Unsupported value: \"x\""),
            ),
        ] {
            let causes = of(resource);
            assert!(causes.len() == 1 && causes[0].starts_with(&expect), "{expect}: {causes:?}");
        }
        let claims: Vec<Value> = (0..30_000).map(|n| json!({"name": format!("k{n}")})).collect();
        let resources: Vec<Value> = (0..30_000).map(|n| json!({"name": format!("claim:k{n}")})).collect();
        let spec = json!({"containers": [{"name": "c", "resources": {"claims": claims}}]});
        let status = json!({"containerStatuses": [{"name": "c", "allocatedResourcesStatus": resources}]});
        let large = json!({"spec": spec, "status": status});
        assert!(found(|causes| all(causes, &Path::root("status"), &large)).is_empty(), "no quadratic work");
        let user =
            said(json!({"containerStatuses": [{"name": "c", "user": {"linux": {"uid": -1, "gid": 0}}}]}));
        assert!(
            user.len() == 1 && user[0].starts_with("status.containerStatuses[0].user.linux.uid: Invalid"),
            "{user:?}"
        );
        let ephemeral =
            said(json!({"ephemeralContainerStatuses": [{"allocatedResourcesStatus": [{"name": "x"}]}]}));
        assert!(
            ephemeral[0].contains("Forbidden: must not be specified in container status"),
            "{ephemeral:?}"
        );
    }
}
