//! The scheduler's requests: bindings, conditions and nominated nodes of pods without a node, and deletions of victims.

use std::time::Duration;

use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams, Preconditions};
use kube::{Client, Error};
use serde::Serialize;
use serde::de::IgnoredAny;
use serde_json::json;

use crate::devices::may_use_devices;
use crate::object::Pod;
use crate::preempt::Victim;
use crate::volumes::claims_of;
use coracle_values::object::ObjectExt;

/// Timeout of the requests for which a pod waits: evictions, and writes of the nominated node.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);

/// The body of a request that binds a pod.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Binding<'a> {
    api_version: &'static str,
    kind: &'static str,
    metadata: BindingMetadata<'a>,
    target: Target<'a>,
}

#[derive(Serialize)]
struct BindingMetadata<'a> {
    name: &'a str,
    namespace: &'a str,
    uid: &'a str,
}

/// The node of a binding.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Target<'a> {
    api_version: &'static str,
    kind: &'static str,
    name: &'a str,
}

/// Binds a pod to a node.
pub(crate) async fn bind(client: Client, pod: &Pod, node: &str) -> Result<(), Error> {
    let api: Api<Pod> = Api::namespaced(client, pod.namespace());
    let binding = Binding {
        api_version: "v1",
        kind: "Binding",
        metadata: BindingMetadata { name: pod.name(), namespace: pod.namespace(), uid: pod.uid() },
        target: Target { api_version: "v1", kind: "Node", name: node },
    };
    // The response is a Status, which is not needed.
    api.create_subresource::<_, IgnoredAny>("binding", pod.name(), &PostParams::default(), &binding)
        .await
        .map(drop)
}

/// Reason of the condition `PodScheduled` of a pod without a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NotScheduled {
    /// No node can run the pod.
    Unschedulable,
    /// An error prevented the scheduling. The scheduler retries the pod. More nodes would not help.
    SchedulerError,
}

impl NotScheduled {
    fn name(self) -> &'static str {
        match self {
            Self::Unschedulable => "Unschedulable",
            Self::SchedulerError => "SchedulerError",
        }
    }
}

/// Writes the condition with the reason why the pod is not scheduled, unless the pod already has this condition.
/// `nominated` is the node from which the scheduler evicts pods for this pod. With the reason `SchedulerError`, the
/// write is tried once more if the pod has changed meanwhile, unless the pod has a node now.
pub(crate) async fn mark_not_scheduled(
    client: Client,
    pod: &Pod,
    reason: NotScheduled,
    message: &str,
    nominated: Option<&str>,
) -> Result<(), Error> {
    let api: Api<Pod> = Api::namespaced(client, pod.namespace());
    let marked = write_condition(&api, pod, reason, message, nominated).await;
    let is_conflict = matches!(&marked, Err(Error::Api(status)) if status.is_conflict());
    if reason != NotScheduled::SchedulerError || !is_conflict {
        return marked;
    }
    // The scheduler's own write of a nominated node may have changed the pod. This nominated node must not stay.
    let newest = api.get(pod.name()).await?;
    if newest.uid() != pod.uid() || newest.node().is_some() {
        return Ok(());
    }
    write_condition(&api, &newest, reason, message, nominated).await
}

/// Writes the condition once. With the reason `SchedulerError`, the write fails if the pod has changed meanwhile.
async fn write_condition(
    api: &Api<Pod>,
    pod: &Pod,
    reason: NotScheduled,
    message: &str,
    nominated: Option<&str>,
) -> Result<(), Error> {
    let old = pod.status.conditions.iter().flatten().find(|condition| condition.type_ == "PodScheduled");
    let is_same = old.is_some_and(|old| {
        old.status == "False"
            && old.reason.as_deref() == Some(reason.name())
            && old.message.as_deref() == Some(message)
    });
    // The binding of a pod with claims writes a nominated node, which this state of the pod may not contain yet.
    let may_be_nominated =
        reason == NotScheduled::SchedulerError && (claims_of(pod).next().is_some() || may_use_devices(pod));
    if is_same && !may_be_nominated && pod.status.nominated_node_name.as_deref() == nominated {
        return Ok(());
    }
    let now = jiff::Timestamp::now();
    let now = jiff::Timestamp::from_second(now.as_second()).unwrap_or(now).to_string();
    let since = old.filter(|old| old.status == "False").and_then(|old| old.last_transition_time.as_ref());
    let condition = json!({
        "type": "PodScheduled",
        "observedGeneration": pod.metadata.generation,
        "status": "False",
        "reason": reason.name(),
        "message": message,
        "lastProbeTime": null,
        "lastTransitionTime": since.map_or(now, |time| time.0.to_string()),
    });
    let mut metadata = json!({"uid": pod.uid()});
    // If the response to a binding was lost, the pod may have a node. With this resource version, the API server
    // refuses the patch of a changed pod.
    if reason == NotScheduled::SchedulerError
        && let Some(version) = &pod.metadata.resource_version
    {
        metadata["resourceVersion"] = version.as_str().into();
    }
    let patch = json!({
        "metadata": metadata,
        "status": {"conditions": [condition], "nominatedNodeName": nominated},
    });
    api.patch_status(pod.name(), &PatchParams::default(), &Patch::Strategic(patch)).await.map(drop)
}

/// Writes the nominated node into the status of a pod. `None` removes it.
pub(crate) async fn set_nominated_node(client: Client, pod: &Pod, node: Option<&str>) -> Result<(), Error> {
    let patch = json!({"metadata": {"uid": pod.uid()}, "status": {"nominatedNodeName": node}});
    let api: Api<Pod> = Api::namespaced(client, pod.namespace());
    let params = PatchParams::default();
    let patch = Patch::Strategic(patch);
    in_time(api.patch_status(pod.name(), &params, &patch)).await.map(drop)
}

/// Sets the condition `DisruptionTarget` of a victim of preemption, then deletes the victim. A victim that does not
/// exist any more is not an error.
pub(crate) async fn evict(client: Client, victim: &Victim, scheduler: &str) -> Result<(), Error> {
    in_time(delete_victim(client, victim, scheduler)).await
}

/// Ends a request with an error after [`REQUEST_TIMEOUT`].
async fn in_time<T>(request: impl Future<Output = Result<T, Error>>) -> Result<T, Error> {
    match tokio::time::timeout(REQUEST_TIMEOUT, request).await {
        Ok(result) => result,
        Err(elapsed) => Err(Error::Service(elapsed.into())),
    }
}

async fn delete_victim(client: Client, victim: &Victim, scheduler: &str) -> Result<(), Error> {
    let now = jiff::Timestamp::now();
    let now = jiff::Timestamp::from_second(now.as_second()).unwrap_or(now).to_string();
    let condition = json!({
        "type": "DisruptionTarget",
        "status": "True",
        "reason": "PreemptionByScheduler",
        "message": format!("{scheduler}: preempting to accommodate a higher priority pod"),
        "lastProbeTime": null,
        "lastTransitionTime": now,
    });
    let patch = json!({"metadata": {"uid": victim.uid}, "status": {"conditions": [condition]}});
    let api: Api<Pod> = Api::namespaced(client, &victim.namespace);
    let patched = api.patch_status(&victim.name, &PatchParams::default(), &Patch::Strategic(patch)).await;
    let preconditions = Some(Preconditions { uid: Some(victim.uid.clone()), resource_version: None });
    let params = DeleteParams { preconditions, ..DeleteParams::default() };
    let deleted = match patched {
        Ok(_) => api.delete(&victim.name, &params).await.map(drop),
        Err(error) => Err(error),
    };
    match deleted {
        Err(Error::Api(status)) if status.is_not_found() || status.is_conflict() => Ok(()),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use http::{Request, Response};
    use kube::client::Body;

    use super::*;
    use crate::config::Profile;
    use crate::fixture;
    use crate::preempt::preempt;

    #[tokio::test]
    async fn a_binding_names_the_pod_and_the_node() {
        let service = tower::service_fn(|request: Request<Body>| async move {
            let path = request.uri().path().to_owned();
            let body = request.into_body().collect_bytes().await.unwrap();
            let body: serde_json::Value = serde_json::from_slice(&body).unwrap();
            let expected = json!({
                "apiVersion": "v1",
                "kind": "Binding",
                "metadata": {"name": "p", "namespace": "d", "uid": "p"},
                "target": {"apiVersion": "v1", "kind": "Node", "name": "a"},
            });
            let is_same = path == "/api/v1/namespaces/d/pods/p/binding" && body == expected;
            let answer = Response::builder().status(if is_same { 201_u16 } else { 500 });
            Ok::<_, Infallible>(answer.body(Body::from(b"{}".to_vec())).unwrap())
        });
        let pod = crate::fixture::pod("p", json!({"containers": [{}]}));
        assert!(bind(Client::new(service, ""), &pod, "a").await.is_ok());
    }

    #[tokio::test]
    async fn the_condition_of_an_error_is_written_again_after_a_conflict_unless_the_pod_has_a_node() {
        for (node, expected) in [(None, vec!["7", "8"]), (Some("a"), vec!["7"])] {
            let (sender, mut versions) = tokio::sync::mpsc::unbounded_channel();
            let service = tower::service_fn(move |request: Request<Body>| {
                let sender = sender.clone();
                async move {
                    let is_read = request.method() == http::Method::GET;
                    let body = request.into_body().collect_bytes().await.unwrap();
                    let metadata = json!({"name": "p", "namespace": "d", "uid": "p", "resourceVersion": "8"});
                    let newest = json!({"metadata": metadata, "spec": {"nodeName": node}});
                    if is_read {
                        let body = Body::from(newest.to_string().into_bytes());
                        return Ok::<_, Infallible>(Response::new(body));
                    }
                    let patch: serde_json::Value = serde_json::from_slice(&body).unwrap();
                    let version = patch["metadata"]["resourceVersion"].as_str().unwrap().to_owned();
                    let status = if version == "8" { 200_u16 } else { 409 };
                    sender.send(version).unwrap();
                    let answer =
                        json!({"kind": "Status", "code": status, "reason": "Conflict", "message": ""});
                    let answer = if status == 200 { newest } else { answer };
                    let body = Body::from(answer.to_string().into_bytes());
                    Ok(Response::builder().status(status).body(body).unwrap())
                }
            });
            let mut pod = fixture::pod("p", json!({"containers": [{}]}));
            pod.metadata.resource_version = Some("7".to_owned());
            let (client, error) = (Client::new(service, ""), NotScheduled::SchedulerError);
            mark_not_scheduled(client, &pod, error, "running Bind", None).await.unwrap();
            let mut found = Vec::new();
            while let Ok(version) = versions.try_recv() {
                found.push(version);
            }
            assert_eq!(found, expected);
        }
    }

    #[tokio::test]
    async fn the_condition_of_an_error_is_written_again_if_the_binding_may_have_nominated_a_node() {
        let claim = json!({"name": "v", "persistentVolumeClaim": {"claimName": "c"}});
        for (volumes, expected) in [(json!([]), 0), (json!([claim]), 1)] {
            let (sender, mut requests) = tokio::sync::mpsc::unbounded_channel();
            let service = tower::service_fn(move |_request: Request<Body>| {
                sender.send(()).unwrap();
                async { Ok::<_, Infallible>(Response::new(Body::from(b"{}".to_vec()))) }
            });
            let mut pod = fixture::pod("p", json!({"containers": [{}], "volumes": volumes}));
            let condition = json!([{"type": "PodScheduled", "status": "False", "reason": "SchedulerError",
                "message": "why"}]);
            pod.status.conditions = serde_json::from_value(condition).unwrap();
            let (client, error) = (Client::new(service, ""), NotScheduled::SchedulerError);
            mark_not_scheduled(client, &pod, error, "why", None).await.unwrap();
            let count = std::iter::from_fn(|| requests.try_recv().ok()).count();
            assert_eq!(count, expected);
        }
    }

    #[tokio::test]
    async fn a_victim_gets_the_reason_and_is_then_deleted_with_its_own_grace_period() {
        let (sender, mut requests) = tokio::sync::mpsc::unbounded_channel();
        let service = tower::service_fn(move |request: Request<Body>| {
            let sender = sender.clone();
            async move {
                let request_line = format!("{} {}", request.method(), request.uri().path());
                let body = request.into_body().collect_bytes().await.unwrap();
                let body: serde_json::Value = serde_json::from_slice(&body).unwrap();
                sender.send((request_line, body)).unwrap();
                let pod = json!({"metadata": {"name": "v", "namespace": "d", "uid": "v"}}).to_string();
                Ok::<_, Infallible>(Response::new(Body::from(pod.into_bytes())))
            }
        });
        let container = json!({"resources": {"requests": {"cpu": "4"}}});
        let pod = |name: &str, priority: i32| {
            fixture::pod(name, json!({"priority": priority, "containers": [container.clone()]}))
        };
        let mut snapshot = fixture::snapshot(&[fixture::node("a", json!({}))]);
        snapshot.place(&pod("v", 0), "a");
        let nodes = ["a".to_owned()].into();
        let found = preempt(&pod("p", 10), &Profile::default(), &mut snapshot, &nodes).unwrap();
        evict(Client::new(service, ""), &found.victims[0], "s").await.unwrap();
        let (request_line, body) = requests.recv().await.unwrap();
        assert_eq!(request_line, "PATCH /api/v1/namespaces/d/pods/v/status");
        let condition = &body["status"]["conditions"][0];
        assert_eq!((&condition["type"], &condition["status"]), (&json!("DisruptionTarget"), &json!("True")));
        let (request_line, body) = requests.recv().await.unwrap();
        assert_eq!(request_line, "DELETE /api/v1/namespaces/d/pods/v");
        assert_eq!(body["preconditions"]["uid"], "v");
        assert!(body["gracePeriodSeconds"].is_null(), "{body}");
    }
}
