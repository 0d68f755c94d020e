//! Limits the time that the searches of one namespace take from the pods of other namespaces.
//!
//! The work of one search for devices is limited, but the search can take a few seconds, and a namespace can have many
//! pods. The users of a namespace write the selectors and constraints of its claims, and the affinity terms of its
//! pods. An attempt compares each term with all pods of the cluster: 14,000 terms and 400 pods take half a second. One
//! term can have thousands of values. An attempt compares these values, and the requested amounts of a pod, with each
//! node. While a namespace is throttled, its gangs wait too, because their pods may have claims.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Affinity, NodeSelectorTerm, PodAffinityTerm, ResourceRequirements};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use tokio::time::Instant;

use super::Scheduler;
use crate::config::Profile;
use crate::object::{Pod, PodSpec};
use coracle_values::object::ObjectExt;

/// An attempt adds this many times its duration to the debt of its namespace. So a namespace uses at most a tenth of
/// the scheduler's time.
const SHARE: u32 = 10;
/// The debt above which the pods of a namespace wait: the debt of attempts that took two seconds.
const MAX_DEBT: Duration = Duration::from_secs(20);
/// A shorter attempt for one pod adds no debt, because attempts for pods without claims can take this time, too.
const SHORT: Duration = Duration::from_millis(10);

/// From this number of terms on, attempts for a pod are limited. Usual pods have fewer than ten.
const MANY_TERMS: usize = 100;

/// Attempts for a pod are limited from this number of parts on. Parts are values of selectors, containers, ports,
/// volumes and requested amounts.
const MANY_PARTS: usize = 1000;

/// The debts of namespaces. A debt decreases as time passes.
#[derive(Debug)]
pub(super) struct SearchLimiter {
    /// The time at which each namespace has no debt any more.
    debts: HashMap<String, Instant>,
    /// The current time.
    clock: fn() -> Instant,
}

/// An attempt for pods of one namespace. The pods need a search for devices, or have many terms or parts.
#[derive(Debug)]
pub(super) struct LimitedAttempt {
    namespace: String,
    pods: u32,
    start: Instant,
}

// === impl SearchLimiter ===

impl Default for SearchLimiter {
    fn default() -> Self {
        Self { debts: HashMap::new(), clock: Instant::now }
    }
}

impl SearchLimiter {
    /// The time until which a namespace is throttled. `None` if it is not throttled.
    fn throttled_until(&self, namespace: &str, now: Instant) -> Option<Instant> {
        let paid_at = *self.debts.get(namespace)?;
        let is_throttled = paid_at.saturating_duration_since(now) > MAX_DEBT;
        is_throttled.then(|| paid_at - MAX_DEBT)
    }

    /// Starts an attempt for these pods of one namespace. `None` if there is no pod.
    fn start(&self, pods: &[&Pod]) -> Option<LimitedAttempt> {
        let namespace = pods.first()?.namespace().to_owned();
        let pods = u32::try_from(pods.len()).unwrap_or(u32::MAX);
        Some(LimitedAttempt { namespace, pods, start: (self.clock)() })
    }

    /// Records an attempt that ends now.
    fn finish(&mut self, attempt: LimitedAttempt) {
        let now = (self.clock)();
        self.charge(attempt, now);
    }

    /// Records an attempt that ended at `now`.
    fn charge(&mut self, attempt: LimitedAttempt, now: Instant) {
        let took = now.saturating_duration_since(attempt.start);
        if took <= SHORT.saturating_mul(attempt.pods) {
            return;
        }
        self.debts.retain(|_, paid_at| *paid_at > now);
        *self.debts.entry(attempt.namespace).or_insert(now) += took * SHARE;
    }
}

// === impl Scheduler ===

impl Scheduler {
    /// The time until which a pod waits because its namespace is throttled. `None` if the pod need not wait. Only pods
    /// of groups and pods whose attempts may take long wait.
    pub(super) fn throttled_until(&self, pod: &Pod, now: Instant) -> Option<Instant> {
        let until = self.searches.throttled_until(pod.namespace(), now)?;
        let is_limited = pod.group().is_some() || self.may_take_long(pod);
        is_limited.then_some(until)
    }

    /// Whether an attempt for a pod may take long: devices are searched for the pod, or it has many terms or parts.
    fn may_take_long(&self, pod: &Pod) -> bool {
        self.snapshot.devices.searches(pod)
            || term_count(&pod.spec) >= MANY_TERMS
            || part_count(&pod.spec) >= MANY_PARTS
    }

    /// Schedules a popped pod without a gang, and records the attempt.
    pub(super) fn schedule_single(&mut self, pod: Arc<Pod>, profile: &Profile) {
        let attempt = self.limited(&[pod.as_ref()]);
        self.schedule_alone(pod, profile);
        self.finish_limited(attempt);
    }

    /// Starts an attempt for these pods of one namespace. `None` if no attempt for these pods may take long.
    pub(super) fn limited(&self, pods: &[&Pod]) -> Option<LimitedAttempt> {
        let devices = &self.snapshot.devices;
        if !pods.iter().any(|pod| self.may_take_long(pod)) {
            return None;
        }
        devices.start_attempt(pods.len(), self.snapshot.node_count());
        self.searches.start(pods)
    }

    /// Records the end of an attempt.
    pub(super) fn finish_limited(&mut self, attempt: Option<LimitedAttempt>) {
        if let Some(attempt) = attempt {
            self.snapshot.devices.end_attempt();
            self.searches.finish(attempt);
        }
    }
}

/// The number of terms of a pod that an attempt compares with nodes and with other pods.
fn term_count(spec: &PodSpec) -> usize {
    let affinity = spec.affinity.as_ref();
    let node = affinity.and_then(|affinity| affinity.node_affinity.as_ref());
    let near = affinity.and_then(|affinity| affinity.pod_affinity.as_ref());
    let far = affinity.and_then(|affinity| affinity.pod_anti_affinity.as_ref());
    let required = node.and_then(|node| node.required_during_scheduling_ignored_during_execution.as_ref());
    [
        required.map_or(0, |selector| selector.node_selector_terms.len()),
        len(node.and_then(|node| node.preferred_during_scheduling_ignored_during_execution.as_ref())),
        len(near.and_then(|near| near.required_during_scheduling_ignored_during_execution.as_ref())),
        len(near.and_then(|near| near.preferred_during_scheduling_ignored_during_execution.as_ref())),
        len(far.and_then(|far| far.required_during_scheduling_ignored_during_execution.as_ref())),
        len(far.and_then(|far| far.preferred_during_scheduling_ignored_during_execution.as_ref())),
        len(spec.topology_spread_constraints.as_ref()),
        len(spec.tolerations.as_ref()),
    ]
    .into_iter()
    .sum()
}

/// The number of parts of a pod: values of selectors, containers, ports, volumes and requested amounts. An attempt
/// compares the parts with nodes and with other pods.
fn part_count(spec: &PodSpec) -> usize {
    let amounts = |resources: Option<&ResourceRequirements>| {
        resources.and_then(|resources| resources.requests.as_ref()).map_or(0, BTreeMap::len)
    };
    let containers = spec.containers.iter().chain(spec.init_containers.iter().flatten());
    let containers =
        containers.map(|container| 1 + len(container.ports.as_ref()) + amounts(container.resources.as_ref()));
    let spread = spec.topology_spread_constraints.iter().flatten();
    containers.sum::<usize>()
        + amounts(spec.resources.as_ref())
        + spec.volumes.len()
        + spec.node_selector.as_ref().map_or(0, BTreeMap::len)
        + spec.affinity.as_ref().map_or(0, values_of_affinity)
        + spread.map(|constraint| values_of_labels(constraint.label_selector.as_ref())).sum::<usize>()
}

/// The number of values in the terms of an affinity.
fn values_of_affinity(affinity: &Affinity) -> usize {
    let node = affinity.node_affinity.iter().flat_map(|node| {
        let required = node.required_during_scheduling_ignored_during_execution.iter();
        let preferred = node.preferred_during_scheduling_ignored_during_execution.iter().flatten();
        let required = required.flat_map(|selector| &selector.node_selector_terms);
        required.chain(preferred.map(|preferred| &preferred.preference))
    });
    let near = affinity.pod_affinity.iter().flat_map(|near| {
        let preferred = near.preferred_during_scheduling_ignored_during_execution.iter().flatten();
        let required = near.required_during_scheduling_ignored_during_execution.iter().flatten();
        required.chain(preferred.map(|preferred| &preferred.pod_affinity_term))
    });
    let far = affinity.pod_anti_affinity.iter().flat_map(|far| {
        let preferred = far.preferred_during_scheduling_ignored_during_execution.iter().flatten();
        let required = far.required_during_scheduling_ignored_during_execution.iter().flatten();
        required.chain(preferred.map(|preferred| &preferred.pod_affinity_term))
    });
    node.map(values_of_node_term).chain(near.chain(far).map(values_of_pod_term)).sum()
}

/// The number of requirements and values of a term that selects nodes.
fn values_of_node_term(term: &NodeSelectorTerm) -> usize {
    let requirements = term.match_expressions.iter().chain(&term.match_fields).flatten();
    requirements.map(|requirement| 1 + len(requirement.values.as_ref())).sum()
}

/// The number of namespaces, keys, requirements and values of a term that selects pods.
fn values_of_pod_term(term: &PodAffinityTerm) -> usize {
    len(term.namespaces.as_ref())
        + len(term.match_label_keys.as_ref())
        + len(term.mismatch_label_keys.as_ref())
        + values_of_labels(term.label_selector.as_ref())
        + values_of_labels(term.namespace_selector.as_ref())
}

/// The number of requirements and values of a label selector.
fn values_of_labels(selector: Option<&LabelSelector>) -> usize {
    let Some(selector) = selector else { return 0 };
    let expressions = selector.match_expressions.iter().flatten();
    selector.match_labels.as_ref().map_or(0, BTreeMap::len)
        + expressions.map(|expression| 1 + len(expression.values.as_ref())).sum::<usize>()
}

fn len<T>(list: Option<&Vec<T>>) -> usize {
    list.map_or(0, Vec::len)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::super::test_scheduler::scheduler_of_accepting_server;
    use super::*;
    use crate::fixture;

    fn with_claim(namespace: &str) -> Pod {
        let spec = json!({"resourceClaims": [{"name": "c", "resourceClaimName": "c"}]});
        let mut pod = fixture::pod("with-claim", spec);
        pod.metadata.namespace = Some(namespace.to_owned());
        pod
    }

    #[test]
    fn a_namespace_uses_a_tenth_of_the_time_after_two_seconds_of_searches() {
        let (mut limiter, now) = (SearchLimiter::default(), Instant::now());
        let spend =
            |limiter: &mut SearchLimiter, (namespace, pods): (&str, u32), took: Duration, start: Instant| {
                let attempt = LimitedAttempt { namespace: namespace.to_owned(), pods, start };
                limiter.charge(attempt, start + took);
            };
        for _ in 0..1000 {
            spend(&mut limiter, ("short", 1), SHORT, now);
            spend(&mut limiter, ("short", 500), 500 * SHORT, now);
        }
        assert_eq!(limiter.throttled_until("short", now), None);
        let start = now + Duration::from_secs(5);
        spend(&mut limiter, ("a", 1), Duration::from_secs(2), now);
        assert_eq!(limiter.throttled_until("a", now + Duration::from_secs(2)), None);
        spend(&mut limiter, ("a", 2), Duration::from_secs(3), now + Duration::from_secs(2));
        assert_eq!(limiter.throttled_until("b", start), None, "another namespace");
        // The debt of 20 s began after two seconds. Then 30 s were added.
        let until = limiter.throttled_until("a", start).unwrap();
        assert_eq!(until - now, Duration::from_secs(2 + 20 + 30) - MAX_DEBT);
        assert_eq!(limiter.throttled_until("a", until), None);
        spend(&mut limiter, ("b", 1), Duration::from_secs(1), until + MAX_DEBT);
        assert_eq!(limiter.debts.keys().collect::<Vec<_>>(), ["b"], "a debt that is paid needs no memory");
    }

    /// A scheduler with one node, and an API server that accepts all requests.
    fn scheduler() -> Scheduler {
        let mut scheduler = scheduler_of_accepting_server();
        scheduler.snapshot.set_node(&fixture::node("a", json!({})));
        scheduler
    }

    #[tokio::test]
    async fn a_gang_is_limited_if_devices_are_searched_for_one_of_its_pods() {
        let (scheduler, plain) = (scheduler(), fixture::pod("plain", json!({"containers": [{}]})));
        assert!(scheduler.limited(&[&plain, &plain]).is_none());
        let attempt = scheduler.limited(&[&plain, &with_claim("d")]).unwrap();
        assert_eq!((attempt.namespace.as_str(), attempt.pods), ("d", 2));
    }

    /// A pod with this number of anti-affinity terms, which select no pod.
    fn with_terms(namespace: &str, count: usize) -> Pod {
        let term = json!({"topologyKey": "zone", "labelSelector": {"matchLabels": {"a": "b"}}});
        let terms = json!({"requiredDuringSchedulingIgnoredDuringExecution": vec![term; count]});
        let spec = json!({"containers": [{}], "affinity": {"podAntiAffinity": terms}});
        let mut pod = fixture::pod(&format!("terms-{namespace}"), spec);
        pod.metadata.namespace = Some(namespace.to_owned());
        pod
    }

    #[tokio::test]
    async fn attempts_for_a_pod_with_many_terms_are_limited() {
        let mut scheduler = scheduler();
        assert!(scheduler.limited(&[&with_terms("d", MANY_TERMS - 1)]).is_none());
        let attempt = scheduler.limited(&[&with_terms("d", MANY_TERMS)]).unwrap();
        scheduler.searches.charge(attempt, Instant::now() + Duration::from_secs(600));
        scheduler.queue.add(with_terms("d", MANY_TERMS));
        scheduler.schedule_next();
        assert!(!scheduler.assumed.contains("terms-d"), "the pod waits");
        scheduler.queue.add(with_terms("e", MANY_TERMS));
        scheduler.schedule_next();
        assert!(scheduler.assumed.contains("terms-e"), "pods of other namespaces do not wait");
    }

    #[tokio::test]
    async fn attempts_for_a_pod_with_many_values_containers_or_amounts_are_limited() {
        let scheduler = scheduler();
        let names = |count: usize| (0..count).map(|number| format!("x.io/n{number}"));
        let values = |count: usize| json!([{"key": "a", "operator": "In", "values": names(count).collect::<Vec<_>>()}]);
        let map = |count: usize| -> Value { names(count).map(|name| (name, Value::from("1"))).collect() };
        let on_node = |count: usize| json!({"matchExpressions": values(count)});
        let of_pods =
            |count: usize| json!({"topologyKey": "a", "labelSelector": {"matchExpressions": values(count)}});
        let required = |terms: Value| json!({"requiredDuringSchedulingIgnoredDuringExecution": terms});
        let preferred = |terms: Value| json!({"preferredDuringSchedulingIgnoredDuringExecution": terms});
        let specs = |count: usize| {
            let spread = json!({
                "maxSkew": 1, "topologyKey": "a", "whenUnsatisfiable": "DoNotSchedule",
                "labelSelector": {"matchLabels": map(count)},
            });
            let affinities = [
                json!({"nodeAffinity": required(json!({"nodeSelectorTerms": [on_node(count)]}))}),
                json!({"nodeAffinity": preferred(json!([{"weight": 1, "preference": on_node(count)}]))}),
                json!({"podAffinity": required(json!([of_pods(count)]))}),
                json!({"podAffinity": preferred(json!([{"weight": 1, "podAffinityTerm": of_pods(count)}]))}),
                json!({"podAntiAffinity": required(json!([of_pods(count)]))}),
                json!({"podAntiAffinity": preferred(json!([{"weight": 1, "podAffinityTerm": of_pods(count)}]))}),
            ];
            let others = [
                json!({"containers": vec![json!({}); count]}),
                json!({"initContainers": vec![json!({}); count]}),
                json!({"containers": [{"resources": {"requests": map(count)}}]}),
                json!({"resources": {"requests": map(count)}}),
                json!({"volumes": vec![json!({"name": "v"}); count]}),
                json!({"nodeSelector": map(count)}),
                json!({"topologySpreadConstraints": [spread]}),
            ];
            affinities.map(|affinity| json!({"affinity": affinity})).into_iter().chain(others)
        };
        let is_limited = |spec: Value| scheduler.limited(&[&fixture::pod("p", spec)]).is_some();
        for spec in specs(MANY_PARTS) {
            assert!(is_limited(spec.clone()), "{spec}");
        }
        for spec in specs(MANY_PARTS / 2) {
            assert!(!is_limited(spec.clone()), "{spec}");
        }
    }

    #[tokio::test]
    async fn an_attempt_counts_with_the_time_that_it_took() {
        std::thread_local! {
            static NEXT: std::cell::Cell<Instant> = std::cell::Cell::new(Instant::now());
        }
        const STEP: Duration = Duration::from_secs(3);
        // Three seconds pass between two readings of the clock.
        let clock = || NEXT.with(|next| next.replace(next.get() + STEP));
        let mut scheduler = scheduler();
        scheduler.searches.clock = clock;
        let (start, profile) = (NEXT.with(std::cell::Cell::get), Profile::default());
        for pod in [fixture::pod("plain", json!({"containers": [{}]})), with_claim("d")] {
            scheduler.queue.add(pod);
            let pod = scheduler.queue.pop(Instant::now()).unwrap();
            scheduler.schedule_single(pod, &profile);
        }
        let debts: Vec<_> = scheduler.searches.debts.into_iter().collect();
        assert_eq!(debts, [("d".to_owned(), start + STEP + STEP * SHARE)]);
    }

    #[tokio::test]
    async fn pods_with_claims_of_a_namespace_with_long_searches_wait_and_other_pods_do_not() {
        let mut scheduler = scheduler();
        let attempt = scheduler.searches.start(&[&with_claim("d")]).unwrap();
        scheduler.searches.charge(attempt, Instant::now() + Duration::from_secs(600));
        scheduler.queue.add(with_claim("d"));
        scheduler.schedule_next();
        // Without a limit the pod would be gated, because its claim does not exist.
        assert!(scheduler.queue.due().is_some_and(|due| due > Instant::now()));
        scheduler.queue.add(fixture::pod("other", json!({"containers": [{}]})));
        scheduler.schedule_next();
        assert!(scheduler.assumed.contains("other"));
    }
}
