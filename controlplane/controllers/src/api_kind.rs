//! The kinds that the API server serves, and requests on objects of any kind.

use kube::api::{DeleteParams, ListParams, Patch, PatchParams, Request};
use kube::core::DynamicObject;
use kube::core::metadata::PartialObjectMeta;
use kube::discovery::{ApiResource, Discovery, Scope, verbs};
use kube::{Client, Resource};
use serde_json::Value;

use crate::context::Context;
use crate::error::{Error, is_not_found};
use crate::object::Key;

/// The metadata of an object of any kind.
pub(crate) type Meta = PartialObjectMeta<DynamicObject>;

/// A kind that the API server serves.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ApiKind {
    pub(crate) resource: ApiResource,
    pub(crate) namespaced: bool,
    /// The verbs that the kind supports.
    pub(crate) verbs: Vec<String>,
}

impl Context {
    /// All kinds that are served now, each in its preferred version. Kinds come and go with custom resource definitions,
    /// so the result is not kept.
    pub(crate) async fn kinds(&self) -> Result<Vec<ApiKind>, Error> {
        discover(&self.client).await.map_err(Error::Discovery)
    }
}

async fn discover(client: &Client) -> Result<Vec<ApiKind>, kube::Error> {
    let discovery = Discovery::new(client.clone()).run_aggregated().await?;
    let mut kinds = Vec::new();
    for group in discovery.groups() {
        for (resource, capabilities) in group.recommended_resources() {
            kinds.push(ApiKind {
                namespaced: capabilities.scope == Scope::Namespaced,
                verbs: capabilities.operations,
                resource,
            });
        }
    }
    Ok(kinds)
}

impl ApiKind {
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

    /// Whether this is an event. Events expire on their own, so the garbage collector ignores them.
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
    pub(crate) async fn live(&self, client: &Client, key: &Key) -> Result<Option<Meta>, Error> {
        let failed = self.failed("get", key);
        let request = self.requests(&key.namespace).get_metadata(&key.name, &Default::default());
        let request = match request.map_err(kube::Error::BuildRequest) {
            Ok(request) => request,
            Err(error) => return Err(failed(error)),
        };
        match client.request::<Meta>(request).await {
            Ok(meta) => Ok(Some(meta)),
            Err(error) if is_not_found(&error) => Ok(None),
            Err(error) => Err(failed(error)),
        }
    }

    /// Reads the metadata of all objects in a namespace.
    pub(crate) async fn list(&self, client: &Client, namespace: &str) -> Result<Vec<Meta>, Error> {
        let place = Key::new(namespace, "*");
        let mut params = ListParams::default().limit(500);
        let mut found = Vec::new();
        loop {
            let request = self.requests(namespace).list_metadata(&params).map_err(kube::Error::BuildRequest);
            let request = request.map_err(self.failed("list", &place))?;
            let list: kube::core::ObjectList<Meta> =
                client.request(request).await.map_err(self.failed("list", &place))?;
            found.extend(list.items);
            params.continue_token = list.metadata.continue_.filter(|token| !token.is_empty());
            if params.continue_token.is_none() {
                return Ok(found);
            }
        }
    }

    /// Deletes an object. An object that does not exist is not an error.
    pub(crate) async fn delete(
        &self,
        client: &Client,
        key: &Key,
        params: &DeleteParams,
    ) -> Result<(), Error> {
        let failed = self.failed("delete", key);
        let request = self.requests(&key.namespace).delete(&key.name, params);
        let request = match request.map_err(kube::Error::BuildRequest) {
            Ok(request) => request,
            Err(error) => return Err(failed(error)),
        };
        match client.request_text(request).await {
            Err(error) if !is_not_found(&error) => Err(failed(error)),
            Ok(_) | Err(_) => Ok(()),
        }
    }

    /// Deletes all objects in a namespace.
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
        let failed = self.failed("patch", key);
        let request =
            self.requests(&key.namespace).patch(&key.name, &PatchParams::default(), &Patch::Merge(patch));
        let request = match request.map_err(kube::Error::BuildRequest) {
            Ok(request) => request,
            Err(error) => return Err(failed(error)),
        };
        match client.request_text(request).await {
            Err(error) if !is_not_found(&error) => Err(failed(error)),
            Ok(_) | Err(_) => Ok(()),
        }
    }
}
