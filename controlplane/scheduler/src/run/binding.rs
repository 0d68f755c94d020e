//! The binding of a pod: first its volumes and devices, then the request. Also handles the result of the binding.

use std::sync::Arc;

use kube::Client;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

use super::report::record_wait;
use super::{Bound, Scheduler};
use crate::bind;
use crate::config::{SchedulerConfig, VOLUME_TIMEOUT};
use crate::consult;
use crate::devices::{self, Devices, may_use_devices};
use crate::extender::client::Remote;
use crate::hint::Changes;
use crate::metrics::{Attempt, AttemptResult, ExtensionPoint, Operation, SchedulerMetrics};
use crate::object::Pod;
use crate::reserve::Reserved;
use crate::volumes::bind::BindError;
use crate::volumes::{self, Volumes};
use coracle_events::{Event, Recorder, cause};
use coracle_values::object::{Key, ObjectExt};

/// Maximum number of concurrent binding requests. The store syncs concurrent writes together. More requests need more
/// memory and, with a remote server, more connections.
pub(super) const MAX_BINDINGS: usize = 32;

/// Maximum number of decided pods (their node is chosen) whose binding needs only one request. So after each request a
/// decided pod is ready, but most pods of a burst wait in the queue. In the queue they need no task, and pods of a
/// higher priority go first.
pub(super) const MAX_DECIDED: usize = 2 * MAX_BINDINGS;

/// The parts of the scheduler that a binding needs.
pub(super) struct Binding {
    config: Arc<SchedulerConfig>,
    client: Client,
    volumes: Volumes,
    devices: Devices,
    recorder: Recorder,
    metrics: SchedulerMetrics,
    extenders: Arc<[Remote]>,
    requests: Arc<Semaphore>,
    extender_requests: Arc<Semaphore>,
}

// === impl Binding ===

impl Binding {
    pub(super) fn new(scheduler: &Scheduler) -> Self {
        Self {
            config: scheduler.config.clone(),
            client: scheduler.client.clone(),
            volumes: scheduler.snapshot.volumes.clone(),
            devices: scheduler.snapshot.devices.clone(),
            recorder: scheduler.recorder.clone(),
            metrics: scheduler.config.metrics.clone(),
            extenders: scheduler.extender_calls.extenders.clone(),
            requests: scheduler.requests.clone(),
            extender_requests: scheduler.extender_requests.clone(),
        }
    }

    /// Binds the volumes, the devices and the pod. If a step fails, the pod is removed from its claims.
    pub(super) async fn run(self, pod: &Pod, node: &str, reserved: &Reserved) -> Result<(), BindError> {
        let profile = pod.scheduler();
        self.nominate(pod, node, reserved).await;
        let pre_bind = self.pre_bind(pod, node, reserved);
        let claims = self.metrics.measure(ExtensionPoint::PreBind, profile, pre_bind).await?;
        let bound = self.metrics.measure(ExtensionPoint::Bind, profile, self.bind(pod, node)).await;
        if bound.is_err() && !claims.is_empty() {
            devices::bind::unreserve(&self.client, &self.devices, pod, &claims).await;
        }
        bound
    }

    /// Writes the node into the status of a pod whose binding may wait for volumes or devices, so that autoscalers see
    /// the node early. As upstream, a failed write does not end the binding. The API server removes the nominated node
    /// when the pod is bound. Source: the feature gate `NominatedNodeNameForExpectation` of upstream.
    async fn nominate(&self, pod: &Pod, node: &str, reserved: &Reserved) {
        let may_wait = !reserved.volumes.is_empty() || !reserved.devices.is_empty();
        if !may_wait || pod.status.nominated_node_name.as_deref() == Some(node) {
            return;
        }
        if let Err(error) = bind::set_nominated_node(self.client.clone(), pod, Some(node)).await {
            tracing::warn!(
                pod = pod.name(),
                namespace = pod.namespace(),
                node,
                %error,
                "cannot write the nominated node of a pod"
            );
        }
    }

    /// Binds the volumes and the devices. Returns the keys of the claims of devices.
    async fn pre_bind(&self, pod: &Pod, node: &str, reserved: &Reserved) -> Result<Vec<Key>, BindError> {
        let Self { client, volumes, devices, .. } = self;
        let profile = self.config.profile(pod.scheduler());
        let timeout = profile.map_or(VOLUME_TIMEOUT, |profile| profile.volume_timeout);
        volumes::bind::bind(client, volumes, &reserved.volumes, node, timeout).await?;
        let claims = devices::bind::bind(client, devices, pod, &reserved.devices).await?;
        let on_wait = || record_wait(&self.recorder, pod, node);
        devices::binding::wait(client, devices, pod, &claims, on_wait).await?;
        Ok(claims)
    }

    async fn bind(&self, pod: &Pod, node: &str) -> Result<(), BindError> {
        if let Some(bound) = consult::bind(&self.extenders, pod, node, &self.extender_requests).await {
            return bound.map_err(BindError::Extender);
        }
        // The semaphore is never closed. The wait for volumes and devices does not hold a permit.
        let _permit = self.requests.acquire().await;
        bind::bind(self.client.clone(), pod, node).await.map_err(BindError::Request)
    }
}

// === impl Scheduler ===

impl Scheduler {
    /// Whether another pod may be decided.
    pub(super) fn may_decide(&self) -> bool {
        self.decided.available_permits() > 0
    }

    /// Starts the binding of a pod that is placed on its node.
    pub(super) fn start_binding(
        &mut self,
        pod: Arc<Pod>,
        node: String,
        reserved: Reserved,
        attempt: Option<Attempt>,
    ) {
        let (binding, permit) = (Binding::new(self), self.decided_permit(&pod));
        let running = self.config.metrics.running(Operation::Binding);
        self.bindings.spawn(async move {
            let result = binding.run(&pod, &node, &reserved).await;
            drop((permit, running));
            Bound { pod, node, reserved, attempt, result }
        });
    }

    /// The permit that a decided pod holds until its binding ends. `None` if the binding may wait for volumes, devices
    /// or an extender, because such a wait must not delay other pods. The pods of a gang are decided together, so some
    /// of them may have no permit.
    fn decided_permit(&self, pod: &Pod) -> Option<OwnedSemaphorePermit> {
        let may_wait = volumes::claims_of(pod).next().is_some()
            || may_use_devices(pod)
            || self.extender_calls.binds(pod);
        if may_wait { None } else { self.decided.clone().try_acquire_owned().ok() }
    }

    /// Handles an ended binding, and the bindings that ended meanwhile. They are handled together, because a turn of
    /// the scheduler's loop polls all inputs, which takes longer than the work for one binding.
    pub(super) fn all_bound(&mut self, bound: Bound) {
        self.bound(bound);
        while let Some(Ok(bound)) = self.bindings.try_join_next() {
            self.bound(bound);
        }
    }

    pub(super) fn bound(&mut self, Bound { pod, node, reserved, attempt, result }: Bound) {
        self.update_saturation();
        if let Some(attempt) = attempt {
            self.count_binding(&pod, &attempt, AttemptResult::of(&result));
        }
        let Err(error) = result else {
            let message = format!("Successfully assigned {}/{} to {node}", pod.namespace(), pod.name());
            return self.record(&pod, Event::normal("Scheduled", message));
        };
        self.snapshot.volumes.release(&reserved.volumes);
        self.snapshot.devices.release(&reserved.devices);
        // If the pod is not in `assumed` any more, the watch has delivered its state.
        if !self.assumed.remove(pod.uid()) {
            return;
        }
        self.snapshot.remove(pod.uid());
        self.groups.forget(pod.uid());
        let BindError::Request(error) = error else {
            return self.pre_bind_failed(&pod, &node, &error);
        };
        if matches!(&error, kube::Error::Api(status) if status.is_not_found()) {
            self.queue.remove(pod.uid());
            self.groups.remove_pod(pod.uid());
        } else {
            tracing::warn!(pod = pod.name(), namespace = pod.namespace(), node, %error, "cannot bind a pod");
            self.queue.failed(pod.uid(), Instant::now());
            let message = format!("running Bind for node \"{node}\": {}", cause(&error));
            if matches!(&error, kube::Error::Api(status) if status.is_conflict()) {
                // After a conflict the pod may already have a node, so its condition is not changed.
                self.record(&pod, Event::warning("FailedScheduling", message));
            } else {
                self.report_error(&pod, message);
            }
        }
        self.queue.change(Changes::POD_GONE, Instant::now());
    }

    /// Queues a pod again after its volumes or devices were not bound, or after an extender failed to bind it.
    fn pre_bind_failed(&mut self, pod: &Pod, node: &str, error: &BindError) {
        tracing::warn!(pod = pod.name(), namespace = pod.namespace(), node, %error, "cannot bind a pod");
        self.queue.failed(pod.uid(), Instant::now());
        let message = match error {
            BindError::Extender(_) => format!("running Bind for node \"{node}\": {error}"),
            BindError::Devices(_) | BindError::DeviceConditions(_) => {
                format!("running PreBind plugin \"DynamicResources\": {error}")
            }
            _ => format!("running PreBind plugin \"VolumeBinding\": {error}"),
        };
        self.report_error(pod, message);
        self.queue.change(Changes::POD_GONE, Instant::now());
    }

    pub(super) fn update_saturation(&self) {
        let is_saturated = self.requests.available_permits() == 0;
        self.is_saturated.send_if_modified(|value| std::mem::replace(value, is_saturated) != is_saturated);
    }
}

#[cfg(test)]
mod tests {
    use http::{Request, Response};
    use kube::client::Body;
    use serde_json::json;

    use super::super::test_scheduler::{scheduler, scheduler_of_accepting_server};
    use super::*;
    use crate::fixture;
    use crate::volumes::{Choice, ChosenVolume};

    /// The requests of a binding to the node `a`, and whether it succeeds. `nominated` is the node in the pod's status.
    async fn requests_of_binding(volumes: Vec<ChosenVolume>, nominated: Option<&str>) -> (Vec<String>, bool) {
        let (sender, mut requests) = tokio::sync::mpsc::unbounded_channel();
        let service = tower::service_fn(move |request: Request<Body>| {
            let sender = sender.clone();
            async move {
                let path = request.uri().path().replace("/api/v1/namespaces/d/pods/", "");
                let method = request.method().clone();
                let body = request.into_body().collect_bytes().await.unwrap();
                let body: serde_json::Value = serde_json::from_slice(&body).unwrap();
                sender.send(format!("{method} {path} {}", body["status"])).unwrap();
                Ok::<_, std::convert::Infallible>(Response::new(Body::from(b"{}".to_vec())))
            }
        });
        let mut pod = fixture::pod("p", json!({"containers": [{}]}));
        pod.status.nominated_node_name = nominated.map(str::to_owned);
        let reserved = Reserved { volumes, ..Reserved::default() };
        let binding = Binding::new(&scheduler(Client::new(service, "")));
        let is_bound = binding.run(&pod, "a", &reserved).await.is_ok();
        let mut found = Vec::new();
        while let Ok(request) = requests.try_recv() {
            found.push(request);
        }
        (found, is_bound)
    }

    #[tokio::test]
    async fn a_pod_whose_binding_may_wait_has_its_node_in_the_status_before() {
        let plain = requests_of_binding(Vec::new(), None).await;
        assert_eq!(plain, (vec!["POST p/binding null".to_owned()], true));
        // The claim does not exist, so the binding of the volumes fails without a request.
        let chosen = || vec![ChosenVolume { claim: Key::new("d", "c"), choice: Choice::Provision }];
        let nominated = vec![r#"PATCH p/status {"nominatedNodeName":"a"}"#.to_owned()];
        for other in [None, Some("b")] {
            assert_eq!(requests_of_binding(chosen(), other).await, (nominated.clone(), false));
        }
        assert_eq!(requests_of_binding(chosen(), Some("a")).await, (Vec::new(), false));
    }

    /// The changes of the claim of a pod whose binding request fails. `node` is the node of the stored pod.
    async fn changes_of_claim(node: Option<&str>) -> Vec<serde_json::Value> {
        let claim = json!({"metadata": {"name": "c", "namespace": "d", "uid": "c", "resourceVersion": "7"},
            "status": {"allocation": {"devices": {}}, "reservedFor": [{"uid": "p"}, {"uid": "q"}]}});
        let stored =
            json!({"metadata": {"name": "p", "namespace": "d", "uid": "p"}, "spec": {"nodeName": node}});
        let (sender, mut changes) = tokio::sync::mpsc::unbounded_channel();
        let answers = (claim.clone(), stored);
        let service = tower::service_fn(move |request: Request<Body>| {
            let (sender, (claim, stored)) = (sender.clone(), answers.clone());
            async move {
                let (parts, body) = request.into_parts();
                let body = body.collect_bytes().await.unwrap();
                if parts.method == http::Method::PATCH {
                    sender.send(serde_json::from_slice(&body).unwrap()).unwrap();
                }
                let is_binding = parts.uri.path().ends_with("/binding");
                let answer = if parts.uri.path().ends_with("/pods/p") { stored } else { claim };
                let response = Response::builder().status(if is_binding { 500_u16 } else { 200 });
                let body = Body::from(answer.to_string().into_bytes());
                Ok::<_, std::convert::Infallible>(response.body(body).unwrap())
            }
        });
        let scheduler = scheduler(Client::new(service, ""));
        scheduler.snapshot.devices.add("ResourceClaim", &claim).unwrap();
        let mut pod = fixture::pod("p", json!({"containers": [{}]}));
        pod.status.nominated_node_name = Some("a".to_owned());
        let reserved = Reserved { devices: vec![(Key::new("d", "c"), None)], ..Reserved::default() };
        let result = Binding::new(&scheduler).run(&pod, "a", &reserved).await;
        assert!(matches!(result, Err(BindError::Request(_))));
        std::iter::from_fn(|| changes.try_recv().ok()).collect()
    }

    #[tokio::test]
    async fn a_pod_whose_binding_request_fails_is_removed_from_its_claim() {
        let changes = changes_of_claim(None).await;
        assert_eq!(changes.len(), 1);
        assert_eq!(changes[0]["status"], json!({"reservedFor": [{"uid": "q"}]}));
        // The response of the request was lost, but the pod is bound.
        assert!(changes_of_claim(Some("a")).await.is_empty());
    }

    #[tokio::test]
    async fn decisions_do_not_run_far_ahead_of_bindings() {
        let mut scheduler = scheduler_of_accepting_server();
        scheduler.snapshot.set_node(&fixture::node("a", json!({"/status/allocatable/pods": "1000"})));
        for number in 0..=MAX_DECIDED {
            scheduler.queue.add(fixture::pod(&format!("p{number}"), json!({"containers": [{}]})));
        }
        for _ in 0..=MAX_DECIDED {
            if scheduler.may_decide() {
                scheduler.schedule_next();
            }
        }
        assert_eq!((scheduler.bindings.len(), scheduler.queue.lengths().active), (MAX_DECIDED, 1));
        let text = scheduler.config.metrics.text();
        let running = format!("scheduler_goroutines{{operation=\"binding\"}} {MAX_DECIDED}\n");
        assert!(text.contains(&running), "{text}");
        let bound = scheduler.bindings.join_next().await.unwrap().unwrap();
        scheduler.bound(bound);
        assert!(scheduler.may_decide());
    }

    #[tokio::test]
    async fn bindings_that_ended_meanwhile_are_handled_together() {
        let mut scheduler = scheduler_of_accepting_server();
        scheduler.snapshot.set_node(&fixture::node("a", json!({})));
        for name in ["p", "q", "r"] {
            scheduler.queue.add(fixture::pod(name, json!({"containers": [{}]})));
            scheduler.schedule_next();
        }
        let first = scheduler.bindings.join_next().await.unwrap().unwrap();
        // The runtime of the test has one thread, so all tasks run while this one yields.
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
        scheduler.all_bound(first);
        assert!(scheduler.bindings.is_empty());
        let text = scheduler.config.metrics.text();
        assert!(text.contains("scheduler_goroutines{operation=\"binding\"} 0\n"), "{text}");
    }

    #[tokio::test]
    async fn bindings_that_may_wait_do_not_delay_other_pods() {
        let scheduler = scheduler_of_accepting_server();
        let with_permit = |spec: serde_json::Value| {
            let permit = scheduler.decided_permit(&fixture::pod("p", spec));
            permit.is_some()
        };
        assert!(with_permit(json!({"containers": [{}]})));
        let claim = json!({"name": "v", "persistentVolumeClaim": {"claimName": "c"}});
        assert!(!with_permit(json!({"volumes": [claim]})));
        assert!(!with_permit(json!({"resourceClaims": [{"name": "c", "resourceClaimName": "c"}]})));
    }
}
