//! Deletes the contents of namespaces, pods first, then removes the finalizer.

use std::sync::Arc;

use jiff::Timestamp;
use kube::api::Request;
use kube::discovery::verbs;
use kube::{Api, Client, Resource};
use serde_json::{Value, json};

use super::plan::{RemainingContent, conditions};
use crate::api_kind::ApiKind;
use crate::context::Context;
use crate::error::{Error, is_not_found};
use crate::object::{Key, Meta, Namespace, ObjectExt};
use crate::queue::{Next, Queue};
use crate::write::Part;

const FINALIZER: &str = "kubernetes";

/// Queues a namespace that is being deleted when it changes, and when one of its pods is deleted.
pub(crate) fn listen(context: &Context, queue: &Arc<Queue<Key>>) {
    let own = queue.clone();
    context.caches.namespaces.on_change(move |change| {
        if let Some(namespace) = change.new
            && namespace.is_being_deleted()
        {
            own.add(namespace.key());
        }
    });
    let (own, namespaces) = (queue.clone(), context.caches.namespaces.clone());
    context.caches.pods.on_change(move |change| {
        let (Some(pod), None) = (change.old, change.new) else { return };
        let key = Key::new("", pod.namespace());
        if namespaces.get(&key).is_some_and(|namespace| namespace.is_being_deleted()) {
            own.add(key);
        }
    });
}

/// Reconciles one namespace.
pub(crate) async fn reconcile(context: &Context, key: Key) -> Result<Next, Error> {
    let cached = context.caches.namespaces.get(&key).filter(|cached| must_be_emptied(cached));
    let Some(cached) = cached else { return Ok(Next::Wait) };
    // The cache has a deleted namespace until the watch reports its deletion. Meanwhile a new namespace can have the
    // same name. The contents of the new namespace must not be deleted.
    let live = read(context, &key).await?;
    let Some(namespace) = live.filter(|live| live.uid() == cached.uid() && must_be_emptied(live)) else {
        return Ok(Next::Wait);
    };
    let discovered = context.kinds().await?;
    let contents =
        discovered.kinds.iter().filter(|kind| kind.namespaced && kind.can(&[verbs::DELETE, verbs::LIST]));
    let (pods, others): (Vec<_>, Vec<_>) =
        contents.partition(|kind| kind.resource.group.is_empty() && kind.resource.plural == "pods");
    let mut remaining = empty(context, &key.name, &pods).await;
    if remaining.is_empty() {
        remaining = empty(context, &key.name, &others).await;
    }
    remaining.undiscovered = discovered.unavailable;
    if remaining.is_empty() {
        return finalize(context, &namespace).await;
    }
    write_conditions(context, &namespace, &remaining).await?;
    // The queue retries with back-off. The deletion of a pod queues the namespace immediately.
    Err(Error::NotEmpty { object: format!("Namespace {key}") })
}

/// Whether the namespace is being deleted and has the finalizer of this controller.
fn must_be_emptied(namespace: &Namespace) -> bool {
    let finalizers = namespace.spec.finalizers.as_deref().unwrap_or_default();
    namespace.is_being_deleted() && finalizers.iter().any(|finalizer| finalizer == FINALIZER)
}

/// Reads a namespace from the API server.
async fn read(context: &Context, key: &Key) -> Result<Option<Namespace>, Error> {
    let namespaces: Api<Namespace> = Api::all(context.client.clone());
    let failed = |source| Error::Request { verb: "get", object: format!("Namespace {key}"), source };
    namespaces.get_opt(&key.name).await.map_err(failed)
}

/// Deletes all objects of these kinds. Returns the remaining objects and the failures.
async fn empty(context: &Context, namespace: &str, kinds: &[&ApiKind]) -> RemainingContent {
    let mut remaining = RemainingContent::default();
    for kind in kinds {
        match delete_kind(&context.client, namespace, kind).await {
            Ok((found, _)) if found.is_empty() => {}
            Ok((found, deleted)) => {
                remaining.count(&kind.name(), found.iter().map(|object| &object.metadata));
                remaining.failures.extend(deleted.err().map(|error| error.to_string()));
            }
            Err(Error::Request { source, .. }) if is_not_found(&source) => {}
            Err(error) => remaining.failures.push(error.to_string()),
        }
    }
    remaining
}

/// Deletes the objects of a kind. Returns the remaining objects, and the result of the deletion.
///
/// Most kinds have no objects in a namespace, and a list costs less than a deletion with its admission and audit. If
/// the list is empty, no deletion is needed: a namespace that is being deleted gets no new objects.
async fn delete_kind(
    client: &Client,
    namespace: &str,
    kind: &ApiKind,
) -> Result<(Vec<Meta>, Result<(), Error>), Error> {
    if kind.is_empty_in(client, namespace).await? {
        return Ok((Vec::new(), Ok(())));
    }
    let deleted = kind.delete_all(client, namespace).await;
    Ok((kind.list(client, namespace).await?, deleted))
}

async fn write_conditions(
    context: &Context,
    namespace: &Namespace,
    remaining: &RemainingContent,
) -> Result<(), Error> {
    let old = namespace.status.conditions.as_deref().unwrap_or_default();
    let new = conditions(old, remaining, Timestamp::now());
    if old == new {
        return Ok(());
    }
    let patch = json!({"metadata": {"uid": namespace.uid()}, "status": {"conditions": new}});
    context.writer(&context.caches.namespaces).merge(&namespace.key(), Part::Status, patch).await.map(drop)
}

/// Removes the finalizer through the subresource `finalize`. No other request can remove it.
async fn finalize(context: &Context, namespace: &Namespace) -> Result<Next, Error> {
    let key = &namespace.key();
    let failed = |verb| move |source| Error::Request { verb, object: format!("Namespace {key}"), source };
    let requests = Request::new(Namespace::url_path(&(), None));
    let get = requests.get(&key.name, &Default::default()).map_err(kube::Error::BuildRequest);
    let mut live: Value = match context.client.request(get.map_err(failed("get"))?).await {
        Err(error) if is_not_found(&error) => return Ok(Next::Wait),
        result => result.map_err(failed("get"))?,
    };
    if live.pointer("/metadata/uid").and_then(Value::as_str) != Some(namespace.uid()) {
        return Ok(Next::Wait);
    }
    if let Some(finalizers) = live.pointer_mut("/spec/finalizers").and_then(Value::as_array_mut) {
        finalizers.retain(|finalizer| finalizer != FINALIZER);
    }
    let put = serde_json::to_vec(&live).map_err(kube::Error::SerdeError).and_then(|body| {
        let request = requests.replace_subresource("finalize", &key.name, &Default::default(), body);
        request.map_err(kube::Error::BuildRequest)
    });
    match context.client.request_text(put.map_err(failed("finalize"))?).await {
        Err(error) if !is_not_found(&error) => Err(failed("finalize")(error)),
        Ok(_) | Err(_) => Ok(Next::Wait),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_api::TestApi;

    const DELETED: &str = "2026-01-01T00:00:00Z";
    const POLICIES: &str = "/apis/networking.k8s.io/v1/namespaces/n/networkpolicies";
    const PODS: &str = "/api/v1/namespaces/n/pods";
    const STATUS: &str = "/api/v1/namespaces/n/status";

    fn namespace(uid: &str, deleted: Option<&str>) -> Value {
        json!({"metadata": {"name": "n", "uid": uid, "resourceVersion": "7", "deletionTimestamp": deleted},
            "spec": {"finalizers": [FINALIZER]}})
    }

    /// The discovery document of a group with one kind.
    fn discovery(group: &str, plural: &str, kind: &str) -> Value {
        let resource = json!({"resource": plural, "scope": "Namespaced", "responseKind": {"kind": kind},
            "verbs": ["list", "delete", "deletecollection"]});
        let versions = json!([{"version": "v1", "freshness": "Current", "resources": [resource]}]);
        json!({"items": [{"metadata": {"name": group}, "versions": versions}]})
    }

    fn list(names: &[&str]) -> Value {
        let items: Vec<Value> = names.iter().map(|name| json!({"metadata": {"name": name}})).collect();
        json!({"metadata": {"resourceVersion": "8"}, "items": items})
    }

    #[tokio::test]
    async fn cve_2024_7598_network_policies_are_deleted_after_the_pods() {
        // The simulated API keeps the objects, as if a pod had a long grace period.
        for (pods, writes) in [
            (list(&["p"]), vec![("DELETE", PODS), ("PATCH", STATUS)]),
            // It is not known whether the namespace has pods.
            (json!("not a list"), vec![("PATCH", STATUS)]),
            (list(&[]), vec![("DELETE", POLICIES), ("PATCH", STATUS)]),
        ] {
            let api = TestApi::new(&[
                ("/api/v1/namespaces/n", namespace("a", Some(DELETED))),
                // Discovery lists the policies before the pods.
                ("/apis", discovery("networking.k8s.io", "networkpolicies", "NetworkPolicy")),
                ("/api", discovery("", "pods", "Pod")),
                (POLICIES, list(&["deny-all"])),
                (PODS, pods.clone()),
            ]);
            let cached = serde_json::from_value(namespace("a", Some(DELETED))).unwrap();
            api.context.caches.namespaces.written(cached);
            let outcome = reconcile(&api.context, Key::new("", "n")).await;
            assert!(matches!(outcome, Err(Error::NotEmpty { .. })), "{pods}");
            let sent = api.writes();
            let sent: Vec<_> = sent.iter().map(|write| (&*write.method, &*write.path)).collect();
            assert_eq!(sent, writes, "{pods}");
        }
    }

    /// Discovery is not simulated: a reconcile that would empty the namespace fails.
    #[tokio::test]
    async fn a_new_namespace_with_the_name_of_a_deleted_one_keeps_its_contents() {
        for (live, empties) in [
            (namespace("new", None), false),
            (namespace("new", Some(DELETED)), false),
            (namespace("old", Some(DELETED)), true),
        ] {
            let api = TestApi::new(&[("/api/v1/namespaces/n", live.clone())]);
            let cached = serde_json::from_value(namespace("old", Some(DELETED))).unwrap();
            api.context.caches.namespaces.written(cached);
            let outcome = reconcile(&api.context, Key::new("", "n")).await;
            assert_eq!(matches!(outcome, Err(Error::Discovery(_))), empties, "{live}");
            assert!(api.writes().is_empty());
        }
    }
}
