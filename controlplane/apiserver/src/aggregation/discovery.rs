//! Group versions of aggregated servers in the discovery documents.

use std::collections::HashMap;

use coracle_kinds::Resources;
use serde_json::{Map, Value, json};

use super::{Remote, Remotes};

/// Adds the groups of other servers to `/apis`.
pub(crate) fn add_groups(remotes: &Remotes, resources: &Resources, list: &mut Value) {
    for remote in served(remotes, resources) {
        let version = json!({"groupVersion": format!("{}/{}", remote.group, remote.version), "version": remote.version});
        add_version(
            list.get_mut("groups"),
            |group| group["name"] == remote.group.as_str(),
            &version,
            || json!({"name": remote.group, "versions": [version], "preferredVersion": version}),
        );
    }
}

/// The document `/apis/<group>` of a group that other servers serve.
pub(crate) fn group(remotes: &Remotes, resources: &Resources, name: &str) -> Option<Value> {
    let mut list = json!({"groups": []});
    add_groups(remotes, resources, &mut list);
    let groups = list["groups"].as_array()?;
    let mut group = groups.iter().find(|group| group["name"] == name)?.as_object()?.clone();
    group.insert("kind".to_owned(), "APIGroup".into());
    group.insert("apiVersion".to_owned(), "v1".into());
    Some(group.into())
}

/// Adds the resources of other servers to the aggregated form of `/apis`.
pub(crate) fn add_resources(remotes: &Remotes, resources: &Resources, list: &mut Value) {
    for remote in served(remotes, resources) {
        let version = match remote.resources() {
            Some(found) => {
                json!({"version": remote.version, "freshness": "Current", "resources": converted(&remote, &found)})
            }
            // As upstream, clients then report an error for the group version instead of regarding its kinds as
            // removed.
            None => json!({"version": remote.version, "freshness": "Stale"}),
        };
        add_version(
            list.get_mut("items"),
            |item| item["metadata"]["name"] == remote.group.as_str(),
            &version,
            || json!({"metadata": {"name": remote.group, "creationTimestamp": null}, "versions": [version]}),
        );
    }
}

/// The other servers, except for group versions that this server serves itself.
fn served(remotes: &Remotes, resources: &Resources) -> Vec<std::sync::Arc<Remote>> {
    let mut all = remotes.all();
    all.retain(|remote| resources.group_version(&remote.group, &remote.version).is_none());
    all
}

fn add_version(
    list: Option<&mut Value>,
    is_group: impl Fn(&Value) -> bool,
    version: &Value,
    new: impl Fn() -> Value,
) {
    let Some(list) = list.and_then(Value::as_array_mut) else { return };
    match list.iter_mut().find(|group| is_group(group)) {
        Some(group) => {
            if let Some(versions) = group.get_mut("versions").and_then(Value::as_array_mut) {
                versions.push(version.clone());
            }
        }
        None => list.push(new()),
    }
}

/// The resources of an APIResourceList in the aggregated form.
fn converted(remote: &Remote, list: &Value) -> Value {
    // Entries without a name are left out. Each entry gets the fields of a resource, so empty entries of a hostile
    // server would make the result many times larger.
    let is_named = |entry: &&Value| entry["name"].as_str().is_some_and(|name| !name.is_empty());
    let entries = || list["resources"].as_array().into_iter().flatten().filter(is_named);
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let kind = |entry: &Value| {
        let or = |field: &str, default: &str| entry[field].as_str().unwrap_or(default).to_owned();
        json!({"group": or("group", &remote.group), "version": or("version", &remote.version), "kind": text(&entry["kind"])})
    };
    // The list is read in one pass: the other server is not trusted, and its list may have 100,000 entries.
    let mut subresources: HashMap<&str, Vec<Value>> = HashMap::new();
    for entry in entries() {
        if let Some((parent, part)) = entry["name"].as_str().and_then(|name| name.split_once('/')) {
            let sub = json!({"subresource": part, "responseKind": kind(entry), "verbs": entry["verbs"]});
            subresources.entry(parent).or_default().push(sub);
        }
    }
    let mains = entries().filter(|entry| !entry["name"].as_str().unwrap_or_default().contains('/'));
    mains
        .map(|entry| {
            let name = entry["name"].as_str().unwrap_or_default();
            let mut resource = Map::new();
            resource.insert("resource".to_owned(), name.into());
            resource.insert("responseKind".to_owned(), kind(entry));
            let scope = if entry["namespaced"] == true { "Namespaced" } else { "Cluster" };
            resource.insert("scope".to_owned(), scope.into());
            resource.insert("singularResource".to_owned(), text(&entry["singularName"]).into());
            for field in ["verbs", "shortNames", "categories"] {
                if entry[field].is_array() {
                    resource.insert(field.to_owned(), entry[field].clone());
                }
            }
            // If several entries have the same name, only the first one gets the subresources.
            if let Some(subresources) = subresources.remove(name) {
                resource.insert("subresources".to_owned(), subresources.into());
            }
            Value::Object(resource)
        })
        .collect()
}

/// Fuzz target: the APIResourceList of another server, in JSON.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn fuzz(data: &[u8]) {
    let Ok(list) = serde_json::from_slice::<Value>(data) else { return };
    let spec = json!({"group": "far.io", "version": "v1", "service": {"namespace": "d", "name": "far"}});
    let remote = Remote::read(&super::FrontProxy::default(), &json!({"spec": spec}));
    let converted = converted(&remote, &list).to_string();
    // The worst case: entries that have only a short name. All other fields are added.
    assert!(converted.len() <= 12 * (data.len() + 10), "{} bytes of {}", converted.len(), data.len());
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::aggregation::FrontProxy;

    #[test]
    fn each_subresource_of_another_server_is_listed_once() {
        let spec = json!({"group": "far.io", "version": "v1", "service": {"namespace": "d", "name": "far"}});
        let remote = Remote::read(&FrontProxy::default(), &json!({"spec": spec}));
        let entry = |name: &str| json!({"name": name, "namespaced": true, "kind": "Thing", "verbs": ["get"]});
        let names = ["things", "things/status", "things", "things/proxy/rest", "others", "none/scale"];
        let found = converted(&remote, &json!({"resources": names.map(entry)}));
        let parts = |index: usize| -> Vec<Value> {
            let list = found[index]["subresources"].as_array().cloned().unwrap_or_default();
            list.iter().map(|sub| sub["subresource"].clone()).collect()
        };
        assert_eq!(found.as_array().unwrap().len(), 3);
        assert_eq!(parts(0), ["status", "proxy/rest"]);
        // Repeated names must not multiply the list of a hostile server.
        assert_eq!([parts(1).len(), parts(2).len()], [0, 0]);
    }

    #[test]
    fn entries_of_another_server_without_a_name_are_not_listed() {
        let remote =
            Remote::read(&FrontProxy::default(), &json!({"spec": {"group": "far.io", "version": "v1"}}));
        let list = json!({"resources": [0, null, {}, {"name": ""}, {"name": 7}, {"name": "things"}]});
        let found = converted(&remote, &list);
        assert_eq!(found.as_array().unwrap().len(), 1, "{found}");
        assert_eq!(found[0]["resource"], "things");
    }
}
