//! Writes of single objects, each answered into the cache of its kind.

use std::sync::Arc;

use kube::api::{DeleteParams, Patch, PatchParams, PostParams, Preconditions, Request};
use kube::core::NamespaceResourceScope;
use kube::{Api, Client, Resource};
use serde_json::{Value, json};

use crate::cache::Cache;
use crate::error::{Error, is_not_found};
use crate::object::{Key, Object};

/// The client and the cache of one kind.
pub(crate) struct Writer<'a, K> {
    pub(crate) client: &'a Client,
    pub(crate) cache: &'a Cache<K>,
}

/// A part of an object that is written apart from the rest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// All but the status.
    Main,
    /// The status alone.
    Status,
    /// Whether a certificate signing request is granted.
    Approval,
}

fn failed<K: Object>(verb: &'static str, key: &Key) -> impl FnOnce(kube::Error) -> Error {
    let object = format!("{} {key}", K::kind(&()));
    move |source| Error::Request { verb, object, source }
}

impl<K: Object> Writer<'_, K> {
    /// Creates an object from JSON without `apiVersion` and `kind`.
    pub(crate) async fn create(&self, namespace: &str, mut object: Value) -> Result<Arc<K>, kube::Error> {
        object["apiVersion"] = K::api_version(&()).into_owned().into();
        object["kind"] = K::kind(&()).into_owned().into();
        let url = K::url_path(&(), (!namespace.is_empty()).then_some(namespace));
        let body = serde_json::to_vec(&object).map_err(kube::Error::SerdeError)?;
        let request =
            Request::new(url).create(&PostParams::default(), body).map_err(kube::Error::BuildRequest)?;
        let created: K = self.client.request(request).await?;
        Ok(self.cache.written(created))
    }

    /// Merges JSON into an object. With `metadata.resourceVersion` in it, only into that version.
    pub(crate) async fn merge(&self, key: &Key, part: Part, patch: Value) -> Result<Arc<K>, Error> {
        let (params, patch) = (PatchParams::default(), Patch::Merge(patch));
        let url = Request::new(K::url_path(&(), (!key.namespace.is_empty()).then_some(&key.namespace)));
        let request = match part {
            Part::Main => url.patch(&key.name, &params, &patch),
            Part::Status => url.patch_subresource("status", &key.name, &params, &patch),
            Part::Approval => url.patch_subresource("approval", &key.name, &params, &patch),
        };
        let request = request.map_err(kube::Error::BuildRequest).map_err(failed::<K>("patch", key))?;
        let patched: K = self.client.request(request).await.map_err(failed::<K>("patch", key))?;
        Ok(self.cache.written(patched))
    }

    /// Deletes this very object. Its being gone already is success.
    pub(crate) async fn delete(&self, object: &K, mut params: DeleteParams) -> Result<(), kube::Error> {
        let key = object.key();
        params.preconditions =
            Some(Preconditions { uid: Some(object.uid().to_owned()), resource_version: None });
        let url = Request::new(K::url_path(&(), (!key.namespace.is_empty()).then_some(&key.namespace)));
        let request = url.delete(&key.name, &params).map_err(kube::Error::BuildRequest)?;
        match self.client.request_status::<K>(request).await {
            // The object itself is the answer while it is only marked; some servers also send it when it is gone.
            Ok(either) => match either.left() {
                Some(marked) if marked.deleting() => drop(self.cache.written(marked)),
                Some(_) | None => self.cache.removed(&key, object.uid()),
            },
            Err(error) if is_not_found(&error) => self.cache.removed(&key, object.uid()),
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// The object as the server has it now.
    pub(crate) async fn live(&self, key: &Key) -> Result<Option<K>, Error>
    where
        K: Resource<Scope = NamespaceResourceScope>,
    {
        let api: Api<K> = Api::namespaced(self.client.clone(), &key.namespace);
        api.get_opt(&key.name).await.map_err(failed::<K>("get", key))
    }
}

/// A patch that replaces the owner references of exactly this version of an object.
pub(crate) fn owners_patch<K: Object>(
    object: &K,
    owners: &[k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference],
) -> Value {
    json!({"metadata": {
        "uid": object.uid(),
        "resourceVersion": object.meta().resource_version,
        "ownerReferences": owners,
    }})
}
