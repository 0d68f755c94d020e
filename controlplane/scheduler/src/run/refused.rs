//! Pods that no node can run: preemption, and the reports about them.

use std::sync::Arc;

use k8s_openapi::api::core::v1::ObjectReference;
use tokio::time::Instant;

use super::Scheduler;
use crate::bind::{self, NotScheduled};
use crate::config::Profile;
use crate::decide::{FoundBy, Unschedulable};
use crate::devices::bind::deallocate;
use crate::devices::may_use_devices;
use crate::groups::condition::Verdict;
use crate::groups::placement::{UNSCHEDULABLE, WAITS_FOR_PREEMPTION, failed_beside};
use crate::hint::Changes;
use crate::metrics::{AttemptResult, ExtensionPoint};
use crate::object::Pod;
use crate::preempt::{Preemption, Victim, preempt, waits_for_victims, with_outcome};
use coracle_events::Event;
use coracle_values::object::ObjectExt;

/// The end of a request after an unsuccessful attempt.
pub(super) enum RequestEnd {
    /// The result does not change when the pod is tried again.
    Done,
    /// A claim of the pod with this uid was not released.
    NotReleased(String),
    Eviction {
        /// The uid of the pod for which a pod was evicted.
        preemptor: String,
        is_done: bool,
    },
}

impl Scheduler {
    /// Handles a pod that no node can run: pods of lower priority may be evicted for it, unless a filter failed.
    pub(super) fn preempt_or_refuse(&mut self, pod: &Pod, profile: &Profile, refused: &Unschedulable) {
        if refused.found_by == FoundBy::Error {
            return self.attempt_failed(pod, &refused.message);
        }
        let preemption = if profile.preempts {
            let (metrics, start) = (&self.config.metrics, Instant::now());
            metrics.preemption_attempted();
            let found = preempt(pod, profile, &mut self.snapshot, &refused.resolvable);
            let result = if found.is_ok() { AttemptResult::Scheduled } else { AttemptResult::Unschedulable };
            metrics.ran(ExtensionPoint::PostFilter, result, pod.scheduler(), start);
            found
        } else {
            Err(String::new())
        };
        self.handle_refusal(pod, refused, preemption);
    }

    /// Starts a preemption, or records why the pod is unschedulable.
    pub(super) fn handle_refusal(
        &mut self,
        pod: &Pod,
        refused: &Unschedulable,
        preemption: Result<Preemption, String>,
    ) {
        let mut message = refused.message.clone();
        let of_group = if preemption.is_ok() { WAITS_FOR_PREEMPTION } else { UNSCHEDULABLE };
        let nominated = match preemption {
            Ok(Preemption { node, victims }) => {
                self.snapshot.nominate(pod, &node);
                self.start_preemption(pod, &node, victims);
                Some(node)
            }
            Err(why) => {
                message = with_outcome(refused, self.deallocate(pod, refused), &why);
                self.nomination_after(pod, refused)
            }
        };
        if self.extender_calls.needs_extenders(pod) {
            self.queue.refused_late(pod.uid(), refused.helped_by, Instant::now());
        } else {
            self.queue.refused(pod.uid(), refused.helped_by, Instant::now());
        }
        self.queue.set_refused_by(pod.uid(), &refused.plugins);
        self.report_refusal(pod, message, nominated);
        if let Some(group) = pod.group() {
            self.report_group(&group, Verdict::refused(of_group));
        }
    }

    /// Queues a pod again after its attempt failed with an error. As upstream, no pods are evicted for this pod.
    pub(super) fn attempt_failed(&mut self, pod: &Pod, why: &str) {
        self.queue.failed(pod.uid(), Instant::now());
        self.report_error(pod, why.to_owned());
        if let Some(group) = pod.group() {
            self.report_group(&group, Verdict::failed(failed_beside(why)));
        }
    }

    /// Releases the devices of a claim if nodes refused the pod because of these devices. Returns upstream's text about
    /// the release.
    fn deallocate(&mut self, pod: &Pod, refused: &Unschedulable) -> &'static str {
        let devices = &self.snapshot.devices;
        if refused.found_by != FoundBy::Filters || !may_use_devices(pod) {
            return devices.outcome(pod);
        }
        let nodes: Vec<_> = self.snapshot.candidates().map(|node| node.properties).collect();
        let Some(unusable) = devices.releasable(pod, &refused.message, &nodes) else {
            return devices.outcome(pod);
        };
        let (client, pod, is_former) = (self.client.clone(), pod.clone(), unusable.is_former);
        self.refusal_requests.spawn(async move {
            let Err(error) = deallocate(&client, &pod, &unusable).await else { return RequestEnd::Done };
            let claim = unusable.key();
            tracing::warn!(claim = claim.name, namespace = claim.namespace, %error, "cannot release a claim");
            RequestEnd::NotReleased(pod.uid().to_owned())
        });
        if is_former {
            "deletion of ResourceClaim completed"
        } else {
            "deallocation of ResourceClaim completed"
        }
    }

    /// The nominated node of a pod for which no pods can be evicted. The pod keeps its node while victims terminate
    /// there, and if its policy forbids preemption. Otherwise the pod loses the nomination, as upstream. The reason:
    /// pods with the same nominated node could block each other forever, although some of them fit.
    fn nomination_after(&mut self, pod: &Pod, refused: &Unschedulable) -> Option<String> {
        let is_nominated = self.snapshot.is_nominated(pod.uid());
        let node = pod.status.nominated_node_name.clone().filter(|_| is_nominated);
        let never_preempts = pod.spec.preemption_policy.as_deref() == Some("Never");
        if never_preempts || waits_for_victims(pod, &self.snapshot, &refused.resolvable) {
            return node;
        }
        self.end_nomination(pod.uid(), "");
        None
    }

    /// Follows the nominated node in the status of a waiting pod, which other clients may set. After a restart all
    /// nominations come from the status. A status without a node ends the nomination only if the last status had a
    /// node. Otherwise the scheduler's own write of the node has not arrived yet. Source: `UpdateNominatedPod` of
    /// upstream.
    pub(super) fn follow_nomination(&mut self, pod: &Pod) {
        fn nominated(pod: &Pod) -> Option<&str> {
            pod.status.nominated_node_name.as_deref().filter(|node| !node.is_empty())
        }
        if let Some(node) = nominated(pod) {
            self.end_nomination(pod.uid(), node);
            self.snapshot.nominate(pod, node);
        } else if self.queue.pod(pod.uid()).is_some_and(|last| nominated(last).is_some()) {
            self.end_nomination(pod.uid(), "");
        }
    }

    /// Removes the nomination of a pod. `node` is the node on which the pod was placed, or empty. If this is not the
    /// nominated node, other pods of the same or a lower priority may use the nominated node now.
    pub(super) fn end_nomination(&mut self, uid: &str, node: &str) {
        if self.snapshot.remove_nomination(uid).is_some_and(|nominated| nominated != node) {
            self.queue.change_by(uid, Changes::POD_GONE, Instant::now());
        }
    }

    /// Gates a popped pod. Other pods may use its nominated node.
    pub(super) fn gate_pod(&mut self, pod: &Pod, message: String) {
        self.queue.gate(pod.uid());
        if self.snapshot.is_nominated(pod.uid()) {
            self.end_nomination(pod.uid(), "");
            self.report_refusal(pod, message, None);
        }
    }

    /// Records an event about a refused pod, and writes its condition.
    pub(super) fn report_refusal(&mut self, pod: &Pod, message: String, nominated: Option<String>) {
        self.report(pod, NotScheduled::Unschedulable, message, nominated);
    }

    /// Records an event about a pod whose scheduling or binding failed with an error, and writes its condition. As
    /// upstream, the pod loses its nominated node: otherwise the next attempt would use that node first, although the
    /// error may be there.
    pub(super) fn report_error(&mut self, pod: &Pod, message: String) {
        self.end_nomination(pod.uid(), "");
        self.report(pod, NotScheduled::SchedulerError, message, None);
    }

    /// Records an event about a pod without a node, and writes its condition.
    pub(super) fn report(
        &mut self,
        pod: &Pod,
        reason: NotScheduled,
        message: String,
        nominated: Option<String>,
    ) {
        self.record(pod, Event::warning("FailedScheduling", message.clone()));
        let result = match reason {
            NotScheduled::Unschedulable => AttemptResult::Unschedulable,
            NotScheduled::SchedulerError => AttemptResult::Error,
        };
        self.count_refusal(pod, result);
        // The watch may have delivered a newer state than that of the attempt.
        let newest = self.queue.pod(pod.uid()).map_or(pod, Arc::as_ref);
        let (client, pod) = (self.client.clone(), newest.clone());
        self.refusal_requests.spawn(async move {
            let marked = bind::mark_not_scheduled(client, &pod, reason, &message, nominated.as_deref()).await;
            if let Err(error) = marked {
                tracing::debug!(
                    pod = pod.name(),
                    namespace = pod.namespace(),
                    %error,
                    "cannot write the condition PodScheduled"
                );
            }
            RequestEnd::Done
        });
    }

    /// Evicts the victims of a preemption on a node. Victims that are already being deleted need no request. If a
    /// victim must be evicted, waiting pods of a lower priority lose their nomination for the node, because they may
    /// not fit there any more. So they can use another node now. Source: `prepareCandidateAsync` of upstream.
    pub(super) fn start_preemption(&mut self, pod: &Pod, node: &str, victims: Vec<Victim>) {
        let count = victims.len();
        let victims: Vec<Victim> = victims.into_iter().filter(|victim| !victim.terminating).collect();
        if victims.is_empty() {
            return;
        }
        self.config.metrics.preempted(count);
        self.end_lower_nominations(pod, node);
        for victim in victims {
            self.evict(pod, victim, node);
        }
    }

    /// Ends the nominations for a node of waiting pods with a lower priority. The pods of a gang are decided together,
    /// so they keep their nominations.
    fn end_lower_nominations(&mut self, pod: &Pod, node: &str) {
        let group = pod.group();
        for uid in self.snapshot.nominated_below(node, pod.spec.priority.unwrap_or_default()) {
            if group.as_ref().is_some_and(|group| self.groups.is_member(&uid, group)) {
                continue;
            }
            self.snapshot.remove_nomination(&uid);
            self.queue.wake(&uid, Instant::now());
            let Some(other) = self.queue.pod(&uid).cloned() else { continue };
            let client = self.client.clone();
            self.refusal_requests.spawn(async move {
                if let Err(error) = bind::set_nominated_node(client, &other, None).await {
                    tracing::debug!(
                        pod = other.name(),
                        namespace = other.namespace(),
                        %error,
                        "cannot remove the nominated node of a pod"
                    );
                }
                RequestEnd::Done
            });
        }
    }

    fn evict(&mut self, pod: &Pod, victim: Victim, node: &str) {
        let about = ObjectReference {
            api_version: Some("v1".to_owned()),
            kind: Some("Pod".to_owned()),
            name: Some(victim.name.clone()),
            namespace: Some(victim.namespace.clone()),
            uid: Some(victim.uid.clone()),
            ..ObjectReference::default()
        };
        let message = format!("Preempted by pod {} on node {node}", pod.uid());
        self.recorder.record(about, pod.scheduler().to_owned(), Event::normal("Preempted", message));
        let (client, name) = (self.client.clone(), pod.scheduler().to_owned());
        let preemptor = pod.uid().to_owned();
        self.queue.eviction_started(pod.uid());
        self.refusal_requests.spawn(async move {
            let evicted = bind::evict(client, &victim, &name).await;
            if let Err(error) = &evicted {
                tracing::warn!(pod = victim.name, namespace = victim.namespace, %error, "cannot preempt a pod");
            }
            RequestEnd::Eviction { preemptor, is_done: evicted.is_ok() }
        });
    }

    /// Handles the end of a request about a refused pod. If a victim was not evicted, or a claim was not released,
    /// there may be no change that causes the next attempt. So the pod is retried after its back-off.
    pub(super) fn request_ended(&mut self, end: RequestEnd) {
        let now = Instant::now();
        match end {
            RequestEnd::Done => {}
            RequestEnd::NotReleased(uid) => self.queue.retry(&uid, now),
            RequestEnd::Eviction { preemptor, is_done } => {
                if !is_done {
                    self.queue.retry(&preemptor, now);
                }
                self.queue.eviction_ended(&preemptor, now);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use http::{Request, Response};
    use kube::client::Body;
    use serde_json::json;

    use super::super::{Client, test_scheduler::scheduler};
    use super::*;
    use crate::decide::decide;
    use crate::fixture;
    use coracle_watch::Event as Watched;

    #[tokio::test]
    async fn the_condition_of_an_error_is_not_that_of_a_refusal() {
        let (sender, mut patches) = tokio::sync::mpsc::unbounded_channel();
        let service = tower::service_fn(move |request: Request<Body>| {
            let sender = sender.clone();
            async move {
                let body = request.into_body().collect_bytes().await.unwrap();
                sender.send(serde_json::from_slice::<serde_json::Value>(&body).unwrap()).unwrap();
                Ok::<_, std::convert::Infallible>(Response::new(Body::empty()))
            }
        });
        let mut scheduler = scheduler(Client::new(service, ""));
        let mut pod = fixture::pod("p", json!({"containers": [{}]}));
        pod.status.nominated_node_name = Some("a".to_owned());
        pod.metadata.resource_version = Some("7".to_owned());
        scheduler.snapshot.nominate(&pod, "a");
        let mut newer = pod.clone();
        newer.metadata.resource_version = Some("8".to_owned());
        scheduler.queue.add(newer);
        scheduler.report_error(&pod, "running Bind".to_owned());
        assert!(!scheduler.snapshot.is_nominated("p"));
        scheduler.report_refusal(&pod, "0/1 nodes are available".to_owned(), None);
        let mut found = Vec::new();
        for _ in 0..2 {
            let patch = patches.recv().await.unwrap();
            let status = &patch["status"];
            let version = patch["metadata"]["resourceVersion"].clone();
            let condition = &status["conditions"][0];
            found.push((condition["reason"].clone(), status["nominatedNodeName"].clone(), version));
        }
        // The two requests run concurrently, so their order is not defined.
        found.sort_by_key(|(reason, ..)| reason.to_string());
        // Only the patch of an error has the resource version, because it must not change a pod that changed meanwhile.
        // It is the version of the newest state.
        let error = (json!("SchedulerError"), json!(null), json!("8"));
        assert_eq!(found, [error, (json!("Unschedulable"), json!(null), json!(null))]);
    }

    /// A scheduler with one node.
    fn with_node() -> Scheduler {
        let service = tower::service_fn(|_request: Request<Body>| async {
            Ok::<_, std::convert::Infallible>(Response::new(Body::empty()))
        });
        let mut scheduler = scheduler(Client::new(service, ""));
        scheduler.snapshot.set_node(&fixture::node("a", json!({})));
        scheduler
    }

    #[tokio::test]
    async fn a_pod_whose_filter_failed_is_an_error_and_is_retried_without_a_change() {
        let mut scheduler = with_node();
        scheduler.queue.add(fixture::pod("p", json!({"containers": [{}]})));
        let pod = scheduler.queue.pop(Instant::now()).unwrap();
        let refused = Unschedulable {
            message: "running \"DynamicResources\" filter plugin: why".to_owned(),
            helped_by: Changes::ALL,
            plugins: BTreeSet::new(),
            resolvable: BTreeSet::new(),
            found_by: FoundBy::Error,
        };
        scheduler.preempt_or_refuse(&pod, &Profile::default(), &refused);
        assert!(scheduler.queue.due().is_some(), "the pod waits only for the end of its back-off");
        let text = scheduler.config.metrics.text();
        let line = "scheduler_schedule_attempts_total{profile=\"default-scheduler\",result=\"error\"} 1";
        assert!(text.lines().any(|other| other == line), "{text}");
    }

    #[tokio::test]
    async fn a_refused_pod_is_unschedulable_by_its_plugins_until_the_next_attempt() {
        let mut scheduler = with_node();
        let labels = json!({"containers": [{}], "nodeSelector": {"disk": "ssd"}});
        scheduler.queue.add(fixture::pod("p", labels));
        let pod = scheduler.queue.pop(Instant::now()).unwrap();
        scheduler.schedule_alone(pod, &Profile::default());
        let line = "scheduler_unschedulable_pods{plugin=\"NodeAffinity\",profile=\"default-scheduler\"}";
        let has = |scheduler: &Scheduler, count: u8| {
            let (text, line) = (scheduler.config.metrics.text(), format!("{line} {count}"));
            assert!(text.lines().any(|other| other == line), "no {line} in {text}");
        };
        has(&scheduler, 1);
        assert!(scheduler.queue.take("p").is_some());
        has(&scheduler, 0);
    }

    #[tokio::test]
    async fn a_pod_whose_claim_is_deleted_loses_its_nominated_node() {
        let mut scheduler = with_node();
        let mut pod = fixture::pod("p", json!({"resourceClaims": [{"name": "c", "resourceClaimName": "c"}]}));
        pod.status.nominated_node_name = Some("a".to_owned());
        scheduler.snapshot.nominate(&pod, "a");
        scheduler.queue.add(pod);
        let pod = scheduler.queue.pop(Instant::now()).unwrap();
        scheduler.schedule_alone(pod, &Profile::default());
        assert!(!scheduler.snapshot.is_nominated("p"));
        assert_eq!(scheduler.queue.due(), None, "the pod waits for its claim");
    }

    #[tokio::test]
    async fn pods_are_retried_when_a_nominated_pod_or_a_domain_is_gone() {
        let pod = |name: &str, more: serde_json::Value| {
            let mut spec = json!({"containers": [{"resources": {"requests": {"cpu": "3"}}}]});
            spec.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            fixture::pod(name, spec)
        };
        let mut scheduler = with_node();
        scheduler.snapshot.nominate(&pod("nominated", json!({"priority": 5})), "a");
        scheduler.queue.add(pod("p", json!({})));
        let refused = scheduler.queue.pop(Instant::now()).unwrap();
        scheduler.schedule_alone(refused, &Profile::default());
        assert_eq!(scheduler.queue.due(), None);
        scheduler.remove_pod("nominated");
        assert!(scheduler.queue.due().is_some(), "its node has room now");
        let mut scheduler = with_node();
        scheduler.snapshot.set_node(&fixture::node("b", json!({"/spec/unschedulable": true})));
        let labels = json!({"matchLabels": {"app": "x"}});
        let spread = json!({"topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "kubernetes.io/hostname",
            "whenUnsatisfiable": "DoNotSchedule", "labelSelector": labels}],
            "containers": [{}]});
        let spread = |name: &str| {
            let mut pod = pod(name, spread.clone());
            pod.metadata.labels = Some([("app".to_owned(), "x".to_owned())].into());
            pod
        };
        scheduler.snapshot.place(&spread("first"), "a");
        scheduler.queue.add(spread("second"));
        let refused = scheduler.queue.pop(Instant::now()).unwrap();
        scheduler.schedule_alone(refused, &Profile::default());
        assert_eq!(scheduler.queue.due(), None);
        scheduler.remove_node("b");
        assert!(scheduler.queue.due().is_some(), "one domain is left");
    }

    async fn end_requests(scheduler: &mut Scheduler) {
        while let Some(end) = scheduler.refusal_requests.join_next().await {
            scheduler.request_ended(end.unwrap());
        }
    }

    /// A pod that leaves no room for another such pod on a node.
    fn large_pod(name: &str, priority: i32) -> Pod {
        let container = json!({"resources": {"requests": {"cpu": "3"}}});
        fixture::pod(name, json!({"priority": priority, "containers": [container]}))
    }

    /// The requests about pods after a preemption by the pod `p`, and whether the pod `waiting` of a lower priority is
    /// still nominated for the node.
    async fn preempt_with_waiting_pod(victim: Pod) -> (Vec<String>, bool) {
        let (sender, mut requests) = tokio::sync::mpsc::unbounded_channel();
        let service = tower::service_fn(move |request: Request<Body>| {
            let sender = sender.clone();
            async move {
                let path = request.uri().path().replace("/api/v1/namespaces/d/pods/", "");
                let method = request.method().clone();
                let body = request.into_body().collect_bytes().await.unwrap();
                let body: serde_json::Value = serde_json::from_slice(&body).unwrap();
                let node = body["status"].get("nominatedNodeName").map(ToString::to_string);
                sender.send(format!("{method} {path} {}", node.unwrap_or_default())).unwrap();
                Ok::<_, std::convert::Infallible>(Response::new(Body::from(b"{}".to_vec())))
            }
        });
        let mut scheduler = scheduler(Client::new(service, ""));
        scheduler.snapshot.set_node(&fixture::node("a", json!({})));
        scheduler.snapshot.place(&victim, "a");
        let (profile, now) = (Profile::default(), Instant::now());
        let mut waiting = large_pod("waiting", 5);
        waiting.status.nominated_node_name = Some("a".to_owned());
        scheduler.snapshot.nominate(&waiting, "a");
        scheduler.queue.add(waiting);
        scheduler.queue.pop(now).unwrap();
        scheduler.queue.refused("waiting", Changes::POD_GONE, now);
        scheduler.queue.add(large_pod("p", 10));
        let preemptor = scheduler.queue.pop(now).unwrap();
        scheduler.schedule_alone(preemptor, &profile);
        assert_eq!(scheduler.snapshot.nominated_node("p"), Some("a"));
        end_requests(&mut scheduler).await;
        let is_nominated = scheduler.snapshot.is_nominated("waiting");
        let next = scheduler.queue.pop(now).map(|pod| pod.name().to_owned());
        assert_eq!(next.as_deref() == Some("waiting"), !is_nominated, "it looks for another node");
        let mut found = Vec::new();
        while let Ok(request) = requests.try_recv() {
            found.push(request);
        }
        found.sort();
        (found, is_nominated)
    }

    #[tokio::test]
    async fn a_preemption_ends_the_nominations_of_lower_priority_for_its_node() {
        let (requests, is_nominated) = preempt_with_waiting_pod(large_pod("victim", 0)).await;
        let expected =
            ["DELETE victim ", "PATCH p/status \"a\"", "PATCH victim/status ", "PATCH waiting/status null"];
        assert_eq!((requests, is_nominated), (expected.map(str::to_owned).to_vec(), false));
    }

    #[tokio::test]
    async fn a_victim_that_is_already_being_deleted_needs_no_request() {
        let mut victim = large_pod("victim", 0);
        victim.metadata.deletion_timestamp = serde_json::from_value(json!("2026-01-01T00:00:00Z")).unwrap();
        let found = preempt_with_waiting_pod(victim).await;
        assert_eq!(found, (vec!["PATCH p/status \"a\"".to_owned()], true));
    }

    #[tokio::test]
    async fn nominations_follow_the_status_of_waiting_pods() {
        let mut scheduler = with_node();
        let mut pod = fixture::pod("p", json!({"containers": [{}]}));
        scheduler.pod_event(Watched::Apply(pod.clone()));
        scheduler.snapshot.nominate(&pod, "a");
        scheduler.pod_event(Watched::Apply(pod.clone()));
        assert!(scheduler.snapshot.is_nominated("p"), "the write of the node has not arrived");
        for node in [Some("a"), Some("b"), None] {
            pod.status.nominated_node_name = node.map(str::to_owned);
            scheduler.pod_event(Watched::Apply(pod.clone()));
            assert_eq!(scheduler.snapshot.nominated_node("p"), node);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_pod_whose_victim_was_not_evicted_is_retried() {
        for (status, retries) in [(200_u16, false), (500, true)] {
            let service = tower::service_fn(move |_request: Request<Body>| async move {
                let answer = json!({"kind": "Status", "code": status, "reason": "x", "message": "m"});
                let body = Body::from(answer.to_string().into_bytes());
                Ok::<_, std::convert::Infallible>(Response::builder().status(status).body(body).unwrap())
            });
            let mut scheduler = scheduler(Client::new(service, ""));
            scheduler.snapshot.set_node(&fixture::node("a", json!({})));
            let pod = |name: &str, priority: i32| {
                let container = json!({"resources": {"requests": {"cpu": "3"}}});
                fixture::pod(name, json!({"priority": priority, "containers": [container]}))
            };
            scheduler.snapshot.place(&pod("victim", 0), "a");
            scheduler.queue.add(pod("p", 10));
            let preemptor = scheduler.queue.pop(Instant::now()).unwrap();
            scheduler.schedule_alone(preemptor, &Profile::default());
            assert!(scheduler.snapshot.is_nominated("p"));
            assert_eq!(scheduler.queue.due(), None, "the requests are in flight");
            end_requests(&mut scheduler).await;
            assert_eq!(scheduler.queue.due().is_some(), retries, "{status}");
            assert!(scheduler.queue.pop(Instant::now()).is_none(), "the back-off lasts");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_eviction_without_an_answer_does_not_delay_the_preemptor_further() {
        let service = tower::service_fn(|_request: Request<Body>| {
            std::future::pending::<Result<Response<Body>, std::convert::Infallible>>()
        });
        let mut scheduler = scheduler(Client::new(service, ""));
        scheduler.snapshot.set_node(&fixture::node("a", json!({})));
        scheduler.snapshot.place(&large_pod("victim", 0), "a");
        scheduler.queue.add(large_pod("p", 10));
        let start = Instant::now();
        let preemptor = scheduler.queue.pop(start).unwrap();
        scheduler.schedule_alone(preemptor, &Profile::default());
        assert_eq!(scheduler.queue.due(), None, "the requests are in flight");
        // The request that writes the condition of the preemptor does not end.
        let end = scheduler.refusal_requests.join_next().await.unwrap().unwrap();
        assert!(matches!(&end, RequestEnd::Eviction { is_done: false, .. }));
        assert!(start.elapsed() < std::time::Duration::from_secs(31), "{:?}", start.elapsed());
        scheduler.request_ended(end);
        assert!(scheduler.queue.pop(Instant::now()).is_some());
    }

    #[tokio::test]
    async fn a_pod_that_loses_its_nomination_is_not_retried_for_that_reason() {
        let mut scheduler = with_node();
        scheduler.snapshot.place(&large_pod("placed", 10), "a");
        for name in ["p", "q"] {
            let mut pod = large_pod(name, 0);
            pod.status.nominated_node_name = Some("a".to_owned());
            scheduler.snapshot.nominate(&pod, "a");
            scheduler.queue.add(pod);
        }
        let (profile, now) = (Profile::default(), Instant::now());
        for expected in ["p", "q", "p"] {
            let pod = scheduler.queue.pop(now).unwrap();
            assert_eq!(pod.name(), expected);
            scheduler.schedule_alone(pod, &profile);
        }
        assert!(!scheduler.snapshot.is_nominated("p") && !scheduler.snapshot.is_nominated("q"));
        assert!(scheduler.queue.pop(now).is_none());
    }

    #[tokio::test]
    async fn pods_that_are_nominated_for_one_node_do_not_block_each_other() {
        let mut scheduler = with_node();
        for name in ["p", "q"] {
            let mut pod =
                fixture::pod(name, json!({"containers": [{"resources": {"requests": {"cpu": "3"}}}]}));
            pod.status.nominated_node_name = Some("a".to_owned());
            scheduler.snapshot.nominate(&pod, "a");
            scheduler.queue.add(pod);
        }
        let (profile, now) = (Profile::default(), Instant::now());
        let (first, second) = (scheduler.queue.pop(now).unwrap(), scheduler.queue.pop(now).unwrap());
        scheduler.schedule_alone(first, &profile);
        assert!(!scheduler.snapshot.is_nominated("p"), "no node has room for both");
        assert!(scheduler.snapshot.is_nominated("q"));
        assert_eq!(decide(&second, &profile, &mut scheduler.snapshot), Ok("a".to_owned()));
    }
}
