//! The task that owns the queue and the snapshot. It receives watch events and starts bindings.

mod binding;
mod extender_calls;
mod grouped;
mod limiter;
mod measured;
mod refused;
mod report;
#[cfg(test)]
mod test_scheduler;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use futures::stream::BoxStream;
use futures::{FutureExt, StreamExt};
use kube::Client;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::affinity_term::Labels;
use crate::budget::Budgets;
use crate::config::{Profile, SchedulerConfig};
use crate::devices;
use crate::groups::Groups;
use crate::groups::condition::{Verdict, Write};
use crate::groups::feed::Feed;
use crate::hint::Changes;
use crate::metrics::{Attempt, AttemptResult, ExtensionPoint};
use crate::object::{Namespace, Node, Pod, PodDisruptionBudget};
use crate::queue::Queue;
use crate::reserve::{Reserved, reserve};
use crate::selectors;
use crate::snapshot::Snapshot;
use crate::volumes;
use crate::volumes::bind::BindError;
use crate::watch::stream;
use binding::{MAX_BINDINGS, MAX_DECIDED};
use coracle_events::{Event, Recorder};
use coracle_values::object::ObjectExt;
use coracle_watch::{Config, Event as Watched};
use extender_calls::ExtenderCalls;
use limiter::SearchLimiter;
use refused::RequestEnd;

/// Maximum number of pod events that one turn of the scheduler's loop handles. A turn handles several events, because
/// polling all inputs takes longer than handling a few events.
const EVENTS_PER_TURN: usize = 32;

/// The result of a binding.
struct Bound {
    pod: Arc<Pod>,
    node: String,
    reserved: Reserved,
    attempt: Option<Attempt>,
    result: Result<(), BindError>,
}

struct Scheduler {
    client: Client,
    config: Arc<SchedulerConfig>,
    recorder: Recorder,
    queue: Queue,
    snapshot: Snapshot,
    /// The uids of pods that are being bound. A pod leaves the set when its binding fails, or when the watch or a new
    /// list shows its state. The set has no expiry, like upstream's cache: a delayed watch must not free the resources
    /// of a bound pod.
    assumed: HashSet<String>,
    bindings: JoinSet<Bound>,
    /// Permits of concurrent binding requests.
    requests: Arc<Semaphore>,
    /// Permits of decided pods whose binding needs only one request.
    decided: Arc<Semaphore>,
    /// Whether all permits of `requests` are in use. While this is true, the recorder delays events.
    is_saturated: tokio::sync::watch::Sender<bool>,
    /// Permits of concurrent binding requests to extenders. A slow extender does not delay pods that no extender binds.
    extender_requests: Arc<Semaphore>,
    /// Requests after an unsuccessful attempt.
    refusal_requests: JoinSet<RequestEnd>,
    extender_calls: ExtenderCalls,
    groups: Groups,
    group_feed: Feed,
    /// The scheduler does not retry a refused gang before this time. So attempts of gangs take at most a tenth of the
    /// scheduler's time.
    gangs_delayed_until: Instant,
    searches: SearchLimiter,
    /// Writes of group conditions in flight, at most one for each group. Each task returns whether the write succeeded.
    group_writes: JoinSet<(Write, bool)>,
    pods: Listing,
    nodes: Listing,
    namespaces: Listing,
    budgets: Listing,
    /// The namespaces of a list that is being received, with their labels.
    listed_namespaces: HashMap<String, Labels>,
    /// The budgets of a list that is being received.
    listed_budgets: Budgets,
}

/// The progress of the list of one kind.
#[derive(Default)]
struct Listing {
    complete: bool,
    /// The uids or names of the objects in the list that is being received.
    listed: HashSet<String>,
}

/// Schedules pods until `shutdown` is cancelled. Failed watches are retried forever.
pub async fn run(client: Client, config: SchedulerConfig, shutdown: CancellationToken) {
    let is_saturated = tokio::sync::watch::Sender::new(false);
    let (recorder, events) = coracle_events::yielding_recorder(client.clone(), "", is_saturated.subscribe());
    let unfinished = Config::control_plane().fields("status.phase!=Succeeded,status.phase!=Failed");
    let mut pods = stream::<Pod>(&client, unfinished);
    let mut nodes = stream::<Node>(&client, Config::control_plane());
    let mut namespaces = stream::<Namespace>(&client, Config::control_plane());
    let mut budgets = stream::<PodDisruptionBudget>(&client, Config::control_plane());
    let mut sending = JoinSet::from_iter([events.run()]);
    let extender_calls = match ExtenderCalls::new(&config) {
        Ok(extender_calls) => extender_calls,
        // The configuration was checked when it was read.
        Err(error) => return tracing::error!(error, "scheduler stopped: an extender cannot be used"),
    };
    let mut scheduler = Scheduler::new(client, config, recorder, is_saturated, extender_calls);
    sending.spawn(volumes::feed::run(scheduler.client.clone(), scheduler.snapshot.volumes.clone()).boxed());
    sending.spawn(devices::feed::run(scheduler.client.clone(), scheduler.snapshot.devices.clone()).boxed());
    let mut device_changes = scheduler.snapshot.devices.changes();
    let mut selectors = selectors::feed::changes(&scheduler.client);
    let mut volume_changes = scheduler.snapshot.volumes.changes();
    loop {
        let due = scheduler.due();
        // Cancel-safe: streams and sets keep the items that were not received.
        tokio::select! {
            () = shutdown.cancelled() => return,
            Some(event) = pods.next() => {
                scheduler.pod_event(event);
                scheduler.pending_pod_events(&mut pods);
            }
            Some(event) = nodes.next() => scheduler.node_event(event),
            Some(event) = namespaces.next() => scheduler.namespace_event(event),
            Some(event) = budgets.next() => scheduler.budget_event(event),
            Some(change) = selectors.next() => scheduler.snapshot.selectors.apply(change),
            Ok(()) = device_changes.changed() => {
                let changes = scheduler.snapshot.devices.take_changes();
                scheduler.queue.devices_changed(&changes, Instant::now());
            }
            Ok(()) = volume_changes.changed() => {
                let changes = scheduler.snapshot.volumes.take_changes();
                scheduler.queue.volumes_changed(&changes, Instant::now());
            }
            Some(Ok(bound)) = scheduler.bindings.join_next() => scheduler.all_bound(bound),
            Some(Ok(end)) = scheduler.refusal_requests.join_next() => scheduler.request_ended(end),
            change = scheduler.group_feed.next() => scheduler.group_change(change),
            Some(Ok((write, is_done))) = scheduler.group_writes.join_next() => {
                scheduler.group_written(&write, is_done);
            }
            event = scheduler.extender_calls.next() => scheduler.handle_extender_event(event),
            Some(_) = sending.join_next() => return,
            () = wait_until(due) => {
                scheduler.schedule_next();
                // Yield, so that bindings and watches run before the next decision.
                tokio::task::yield_now().await;
            }
        }
        scheduler.measure_queue();
    }
}

/// Waits until a time. Returns immediately if the time has passed: a timer would wait for up to a millisecond, and each
/// event would start a new timer.
async fn wait_until(due: Option<Instant>) {
    match due {
        Some(due) if due <= Instant::now() => {}
        Some(due) => tokio::time::sleep_until(due).await,
        None => std::future::pending().await,
    }
}

// === impl Scheduler ===

impl Scheduler {
    fn new(
        client: Client,
        config: SchedulerConfig,
        recorder: Recorder,
        is_saturated: tokio::sync::watch::Sender<bool>,
        extender_calls: ExtenderCalls,
    ) -> Self {
        let snapshot = Snapshot::default();
        snapshot.devices.set_timeouts(&config.profiles);
        Self {
            client,
            queue: Queue::new(
                config.first_backoff,
                config.longest_backoff,
                config.queue_sort(),
                config.metrics.clone(),
            ),
            config: Arc::new(config),
            recorder,
            snapshot,
            assumed: HashSet::new(),
            bindings: JoinSet::new(),
            requests: Arc::new(Semaphore::new(MAX_BINDINGS)),
            decided: Arc::new(Semaphore::new(MAX_DECIDED)),
            is_saturated,
            extender_requests: Arc::new(Semaphore::new(MAX_BINDINGS)),
            refusal_requests: JoinSet::new(),
            extender_calls,
            groups: Groups::default(),
            group_feed: Feed::default(),
            gangs_delayed_until: Instant::now(),
            searches: SearchLimiter::default(),
            group_writes: JoinSet::new(),
            pods: Listing::default(),
            nodes: Listing::default(),
            namespaces: Listing::default(),
            budgets: Listing::default(),
            listed_namespaces: HashMap::new(),
            listed_budgets: Budgets::default(),
        }
    }

    /// The time at which the next pod can be scheduled. `None` until all kinds are listed, and while enough decided
    /// pods wait for their bindings.
    fn due(&self) -> Option<Instant> {
        let kinds = [&self.pods, &self.nodes, &self.namespaces, &self.budgets];
        let (volumes, selectors) = (&self.snapshot.volumes, &self.snapshot.selectors);
        let listed = kinds.iter().all(|kind| kind.complete)
            && volumes.is_complete()
            && selectors.is_complete()
            && self.snapshot.devices.is_complete();
        if listed && self.may_decide() { self.queue.next_attempt() } else { None }
    }

    /// Handles the events of pods that can be received without waiting.
    fn pending_pod_events(&mut self, pods: &mut BoxStream<'static, Watched<Pod>>) {
        for _ in 1..EVENTS_PER_TURN {
            // The next turn polls the stream again, so no wake-up is lost.
            let Some(Some(event)) = pods.next().now_or_never() else { return };
            self.pod_event(event);
        }
    }

    fn pod_event(&mut self, event: Watched<Pod>) {
        match event {
            Watched::Init => self.pods.listed.clear(),
            Watched::InitApply(pod) => {
                self.pods.listed.insert(pod.uid().to_owned());
                self.update_pod(pod);
            }
            Watched::Apply(pod) => self.update_pod(pod),
            Watched::Delete(pod) => self.remove_pod(pod.uid()),
            Watched::InitDone => {
                self.pods.complete = true;
                let listed = std::mem::take(&mut self.pods.listed);
                let known = self.snapshot.placed().into_iter().chain(self.queue.uids());
                let known = known.chain(self.groups.uids().cloned());
                for uid in known.filter(|uid| !listed.contains(uid)).collect::<Vec<_>>() {
                    // The pod was deleted. This also applies to a pod that is being bound, because it existed when it
                    // was queued.
                    self.remove_pod(&uid);
                }
            }
        }
    }

    fn update_pod(&mut self, pod: Pod) {
        if pod.finished() {
            self.remove_pod(pod.uid());
        } else if let Some(node) = pod.node() {
            self.assumed.remove(pod.uid());
            self.queue.remove(pod.uid());
            self.put_in_group(&pod, true);
            self.end_nomination(pod.uid(), node);
            let changes = self.snapshot.place(&pod, node);
            self.changed(changes);
        } else if self.assumed.contains(pod.uid()) {
            // The pod is being bound. If the binding fails, the scheduler retries with the latest state of the pod.
            if pod.needs_node() {
                self.queue.add(pod);
            } else {
                self.queue.remove(pod.uid());
            }
        } else if pod.needs_node() && self.config.profile(pod.scheduler()).is_some() {
            self.follow_nomination(&pod);
            self.put_in_group(&pod, false);
            self.queue.add(pod);
        } else {
            self.queue.remove(pod.uid());
            // Gated and terminating pods count for their group. Pods of other schedulers do not count.
            if self.config.profile(pod.scheduler()).is_some() {
                self.put_in_group(&pod, false);
            }
        }
    }

    fn changed(&mut self, changes: Changes) {
        if changes != Changes::default() {
            self.queue.change(changes, Instant::now());
        }
    }

    fn remove_pod(&mut self, uid: &str) {
        self.assumed.remove(uid);
        self.queue.remove(uid);
        self.groups.remove_pod(uid);
        self.end_nomination(uid, "");
        if self.snapshot.remove(uid) {
            self.queue.change(Changes::POD_GONE, Instant::now());
        }
    }

    fn node_event(&mut self, event: Watched<Node>) {
        match event {
            Watched::Init => self.nodes.listed.clear(),
            Watched::InitApply(node) => {
                self.nodes.listed.extend(node.metadata.name.clone());
                self.update_node(&node);
            }
            Watched::Apply(node) => self.update_node(&node),
            Watched::Delete(node) => self.remove_node(&node.metadata.name.unwrap_or_default()),
            Watched::InitDone => {
                self.nodes.complete = true;
                let listed = std::mem::take(&mut self.nodes.listed);
                for name in self.snapshot.node_names().iter().filter(|name| !listed.contains(*name)) {
                    self.remove_node(name);
                }
            }
        }
    }

    fn namespace_event(&mut self, event: Watched<Namespace>) {
        let parts = |namespace: Namespace| {
            let metadata = namespace.metadata;
            (metadata.name.unwrap_or_default(), metadata.labels.unwrap_or_default())
        };
        let has_new_labels = match event {
            // The known namespaces stay until the list is complete: without them a pod could violate an anti-affinity.
            Watched::Init => return self.listed_namespaces.clear(),
            Watched::InitApply(namespace) => return self.listed_namespaces.extend([parts(namespace)]),
            Watched::Apply(namespace) => {
                let (name, labels) = parts(namespace);
                let before = self.snapshot.namespaces.insert(name, labels.clone());
                before.is_some_and(|before| before != labels)
            }
            Watched::Delete(namespace) => {
                return drop(self.snapshot.namespaces.remove(&parts(namespace).0));
            }
            Watched::InitDone => {
                self.namespaces.complete = true;
                let listed = std::mem::take(&mut self.listed_namespaces);
                let before = std::mem::replace(&mut self.snapshot.namespaces, listed);
                let now = &self.snapshot.namespaces;
                before.iter().any(|(name, labels)| now.get(name).is_some_and(|new| new != labels))
            }
        };
        // After a change of a namespace's labels, an affinity term may select other pods.
        if has_new_labels {
            self.queue.change(Changes::NAMESPACE, Instant::now());
        }
    }

    fn budget_event(&mut self, event: Watched<PodDisruptionBudget>) {
        match event {
            // The known budgets stay until the list is complete: without them a preemption could violate them.
            Watched::Init => self.listed_budgets = Budgets::default(),
            Watched::InitApply(budget) => self.listed_budgets.set(&budget),
            Watched::Apply(budget) => self.snapshot.budgets.set(&budget),
            Watched::Delete(budget) => self.snapshot.budgets.remove(&budget),
            Watched::InitDone => {
                self.budgets.complete = true;
                self.snapshot.budgets = std::mem::take(&mut self.listed_budgets);
            }
        }
    }

    fn remove_node(&mut self, name: &str) {
        self.snapshot.remove_node(name);
        self.queue.change(Changes::NODE_GONE, Instant::now());
    }

    fn update_node(&mut self, node: &Node) {
        if self.snapshot.set_node(node) {
            self.queue.change(Changes::NODE, Instant::now());
        }
    }

    fn schedule_next(&mut self) {
        self.schedule_popped();
        self.queue.attempt_ended(Instant::now());
    }

    /// Pops a pod and schedules it.
    fn schedule_popped(&mut self) {
        let now = Instant::now();
        let Some(pod) = self.queue.pop(now) else { return };
        let config = self.config.clone();
        let Some(profile) = config.profile(pod.scheduler()) else { return };
        if let Some(until) = self.throttled_until(&pod, now) {
            return self.queue.hold_back(pod.uid(), until);
        }
        match pod.group().filter(|_| profile.gangs) {
            Some(group) => self.schedule_member(pod, profile, &group),
            None => self.schedule_single(pod, profile),
        }
    }

    fn schedule_alone(&mut self, pod: Arc<Pod>, profile: &Profile) {
        // The change of a claim, or of the pod's status with the claim's name, makes the pod ready again.
        if !self.snapshot.devices.has_claims_of(&pod) {
            let why = self.snapshot.devices.of_pod(&pod).err().unwrap_or_default();
            return self.gate_pod(&pod, why);
        }
        if self.extender_calls.needs_extenders(&pod) {
            return self.consult(&pod);
        }
        let start = Instant::now();
        match self.search(&pod, profile) {
            Ok(node) => {
                self.config.metrics.searched(start.elapsed());
                self.assume_and_bind(pod, profile, node);
            }
            Err(refused) => {
                self.preempt_or_refuse(&pod, profile, &refused);
                self.config.metrics.searched(start.elapsed());
            }
        }
    }

    /// Reserves the volumes and devices of a pod on a node, and starts the binding.
    fn assume_and_bind(&mut self, pod: Arc<Pod>, profile: &Profile, node: String) {
        let start = Instant::now();
        let reserved = reserve(&pod, profile, &self.snapshot, &node);
        let (metrics, result) = (&self.config.metrics, AttemptResult::of(&reserved));
        metrics.ran(ExtensionPoint::Reserve, result, pod.scheduler(), start);
        match reserved {
            Ok(reserved) => self.assume(pod, node, reserved),
            Err(message) => self.attempt_failed(&pod, &message),
        }
    }

    /// Places a pod on its node and starts the binding.
    fn assume(&mut self, pod: Arc<Pod>, node: String, reserved: Reserved) {
        let changes = self.snapshot.place(&pod, &node);
        self.changed(changes);
        self.assumed.insert(pod.uid().to_owned());
        let attempt = self.queue.finish_attempt(pod.uid());
        self.groups.assume(pod.uid());
        if let Some(group) = pod.group() {
            self.report_group(&group, Verdict::scheduled());
        }
        self.start_binding(pod, node, reserved, attempt);
        self.update_saturation();
    }

    fn record(&self, pod: &Pod, event: Event) {
        self.recorder.record(pod.object_reference(), pod.scheduler().to_owned(), event);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use http::{Request, Response};
    use kube::client::Body;
    use serde_json::json;

    use super::*;

    #[tokio::test]
    async fn known_namespaces_stay_until_a_new_list_is_complete() {
        let service = tower::service_fn(|_request: Request<Body>| async {
            Ok::<_, std::convert::Infallible>(Response::new(Body::empty()))
        });
        let mut scheduler = test_scheduler::scheduler(Client::new(service, ""));
        let mut names = |event: Watched<Namespace>| {
            scheduler.namespace_event(event);
            let mut names: Vec<_> = scheduler.snapshot.namespaces.keys().cloned().collect();
            names.sort();
            names.concat()
        };
        let namespace =
            |name: &str| serde_json::from_value::<Namespace>(json!({"metadata": {"name": name}})).unwrap();
        assert_eq!(names(Watched::Apply(namespace("a"))), "a");
        assert_eq!(names(Watched::Apply(namespace("b"))), "ab");
        assert_eq!(names(Watched::Init), "ab");
        assert_eq!(names(Watched::InitApply(namespace("b"))), "ab");
        assert_eq!(names(Watched::InitApply(namespace("c"))), "ab");
        assert_eq!(names(Watched::InitDone), "bc");
        assert_eq!(names(Watched::Delete(namespace("b"))), "c");
    }

    #[tokio::test]
    async fn one_turn_handles_the_events_that_are_ready_up_to_a_limit() {
        let mut scheduler = test_scheduler::scheduler_of_accepting_server();
        let pod = |number: usize| crate::fixture::pod(&format!("p{number}"), json!({"containers": [{}]}));
        let events: Vec<_> = (0..=EVENTS_PER_TURN).map(|number| Watched::Apply(pod(number))).collect();
        let mut pods = futures::stream::iter(events).chain(futures::stream::pending()).boxed();
        scheduler.pending_pod_events(&mut pods);
        assert_eq!(scheduler.queue.lengths().active, EVENTS_PER_TURN - 1);
        scheduler.pending_pod_events(&mut pods);
        assert_eq!(scheduler.queue.lengths().active, EVENTS_PER_TURN + 1);
    }

    #[tokio::test]
    async fn a_pod_that_is_deleted_while_it_is_bound_is_not_scheduled_again() {
        let service = tower::service_fn(|_request: Request<Body>| async {
            let conflict = json!({"kind": "Status", "status": "Failure", "code": 409, "reason": "Conflict"});
            let body = Body::from(conflict.to_string().into_bytes());
            Ok::<_, std::convert::Infallible>(Response::builder().status(409).body(body).unwrap())
        });
        for is_deleted in [false, true] {
            let mut scheduler = test_scheduler::scheduler(Client::new(service, ""));
            scheduler.node_event(Watched::Apply(crate::fixture::node("a", json!({}))));
            let mut pod = crate::fixture::pod("p", json!({"containers": [{}]}));
            scheduler.pod_event(Watched::Apply(pod.clone()));
            scheduler.schedule_next();
            assert!(scheduler.assumed.contains("p"));
            if is_deleted {
                pod.metadata.deletion_timestamp =
                    serde_json::from_value(json!("2026-01-01T00:00:00Z")).unwrap();
            }
            scheduler.pod_event(Watched::Apply(pod));
            let bound = scheduler.bindings.join_next().await.unwrap().unwrap();
            scheduler.bound(bound);
            assert_eq!(scheduler.queue.uids().is_empty(), is_deleted);
        }
    }

    #[tokio::test]
    async fn an_assumed_pod_that_a_new_list_does_not_have_frees_its_node() {
        let mut scheduler = test_scheduler::scheduler_of_accepting_server();
        scheduler.node_event(Watched::Apply(crate::fixture::node("a", json!({}))));
        let container = json!({"resources": {"requests": {"cpu": "4"}}});
        let pod = |name: &str| crate::fixture::pod(name, json!({"containers": [container.clone()]}));
        scheduler.pod_event(Watched::Apply(pod("p")));
        scheduler.schedule_next();
        assert!(scheduler.assumed.contains("p"));
        // The pod was bound and deleted while the watch was interrupted.
        scheduler.pod_event(Watched::Init);
        scheduler.pod_event(Watched::InitApply(pod("q")));
        scheduler.pod_event(Watched::InitDone);
        assert!(scheduler.assumed.is_empty());
        scheduler.schedule_next();
        assert!(scheduler.assumed.contains("q"), "the node has room");
    }

    #[tokio::test]
    async fn a_pod_with_scheduling_gates_is_not_tried_until_all_are_removed() {
        let mut scheduler = test_scheduler::scheduler_of_accepting_server();
        scheduler.node_event(Watched::Apply(crate::fixture::node("a", json!({}))));
        for (gates, is_assumed) in [
            (json!([{"name": "a"}, {"name": "b"}]), false),
            (json!([{"name": "b"}]), false),
            (json!([]), true),
        ] {
            let spec = json!({"schedulingGates": gates, "containers": [{}]});
            scheduler.pod_event(Watched::Apply(crate::fixture::pod("p", spec)));
            scheduler.schedule_next();
            assert_eq!(scheduler.assumed.contains("p"), is_assumed, "{gates}");
        }
    }

    #[tokio::test]
    async fn pods_of_other_schedulers_are_not_scheduled_and_each_profile_has_its_pods() {
        let mut scheduler = test_scheduler::scheduler_of_accepting_server();
        let mut config = (*scheduler.config).clone();
        let second = Profile { name: "second".to_owned(), ..Profile::default() };
        config.profiles.push(Profile { without_filters: ["NodeUnschedulable"].into(), ..second });
        scheduler.config = Arc::new(config);
        let cordoned = crate::fixture::node("a", json!({"/spec/unschedulable": true}));
        scheduler.node_event(Watched::Apply(cordoned));
        for name in ["default-scheduler", "second", "other"] {
            let spec = json!({"schedulerName": name, "containers": [{}]});
            scheduler.pod_event(Watched::Apply(crate::fixture::pod(name, spec)));
        }
        while scheduler.queue.due().is_some_and(|due| due <= Instant::now()) {
            scheduler.schedule_next();
        }
        assert_eq!(scheduler.assumed.iter().collect::<Vec<_>>(), ["second"]);
        assert!(!scheduler.queue.uids().contains(&"other".to_owned()));
    }

    #[tokio::test]
    async fn a_ready_pod_does_not_wait_for_a_timer() {
        let now = Instant::now();
        assert!(wait_until(Some(now)).now_or_never().is_some());
        assert!(wait_until(Some(now + Duration::from_secs(10))).now_or_never().is_none());
        assert!(wait_until(None).now_or_never().is_none());
    }
}
