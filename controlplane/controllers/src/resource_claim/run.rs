//! Creates the missing claims of a pod.

use std::sync::Arc;

use coracle_events::Event;
use kube::api::ApiResource;
use kube::core::DynamicObject;
use kube::{Api, Client};
use serde_json::Value;

use super::plan::{self, Step};
use crate::context::Context;
use crate::error::{Error, is_namespace_terminating};
use crate::object::{Key, ObjectExt, Pod};
use crate::pod_control::reason;
use crate::queue::{Next, Queue};
use crate::queueing::queue_pod_of_deleted;
use crate::write::Part;

const COMPONENT: &str = "resource_claim";

/// Queues pods whose claims have templates, and the pods of deleted claims.
pub(crate) fn listen(context: &Context, queue: &Arc<Queue<Key>>) {
    let own = queue.clone();
    context.caches.pods.on_change(move |change| {
        let by_template = |pod: &&&Arc<Pod>| {
            pod.spec.resource_claims.iter().any(|claim| claim.resource_claim_template_name.is_some())
        };
        if let Some(pod) = change.new.as_ref().filter(|pod| by_template(pod)) {
            own.add(pod.key());
        }
    });
    queue_pod_of_deleted(&context.caches.resource_claims, queue);
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
    Ok(Next::Wait)
}

/// Creates a claim from its template. Returns its name, or `None` if the namespace is being deleted.
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
            let message = format!("PodResourceClaim {name}: {}", reason(&source));
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
