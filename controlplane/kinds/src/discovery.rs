//! Discovery documents, plain and aggregated, from a set of resources.

use base64::{Engine as _, prelude::BASE64_STANDARD};
use serde_json::{Map, Value, json};
use sha2::{Digest as _, Sha256};

use crate::resource::{GroupVersion, Resource, Resources, Subresource, Text};

/// Priority of groups of custom resources.
pub const CUSTOM_PRIORITY: i64 = 1000;
/// Priorities of groups, as upstream.
const PRIORITIES: &[(&str, i64)] = &[
    ("", 18_000),
    ("apps", 17_800),
    ("events.k8s.io", 17_750),
    ("authentication.k8s.io", 17_700),
    ("authorization.k8s.io", 17_600),
    ("autoscaling", 17_500),
    ("batch", 17_400),
    ("certificates.k8s.io", 17_300),
    ("networking.k8s.io", 17_200),
    ("policy", 17_100),
    ("rbac.authorization.k8s.io", 17_000),
    ("storage.k8s.io", 16_800),
    ("apiextensions.k8s.io", 16_700),
    ("admissionregistration.k8s.io", 16_700),
    ("scheduling.k8s.io", 16_600),
    ("coordination.k8s.io", 16_500),
    ("node.k8s.io", 16_300),
    ("discovery.k8s.io", 16_200),
    ("flowcontrol.apiserver.k8s.io", 16_100),
    ("resource.k8s.io", 16_200),
];

/// The priority of a built-in group. If several groups have a resource with the same name, clients use the resource of
/// the first group in the discovery documents.
#[must_use]
pub fn group_priority(group: &str) -> Option<i64> {
    PRIORITIES.iter().find(|(name, _)| *name == group).map(|(_, priority)| *priority)
}

/// The priority of a group in the discovery documents. The group of APIServices always comes first, although
/// [`group_priority`] has no priority for it.
#[must_use]
pub fn order_priority(group: &str) -> i64 {
    match group {
        "apiregistration.k8s.io" => i64::MAX,
        group => group_priority(group).unwrap_or(CUSTOM_PRIORITY),
    }
}

/// The priority of a version that this server serves, as upstream. Versions with a higher priority come first.
#[must_use]
pub fn version_priority(group: &str, version: &str) -> i64 {
    match (group, version) {
        (group, _) if group_priority(group).is_none() => 100,
        ("", _) => 1,
        ("flowcontrol.apiserver.k8s.io" | "resource.k8s.io", _) => 21,
        (_, "v2") => 30,
        _ => 15,
    }
}

/// The named groups in the order of the documents: by descending priority, then by name.
fn groups(set: &Resources) -> Vec<&str> {
    let (mut all, priority) = (set.groups(), order_priority);
    all.sort_by(|one, other| priority(other).cmp(&priority(one)).then_with(|| one.cmp(other)));
    all
}

/// `/api`: the versions of the core group. `server` is the `host:port` for clients.
pub fn api_versions(server: &str) -> Value {
    json!({
        "kind": "APIVersions",
        "versions": ["v1"],
        "serverAddressByClientCIDRs": [{"clientCIDR": "0.0.0.0/0", "serverAddress": server}],
    })
}

/// `/apis`: all named groups.
pub fn api_group_list(set: &Resources) -> Value {
    let groups: Vec<Value> = groups(set).into_iter().map(|group| group_entry(set, group)).collect();
    json!({"kind": "APIGroupList", "apiVersion": "v1", "groups": groups})
}

/// `/apis/<group>`.
pub fn api_group(set: &Resources, group: &str) -> Option<Value> {
    if group.is_empty() || set.versions_of(group).next().is_none() {
        return None;
    }
    let mut entry = group_entry(set, group);
    entry["kind"] = "APIGroup".into();
    entry["apiVersion"] = "v1".into();
    Some(entry)
}

/// `/api/v1` (group empty) and `/apis/<group>/<version>`.
pub fn resource_list(set: &Resources, group: &str, version: &str) -> Option<Value> {
    let found = set.group_version(group, version)?;
    let first = found.resources.first()?;
    let resources: Vec<Value> = found.resources.iter().flat_map(|kind| plain_resources(kind)).collect();
    Some(json!({
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": first.api_version(),
        "resources": resources,
    }))
}

/// `/api` as `APIGroupDiscoveryList`.
pub fn aggregated_core(set: &Resources) -> Value {
    aggregated(set, &[""])
}

/// `/apis` as `APIGroupDiscoveryList`.
pub fn aggregated_groups(set: &Resources) -> Value {
    aggregated(set, &groups(set))
}

fn group_entry(set: &Resources, group: &str) -> Value {
    let versions: Vec<Value> = set
        .versions_of(group)
        .map(|found| json!({"groupVersion": format!("{group}/{}", found.version), "version": found.version}))
        .collect();
    json!({"name": group, "preferredVersion": versions.first(), "versions": versions})
}

fn plain_resources(kind: &Resource) -> Vec<Value> {
    let mut main = json!({
        "name": kind.plural,
        "singularName": kind.singular,
        "namespaced": kind.namespaced,
        "kind": kind.kind,
        "verbs": kind.discovered_verbs(),
    });
    add_names(&mut main, kind);
    if kind.is_stored() {
        main["storageVersionHash"] = storage_version_hash(kind.stored_as()).into();
    }
    let mut resources = vec![main];
    resources.extend(kind.subresources.iter().map(|sub| {
        let mut entry = json!({
            "name": format!("{}/{}", kind.plural, sub.name),
            "singularName": "",
            "namespaced": kind.namespaced,
            "kind": sub.kind,
            "verbs": sub.verbs,
        });
        if (&sub.group, &sub.version) != (&kind.group, &kind.version) {
            entry["group"] = sub.group.as_ref().into();
            entry["version"] = sub.version.as_ref().into();
        }
        entry
    }));
    resources
}

/// A short hash of the stored version and the kind. Migrations of stored objects read it. Source: `StorageVersionHash`
/// of `k8s.io/apiserver/pkg/endpoints/discovery`.
fn storage_version_hash(stored: &Resource) -> String {
    const BYTES: usize = 8;
    let text = format!("{}/{}/{}", stored.group, stored.version, stored.kind);
    BASE64_STANDARD.encode(&Sha256::digest(text)[..BYTES])
}

fn aggregated(set: &Resources, groups: &[&str]) -> Value {
    let items: Vec<Value> = groups
        .iter()
        .map(|group| {
            let versions: Vec<Value> =
                set.versions_of(group).map(|found| aggregated_version(found)).collect();
            let metadata = if group.is_empty() {
                json!({"creationTimestamp": null})
            } else {
                json!({"name": group, "creationTimestamp": null})
            };
            json!({"metadata": metadata, "versions": versions})
        })
        .collect();
    json!({
        "kind": "APIGroupDiscoveryList",
        "apiVersion": "apidiscovery.k8s.io/v2",
        "metadata": {},
        "items": items,
    })
}

fn aggregated_version(found: &GroupVersion) -> Value {
    let resources: Vec<Value> = found.resources.iter().map(|kind| aggregated_resource(kind)).collect();
    json!({"version": found.version, "freshness": "Current", "resources": resources})
}

fn aggregated_resource(kind: &Resource) -> Value {
    let mut entry = json!({
        "resource": kind.plural,
        "responseKind": {"group": kind.group, "version": kind.version, "kind": kind.kind},
        "scope": if kind.namespaced { "Namespaced" } else { "Cluster" },
        "singularResource": kind.singular,
        "verbs": kind.discovered_verbs(),
    });
    add_names(&mut entry, kind);
    if !kind.subresources.is_empty() {
        let subresources: Vec<Value> = kind.subresources.iter().map(aggregated_subresource).collect();
        entry["subresources"] = subresources.into();
    }
    entry
}

fn aggregated_subresource(sub: &Subresource) -> Value {
    json!({
        "subresource": sub.name,
        "responseKind": {"group": sub.group, "version": sub.version, "kind": sub.kind},
        "verbs": sub.verbs,
    })
}

fn add_names(entry: &mut Value, kind: &Resource) {
    let mut names = Map::new();
    for (name, list) in [("shortNames", &kind.short_names), ("categories", &kind.categories)] {
        if !list.is_empty() {
            names.insert(name.to_owned(), list.iter().map(Text::as_ref).collect());
        }
    }
    if let Some(entry) = entry.as_object_mut() {
        entry.extend(names);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kind::built_in;

    fn named<'a>(list: &'a Value, key: &str, name: &str) -> &'a Value {
        list.as_array().unwrap().iter().find(|entry| entry[key] == name).unwrap()
    }

    #[test]
    fn both_forms_name_the_kinds_of_subresources() {
        let core = resource_list(built_in(), "", "v1").unwrap();
        let eviction = named(&core["resources"], "name", "pods/eviction");
        assert_eq!(eviction["group"], "policy");
        assert_eq!(eviction["kind"], "Eviction");
        let pods = named(&core["resources"], "name", "pods");
        assert_eq!((&pods["shortNames"], &pods["categories"]), (&json!(["po"]), &json!(["all"])));
        let groups = aggregated_groups(built_in());
        let apps = groups["items"]
            .as_array()
            .unwrap()
            .iter()
            .find(|item| item["metadata"]["name"] == "apps")
            .unwrap();
        let deployments = named(&apps["versions"][0]["resources"], "resource", "deployments");
        let scale = named(&deployments["subresources"], "subresource", "scale");
        assert_eq!(scale["responseKind"], json!({"group": "autoscaling", "version": "v1", "kind": "Scale"}));
    }

    #[test]
    fn stored_resources_have_the_hash_that_upstream_serves() {
        let hash = |group: &str, version: &str, name: &str| {
            let list = resource_list(built_in(), group, version).unwrap();
            named(&list["resources"], "name", name)["storageVersionHash"].clone()
        };
        assert_eq!(hash("", "v1", "pods"), "xPOwRZ+Yhw8=");
        assert_eq!(hash("apps", "v1", "deployments"), "8aSe+NMegvE=");
        // All versions of a resource have the hash of the stored version.
        assert_eq!([hash("", "v1", "events"), hash("events.k8s.io", "v1", "events")], ["r2yiGXH7wu8="; 2]);
        for (group, name) in [("", "pods/status"), ("", "componentstatuses"), ("", "bindings")] {
            assert_eq!(hash(group, "v1", name), Value::Null, "{name}");
        }
    }

    #[test]
    fn every_group_is_listed_once_by_its_priority() {
        let list = api_group_list(built_in());
        let names: Vec<&Value> =
            list["groups"].as_array().unwrap().iter().map(|group| &group["name"]).collect();
        let expect = [
            "apiregistration.k8s.io",
            "apps",
            "events.k8s.io",
            "authentication.k8s.io",
            "authorization.k8s.io",
            "autoscaling",
            "batch",
            "certificates.k8s.io",
            "networking.k8s.io",
            "policy",
            "rbac.authorization.k8s.io",
            "storage.k8s.io",
            "admissionregistration.k8s.io",
            "apiextensions.k8s.io",
            "scheduling.k8s.io",
            "coordination.k8s.io",
            "node.k8s.io",
            "discovery.k8s.io",
            "resource.k8s.io",
            "flowcontrol.apiserver.k8s.io",
            "metrics.k8s.io",
            "storagemigration.k8s.io",
        ];
        assert_eq!(names, expect);
        assert_eq!(api_group(built_in(), "apps").unwrap()["preferredVersion"]["groupVersion"], "apps/v1");
        assert_eq!(api_group(built_in(), "nope"), None);
        assert_eq!(resource_list(built_in(), "apps", "v2"), None);
        assert_eq!(aggregated_core(built_in())["items"].as_array().unwrap().len(), 1);
    }
}
