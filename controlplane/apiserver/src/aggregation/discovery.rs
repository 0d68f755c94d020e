//! Group versions of aggregated servers in the discovery documents.

use std::{cmp::Reverse, collections::HashMap, sync::Arc};

use coracle_kinds::{Resources, discovery, resource::version_preference};
use http::{HeaderValue, header};
use serde_json::{Value, json};

use super::{
    Discovered, Remote, Remotes,
    forward::{DocumentRequest, Forwarder, MAX_DOCUMENT},
};
use crate::offload;

/// The media type of the aggregated discovery document.
const AGGREGATED: &str = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList";
/// Maximum bytes of an ETag.
const MAX_TAG: usize = 256;
/// Maximum resources and subresources of a group version. An APIResourceList of the maximum size ([`MAX_DOCUMENT`])
/// from a metrics server has half as many.
const MAX_ENTRIES: usize = 50_000;

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
        let version = match remote.discovered() {
            Some(found) => {
                json!({"version": remote.version, "freshness": "Current", "resources": *found.resources})
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
    // As upstream, these documents omit an aggregated server of the core group.
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

/// Sorts the groups by descending priority, then by name. If several groups have a resource of the same name, clients
/// use the first group. Sorts the versions of a group by descending priority, then by stability. Source:
/// `SortedByGroupAndVersion` of `kube-aggregator/pkg/apis/apiregistration/v1/helper`.
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

/// Reads the resources of a group version from the aggregated document of its server. `None` if the server lacks the
/// document, or if the document lacks the group version. Source: `fetchFreshDiscoveryForService` of
/// `kube-aggregator/pkg/apiserver`.
pub(crate) async fn read(forwarder: &Forwarder, remote: &Remote) -> Result<Option<Discovered>, String> {
    let known = remote.discovered().filter(|known| known.tag.is_some());
    let tag = known.as_ref().and_then(|known| known.tag.as_deref());
    let wanted = DocumentRequest { path: "/apis", media: AGGREGATED, tag, max: MAX_DOCUMENT };
    let found = forwarder.fetch(remote, wanted).await.map_err(|error| error.to_string())?;
    let Some(found) = found else { return Ok(known) };
    if !is_aggregated(found.headers.get(header::CONTENT_TYPE)) {
        return Ok(None);
    }
    let tag = found.headers.get(header::ETAG).and_then(|tag| tag.to_str().ok());
    let tag = tag.filter(|tag| tag.len() <= MAX_TAG).map(str::to_owned);
    let is_large = found.body.len() > offload::MIN_OFFLOADED_BYTES;
    let resources = offload::run(is_large, || {
        let document = serde_json::from_slice::<Value>(&found.body);
        let document = document.map_err(|error| format!("the discovery document is not JSON: {error}"))?;
        of_document(remote, &document)
    });
    Ok(resources?.map(|resources| Discovered { resources: Arc::new(resources), tag }))
}

/// The resources of an APIResourceList.
///
/// # Errors
/// The list has too many resources.
pub(crate) fn of_list(remote: &Remote, list: &Value) -> Result<Discovered, String> {
    let is_large = offload::is_longer(list, offload::MIN_OFFLOADED_BYTES);
    let resources = offload::run(is_large, || converted(remote, list))?;
    Ok(Discovered { resources: Arc::new(resources), tag: None })
}

/// Whether a `Content-Type` is the media type of the aggregated document.
fn is_aggregated(media: Option<&HeaderValue>) -> bool {
    let mut parts = media.and_then(|media| media.to_str().ok()).unwrap_or_default().split(';').map(str::trim);
    let is_json = parts.next() == Some("application/json");
    let parts: Vec<&str> = parts.collect();
    is_json && AGGREGATED.split(';').skip(1).all(|part| parts.contains(&part))
}

/// The resources of a group version in the aggregated document of its server. `None` if the document lacks the group
/// version.
fn of_document(remote: &Remote, document: &Value) -> Result<Option<Value>, String> {
    let groups = document["items"].as_array().into_iter().flatten();
    let own = groups.filter(|group| group["metadata"]["name"] == remote.group);
    let mut versions = own.flat_map(|group| group["versions"].as_array().into_iter().flatten());
    let Some(version) = versions.find(|version| version["version"] == remote.version) else {
        return Ok(None);
    };
    let mut entries = Entries::default();
    for (name, entry) in named(&version["resources"], "resource") {
        let scope = if entry["scope"] == "Namespaced" { "Namespaced" } else { "Cluster" };
        let mut kept = resource(name, scope, kind_of(&entry["responseKind"]), entry);
        kept["singularResource"] = text(&entry["singularResource"]).into();
        let at = entries.add(kept)?;
        for (name, entry) in named(&entry["subresources"], "subresource") {
            let mut kept = subresource(name, kind_of(&entry["responseKind"]), entry);
            let accepted: Vec<Value> =
                named(&entry["acceptedTypes"], "kind").map(|(_, kind)| kind_of(kind)).collect();
            if !accepted.is_empty() {
                kept["acceptedTypes"] = accepted.into();
            }
            entries.add_part(at, kept)?;
        }
    }
    Ok(Some(entries.finish()))
}

/// The resources of an APIResourceList in the aggregated form. As upstream, if the list has a subresource without its
/// resource, a resource without a kind is added. Servers of custom metrics list only names like `pods/METRIC`. Source:
/// `ConvertGroupVersionIntoToDiscovery` of `k8s.io/apiserver/pkg/endpoints`.
fn converted(remote: &Remote, list: &Value) -> Result<Value, String> {
    let kind = |entry: &Value| match text(&entry["kind"]) {
        "" => gvk("", "", ""),
        kind => {
            let group = entry["group"].as_str().unwrap_or(&remote.group);
            gvk(group, entry["version"].as_str().unwrap_or(&remote.version), kind)
        }
    };
    let scope = |entry: &Value| if entry["namespaced"] == true { "Namespaced" } else { "Cluster" };
    // The list is read in linear time: the other server is not trusted, and its list may have 100,000 entries.
    let (mut entries, mut known) = (Entries::default(), HashMap::new());
    let list = &list["resources"];
    for (name, entry) in named(list, "name").filter(|(name, _)| !name.contains('/')) {
        let mut kept = resource(name, scope(entry), kind(entry), entry);
        kept["singularResource"] = text(&entry["singularName"]).into();
        let at = entries.add(kept)?;
        // If several entries have the same name, only the first one gets the subresources.
        known.entry(name).or_insert(at);
    }
    for (name, entry) in named(list, "name") {
        let Some((parent, part)) = name.split_once('/') else { continue };
        if parent.is_empty() || part.is_empty() {
            continue;
        }
        let at = match known.get(parent) {
            Some(at) => *at,
            None => {
                let at = entries.add(resource(parent, scope(entry), gvk("", "", ""), &Value::Null))?;
                known.insert(parent, at);
                at
            }
        };
        entries.add_part(at, subresource(part, kind(entry), entry))?;
    }
    Ok(entries.finish())
}

/// The resources of a group version, each with its subresources.
#[derive(Default)]
struct Entries {
    all: Vec<(Value, Vec<Value>)>,
    count: usize,
}

impl Entries {
    /// Adds a resource. Returns its position.
    fn add(&mut self, resource: Value) -> Result<usize, String> {
        self.count()?;
        self.all.push((resource, Vec::new()));
        Ok(self.all.len() - 1)
    }

    /// Adds a subresource to the resource at a position.
    fn add_part(&mut self, at: usize, subresource: Value) -> Result<(), String> {
        self.count()?;
        self.all[at].1.push(subresource);
        Ok(())
    }

    /// Counts an entry, up to [`MAX_ENTRIES`]. Each entry gets all fields of a resource. Without the limit, short
    /// entries of a hostile server would make the discovery documents many times larger than its list.
    ///
    /// # Errors
    /// The group version has too many entries.
    fn count(&mut self) -> Result<(), String> {
        self.count += 1;
        match self.count <= MAX_ENTRIES {
            true => Ok(()),
            false => Err(format!("the group version has more than {MAX_ENTRIES} resources")),
        }
    }

    fn finish(self) -> Value {
        let all = self.all.into_iter().map(|(mut resource, parts)| {
            if !parts.is_empty() {
                resource["subresources"] = parts.into();
            }
            resource
        });
        all.collect()
    }
}

/// The entries of a list with their names. Entries without a name are skipped. `field` is the field of the name.
fn named<'a>(list: &'a Value, field: &'static str) -> impl Iterator<Item = (&'a str, &'a Value)> {
    let entries = list.as_array().into_iter().flatten();
    entries.map(move |entry| (text(&entry[field]), entry)).filter(|(name, _)| !name.is_empty())
}

/// A resource with an empty singular name. Fields of a wrong type are replaced by empty fields: one such field would
/// make the whole discovery document unreadable for clients. For the same reason, kube-aggregator decodes the list into
/// typed objects.
fn resource(name: &str, scope: &str, kind: Value, entry: &Value) -> Value {
    let mut kept = json!({"resource": name, "responseKind": kind, "scope": scope, "singularResource": "",
        "verbs": texts(&entry["verbs"])});
    for field in ["shortNames", "categories"] {
        let list = texts(&entry[field]);
        if !list.is_empty() {
            kept[field] = list.into();
        }
    }
    kept
}

fn subresource(name: &str, kind: Value, entry: &Value) -> Value {
    json!({"subresource": name, "responseKind": kind, "verbs": texts(&entry["verbs"])})
}

fn kind_of(value: &Value) -> Value {
    gvk(text(&value["group"]), text(&value["version"]), text(&value["kind"]))
}

fn gvk(group: &str, version: &str, kind: &str) -> Value {
    json!({"group": group, "version": version, "kind": kind})
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

/// The strings of a list.
fn texts(list: &Value) -> Vec<&str> {
    list.as_array().into_iter().flatten().filter_map(Value::as_str).collect()
}

/// Fuzz target: the discovery documents of another server, in JSON.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn fuzz(data: &[u8]) {
    let Ok(list) = serde_json::from_slice::<Value>(data) else { return };
    let spec = json!({"group": "far.io", "version": "v1", "service": {"namespace": "d", "name": "far"}});
    let remote = Remote::read(&super::FrontProxy::default(), &json!({"spec": spec}));
    for found in [converted(&remote, &list).ok(), of_document(&remote, &list).ok().flatten()] {
        let length = found.map_or(0, |found| found.to_string().len());
        // The worst case: entries that have only a short name. All other fields are added.
        assert!(length <= 16 * (data.len() + 10), "{length} bytes of {}", data.len());
    }
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
        let found = converted(&remote, &json!({"resources": names.map(entry)})).unwrap();
        let parts = |index: usize| -> Vec<Value> {
            let list = found[index]["subresources"].as_array().cloned().unwrap_or_default();
            list.iter().map(|sub| sub["subresource"].clone()).collect()
        };
        assert_eq!(found.as_array().unwrap().len(), 4);
        assert_eq!(parts(0), ["status", "proxy/rest"]);
        // Repeated names must not multiply the list of a hostile server.
        assert_eq!([parts(1).len(), parts(2).len()], [0, 0]);
        assert_eq!((&found[3]["resource"], parts(3)), (&json!("none"), vec![json!("scale")]));
    }

    #[test]
    fn entries_of_another_server_without_a_name_are_not_listed() {
        let remote =
            Remote::read(&FrontProxy::default(), &json!({"spec": {"group": "far.io", "version": "v1"}}));
        let list = json!({"resources": [0, null, {}, {"name": ""}, {"name": 7}, {"name": "things"}]});
        let found = converted(&remote, &list).unwrap();
        assert_eq!(found.as_array().unwrap().len(), 1, "{found}");
        assert_eq!(found[0]["resource"], "things");
    }

    fn far() -> Remote {
        Remote::read(&FrontProxy::default(), &json!({"spec": {"group": "far.io", "version": "v1"}}))
    }

    /// prometheus-adapter and KEDA list only names like these.
    #[test]
    fn metrics_without_their_resource_have_a_resource_without_a_kind() {
        let metric = |name: &str, namespaced: bool| {
            json!({"name": name, "singularName": "", "namespaced": namespaced, "kind": "MetricValueList",
                "verbs": ["get"]})
        };
        let list = json!({"resources": [metric("pods/hits", true), metric("namespaces/hits", false),
            metric("pods/errors", true)]});
        let (kind, none) = (gvk("far.io", "v1", "MetricValueList"), gvk("", "", ""));
        let part = |name: &str| json!({"subresource": name, "responseKind": kind, "verbs": ["get"]});
        let parent = |name: &str, scope: &str, parts: Vec<Value>| {
            json!({"resource": name, "responseKind": none, "scope": scope, "singularResource": "", "verbs": [],
                "subresources": parts})
        };
        let expect = json!([
            parent("pods", "Namespaced", vec![part("hits"), part("errors")]),
            parent("namespaces", "Cluster", vec![part("hits")]),
        ]);
        assert_eq!(converted(&far(), &list).unwrap(), expect);
    }

    #[test]
    fn fields_of_other_types_do_not_make_the_documents_of_all_servers_unreadable() {
        let wrong = json!({"name": "things", "singularName": 7, "kind": "Thing", "verbs": null, "shortNames": [1, "t"],
            "categories": "all", "namespaced": "yes"});
        let list = json!({"resources": [wrong, {"name": "things/status", "kind": {}}]});
        let of_list = converted(&far(), &list).unwrap();
        let status = json!({"subresource": "status", "responseKind": gvk("", "", ""), "verbs": []});
        let expect = json!([{"resource": "things", "responseKind": gvk("far.io", "v1", "Thing"), "scope": "Cluster",
            "singularResource": "", "verbs": [], "shortNames": ["t"], "subresources": [status]}]);
        assert_eq!(of_list, expect);
        let status = json!({"subresource": "status", "responseKind": 7, "verbs": {}, "acceptedTypes": 1});
        let wrong = json!({"resource": "things", "responseKind": {"group": "far.io", "version": "v1", "kind": "Thing"},
            "scope": 1, "verbs": "get", "shortNames": ["t", null], "subresources": [status, 3]});
        let versions = json!([{"version": "v1", "resources": [wrong, null]}]);
        let document = json!({"items": [7, {"metadata": {"name": "far.io"}, "versions": versions}]});
        assert_eq!(of_document(&far(), &document), Ok(Some(expect)));
    }

    #[test]
    fn the_aggregated_document_of_a_server_has_the_group_version_or_not() {
        let things = json!({"resource": "things", "responseKind": gvk("far.io", "v1", "Thing"), "scope": "Namespaced",
            "singularResource": "thing", "verbs": ["get"], "categories": ["all"],
            "subresources": [{"subresource": "scale", "responseKind": gvk("autoscaling", "v1", "Scale"),
                "verbs": ["get"], "acceptedTypes": [gvk("autoscaling", "v1", "Scale")]}]});
        let of = |group: &str, version: &str| {
            let versions = json!([{"version": version, "freshness": "Current", "resources": [things]}]);
            let document = json!({"items": [{"metadata": {"name": group}, "versions": versions}]});
            of_document(&far(), &document).unwrap()
        };
        assert_eq!(of("far.io", "v1"), Some(json!([things])));
        assert_eq!((of("far.io", "v2"), of("other.io", "v1")), (None, None));
        let media = |text: &'static str| is_aggregated(Some(&HeaderValue::from_static(text)));
        assert!(media("application/json; g=apidiscovery.k8s.io; v=v2; as=APIGroupDiscoveryList"));
        assert!(media(AGGREGATED) && !media("application/json") && !is_aggregated(None));
        assert!(!media("application/json;g=apidiscovery.k8s.io;v=v2beta1;as=APIGroupDiscoveryList"));
    }

    #[test]
    fn a_server_cannot_have_very_many_resources() {
        let list = |count: usize| {
            let names = (0..count).map(|number| json!({"name": format!("r{number}/s")}));
            converted(&far(), &json!({"resources": names.collect::<Vec<_>>()}))
        };
        assert!(list(MAX_ENTRIES / 2).is_ok());
        assert!(list(MAX_ENTRIES / 2 + 1).unwrap_err().contains("50000"));
    }
}
