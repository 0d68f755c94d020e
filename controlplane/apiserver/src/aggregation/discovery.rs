//! Group versions of aggregated servers in the discovery documents.

use std::{cmp::Reverse, collections::HashMap, sync::Arc};

use coracle_kinds::{Resources, discovery, resource::version_preference};
use serde_json::{Map, Value, json};

use super::{Remote, Remotes};

/// Adds the groups of other servers to `/apis`.
pub(crate) fn add_groups(remotes: &Remotes, resources: &Resources, list: &mut Value) {
    add_plain(&served(remotes, resources), resources, list);
}

fn add_plain(remotes: &[Arc<Remote>], resources: &Resources, list: &mut Value) {
    for remote in remotes {
        let version = json!({"groupVersion": format!("{}/{}", remote.group, remote.version), "version": remote.version});
        let group = || json!({"name": remote.group, "preferredVersion": null, "versions": []});
        add_version(list.get_mut("groups"), remote, version, |group| &group["name"], group);
    }
    sort(list.get_mut("groups"), remotes, resources, |group| &group["name"]);
    for group in list["groups"].as_array_mut().into_iter().flatten() {
        group["preferredVersion"] = group["versions"][0].clone();
    }
}

/// The document `/apis/<group>`.
pub(crate) fn group(remotes: &Remotes, resources: &Resources, name: &str) -> Option<Value> {
    let own = discovery::api_group(resources, name);
    let mut list = json!({"groups": own.into_iter().collect::<Vec<_>>()});
    let mut remotes = served(remotes, resources);
    remotes.retain(|remote| remote.group == name);
    add_plain(&remotes, resources, &mut list);
    let mut group = list["groups"].as_array()?.first()?.as_object()?.clone();
    group.insert("kind".to_owned(), "APIGroup".into());
    group.insert("apiVersion".to_owned(), "v1".into());
    Some(group.into())
}

/// Adds the resources of other servers to the aggregated form of `/apis`.
pub(crate) fn add_resources(remotes: &Remotes, resources: &Resources, list: &mut Value) {
    let remotes = served(remotes, resources);
    for remote in &remotes {
        let version = match remote.resources() {
            Some(found) => {
                json!({"version": remote.version, "freshness": "Current", "resources": converted(remote, &found)})
            }
            // As upstream, clients then report an error for the group version instead of regarding its kinds as
            // removed.
            None => json!({"version": remote.version, "freshness": "Stale"}),
        };
        let group = || json!({"metadata": {"name": remote.group, "creationTimestamp": null}, "versions": []});
        add_version(list.get_mut("items"), remote, version, |item| &item["metadata"]["name"], group);
    }
    sort(list.get_mut("items"), &remotes, resources, |item| &item["metadata"]["name"]);
}

/// The other servers, except for group versions that this server serves itself.
fn served(remotes: &Remotes, resources: &Resources) -> Vec<Arc<Remote>> {
    let mut all = remotes.all();
    // Another server for the core group is not in these documents, as upstream.
    all.retain(|remote| {
        !remote.group.is_empty() && resources.group_version(&remote.group, &remote.version).is_none()
    });
    all
}

/// Adds a version to its group. `new` is the group without versions.
fn add_version(
    list: Option<&mut Value>,
    remote: &Remote,
    version: Value,
    name: fn(&Value) -> &Value,
    new: impl Fn() -> Value,
) {
    let Some(list) = list.and_then(Value::as_array_mut) else { return };
    let known = list.iter().position(|group| *name(group) == remote.group.as_str());
    let position = known.unwrap_or_else(|| {
        list.push(new());
        list.len() - 1
    });
    if let Some(versions) = list[position].get_mut("versions").and_then(Value::as_array_mut) {
        versions.push(version);
    }
}

/// Sorts the groups by descending priority, then by name. Clients use the first group that has a resource. Sorts the
/// versions of a group by descending priority, then by stability. Source: `SortedByGroupAndVersion` of
/// `kube-aggregator/pkg/apis/apiregistration/v1/helper`.
fn sort(
    list: Option<&mut Value>,
    remotes: &[Arc<Remote>],
    resources: &Resources,
    name: fn(&Value) -> &Value,
) {
    let Some(list) = list.and_then(Value::as_array_mut).filter(|_| !remotes.is_empty()) else { return };
    list.sort_by_cached_key(|group| {
        let name = name(group).as_str().unwrap_or_default();
        let is_own = resources.versions_of(name).next().is_some();
        let own = is_own.then(|| discovery::order_priority(name));
        let others = remotes.iter().filter(|remote| remote.group == name).map(|remote| remote.group_priority);
        (Reverse(others.chain(own).max()), name.to_owned())
    });
    for group in list {
        let of = name(group).as_str().unwrap_or_default().to_owned();
        let others: Vec<&Arc<Remote>> = remotes.iter().filter(|remote| remote.group == of).collect();
        let versions = group.get_mut("versions").and_then(Value::as_array_mut);
        let Some(versions) = versions.filter(|_| !others.is_empty()) else { continue };
        versions.sort_by_cached_key(|version| {
            let version = version["version"].as_str().unwrap_or_default();
            let other = others.iter().find(|remote| remote.version == version);
            let own = || discovery::version_priority(&of, version);
            (Reverse(other.map_or_else(own, |remote| remote.version_priority)), version_preference(version))
        });
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

    /// API services of other servers: group, version, priority of the group, priority of the version.
    fn remotes(all: &[(&str, &str, i64, i64)]) -> Remotes {
        let remotes = Remotes::default();
        let read = |&(group, version, of_group, of_version): &(&str, &str, i64, i64)| {
            let spec = json!({"group": group, "version": version, "groupPriorityMinimum": of_group,
                "versionPriority": of_version, "service": {"namespace": "d", "name": "far"}});
            let remote = Remote::read(&FrontProxy::default(), &json!({"spec": spec}));
            ((group.to_owned(), version.to_owned()), Arc::new(remote))
        };
        remotes.replace(all.iter().map(read).collect());
        remotes
    }

    #[test]
    fn groups_and_versions_of_other_servers_are_in_the_order_of_their_priorities() {
        let own = coracle_kinds::kind::built_in();
        let remotes = remotes(&[
            ("custom.metrics.k8s.io", "v1beta1", 100, 100),
            ("custom.metrics.k8s.io", "v1beta2", 100, 200),
            ("first.io", "v1alpha1", 20_000, 15),
            ("first.io", "v1", 20_000, 15),
            ("autoscaling", "v3", 17_550, 20),
        ]);
        let mut plain = discovery::api_group_list(own);
        add_groups(&remotes, own, &mut plain);
        let mut full = discovery::aggregated_groups(own);
        add_resources(&remotes, own, &mut full);
        let groups = plain["groups"].as_array().unwrap();
        let names: Vec<&str> = groups.iter().map(|group| group["name"].as_str().unwrap()).collect();
        let items = full["items"].as_array().unwrap();
        let same: Vec<&str> = items.iter().map(|item| item["metadata"]["name"].as_str().unwrap()).collect();
        assert_eq!(names, same);
        assert_eq!(names[..3], ["apiregistration.k8s.io", "first.io", "apps"]);
        assert_eq!(names.last(), Some(&"custom.metrics.k8s.io"));
        let versions = |group: &Value| -> Vec<String> {
            let versions = group["versions"].as_array().unwrap().iter();
            versions.map(|version| version["version"].as_str().unwrap().to_owned()).collect()
        };
        for (name, expect) in [
            ("custom.metrics.k8s.io", &["v1beta2", "v1beta1"][..]),
            ("first.io", &["v1", "v1alpha1"]),
            ("autoscaling", &["v2", "v3", "v1"]),
        ] {
            let position = names.iter().position(|one| *one == name).unwrap();
            assert_eq!(versions(&groups[position]), expect);
            assert_eq!(versions(&items[position]), expect);
            assert_eq!(groups[position]["preferredVersion"]["version"], expect[0]);
            let one = group(&remotes, own, name).unwrap();
            assert_eq!((versions(&one), &one["kind"]), (versions(&groups[position]), &json!("APIGroup")));
        }
        assert_eq!(group(&remotes, own, "none.io"), None);
        assert_eq!(group(&remotes, own, "apps"), discovery::api_group(own, "apps"));
    }

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
