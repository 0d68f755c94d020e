//! Pods of groups: gated pods, and the scheduling of all pods of a gang in one step.

use std::collections::BTreeSet;
use std::sync::Arc;

use coracle_watch::Event;
use tokio::time::Instant;

use super::Scheduler;
use crate::bind::NotScheduled;
use crate::config::Profile;
use crate::groups::Policy;
use crate::groups::condition::{self, Verdict, Write};
use crate::groups::feed::Change;
use crate::groups::object::PodGroup;
use crate::groups::placement::{Decision, Outcome, place};
use crate::hint::Changes;
use crate::object::Pod;
use coracle_values::object::{Key, ObjectExt};

/// After an attempt with refused pods, no refused gang is retried for the duration of the attempt times this factor.
/// The back-off of the refused pods starts after this delay. So gangs that do not fit use at most a tenth of the
/// scheduler's time.
const DELAY_FACTOR: u32 = 9;
/// Message of a pod that is gated. Upstream's plugin uses it for PreEnqueue.
const GATED: &str = "waiting for minCount pods from a gang to appear in scheduling queue";
/// The reason why this scheduler cannot schedule a group.
const CONSTRAINTS: &str = "this scheduler does not support schedulingConstraints of a PodGroup";
const EXTENDERS: &str =
    "this scheduler does not support extenders that filter, score or preempt for pods of a gang";

impl Scheduler {
    pub(super) fn group_change(&mut self, change: Change) {
        match change {
            Change::Watched(event) => self.group_event(*event),
            Change::NotServed => {
                let helped = self.groups.ignore_all();
                self.wake(helped);
                if self.groups.is_empty() {
                    self.group_feed.stop();
                }
            }
        }
    }

    fn group_event(&mut self, event: Event<PodGroup>) {
        let helped = match event {
            Event::Init => {
                self.groups.list();
                Vec::new()
            }
            Event::InitApply(group) => self.groups.put_listed(group),
            Event::Apply(group) => self.groups.put(group),
            Event::Delete(group) => {
                self.groups.remove(&group.key());
                Vec::new()
            }
            Event::InitDone => {
                self.groups.finish_list();
                Vec::new()
            }
        };
        self.wake(helped);
    }

    /// Adds a pod to its group.
    pub(super) fn put_in_group(&mut self, pod: &Pod, is_placed: bool) {
        if pod.group().is_some() {
            self.group_feed.start(&self.client);
            let helped = self.groups.put_pod(pod, is_placed);
            self.wake(helped);
        }
    }

    fn wake(&mut self, uids: Vec<String>) {
        for uid in uids {
            self.queue.wake(&uid, Instant::now());
        }
    }

    /// Schedules a popped pod of a group.
    pub(super) fn schedule_member(&mut self, pod: Arc<Pod>, profile: &Profile, group: &Key) {
        match self.groups.policy(group) {
            Policy::Gated => self.gate(&pod),
            Policy::Basic => self.schedule_single(pod, profile),
            Policy::Unsupported => self.refuse_group(&[pod], group, CONSTRAINTS),
            Policy::Gang { needed } => self.schedule_gang(pod, profile, group, needed),
        }
    }

    fn gate(&mut self, pod: &Pod) {
        self.groups.gate(pod.uid());
        // End the nomination: an earlier attempt may have nominated a node for this pod, before the group lost pods.
        self.gate_pod(pod, GATED.to_owned());
    }

    /// Schedules all waiting pods of a gang.
    fn schedule_gang(&mut self, pod: Arc<Pod>, profile: &Profile, group: &Key, needed: usize) {
        // A new pod does not shorten the back-off of its group, because each attempt costs as much as all pods of the
        // group.
        let delayed = self.groups.backoff_until(group).map(|until| until.max(self.gangs_delayed_until));
        if let Some(until) = delayed.filter(|until| *until > Instant::now()) {
            return self.queue.hold_back(pod.uid(), until);
        }
        let waiting = self.groups.waiting(group);
        let mut pods: Vec<Arc<Pod>> = waiting.iter().filter_map(|uid| self.queue.take(uid)).collect();
        pods.push(pod);
        self.queue.sort(&mut pods);
        let members: Vec<&Pod> = pods.iter().map(Arc::as_ref).collect();
        if let Some(why) = self.unsupported(&members) {
            return self.refuse_group(&pods, group, &why);
        }
        let attempt = self.limited(&members);
        let (groups, start) = (&self.groups, Instant::now());
        let is_member = |uid: &str| groups.is_member(uid, group);
        let outcome = place(&members, profile, &mut self.snapshot, needed, &is_member);
        tracing::debug!(
            group = group.name,
            namespace = group.namespace,
            pods = pods.len(),
            scheduled = outcome.verdict.is_scheduled(),
            "placed a pod group"
        );
        self.finish_limited(attempt);
        self.count_waits(&outcome);
        let now = Instant::now();
        self.apply(pods, group, outcome, now + (now - start) * DELAY_FACTOR);
    }

    /// The reason why the pods cannot be scheduled together.
    fn unsupported(&self, pods: &[&Pod]) -> Option<String> {
        let schedulers: BTreeSet<&str> = pods.iter().map(|pod| pod.scheduler()).collect();
        if let [one, other, ..] = schedulers.into_iter().collect::<Vec<_>>()[..] {
            let why = "all pods in a single pod group should have the same .spec.schedulerName set";
            return Some(format!("{why}, got: {one:?} and {other:?}"));
        }
        let needs = |pod: &&Pod| self.extender_calls.needs_extenders(pod);
        pods.iter().any(needs).then(|| EXTENDERS.to_owned())
    }

    /// Binds or refuses the pods of a gang. The back-off of refused pods starts at `backoff_start`.
    fn apply(&mut self, pods: Vec<Arc<Pod>>, group: &Key, outcome: Outcome, backoff_start: Instant) {
        let (mut is_released, mut backoff, is_error) = (false, None, outcome.verdict.is_error());
        for (pod, decision) in pods.into_iter().zip(outcome.decisions) {
            match decision {
                Decision::Bind(node, reserved) => self.assume(pod, node, reserved),
                Decision::Refuse { message, nominated, victims } => {
                    let before = self.snapshot.nominated_node(pod.uid());
                    is_released |= before.is_some() && before != nominated.as_deref();
                    self.snapshot.remove_nomination(pod.uid());
                    if let Some(node) = &nominated {
                        self.snapshot.nominate(&pod, node);
                        self.start_preemption(&pod, node, victims);
                    }
                    if is_error {
                        self.queue.failed(pod.uid(), backoff_start);
                    } else {
                        self.queue.refused(pod.uid(), outcome.helped_by, backoff_start);
                    }
                    backoff = backoff.max(self.queue.backoff_until(pod.uid()));
                    let reason =
                        if is_error { NotScheduled::SchedulerError } else { NotScheduled::Unschedulable };
                    self.report(&pod, reason, message, nominated);
                }
            }
        }
        if let Some(until) = backoff {
            self.groups.set_backoff(group, until);
            self.gangs_delayed_until = backoff_start;
        }
        // Pods of the same or a lower priority may use the nodes that were nominated before. This also helps the gang:
        // the nomination of one pod may have kept another pod of the gang from the node.
        if is_released {
            self.queue.change(Changes::POD_GONE, Instant::now());
        }
        // A success is reported when a pod of the gang is bound.
        if !outcome.verdict.is_scheduled() {
            self.report_group(group, outcome.verdict);
        }
    }

    /// Refuses popped pods for a reason that only a change of the pods or the group resolves.
    fn refuse_group(&mut self, pods: &[Arc<Pod>], group: &Key, why: &str) {
        for pod in pods {
            self.queue.refused(pod.uid(), Changes::GROUP, Instant::now());
            if let Some(until) = self.queue.backoff_until(pod.uid()) {
                self.groups.set_backoff(group, until);
            }
            self.end_nomination(pod.uid(), "");
            self.report_refusal(pod, why.to_owned(), None);
        }
        self.report_group(group, Verdict::refused(why));
    }

    /// Writes the condition of a group.
    pub(super) fn report_group(&mut self, group: &Key, verdict: Verdict) {
        let write = self.groups.report(group, verdict);
        self.start_write(write);
    }

    pub(super) fn group_written(&mut self, write: &Write, is_done: bool) {
        let next = self.groups.written(write, is_done);
        self.start_write(next);
    }

    fn start_write(&mut self, write: Option<Write>) {
        let Some(write) = write else { return };
        let client = self.client.clone();
        self.group_writes.spawn(async move {
            let written = condition::write(client, &write).await;
            if let Err(error) = &written {
                let (group, namespace) = (&write.key.name, &write.key.namespace);
                tracing::debug!(group, namespace, %error, "cannot write the condition PodGroupScheduled");
            }
            let is_done = written.is_ok();
            (write, is_done)
        });
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::sync::Mutex;

    use futures::FutureExt as _;
    use http::{Request, Response};
    use kube::Client;
    use kube::client::Body;
    use serde_json::{Value, json};

    use super::super::test_scheduler;
    use super::*;
    use crate::fixture;

    type Requests = Arc<Mutex<Vec<String>>>;

    /// A scheduler with these nodes, and the requests that it sends to an API server that accepts all of them.
    fn scheduler(nodes: &[&str]) -> (Scheduler, Requests) {
        with_api(nodes, json!([{"name": "podgroups"}]))
    }

    /// A scheduler with an API server that serves these kinds.
    fn with_api(nodes: &[&str], kinds: Value) -> (Scheduler, Requests) {
        let answer = json!({"resources": kinds}).to_string();
        let requests = Requests::default();
        let seen = requests.clone();
        let service = tower::service_fn(move |request: Request<Body>| {
            seen.lock().unwrap().push(format!("{} {}", request.method(), request.uri().path()));
            let is_discovery = request.uri().path() == "/apis/scheduling.k8s.io/v1alpha2";
            let body = if is_discovery { answer.clone() } else { "{}".to_owned() };
            async { Ok::<_, Infallible>(Response::new(Body::from(body.into_bytes()))) }
        });
        let mut scheduler = test_scheduler::scheduler(Client::new(service, ""));
        for name in nodes {
            scheduler.node_event(Event::Apply(fixture::node(name, json!({}))));
        }
        (scheduler, requests)
    }

    fn pod(name: &str, group: Option<&str>) -> Pod {
        let container = json!({"resources": {"requests": {"cpu": "3"}}});
        let group = group.map(|name| json!({"podGroupName": name}));
        fixture::pod(name, json!({"schedulingGroup": group, "containers": [container]}))
    }

    fn group(name: &str, policy: Value) -> PodGroup {
        let metadata = json!({"name": name, "namespace": "d", "uid": name});
        serde_json::from_value(json!({"metadata": metadata, "spec": {"schedulingPolicy": policy}})).unwrap()
    }

    /// The pods that are assumed after all ready pods were scheduled.
    fn assumed(scheduler: &mut Scheduler) -> Vec<String> {
        while scheduler.queue.due().is_some_and(|due| due <= Instant::now()) {
            scheduler.schedule_next();
        }
        let mut assumed: Vec<String> = scheduler.assumed.iter().cloned().collect();
        assumed.sort();
        assumed
    }

    #[tokio::test]
    async fn a_gang_is_bound_together_and_delays_no_other_pod() {
        let (mut scheduler, requests) = scheduler(&["a", "b", "c"]);
        scheduler.group_event(Event::Apply(group("g", json!({"gang": {"minCount": 2}}))));
        scheduler.pod_event(Event::Apply(pod("p", Some("g"))));
        scheduler.pod_event(Event::Apply(pod("alone", None)));
        assert_eq!(assumed(&mut scheduler), ["alone"]);
        assert_eq!(scheduler.queue.due(), None, "a gated pod is not tried");
        scheduler.pod_event(Event::Apply(pod("q", Some("g"))));
        assert_eq!(assumed(&mut scheduler), ["alone", "p", "q"]);
        while let Some(Ok(bound)) = scheduler.bindings.join_next().await {
            scheduler.bound(bound);
        }
        while let Some(Ok((write, is_done))) = scheduler.group_writes.join_next().await {
            scheduler.group_written(&write, is_done);
        }
        let requests = requests.lock().unwrap();
        let count = |end: &str| requests.iter().filter(|request| request.ends_with(end)).count();
        assert_eq!(count("/binding"), 3);
        let status = "PATCH /apis/scheduling.k8s.io/v1alpha2/namespaces/d/podgroups/g/status";
        assert_eq!(count(status), 1);
    }

    // With a running clock, the back-off of one second could end before the test looks.
    #[tokio::test(start_paused = true)]
    async fn a_gang_that_does_not_fit_is_refused_and_a_new_pod_waits_for_its_back_off() {
        let (mut scheduler, _) = scheduler(&["a"]);
        scheduler.group_event(Event::Apply(group("g", json!({"gang": {"minCount": 2}}))));
        for name in ["p", "q"] {
            scheduler.pod_event(Event::Apply(pod(name, Some("g"))));
        }
        assert!(assumed(&mut scheduler).is_empty());
        assert_eq!(scheduler.queue.due(), None);
        scheduler.pod_event(Event::Apply(pod("r", Some("g"))));
        assert!(assumed(&mut scheduler).is_empty());
        assert!(scheduler.queue.due().is_some_and(|due| due > Instant::now()));
        scheduler.pod_event(Event::Apply(pod("alone", None)));
        assert_eq!(assumed(&mut scheduler), ["alone"], "the gang reserves no resources");
    }

    #[tokio::test(start_paused = true)]
    async fn a_gang_is_retried_with_all_its_pods_when_a_node_is_added() {
        let (mut scheduler, _) = scheduler(&["a"]);
        scheduler.group_event(Event::Apply(group("g", json!({"gang": {"minCount": 2}}))));
        for name in ["p", "q"] {
            scheduler.pod_event(Event::Apply(pod(name, Some("g"))));
        }
        assert!(assumed(&mut scheduler).is_empty());
        scheduler.node_event(Event::Apply(fixture::node("b", json!({}))));
        assert!(assumed(&mut scheduler).is_empty(), "the back-off lasts");
        tokio::time::advance(std::time::Duration::from_secs(2)).await;
        assert_eq!(assumed(&mut scheduler), ["p", "q"]);
        let text = scheduler.config.metrics.text();
        for (result, pods) in [("Unschedulable", 1), ("Success", 2)] {
            let line =
                format!("scheduler_permit_wait_duration_seconds_count{{result=\"{result}\"}} {pods}\n");
            assert!(text.contains(&line), "no {line} in\n{text}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn refused_gangs_wait_together_but_other_pods_and_new_gangs_do_not_wait() {
        let (mut scheduler, _) = scheduler(&["a"]);
        scheduler.group_event(Event::Apply(group("g", json!({"gang": {"minCount": 2}}))));
        for name in ["p", "q"] {
            scheduler.pod_event(Event::Apply(pod(name, Some("g"))));
        }
        assert!(assumed(&mut scheduler).is_empty());
        let seconds = std::time::Duration::from_secs;
        // An attempt took a long time.
        scheduler.gangs_delayed_until = Instant::now() + seconds(100);
        for name in ["b", "c", "d"] {
            scheduler.node_event(Event::Apply(fixture::node(name, json!({}))));
        }
        tokio::time::advance(seconds(20)).await;
        scheduler.pod_event(Event::Apply(pod("alone", None)));
        scheduler.group_event(Event::Apply(group("new", json!({"gang": {"minCount": 1}}))));
        scheduler.pod_event(Event::Apply(pod("first", Some("new"))));
        assert_eq!(assumed(&mut scheduler), ["alone", "first"]);
        tokio::time::advance(seconds(100)).await;
        assert_eq!(assumed(&mut scheduler), ["alone", "first", "p", "q"]);
    }

    #[tokio::test]
    async fn the_missing_pods_of_a_gang_are_placed_after_a_restart() {
        let (mut scheduler, _) = scheduler(&["a", "b", "c"]);
        for (name, node) in [("p", "a"), ("q", "b")] {
            let mut bound = pod(name, Some("g"));
            bound.spec.node_name = Some(node.to_owned());
            scheduler.pod_event(Event::Apply(bound));
        }
        scheduler.pod_event(Event::Apply(pod("r", Some("g"))));
        assert!(assumed(&mut scheduler).is_empty(), "the group is not known yet");
        scheduler.group_event(Event::Apply(group("g", json!({"gang": {"minCount": 3}}))));
        assert_eq!(assumed(&mut scheduler), ["r"]);
        scheduler.pod_event(Event::Delete(pod("p", Some("g"))));
        scheduler.pod_event(Event::Apply(pod("s", Some("g"))));
        assert_eq!(assumed(&mut scheduler), ["r", "s"], "a deleted pod is replaced");
    }

    #[tokio::test]
    async fn a_gated_pod_keeps_no_node() {
        let (mut scheduler, _) = scheduler(&["a"]);
        scheduler.group_event(Event::Apply(group("g", json!({"gang": {"minCount": 2}}))));
        let mut nominated = pod("p", Some("g"));
        nominated.status.nominated_node_name = Some("a".to_owned());
        scheduler.pod_event(Event::Apply(nominated));
        assert!(scheduler.snapshot.is_nominated("p"));
        scheduler.pod_event(Event::Apply(pod("alone", None)));
        assert_eq!(assumed(&mut scheduler), ["alone"]);
        assert!(!scheduler.snapshot.is_nominated("p"));
    }

    #[tokio::test]
    async fn other_pods_may_use_the_nominated_node_of_a_refused_group() {
        let (mut scheduler, _) = scheduler(&["a"]);
        let nominated = pod("p", Some("g"));
        scheduler.snapshot.nominate(&nominated, "a");
        scheduler.pod_event(Event::Apply(pod("alone", None)));
        assert!(assumed(&mut scheduler).is_empty());
        scheduler.refuse_group(&[Arc::new(nominated)], &Key::new("d", "g"), CONSTRAINTS);
        assert_eq!(assumed(&mut scheduler), ["alone"]);
    }

    #[tokio::test]
    async fn pods_of_a_basic_group_are_scheduled_one_by_one() {
        let (mut scheduler, _) = scheduler(&["a"]);
        for name in ["p", "q"] {
            scheduler.pod_event(Event::Apply(pod(name, Some("g"))));
        }
        assert!(assumed(&mut scheduler).is_empty());
        scheduler.group_event(Event::Apply(group("g", json!({"basic": {}}))));
        assert_eq!(assumed(&mut scheduler).len(), 1);
    }

    #[tokio::test]
    async fn nothing_is_watched_before_a_pod_names_a_group() {
        let (mut scheduler, requests) = scheduler(&["a"]);
        scheduler.pod_event(Event::Apply(pod("alone", None)));
        assert!(scheduler.group_feed.next().now_or_never().is_none());
        assert!(requests.lock().unwrap().is_empty());
        scheduler.pod_event(Event::Apply(pod("p", Some("g"))));
        let change = scheduler.group_feed.next().await;
        assert!(matches!(change, Change::Watched(event) if matches!(*event, Event::Init)));
    }

    #[tokio::test(start_paused = true)]
    async fn pods_do_not_wait_for_groups_that_the_api_server_does_not_serve() {
        let (mut scheduler, _) = with_api(&["a"], json!([]));
        scheduler.pod_event(Event::Apply(pod("p", Some("g"))));
        assert!(assumed(&mut scheduler).is_empty());
        let change = scheduler.group_feed.next().await;
        assert!(matches!(change, Change::NotServed));
        scheduler.group_change(change);
        assert_eq!(assumed(&mut scheduler), ["p"]);
        scheduler.pod_event(Event::Delete(pod("p", Some("g"))));
        let change = scheduler.group_feed.next().await;
        scheduler.group_change(change);
        assert!(scheduler.group_feed.next().now_or_never().is_none(), "the checks ended");
        // After an upgrade, the API server serves groups, so the pod waits for its group.
        scheduler.group_event(Event::Init);
        scheduler.pod_event(Event::Apply(pod("q", Some("g"))));
        assert_eq!(assumed(&mut scheduler), Vec::<String>::new());
    }

    #[tokio::test]
    async fn events_wait_only_while_all_permits_of_bindings_are_in_use() {
        let (scheduler, _) = scheduler(&[]);
        let permits = scheduler.requests.clone();
        let all = permits
            .try_acquire_many_owned(u32::try_from(super::super::binding::MAX_BINDINGS).unwrap())
            .unwrap();
        scheduler.update_saturation();
        assert!(*scheduler.is_saturated.borrow());
        drop(all);
        scheduler.update_saturation();
        assert!(!*scheduler.is_saturated.borrow());
    }

    #[tokio::test]
    async fn pods_of_two_schedulers_are_refused() {
        let (scheduler, _) = scheduler(&["a"]);
        let mut other = pod("q", Some("g"));
        other.spec.scheduler_name = Some("other".to_owned());
        let why = scheduler.unsupported(&[&pod("p", Some("g")), &other]).unwrap();
        assert!(why.ends_with(r#"got: "default-scheduler" and "other""#), "{why}");
        assert_eq!(scheduler.unsupported(&[&pod("p", Some("g"))]), None);
    }
}
