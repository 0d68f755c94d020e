//! Writes of single objects. The cache of the kind is updated with each response.

use std::sync::Arc;

use coracle_values::merge_patch;
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

/// The part of an object that a patch changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// The object without its status.
    Main,
    /// `status`.
    Status,
    /// `approval`, of a certificate signing request.
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

    /// Applies a merge patch to an object. A patch with `metadata.resourceVersion` applies only to that version.
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

    /// Deletes the object with this uid. A resource version in the parameters is a further precondition. A missing
    /// object is not an error.
    pub(crate) async fn delete(&self, object: &K, mut params: DeleteParams) -> Result<(), kube::Error> {
        let key = object.key();
        let resource_version = params.preconditions.take().and_then(|given| given.resource_version);
        params.preconditions = Some(Preconditions { uid: Some(object.uid().to_owned()), resource_version });
        let url = Request::new(K::url_path(&(), (!key.namespace.is_empty()).then_some(&key.namespace)));
        let request = url.delete(&key.name, &params).map_err(kube::Error::BuildRequest)?;
        match self.client.request_status::<K>(request).await {
            // The response is the object while it has finalizers; some servers also send it after the deletion.
            Ok(either) => match either.left() {
                Some(marked) if marked.is_being_deleted() => drop(self.cache.written(marked)),
                Some(_) | None => self.cache.removed(&key, object.uid()),
            },
            Err(error) if is_not_found(&error) => self.cache.removed(&key, object.uid()),
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// Reads the object from the API server, not from the cache.
    pub(crate) async fn live(&self, key: &Key) -> Result<Option<K>, Error>
    where
        K: Resource<Scope = NamespaceResourceScope>,
    {
        let api: Api<K> = Api::namespaced(self.client.clone(), &key.namespace);
        api.get_opt(&key.name).await.map_err(failed::<K>("get", key))
    }
}

/// Parameters that delete only this version of an object: the reason for the deletion may not apply to a newer version.
pub(crate) fn if_unchanged<K: Object>(object: &K) -> DeleteParams {
    let resource_version = object.meta().resource_version.clone();
    let preconditions = Preconditions { uid: Some(object.uid().to_owned()), resource_version };
    DeleteParams { preconditions: Some(preconditions), ..DeleteParams::default() }
}

/// A patch that replaces the owner references. It applies only to this version of the object.
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

/// The merge patch between two statuses. `None` if they are equal.
pub(crate) fn status_patch<K: Object>(object: &K, old: &Value, new: &Value) -> Option<Value> {
    let difference = merge_patch::difference(old, new)?;
    Some(json!({"metadata": {"uid": object.uid()}, "status": difference}))
}
