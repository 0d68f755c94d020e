//! Pods whose scheduling needs calls to extenders. The calls are made for one pod at a time, so the extenders get the
//! pods in the order of the queue. Other pods are scheduled in the meantime, so that a slow extender delays only its
//! own pods.

use std::cmp::Reverse;
use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::Instant;

use super::Scheduler;
use crate::config::{Profile, SchedulerConfig};
use crate::consult;
use crate::decide::{FoundBy, Ranked, Unschedulable, first_fitting, rank};
use crate::extender::client::Remote;
use crate::extender::result::ExtenderResult;
use crate::metrics::AttemptResult;
use crate::object::Pod;
use crate::preempt::{self, Preemption};
use crate::turn_queue::{QueueOrder, TurnQueue};
use coracle_events::Event;
use coracle_values::object::ObjectExt;

/// Delay after which a pod that extenders refused is retried, because no event reports a change of an extender.
/// Upstream retries unschedulable pods after the same time.
const RETRY: Duration = Duration::from_secs(300);

/// The extenders and the pods that wait for them.
pub(super) struct ExtenderCalls {
    pub(super) extenders: Arc<[Remote]>,
    /// Popped pods that wait for the extenders.
    waiting: TurnQueue,
    /// Number of pods that were added to `waiting` so far.
    pushed: u64,
    /// The call in flight.
    in_flight: JoinSet<ExtenderOutcome>,
    retries: JoinSet<String>,
    /// The pods that will be retried.
    retried: HashSet<String>,
}

/// The result of the calls for one pod. The error is the message of an extender.
pub(super) enum ExtenderOutcome {
    Nodes { pod: Arc<Pod>, ranked: Ranked, advice: Result<ExtenderResult, String> },
    Preemption { pod: Arc<Pod>, refused: Unschedulable, found: Result<Vec<Preemption>, String> },
}

/// An event of the extenders.
pub(super) enum ExtenderEvent {
    Finished(Box<ExtenderOutcome>),
    Retry(String),
    /// No call is in flight, and pods are waiting.
    Next,
}

// === impl ExtenderCalls ===

impl ExtenderCalls {
    pub(super) fn new(config: &SchedulerConfig) -> Result<Self, String> {
        let extenders = config.extenders.iter().cloned().map(Remote::new).collect::<Result<_, _>>()?;
        Ok(Self {
            extenders,
            waiting: TurnQueue::new(config.queue_sort()),
            pushed: 0,
            in_flight: JoinSet::new(),
            retries: JoinSet::new(),
            retried: HashSet::new(),
        })
    }

    /// The next event. Cancel-safe.
    pub(super) async fn next(&mut self) -> ExtenderEvent {
        if self.in_flight.is_empty() && !self.waiting.is_empty() {
            // Lets the watches run between pods for which no node is found.
            tokio::task::yield_now().await;
            return ExtenderEvent::Next;
        }
        tokio::select! {
            Some(Ok(outcome)) = self.in_flight.join_next() => ExtenderEvent::Finished(Box::new(outcome)),
            Some(Ok(uid)) = self.retries.join_next() => ExtenderEvent::Retry(uid),
            else => std::future::pending().await,
        }
    }

    /// Adds a pod to the pods that wait for the extenders.
    fn push(&mut self, pod: &Pod) {
        self.pushed += 1;
        let order = QueueOrder(Reverse(pod.spec.priority.unwrap_or_default()), self.pushed);
        self.waiting.insert(pod.namespace(), order, pod.uid().to_owned());
    }

    /// Whether an extender must be called before the pod is bound.
    pub(super) fn needs_extenders(&self, pod: &Pod) -> bool {
        let calls = |one: &Remote| one.extender.chooses() || one.extender.preempt.is_some();
        self.extenders.iter().any(|one| calls(one) && one.extender.is_interested(pod))
    }

    /// Whether an extender binds the pod.
    pub(super) fn binds(&self, pod: &Pod) -> bool {
        self.extenders.iter().any(|one| one.extender.bind.is_some() && one.extender.is_interested(pod))
    }

    fn preempts(&self, pod: &Pod) -> bool {
        self.extenders.iter().any(|one| one.extender.preempt.is_some() && one.extender.is_interested(pod))
    }

    fn retry_later(&mut self, pod: &Pod) {
        let uid = pod.uid().to_owned();
        if self.retried.insert(uid.clone()) {
            self.retries.spawn(async move {
                tokio::time::sleep(RETRY).await;
                uid
            });
        }
    }
}

impl Scheduler {
    /// Schedules a popped pod in which an extender is interested.
    pub(super) fn consult(&mut self, pod: &Pod) {
        self.extender_calls.push(pod);
        self.consult_next();
    }

    pub(super) fn handle_extender_event(&mut self, event: ExtenderEvent) {
        match event {
            ExtenderEvent::Finished(outcome) => {
                self.handle_outcome(*outcome);
                self.consult_next();
            }
            ExtenderEvent::Next => self.consult_next(),
            ExtenderEvent::Retry(uid) => {
                self.extender_calls.retried.remove(&uid);
                self.queue.retry(&uid, Instant::now());
            }
        }
    }

    /// Starts the calls for the next pod, unless a call is in flight.
    fn consult_next(&mut self) {
        if !self.extender_calls.in_flight.is_empty() {
            return;
        }
        let Some(uid) = self.extender_calls.waiting.pop_first() else { return };
        let Some(pod) = self.undecided(&uid) else { return };
        let config = self.config.clone();
        let Some(profile) = config.profile(pod.scheduler()) else { return };
        let ranked = rank(&pod, profile, &mut self.snapshot);
        self.call_extenders(pod, profile, ranked);
    }

    /// Calls the extenders about the nodes that can run the pod.
    fn call_extenders(&mut self, pod: Arc<Pod>, profile: &Profile, ranked: Result<Ranked, Unschedulable>) {
        let ranked = match ranked {
            Ok(ranked) => ranked,
            Err(refused) => return self.refused_by_extenders(pod, profile, refused),
        };
        let (client, extenders) = (self.client.clone(), self.extender_calls.extenders.clone());
        let nodes = ranked.nodes.iter().map(|node| node.name.clone()).collect();
        let metrics = self.config.metrics.clone();
        self.extender_calls.in_flight.spawn(async move {
            let advice = consult::nodes(&client, &extenders, &pod, nodes, &metrics).await;
            ExtenderOutcome::Nodes { pod, ranked, advice }
        });
    }

    /// The pod if it was popped and is neither refused nor being bound. It may be deleted during a call of an extender.
    fn undecided(&self, uid: &str) -> Option<Arc<Pod>> {
        self.queue.in_flight(uid).filter(|_| !self.assumed.contains(uid)).cloned()
    }

    fn handle_outcome(&mut self, outcome: ExtenderOutcome) {
        let (ExtenderOutcome::Nodes { pod, .. } | ExtenderOutcome::Preemption { pod, .. }) = &outcome;
        if self.undecided(pod.uid()).is_none() {
            return;
        }
        let config = self.config.clone();
        let Some(profile) = config.profile(pod.scheduler()) else { return };
        // If only the preemption failed, the pod counts as unschedulable, not as failed.
        let is_error = matches!(outcome, ExtenderOutcome::Nodes { .. });
        match outcome {
            ExtenderOutcome::Nodes { pod, advice: Err(why), .. }
            | ExtenderOutcome::Preemption { pod, found: Err(why), .. } => {
                tracing::warn!(
                    pod = pod.name(),
                    namespace = pod.namespace(),
                    error = why,
                    "cannot schedule a pod"
                );
                self.queue.failed(pod.uid(), Instant::now());
                if is_error {
                    self.report_error(&pod, why);
                } else {
                    self.count_refusal(&pod, AttemptResult::Unschedulable);
                    self.record(&pod, Event::warning("FailedScheduling", why));
                }
            }
            ExtenderOutcome::Nodes { pod, ranked, advice: Ok(advice) } => {
                self.apply_extender_result(pod, profile, ranked, advice)
            }
            ExtenderOutcome::Preemption { pod, refused, found: Ok(found) } => {
                let none = || "preemption: the extenders accept no node".to_owned();
                self.handle_refusal(&pod, &refused, preempt::best(found).ok_or_else(none));
                self.extender_calls.retry_later(&pod);
            }
        }
    }

    fn apply_extender_result(
        &mut self,
        pod: Arc<Pod>,
        profile: &Profile,
        ranked: Ranked,
        advice: ExtenderResult,
    ) {
        let order = ranked.order(&advice);
        if order.is_empty() && ranked.only_nominated {
            // The extenders refuse the nominated node. As upstream, all nodes are tried now.
            let mut without_node = Pod::clone(&pod);
            without_node.status.nominated_node_name = None;
            let ranked = rank(&without_node, profile, &mut self.snapshot);
            return self.call_extenders(pod, profile, ranked);
        }
        if order.is_empty() {
            return self.refused_by_extenders(pod, profile, ranked.unschedulable(advice));
        }
        // Other pods may have been placed during the calls of the extenders.
        match first_fitting(&pod, profile, &mut self.snapshot, order) {
            Some(node) => self.assume_and_bind(pod, profile, node),
            None => self.queue.failed(pod.uid(), Instant::now()),
        }
    }

    /// Handles a pod that no node can run. Extenders with a verb for preemption are asked about the victims.
    fn refused_by_extenders(&mut self, pod: Arc<Pod>, profile: &Profile, refused: Unschedulable) {
        let is_error = refused.found_by == FoundBy::Error;
        if is_error || !profile.preempts || !self.extender_calls.preempts(&pod) {
            self.preempt_or_refuse(&pod, profile, &refused);
            return self.extender_calls.retry_later(&pod);
        }
        self.config.metrics.preemption_attempted();
        match preempt::search(&pod, profile, &mut self.snapshot, &refused.resolvable) {
            Err(why) => {
                self.handle_refusal(&pod, &refused, Err(why));
                self.extender_calls.retry_later(&pod);
            }
            Ok(found) => {
                let removable = preempt::removable(&pod, &self.snapshot, &found);
                let (client, extenders) = (self.client.clone(), self.extender_calls.extenders.clone());
                self.extender_calls.in_flight.spawn(async move {
                    let found = consult::preemption(&client, &extenders, &pod, found, &removable).await;
                    ExtenderOutcome::Preemption { pod, refused, found }
                });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::extender::Extender;
    use crate::fixture;
    use crate::hint::Changes;
    use crate::run::test_scheduler::scheduler_of_accepting_server;

    #[tokio::test(start_paused = true)]
    async fn a_pod_that_needs_extenders_is_not_tried_before_the_end_of_its_back_off() {
        for needs_extenders in [false, true] {
            let mut scheduler = scheduler_of_accepting_server();
            // Without a node for the pod, the extender is not called.
            let (url, filter) = ("http://127.0.0.1:1".to_owned(), Some("filter".to_owned()));
            let extender = Extender { url, filter, ..Extender::default() };
            if needs_extenders {
                scheduler.extender_calls.extenders = [Remote::new(extender).unwrap()].into();
            }
            scheduler.snapshot.set_node(&fixture::node("a", json!({})));
            let spec = json!({"containers": [{}], "nodeSelector": {"disk": "ssd"}});
            scheduler.queue.add(fixture::pod("p", spec));
            scheduler.schedule_next();
            scheduler.queue.change(Changes::ALL, Instant::now());
            let is_tried = scheduler.queue.pop(Instant::now()).is_some();
            assert_eq!(is_tried, !needs_extenders);
        }
    }

    #[tokio::test]
    async fn all_nodes_are_tried_after_extenders_refuse_the_nominated_node() {
        let mut scheduler = scheduler_of_accepting_server();
        for name in ["a", "b"] {
            scheduler.snapshot.set_node(&fixture::node(name, json!({})));
        }
        let mut pod = fixture::pod("p", json!({"containers": [{}]}));
        pod.status.nominated_node_name = Some("a".to_owned());
        let profile = Profile::default();
        let ranked = rank(&pod, &profile, &mut scheduler.snapshot).unwrap();
        scheduler.apply_extender_result(Arc::new(pod), &profile, ranked, ExtenderResult::default());
        let outcome = scheduler.extender_calls.in_flight.join_next().await.unwrap().unwrap();
        let ExtenderOutcome::Nodes { pod, ranked, .. } = outcome else { panic!("the nodes are not tried") };
        assert_eq!(pod.status.nominated_node_name.as_deref(), Some("a"));
        assert_eq!((ranked.nodes.len(), ranked.only_nominated), (2, false));
        // If the extenders refuse these nodes, too, the pod is refused.
        scheduler.apply_extender_result(pod, &profile, ranked, ExtenderResult::default());
        assert!(scheduler.extender_calls.in_flight.is_empty());
    }

    #[test]
    fn extenders_get_the_waiting_pod_with_the_highest_priority_first() {
        let mut calls = ExtenderCalls::new(&SchedulerConfig::default()).unwrap();
        for (priority, uid) in [(0, "a"), (0, "b"), (1000, "urgent"), (-1, "last"), (0, "c")] {
            calls.push(&fixture::pod(uid, json!({"priority": priority})));
        }
        let order: Vec<String> = std::iter::from_fn(|| calls.waiting.pop_first()).collect();
        assert_eq!(order, ["urgent", "a", "b", "c", "last"]);
    }
}
