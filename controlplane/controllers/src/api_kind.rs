//! The kinds that the API server serves, and requests on objects of any kind.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, Request};
use kube::core::discovery::v2::{APIGroupDiscovery, APIResourceDiscovery};
use kube::core::{DynamicObject, GroupVersionKind};
use kube::discovery::{ApiResource, verbs};
use kube::{Client, Resource};
use percent_encoding::{AsciiSet, CONTROLS, utf8_percent_encode};
use serde_json::{Value, json};

use crate::context::Context;
use crate::error::{Error, is_missing, is_not_found};
use crate::object::{Key, Meta};

/// A kind that the API server serves.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ApiKind {
    pub(crate) resource: ApiResource,
    pub(crate) namespaced: bool,
    /// The verbs that the kind supports.
    pub(crate) verbs: Vec<String>,
}

/// Result of API discovery.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Discovered {
    /// The served kinds, each in the first version of its group that has the kind.
    pub(crate) kinds: Vec<ApiKind>,
    /// Group versions whose server does not respond: `group/version`. Their kinds are unknown.
    pub(crate) unavailable: Vec<String>,
}

/// Characters that end the path of a URL or that a URL cannot have. The names of objects of some kinds may have these
/// characters.
const ENCODED: &AsciiSet =
    &CONTROLS.add(b' ').add(b'"').add(b'#').add(b'<').add(b'>').add(b'?').add(b'`').add(b'{').add(b'}');

/// The path segment of an object's name. `None` if no object can have this name: names in owner references are free
/// text.
fn path_segment(name: &str) -> Option<String> {
    let is_possible = !matches!(name, "" | "." | "..") && !name.contains(['/', '%', '\\']);
    is_possible.then(|| utf8_percent_encode(name, ENCODED).to_string())
}

impl Context {
    /// All kinds that are served now. The result is not cached, because the kinds change with custom resource
    /// definitions and API services.
    pub(crate) async fn kinds(&self) -> Result<Discovered, Error> {
        let groups = self.client.list_api_groups_aggregated().await.map_err(Error::Discovery)?;
        let core = self.client.list_core_api_versions_aggregated().await.map_err(Error::Discovery)?;
        Ok(Discovered::read(groups.items.iter().chain(&core.items)))
    }
}

impl Discovered {
    /// Reads the groups of the aggregated discovery. The first version of a group is its preferred version.
    fn read<'a>(groups: impl Iterator<Item = &'a APIGroupDiscovery>) -> Self {
        let mut found = Self::default();
        for group in groups {
            let name = group.metadata.as_ref().and_then(|meta| meta.name.as_deref()).unwrap_or_default();
            let first = found.kinds.len();
            for version in &group.versions {
                let known = version.version.as_deref().unwrap_or_default();
                if version.freshness.as_deref() == Some("Stale") {
                    found.unavailable.push(format!("{name}/{known}"));
                }
                for resource in &version.resources {
                    let kind = ApiKind::read(name, known, resource);
                    // As upstream, skip resources without a kind. A metrics server has such resources; they only have
                    // subresources.
                    if kind.resource.kind.is_empty() {
                        continue;
                    }
                    if found.kinds[first..].iter().all(|other| other.resource.plural != kind.resource.plural)
                    {
                        found.kinds.push(kind);
                    }
                }
            }
        }
        found
    }

    /// Whether the server of a kind's group version does not respond.
    pub(crate) fn is_unavailable(&self, kind: &ApiKind) -> bool {
        self.unavailable.contains(&kind.resource.api_version)
    }
}

impl ApiKind {
    fn read(group: &str, version: &str, resource: &APIResourceDiscovery) -> Self {
        let kind = resource.response_kind.as_ref().and_then(|kind| kind.kind.clone()).unwrap_or_default();
        let gvk = GroupVersionKind::gvk(group, version, &kind);
        let plural = resource.resource.as_deref().unwrap_or_default();
        Self {
            resource: ApiResource::from_gvk_with_plural(&gvk, plural),
            namespaced: resource.scope.as_deref() == Some("Namespaced"),
            verbs: resource.verbs.clone(),
        }
    }

    /// Whether the kind supports all of these verbs.
    pub(crate) fn can(&self, verbs: &[&str]) -> bool {
        verbs.iter().all(|verb| self.verbs.iter().any(|own| own == verb))
    }

    /// The name in API paths: resource and group.
    pub(crate) fn name(&self) -> String {
        if self.resource.group.is_empty() {
            self.resource.plural.clone()
        } else {
            format!("{}.{}", self.resource.plural, self.resource.group)
        }
    }

    /// Whether objects of this kind define kinds: custom resource definitions and API services.
    pub(crate) fn defines_kinds(&self) -> bool {
        matches!(
            (self.resource.group.as_str(), self.resource.plural.as_str()),
            ("apiextensions.k8s.io", "customresourcedefinitions") | ("apiregistration.k8s.io", "apiservices")
        )
    }

    /// Whether objects of this kind are events. Events expire on their own, so the garbage collector ignores them.
    pub(crate) fn is_event(&self) -> bool {
        self.resource.plural == "events"
    }

    fn requests(&self, namespace: &str) -> Request {
        let namespace = (self.namespaced && !namespace.is_empty()).then_some(namespace);
        Request::new(DynamicObject::url_path(&self.resource, namespace))
    }

    fn failed(&self, verb: &'static str, key: &Key) -> impl FnOnce(kube::Error) -> Error {
        let object = format!("{} {key}", self.resource.kind);
        move |source| Error::Request { verb, object, source }
    }

    /// Reads the object's metadata from the API server.
    ///
    /// # Errors
    /// The request fails, or the API server does not serve the kind at this moment. In the second case the 404 response
    /// does not name an object, and the object may exist.
    pub(crate) async fn live(&self, client: &Client, key: &Key) -> Result<Option<Meta>, Error> {
        let failed = self.failed("get", key);
        let Some(name) = path_segment(&key.name) else { return Ok(None) };
        let request = self.requests(&key.namespace).get_metadata(&name, &Default::default());
        let request = match request.map_err(kube::Error::BuildRequest) {
            Ok(request) => request,
            Err(error) => return Err(failed(error)),
        };
        match client.request::<Meta>(request).await {
            Ok(meta) => Ok(Some(meta)),
            Err(error) if is_missing(&error, &key.name) => Ok(None),
            // The 404 responses of some aggregated servers never name an object. The kind is served if its objects can
            // be listed.
            Err(error) if is_not_found(&error) && self.can(&["list"]) => {
                self.list_version(client).await.map(|_version| None)
            }
            Err(error) => Err(failed(error)),
        }
    }

    /// Reads the metadata of all objects of this kind in a namespace.
    pub(crate) async fn list(&self, client: &Client, namespace: &str) -> Result<Vec<Meta>, Error> {
        let mut params = ListParams::default().limit(500);
        let mut found = Vec::new();
        loop {
            let list = self.page(client, namespace, &params).await?;
            found.extend(list.items);
            params.continue_token = list.metadata.continue_.filter(|token| !token.is_empty());
            if params.continue_token.is_none() {
                return Ok(found);
            }
        }
    }

    /// The resource version of a list of all objects of this kind.
    pub(crate) async fn list_version(&self, client: &Client) -> Result<String, Error> {
        let page = self.page(client, "", &ListParams::default().limit(1)).await?;
        Ok(page.metadata.resource_version.unwrap_or_default())
    }

    /// Whether a namespace has no objects of this kind.
    pub(crate) async fn is_empty_in(&self, client: &Client, namespace: &str) -> Result<bool, Error> {
        let page = self.page(client, namespace, &ListParams::default().limit(1)).await?;
        Ok(page.items.is_empty() && page.metadata.continue_.is_none_or(|token| token.is_empty()))
    }

    /// One page of the metadata of the objects of this kind in a namespace.
    pub(crate) async fn page(
        &self,
        client: &Client,
        namespace: &str,
        params: &ListParams,
    ) -> Result<kube::core::ObjectList<Meta>, Error> {
        let place = Key::new(namespace, "*");
        let request = self.requests(namespace).list_metadata(params).map_err(kube::Error::BuildRequest);
        let request = request.map_err(self.failed("list", &place))?;
        client.request(request).await.map_err(self.failed("list", &place))
    }

    /// Applies an empty configuration to this version of an object. The API server then writes the object again if it
    /// is stored in another form. The object is not created if it does not exist any more.
    pub(crate) async fn rewrite(
        &self,
        client: &Client,
        meta: &Meta,
        manager: &str,
    ) -> Result<(), kube::Error> {
        let ApiResource { api_version, kind, .. } = &self.resource;
        let ObjectMeta { name, uid, resource_version, .. } = &meta.metadata;
        let metadata = json!({"name": name, "uid": uid, "resourceVersion": resource_version});
        let body = json!({"apiVersion": api_version, "kind": kind, "metadata": metadata});
        let key = Key::of(&meta.metadata);
        let params = PatchParams::apply(manager);
        let request = self.requests(&key.namespace).patch(&key.name, &params, &Patch::Apply(body));
        client.request_text(request.map_err(kube::Error::BuildRequest)?).await.map(drop)
    }

    /// Deletes an object. An object that does not exist is not an error.
    pub(crate) async fn delete(
        &self,
        client: &Client,
        key: &Key,
        params: &DeleteParams,
    ) -> Result<(), Error> {
        let request = self.requests(&key.namespace).delete(&key.name, params);
        let request = request.map_err(kube::Error::BuildRequest).map_err(self.failed("delete", key))?;
        unless_absent(client.request_text(request).await).map_err(self.failed("delete", key))
    }

    /// Deletes all objects of this kind in a namespace.
    pub(crate) async fn delete_all(&self, client: &Client, namespace: &str) -> Result<(), Error> {
        if !self.can(&[verbs::DELETE_COLLECTION]) {
            for object in self.list(client, namespace).await? {
                self.delete(client, &Key::of(&object.metadata), &DeleteParams::background()).await?;
            }
            return Ok(());
        }
        let place = Key::new(namespace, "*");
        let request =
            self.requests(namespace).delete_collection(&DeleteParams::background(), &ListParams::default());
        let request = request.map_err(kube::Error::BuildRequest).map_err(self.failed("delete", &place))?;
        client.request_text(request).await.map(drop).map_err(self.failed("delete", &place))
    }

    /// Applies a merge patch to an object. An object that does not exist is not an error.
    pub(crate) async fn merge(&self, client: &Client, key: &Key, patch: Value) -> Result<(), Error> {
        let request =
            self.requests(&key.namespace).patch(&key.name, &PatchParams::default(), &Patch::Merge(patch));
        let request = request.map_err(kube::Error::BuildRequest).map_err(self.failed("patch", key))?;
        unless_absent(client.request_text(request).await).map_err(self.failed("patch", key))
    }
}

/// The result of a change of an object. An object that does not exist is not an error.
fn unless_absent(result: Result<String, kube::Error>) -> Result<(), kube::Error> {
    match result {
        Err(error) if !is_not_found(&error) => Err(error),
        Ok(_) | Err(_) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(groups: Value) -> Discovered {
        let groups: Vec<APIGroupDiscovery> = serde_json::from_value(groups).unwrap();
        Discovered::read(groups.iter())
    }

    fn resource(plural: &str, version: &str) -> Value {
        json!({"resource": plural, "scope": "Namespaced", "verbs": ["list"],
            "responseKind": {"group": "g.io", "version": version, "kind": plural.to_uppercase()}})
    }

    #[test]
    fn a_name_is_one_segment_of_a_path() {
        assert_eq!(path_segment("system:a-b.c").as_deref(), Some("system:a-b.c"));
        assert_eq!(path_segment("a?b#c").as_deref(), Some("a%3Fb%23c"));
        for name in ["", ".", "..", "a/b", "a%2fb", "a\\b"] {
            assert_eq!(path_segment(name), None, "{name}");
        }
    }

    #[test]
    fn a_kind_that_the_preferred_version_of_its_group_lacks_is_found() {
        let versions = json!([
            {"version": "v2", "freshness": "Current", "resources": [resource("a", "v2")]},
            {"version": "v1", "freshness": "Current", "resources": [resource("a", "v1"), resource("b", "v1")]},
        ]);
        let found = read(json!([{"metadata": {"name": "g.io"}, "versions": versions}]));
        let names = found.kinds.iter().map(|kind| (&*kind.resource.plural, &*kind.resource.api_version));
        assert_eq!(names.collect::<Vec<_>>(), [("a", "g.io/v2"), ("b", "g.io/v1")]);
        assert_eq!(found.kinds[1].resource.kind, "B");
        assert!(found.kinds[1].namespaced && found.unavailable.is_empty());
    }

    #[test]
    fn a_resource_without_a_kind_has_no_objects() {
        let metric = json!({"resource": "pods", "scope": "Namespaced", "verbs": [],
            "responseKind": {"group": "", "version": "", "kind": ""}, "subresources": [{"subresource": "hits"}]});
        let versions = json!([{"version": "v1beta1", "resources": [metric]}]);
        let found = read(json!([{"metadata": {"name": "custom.metrics.k8s.io"}, "versions": versions}]));
        assert_eq!(found, Discovered::default());
    }

    #[test]
    fn a_group_version_whose_server_does_not_respond_is_reported_and_hides_no_other() {
        let found = read(json!([
            {"metadata": {"name": "far.io"}, "versions": [{"version": "v1", "freshness": "Stale"}]},
            {"metadata": {"name": ""}, "versions": [{"version": "v1", "freshness": "Current", "resources": [
                {"resource": "pods", "scope": "Namespaced", "verbs": [], "responseKind": {"kind": "Pod"}}]}]},
        ]));
        assert_eq!(found.unavailable, ["far.io/v1"]);
        assert_eq!(found.kinds.len(), 1);
        assert_eq!(found.kinds[0].resource.api_version, "v1");
        assert!(!found.is_unavailable(&found.kinds[0]));
    }
}
