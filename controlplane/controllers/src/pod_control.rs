//! Writes of the pods that a workload controls: adoption, release, creation in batches, deletion.

use std::sync::Arc;

use coracle_events::{Event, cause};
use coracle_values::label_selector::LabelSelector;
use futures::future::join_all;
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector as ApiLabelSelector;
use kube::Resource;
use kube::api::DeleteParams;
use kube::core::NamespaceResourceScope;
use serde_json::{Map, Value, json};

use crate::cache::Cache;
use crate::context::Context;
use crate::error::{Error, is_namespace_terminating};
use crate::object::{Object, ObjectExt, Pod, controller_of};
use crate::timestamp::whole_seconds;
use crate::write::{Part, owners_patch};

/// A workload whose pods are written.
pub(crate) struct PodControl<'a, K> {
    pub(crate) context: &'a Context,
    pub(crate) owner: &'a K,
    pub(crate) cache: &'a Cache<K>,
    /// The component in events.
    pub(crate) component: &'static str,
    /// Finalizer that is added to adopted pods and removed from released pods.
    pub(crate) finalizer: Option<&'static str>,
}

/// The pods that may belong to a workload, grouped by owner references and labels.
#[derive(Debug, Default)]
pub(crate) struct Claim {
    /// Controlled pods that match the selector.
    pub(crate) own: Vec<Arc<Pod>>,
    /// Orphaned pods that match the selector.
    pub(crate) adopt: Vec<Arc<Pod>>,
    /// Controlled pods that no longer match the selector.
    pub(crate) release: Vec<Arc<Pod>>,
}

impl Claim {
    /// Groups the pods that a workload controls and the orphaned pods of its namespace. A workload that is being
    /// deleted neither adopts nor releases pods.
    pub(crate) fn of(deleted: bool, selector: &LabelSelector, pods: Vec<Arc<Pod>>) -> Self {
        let mut claim = Self::default();
        for pod in pods {
            let fits = selector.matches(pod.metadata.labels.as_ref());
            match (controller_of(&pod.metadata).is_some(), fits) {
                (true, true) => claim.own.push(pod),
                (true, false) if !deleted && !pod.is_being_deleted() => claim.release.push(pod),
                (false, true) if !deleted && !pod.is_being_deleted() && !pod.finished() => {
                    claim.adopt.push(pod);
                }
                (true | false, _) => {}
            }
        }
        claim
    }
}

/// The label selector of a workload.
pub(crate) fn selector_of<K: Object>(owner: &K, selector: &ApiLabelSelector) -> Result<LabelSelector, Error> {
    LabelSelector::try_from(selector).map_err(|source| {
        let object = format!("{} {}", K::kind(&()), owner.key());
        Error::Selector { object, source }
    })
}

/// The pods that this workload controls, and the orphaned pods of its namespace.
pub(crate) fn candidates<K: Object>(context: &Context, owner: &K) -> Vec<Arc<Pod>> {
    let cache = &context.caches.pods;
    let mut pods = cache.owned_by(owner.namespace(), owner.uid());
    pods.extend(cache.owned_by(owner.namespace(), ""));
    pods
}

/// A pod from a pod template, without a name. Fields of a wrong type are omitted, because a write below such a field
/// would panic. A tenant controls the template of a revision.
pub(crate) fn from_template<K: Object>(owner: &K, template: &Value) -> Value {
    let mut metadata = Map::new();
    for field in ["labels", "annotations", "finalizers"] {
        let value = template.pointer(&format!("/metadata/{field}"));
        let is_right =
            |value: &&Value| if field == "finalizers" { value.is_array() } else { value.is_object() };
        if let Some(value) = value.filter(is_right) {
            metadata.insert(field.to_owned(), value.clone());
        }
    }
    let spec = template.get("spec").filter(|spec| spec.is_object()).cloned().unwrap_or_else(|| json!({}));
    metadata.insert("ownerReferences".to_owned(), json!([owner.controller_reference()]));
    json!({"metadata": metadata, "spec": spec})
}

/// The condition DisruptionTarget of a pod that a controller deletes, with the controller's reason and message.
pub(crate) fn disruption_target(pod: &Pod, reason: &str, message: &str, now: Timestamp) -> Value {
    json!({
        "type": "DisruptionTarget",
        "status": "True",
        "reason": reason,
        "message": message,
        "observedGeneration": pod.metadata.generation,
        "lastTransitionTime": whole_seconds(now),
    })
}

impl<K: Object + Resource<Scope = NamespaceResourceScope>> PodControl<'_, K> {
    /// Releases and adopts pods.
    pub(crate) async fn apply(&self, claim: &Claim) -> Result<(), Error> {
        self.release(&claim.release).await?;
        self.adopt(&claim.adopt).await
    }

    /// Removes the workload's owner reference and finalizer from pods.
    pub(crate) async fn release(&self, pods: &[Arc<Pod>]) -> Result<(), Error> {
        for pod in pods {
            let owners = pod.metadata.owner_references.iter().flatten();
            let owners: Vec<_> = owners.filter(|owner| owner.uid != self.owner.uid()).cloned().collect();
            let mut patch = owners_patch(&**pod, &owners);
            if let Some(finalizer) = self.finalizer {
                let others = pod.metadata.finalizers.iter().flatten().filter(|name| *name != finalizer);
                patch["metadata"]["finalizers"] = others.cloned().collect::<Vec<_>>().into();
            }
            self.context.pods().merge(&pod.key(), Part::Main, patch).await?;
        }
        Ok(())
    }

    /// Adds the workload's owner reference and finalizer to orphaned pods.
    pub(crate) async fn adopt(&self, pods: &[Arc<Pod>]) -> Result<(), Error> {
        if pods.is_empty() {
            return Ok(());
        }
        if !self.may_adopt().await? {
            return Ok(());
        }
        for pod in pods {
            let mut owners = pod.metadata.owner_references.clone().unwrap_or_default();
            owners.push(self.owner.controller_reference());
            let mut patch = owners_patch(&**pod, &owners);
            if let Some(finalizer) = self.finalizer {
                let mut finalizers = pod.metadata.finalizers.clone().unwrap_or_default();
                finalizers.retain(|name| name != finalizer);
                finalizers.push(finalizer.to_owned());
                patch["metadata"]["finalizers"] = finalizers.into();
            }
            self.context.pods().merge(&pod.key(), Part::Main, patch).await?;
        }
        Ok(())
    }

    /// Whether the workload exists and is not being deleted, according to the API server. A cached workload may have
    /// been deleted already, with the option to orphan its pods. Such pods must stay orphans.
    pub(crate) async fn may_adopt(&self) -> Result<bool, Error> {
        let live = self.context.writer(self.cache).live(&self.owner.key()).await?;
        Ok(live.is_some_and(|live| live.uid() == self.owner.uid() && !live.is_being_deleted()))
    }

    /// Creates pods in batches of 1, 2, 4 and so on, so that an error that affects all pods causes only one failed
    /// request. The namespace's [permits](crate::state::pod_creations) limit the concurrent requests.
    pub(crate) async fn create(&self, pods: &[Value]) -> Result<(), kube::Error> {
        self.create_counted(pods).await.1
    }

    /// Does the same as [`PodControl::create`]. Also returns the number of pods that were created.
    pub(crate) async fn create_counted(&self, pods: &[Value]) -> (usize, Result<(), kube::Error>) {
        let namespace = self.owner.namespace();
        let permits = &self.context.pod_creations.permits(namespace);
        let (mut left, mut size, mut created) = (pods, 1, 0);
        while !left.is_empty() {
            let (batch, rest) = left.split_at(size.min(left.len()));
            let requests = batch.iter().map(|pod| async move {
                // The semaphore is never closed.
                let _permit = permits.acquire().await;
                self.context.pods().create_in(namespace, pod).await
            });
            let mut failure = None;
            for result in join_all(requests).await {
                match result {
                    Ok(pod) => {
                        created += 1;
                        let message = format!("Created pod: {}", pod.name());
                        self.record(Event::normal("SuccessfulCreate", message));
                    }
                    // The workload is deleted together with the namespace.
                    Err(error) if is_namespace_terminating(&error) => return (created, Ok(())),
                    Err(error) => failure = Some(error),
                }
            }
            if let Some(error) = failure {
                let message = format!("Error creating: {}", cause(&error));
                self.record(Event::warning("FailedCreate", message));
                return (created, Err(error));
            }
            left = rest;
            size *= 2;
        }
        (created, Ok(()))
    }

    /// Deletes pods. All requests are sent. Returns the last error.
    pub(crate) async fn delete(&self, pods: &[Arc<Pod>]) -> Result<(), kube::Error> {
        let writer = self.context.pods();
        let results = join_all(pods.iter().map(|pod| writer.delete(pod, DeleteParams::default()))).await;
        let mut outcome = Ok(());
        for (pod, result) in pods.iter().zip(results) {
            match result {
                Ok(()) => {
                    let message = format!("Deleted pod: {}", pod.name());
                    self.record(Event::normal("SuccessfulDelete", message));
                }
                Err(error) => {
                    let message = format!("Error deleting: {}", cause(&error));
                    self.record(Event::warning("FailedDelete", message));
                    outcome = Err(error);
                }
            }
        }
        outcome
    }

    /// The error of a failed request for this workload.
    pub(crate) fn failed(&self, verb: &'static str, source: kube::Error) -> Error {
        Error::Request { verb, object: format!("{} {}", K::kind(&()), self.owner.key()), source }
    }

    /// Records an event about the workload.
    pub(crate) fn record(&self, event: Event) {
        self.context.record(self.owner, self.component, event);
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;
    use crate::object::ReplicaSet;
    use crate::test_api::TestApi;

    /// Creates a pod of a replica set in this namespace. Returns the number of created pods.
    async fn create_pod(api: &TestApi, namespace: &str) -> usize {
        let set = json!({"metadata": {"name": "rs", "namespace": namespace, "uid": "rs"}, "spec": {"selector": {}}});
        let set: ReplicaSet = serde_json::from_value(set).unwrap();
        let (context, cache) = (&api.context, &api.context.caches.replica_sets);
        let control = PodControl { context, owner: &set, cache, component: "test", finalizer: None };
        control.create_counted(&[json!({"metadata": {"generateName": "rs-"}})]).await.0
    }

    #[tokio::test]
    async fn pods_of_a_namespace_without_permits_wait_and_those_of_others_do_not() {
        let pod =
            json!({"metadata": {"name": "rs-1", "namespace": "other", "uid": "p", "resourceVersion": "7"}});
        let api = TestApi::new(&[("/api/v1/namespaces/other/pods", pod)]);
        let permits = api.context.pod_creations.permits("full");
        let all = u32::try_from(permits.available_permits()).unwrap();
        let held = permits.try_acquire_many(all).unwrap();
        let mut waiting = Box::pin(create_pod(&api, "full"));
        assert!((&mut waiting).now_or_never().is_none());
        assert_eq!(create_pod(&api, "other").await, 1);
        let paths = || api.writes().into_iter().map(|write| write.path).collect::<Vec<_>>();
        assert_eq!(paths(), ["/api/v1/namespaces/other/pods"]);
        drop(held);
        assert_eq!(waiting.await, 0, "the API has no path for these pods");
        assert_eq!(paths(), ["/api/v1/namespaces/other/pods", "/api/v1/namespaces/full/pods"]);
    }

    #[test]
    fn the_disruption_condition_has_the_generation_of_the_pod() {
        let mut pod = Pod::default();
        pod.metadata.generation = Some(3);
        let now = "2026-01-01T12:00:00.5Z".parse().unwrap();
        let condition = disruption_target(&pod, "Why", "because", now);
        assert_eq!(condition["observedGeneration"], 3);
        assert_eq!(condition["lastTransitionTime"], "2026-01-01T12:00:00Z");
    }
}
