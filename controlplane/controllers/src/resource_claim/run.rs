//! Creates the missing claims of a pod, and reserves claims for a pod whose author has set its node.

use std::sync::Arc;

use coracle_events::{Event, cause};
use kube::api::ApiResource;
use kube::core::DynamicObject;
use kube::{Api, Client};
use serde_json::{Value, json};

use super::plan::{self, Step};
use crate::context::Context;
use crate::error::{Error, is_namespace_terminating};
use crate::object::{Key, ObjectExt, Pod, ResourceClaim, controller_of};
use crate::queue::{Next, Queue};
use crate::queueing::queue_pod_of_deleted;
use crate::write::Part;

const COMPONENT: &str = "resource_claim";

/// Queues pods whose claims have templates or are possibly not reserved, and the pods of deleted claims.
pub(crate) fn listen(context: &Context, queue: &Arc<Queue<Key>>) {
    let own = queue.clone();
    context.caches.pods.on_change(move |change| {
        let by_template = |pod: &&&Arc<Pod>| {
            pod.spec.resource_claims.iter().any(|claim| claim.resource_claim_template_name.is_some())
        };
        let is_own = |pod: &&&Arc<Pod>| by_template(pod) || plan::may_lack_reservations(pod);
        if let Some(pod) = change.new.as_ref().filter(|pod| is_own(pod)) {
            own.add(pod.key());
        }
    });
    let (own, pods) = (queue.clone(), context.caches.pods.clone());
    context.caches.resource_claims.on_change(move |change| {
        let Some(claim) = change.new.filter(|claim| is_allocated(claim)) else { return };
        if change.old.is_some_and(is_allocated) {
            return;
        }
        // Other pods do not use a generated claim.
        if let Some(owner) = controller_of(&claim.metadata).filter(|owner| owner.kind == "Pod") {
            let pod = pods.get(&Key::new(claim.namespace(), &owner.name));
            pod.filter(|pod| plan::may_lack_reservations(pod)).into_iter().for_each(|pod| own.add(pod.key()));
            return;
        }
        // All pods of the namespace are read. A shared claim is allocated only once, so an index would cost more than
        // it saves.
        let pods = pods.in_namespace(claim.namespace()).into_iter();
        let pods = pods.filter(|pod| plan::may_lack_reservations(pod));
        pods.filter(|pod| pod.claims().any(|name| name == claim.name())).for_each(|pod| own.add(pod.key()));
    });
    queue_pod_of_deleted(&context.caches.resource_claims, queue);
}

fn is_allocated(claim: &Arc<ResourceClaim>) -> bool {
    claim.status.allocation.is_some()
}

/// Reconciles one pod.
pub(crate) async fn reconcile(context: &Context, key: Key) -> Result<Next, Error> {
    let Some(pod) = context.caches.pods.get(&key) else { return Ok(Next::Wait) };
    context.caches.resource_claims.synced().await;
    let owned = context.caches.resource_claims.owned_by(&key.namespace, pod.uid());
    let owned: Vec<_> = owned.iter().map(AsRef::as_ref).collect();
    let mut names = Vec::new();
    for (name, step) in plan::steps(&pod, &owned) {
        let claim = match step {
            Step::Exists(claim) => claim,
            Step::Create { template } => match create(context, &pod, &name, &template).await? {
                Some(claim) => claim,
                None => continue,
            },
        };
        names.push((name, claim));
    }
    if let Some(patch) = plan::names_patch(&pod, &names) {
        context.pods().merge(&key, Part::Status, patch).await?;
    }
    if plan::may_lack_reservations(&pod) {
        reserve(context, &pod).await?;
    }
    Ok(Next::Wait)
}

/// Reserves the allocated claims for a pod that has a node.
async fn reserve(context: &Context, pod: &Pod) -> Result<(), Error> {
    for (name, is_own) in plan::claims_of_spec(pod) {
        let key = Key::new(pod.namespace(), name);
        let Some(claim) = context.caches.resource_claims.get(&key) else { continue };
        if let Some(users) = plan::reservation(pod, &claim, is_own) {
            let version = json!({"uid": claim.uid(), "resourceVersion": claim.metadata.resource_version});
            let patch = json!({"metadata": version, "status": {"reservedFor": users}});
            context.writer(&context.caches.resource_claims).merge(&key, Part::Status, patch).await?;
        }
    }
    Ok(())
}

/// Creates a claim from its template. Returns the name of the claim. `None` if the namespace is being deleted.
async fn create(context: &Context, pod: &Pod, name: &str, template: &str) -> Result<Option<String>, Error> {
    let found = read_template(&context.client, pod.namespace(), template).await;
    let created = match found {
        Ok(template) => {
            let claim = plan::claim(pod, name, &template);
            context.writer(&context.caches.resource_claims).create(pod.namespace(), claim).await
        }
        Err(error) => Err(error),
    };
    match created {
        Ok(claim) => Ok(Some(claim.name().to_owned())),
        Err(error) if is_namespace_terminating(&error) => Ok(None),
        Err(source) => {
            let message = format!("PodResourceClaim {name}: {}", cause(&source));
            context.record(pod, COMPONENT, Event::warning("FailedResourceClaimCreation", message));
            let object = format!("ResourceClaim of pod {}", pod.key());
            Err(Error::Request { verb: "create", object, source })
        }
    }
}

async fn read_template(client: &Client, namespace: &str, name: &str) -> Result<Value, kube::Error> {
    let resource = ApiResource {
        group: "resource.k8s.io".to_owned(),
        version: "v1".to_owned(),
        api_version: "resource.k8s.io/v1".to_owned(),
        kind: "ResourceClaimTemplate".to_owned(),
        plural: "resourceclaimtemplates".to_owned(),
    };
    let api: Api<DynamicObject> = Api::namespaced_with(client.clone(), namespace, &resource);
    Ok(api.get(name).await?.data)
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::time::Duration;

    use super::*;
    use crate::test_api::TestApi;

    #[tokio::test(start_paused = true)]
    async fn an_allocated_claim_queues_the_pods_that_use_it() {
        let api = TestApi::new(&[]);
        let (caches, queue) = (&api.context.caches, Arc::new(Queue::new()));
        for name in ["p", "q"] {
            let metadata = json!({"name": name, "namespace": "n", "uid": name, "resourceVersion": "1"});
            let claims = json!([{"name": "own", "resourceClaimName": "own"},
                {"name": "shared", "resourceClaimName": "shared"}]);
            let pod = json!({"metadata": metadata, "spec": {"nodeName": "a", "resourceClaims": claims}});
            caches.pods.written(serde_json::from_value(pod).unwrap());
        }
        listen(&api.context, &queue);
        let owner = json!({"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": "p", "controller": true});
        for (name, owners, expected) in
            [("own", json!([owner]), &["p"][..]), ("shared", json!([]), &["p", "q"][..])]
        {
            let metadata = json!({"name": name, "namespace": "n", "uid": name, "resourceVersion": "2",
                "ownerReferences": owners});
            let claim = json!({"metadata": metadata, "status": {"allocation": {"devices": {}}}});
            caches.resource_claims.written(serde_json::from_value(claim).unwrap());
            let queued = Mutex::new(Vec::new());
            let work = queue.work("test", |key: Key| {
                queued.lock().unwrap().push(key.name);
                async { Ok(Next::Wait) }
            });
            assert!(tokio::time::timeout(Duration::from_secs(1), work).await.is_err());
            assert_eq!(queued.into_inner().unwrap(), expected, "{name}");
        }
    }

    #[tokio::test]
    async fn a_claim_is_reserved_for_a_pod_that_was_created_with_a_node() {
        let path = "/apis/resource.k8s.io/v1/namespaces/n/resourceclaims/c";
        let claim = json!({"metadata": {"name": "c", "namespace": "n", "uid": "c", "resourceVersion": "7"},
            "status": {"allocation": {"devices": {}}}});
        let api = TestApi::new(&[(path, claim.clone())]);
        let caches = &api.context.caches;
        let metadata = json!({"name": "p", "namespace": "n", "uid": "p", "resourceVersion": "1"});
        let pod = json!({"metadata": metadata, "spec": {"nodeName": "a",
            "resourceClaims": [{"name": "gpu", "resourceClaimName": "c"}]}});
        caches.pods.written(serde_json::from_value(pod).unwrap());
        caches.resource_claims.written(serde_json::from_value(claim).unwrap());
        reserve(&api.context, &caches.pods.get(&Key::new("n", "p")).unwrap()).await.unwrap();
        let [write] = &api.writes()[..] else { panic!("{:?}", api.writes()) };
        assert_eq!(
            (write.method.as_str(), write.path.as_str()),
            ("PATCH", format!("{path}/status").as_str())
        );
        let user = json!({"resource": "pods", "name": "p", "uid": "p"});
        assert_eq!(write.body["status"], json!({"reservedFor": [user]}));
        assert_eq!(write.body["metadata"]["resourceVersion"], "7");
    }
}
