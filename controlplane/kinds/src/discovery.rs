//! Discovery documents, plain and aggregated, from the table of kinds.

use serde_json::{Map, Value, json};

use crate::kind::{self, Kind, Subresource};

/// `/api`: the versions of the core group. `server` is the `host:port` for clients.
pub fn api_versions(server: &str) -> Value {
    json!({
        "kind": "APIVersions",
        "versions": ["v1"],
        "serverAddressByClientCIDRs": [{"clientCIDR": "0.0.0.0/0", "serverAddress": server}],
    })
}

/// `/apis`: all named groups.
pub fn api_group_list() -> Value {
    let groups: Vec<Value> = groups().into_iter().map(group_entry).collect();
    json!({"kind": "APIGroupList", "apiVersion": "v1", "groups": groups})
}

/// `/apis/<group>`.
pub fn api_group(group: &str) -> Option<Value> {
    let group = groups().into_iter().find(|known| *known == group)?;
    let mut entry = group_entry(group);
    entry["kind"] = "APIGroup".into();
    entry["apiVersion"] = "v1".into();
    Some(entry)
}

/// `/api/v1` (group empty) and `/apis/<group>/<version>`.
pub fn resource_list(group: &str, version: &str) -> Option<Value> {
    let kinds = kind::of_version(group, version);
    let first = kinds.first()?;
    let resources: Vec<Value> = kinds.iter().flat_map(|kind| plain_resources(kind)).collect();
    Some(json!({
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": first.api_version(),
        "resources": resources,
    }))
}

/// `/api` as `APIGroupDiscoveryList`.
pub fn aggregated_core() -> Value {
    aggregated(&[""])
}

/// `/apis` as `APIGroupDiscoveryList`.
pub fn aggregated_groups() -> Value {
    aggregated(&groups())
}

/// Named groups, in alphabetical order.
fn groups() -> Vec<&'static str> {
    let mut groups: Vec<&str> = kind::group_versions().into_iter().map(|(group, _)| group).collect();
    groups.retain(|group| !group.is_empty());
    groups.dedup();
    groups
}

fn versions(group: &str) -> Vec<&'static str> {
    kind::group_versions()
        .into_iter()
        .filter(|(known, _)| *known == group)
        .map(|(_, version)| version)
        .collect()
}

fn group_entry(group: &str) -> Value {
    let versions: Vec<Value> = versions(group)
        .into_iter()
        .map(|version| json!({"groupVersion": format!("{group}/{version}"), "version": version}))
        .collect();
    json!({"name": group, "preferredVersion": versions.first(), "versions": versions})
}

fn plain_resources(kind: &Kind) -> Vec<Value> {
    let mut main = json!({
        "name": kind.plural,
        "singularName": kind.singular,
        "namespaced": kind.namespaced,
        "kind": kind.kind,
        "verbs": kind.verbs,
    });
    add_names(&mut main, kind);
    let mut resources = vec![main];
    resources.extend(kind.subresources.iter().map(|sub| {
        let mut entry = json!({
            "name": format!("{}/{}", kind.plural, sub.name),
            "singularName": "",
            "namespaced": kind.namespaced,
            "kind": sub.kind,
            "verbs": sub.verbs,
        });
        if (sub.group, sub.version) != (kind.group, kind.version) {
            entry["group"] = sub.group.into();
            entry["version"] = sub.version.into();
        }
        entry
    }));
    resources
}

fn aggregated(groups: &[&str]) -> Value {
    let items: Vec<Value> = groups
        .iter()
        .map(|group| {
            let versions: Vec<Value> = versions(group)
                .into_iter()
                .map(|version| {
                    let kinds = kind::of_version(group, version);
                    let resources: Vec<Value> = kinds.into_iter().map(aggregated_resource).collect();
                    json!({"version": version, "freshness": "Current", "resources": resources})
                })
                .collect();
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

fn aggregated_resource(kind: &Kind) -> Value {
    let mut entry = json!({
        "resource": kind.plural,
        "responseKind": {"group": kind.group, "version": kind.version, "kind": kind.kind},
        "scope": if kind.namespaced { "Namespaced" } else { "Cluster" },
        "singularResource": kind.singular,
        "verbs": kind.verbs,
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

fn add_names(entry: &mut Value, kind: &Kind) {
    let mut names = Map::new();
    for (name, list) in [("shortNames", kind.short_names), ("categories", kind.categories)] {
        if !list.is_empty() {
            names.insert(name.to_owned(), list.into());
        }
    }
    if let Some(entry) = entry.as_object_mut() {
        entry.extend(names);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named<'a>(list: &'a Value, key: &str, name: &str) -> &'a Value {
        list.as_array().unwrap().iter().find(|entry| entry[key] == name).unwrap()
    }

    #[test]
    fn both_forms_name_the_kinds_of_subresources() {
        let core = resource_list("", "v1").unwrap();
        let eviction = named(&core["resources"], "name", "pods/eviction");
        assert_eq!(eviction["group"], "policy");
        assert_eq!(eviction["kind"], "Eviction");
        let pods = named(&core["resources"], "name", "pods");
        assert_eq!((&pods["shortNames"], &pods["categories"]), (&json!(["po"]), &json!(["all"])));
        let groups = aggregated_groups();
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
    fn every_group_is_listed_once() {
        let list = api_group_list();
        let names: Vec<&Value> =
            list["groups"].as_array().unwrap().iter().map(|group| &group["name"]).collect();
        let expect = [
            "apps",
            "authentication.k8s.io",
            "authorization.k8s.io",
            "certificates.k8s.io",
            "coordination.k8s.io",
            "discovery.k8s.io",
            "policy",
            "rbac.authorization.k8s.io",
            "storage.k8s.io",
        ];
        assert_eq!(names, expect);
        assert_eq!(api_group("apps").unwrap()["preferredVersion"]["groupVersion"], "apps/v1");
        assert_eq!(api_group("nope"), None);
        assert_eq!(resource_list("apps", "v2"), None);
        assert_eq!(aggregated_core()["items"].as_array().unwrap().len(), 1);
    }
}
