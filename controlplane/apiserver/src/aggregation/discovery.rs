//! Group versions of aggregated servers in the discovery documents.

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
    let entries = || list["resources"].as_array().into_iter().flatten();
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let kind = |entry: &Value| {
        let or = |field: &str, default: &str| entry[field].as_str().unwrap_or(default).to_owned();
        json!({"group": or("group", &remote.group), "version": or("version", &remote.version), "kind": text(&entry["kind"])})
    };
    let mains = entries().filter(|entry| !text(&entry["name"]).contains('/'));
    mains
        .map(|entry| {
            let name = text(&entry["name"]);
            let mut resource = Map::new();
            resource.insert("resource".to_owned(), name.clone().into());
            resource.insert("responseKind".to_owned(), kind(entry));
            let scope = if entry["namespaced"] == true { "Namespaced" } else { "Cluster" };
            resource.insert("scope".to_owned(), scope.into());
            resource.insert("singularResource".to_owned(), text(&entry["singularName"]).into());
            for field in ["verbs", "shortNames", "categories"] {
                if entry[field].is_array() {
                    resource.insert(field.to_owned(), entry[field].clone());
                }
            }
            let subresources: Vec<Value> = entries()
                .filter_map(|sub| Some((sub, text(&sub["name"]).strip_prefix(&format!("{name}/"))?.to_owned())))
                .map(|(sub, part)| json!({"subresource": part, "responseKind": kind(sub), "verbs": sub["verbs"]}))
                .collect();
            if !subresources.is_empty() {
                resource.insert("subresources".to_owned(), subresources.into());
            }
            Value::Object(resource)
        })
        .collect()
}
