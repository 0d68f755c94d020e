//! Writes of single objects. The cache of the kind is updated with each response.

use std::sync::Arc;

use coracle_values::merge_patch;
use futures::future::BoxFuture;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams, Preconditions, Request};
use kube::core::NamespaceResourceScope;
use kube::{Api, Client, Resource};
use serde::Deserialize;
use serde::de::{Error as _, IgnoredAny};
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

/// A request, or the reason why it cannot be built.
type Built = Result<http::Request<Vec<u8>>, kube::core::request::Error>;

/// Sends a request and returns the text of the response. The future is boxed, so that its code is compiled once for all
/// kinds.
fn send(client: &Client, request: Built) -> BoxFuture<'_, Result<String, kube::Error>> {
    Box::pin(async move { client.request_text(request.map_err(kube::Error::BuildRequest)?).await })
}

fn decode<K: Object>(text: &str) -> Result<K, kube::Error> {
    serde_json::from_str(text).map_err(kube::Error::SerdeError)
}

/// Requests on the objects of a kind in one namespace, or of a kind without namespaces.
fn requests<K: Object>(namespace: &str) -> Request {
    Request::new(K::url_path(&(), (!namespace.is_empty()).then_some(namespace)))
}

fn patch_request(requests: &Request, name: &str, part: Part, patch: Value) -> Built {
    let (params, patch) = (PatchParams::default(), Patch::Merge(patch));
    match part {
        Part::Main => requests.patch(name, &params, &patch),
        Part::Status => requests.patch_subresource("status", name, &params, &patch),
        Part::Approval => requests.patch_subresource("approval", name, &params, &patch),
    }
}

/// The response to a request that deletes an object: the object while it has finalizers, otherwise a status. Some
/// servers also send the object after the deletion.
#[derive(Deserialize)]
struct Deleted {
    kind: Option<String>,
    #[serde(default)]
    metadata: DeletedMetadata,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct DeletedMetadata {
    uid: Option<String>,
    deletion_timestamp: Option<IgnoredAny>,
}

/// Whether the deleted object still exists and waits for its finalizers, according to the response. Other responses are
/// errors: if the cache removed an object by mistake, controllers would create the object again.
fn waits_for_finalizers(text: &str, uid: &str) -> Result<bool, kube::Error> {
    let deleted: Deleted = serde_json::from_str(text).map_err(kube::Error::SerdeError)?;
    if deleted.kind.as_deref() == Some("Status") {
        return Ok(false);
    }
    if deleted.metadata.uid.as_deref() != Some(uid) {
        let error =
            serde_json::Error::custom("the response to a deletion is neither a status nor the object");
        return Err(kube::Error::SerdeError(error));
    }
    Ok(deleted.metadata.deletion_timestamp.is_some())
}

impl<K: Object> Writer<'_, K> {
    /// Creates an object from JSON without `apiVersion` and `kind`.
    pub(crate) async fn create(&self, namespace: &str, mut object: Value) -> Result<Arc<K>, kube::Error> {
        object["apiVersion"] = K::api_version(&()).into_owned().into();
        object["kind"] = K::kind(&()).into_owned().into();
        let body = serde_json::to_vec(&object).map_err(kube::Error::SerdeError)?;
        let request = requests::<K>(namespace).create(&PostParams::default(), body);
        let created = send(self.client, request).await?;
        Ok(self.cache.written(decode(&created)?))
    }

    /// Applies a merge patch to an object. A patch with `metadata.resourceVersion` applies only to that version.
    pub(crate) async fn merge(&self, key: &Key, part: Part, patch: Value) -> Result<Arc<K>, Error> {
        let request = patch_request(&requests::<K>(&key.namespace), &key.name, part, patch);
        let patched = send(self.client, request).await.and_then(|patched| decode(&patched));
        Ok(self.cache.written(patched.map_err(failed::<K>("patch", key))?))
    }

    /// Deletes an object. Its uid is a precondition, and so is a resource version in the parameters. A missing object
    /// is not an error.
    pub(crate) async fn delete(&self, object: &K, mut params: DeleteParams) -> Result<(), kube::Error> {
        let key = object.key();
        let resource_version = params.preconditions.take().and_then(|given| given.resource_version);
        params.preconditions = Some(Preconditions { uid: Some(object.uid().to_owned()), resource_version });
        let request = requests::<K>(&key.namespace).delete(&key.name, &params);
        match send(self.client, request).await {
            Ok(text) if waits_for_finalizers(&text, object.uid())? => {
                drop(self.cache.written(decode(&text)?))
            }
            Ok(_) => self.cache.removed(&key, object.uid()),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_status_or_the_object_is_a_response_to_a_deletion() {
        let time = "2026-01-01T00:00:00Z";
        let waits = |response: Value| waits_for_finalizers(&response.to_string(), "u").ok();
        assert_eq!(waits(json!({"kind": "Status", "metadata": {}, "status": "Success"})), Some(false));
        assert_eq!(waits(json!({"kind": "Pod", "metadata": {"uid": "u"}, "spec": 7})), Some(false));
        assert_eq!(waits(json!({"metadata": {"uid": "u", "deletionTimestamp": null}})), Some(false));
        assert_eq!(waits(json!({"metadata": {"uid": "u", "deletionTimestamp": time}})), Some(true));
        for other in [
            json!({}),
            json!({"kind": "Pod"}),
            json!({"kind": "Pod", "metadata": {"deletionTimestamp": time}}),
            json!({"kind": "Pod", "metadata": {"uid": "v", "deletionTimestamp": time}}),
            json!([]),
            json!("deleted"),
        ] {
            assert_eq!(waits(other.clone()), None, "{other}");
        }
    }
}
