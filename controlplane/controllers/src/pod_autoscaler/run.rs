//! Reads scale, pods and metrics of an autoscaler's target, and applies the plan.

use std::sync::Arc;
use std::time::{Duration, Instant};

use coracle_events::Event;
use coracle_values::label_selector::{LabelSelector, Labels};
use jiff::Timestamp;
use k8s_openapi::api::autoscaling::v1::Scale;
use k8s_openapi::api::autoscaling::v2::MetricSpec;
use serde_json::{Value, json};

use super::condition::Conditions;
use super::metrics::{Measured, Selected};
use super::plan::{self, ABLE, ACTIVE, Decision, Observed};
use super::{AutoscalerState, State};
use crate::autoscaler_metrics::Scaling;
use crate::context::Context;
use crate::error::Error;
use crate::object::{HorizontalPodAutoscaler, Key, ObjectExt, Pod};
use crate::queue::{Next, Queue};
use crate::scale_target::Target;
use crate::timestamp::whole_seconds;
use crate::write::{Part, status_patch};

const COMPONENT: &str = "horizontal-pod-autoscaler";
/// Maximum metrics of an autoscaler. Each metric costs a request in each reconcile. Its values for all pods stay in
/// memory until the reconcile ends.
const MAX_METRICS: usize = 100;
/// Maximum number of autoscalers that the message about an overlap names. Each overlapping autoscaler has the
/// message in its status.
const MAX_NAMES: usize = 10;
/// Maximum number of comparisons of requirements with the labels of pods, to find overlapping autoscalers. A namespace
/// can have thousands of autoscalers, and thousands of pods with different labels. All other autoscalers wait during
/// these comparisons.
const MAX_COMPARED: usize = 100_000;
/// Requirements that are compared with the labels of pods before other tasks run. A namespace can have thousands of
/// pods, and a selector hundreds of requirements.
const STEP: usize = 1000;
/// Maximum characters of the selector in the message about overlapping autoscalers.
const MAX_SELECTOR: usize = 1024;

/// Queues changed autoscalers.
pub(crate) fn listen(context: &Context, queue: &Arc<Queue<Key>>) {
    let own = queue.clone();
    context.caches.autoscalers.on_change(move |change| {
        // This controller itself changes the status, so such changes are skipped.
        let same = change.old.zip(change.new).is_some_and(|(old, new)| {
            old.spec == new.spec && old.metadata.annotations == new.metadata.annotations
        });
        if let (Some(autoscaler), false) = (change.latest(), same) {
            own.add(autoscaler.key());
        }
    });
}

/// Reconciles one autoscaler.
pub(crate) async fn reconcile(context: &Context, state: &State, key: Key) -> Result<Next, Error> {
    let Some(autoscaler) = context.caches.autoscalers.get(&key) else {
        state.lock().remove(&key);
        return Ok(Next::Wait);
    };
    let reconcile = Reconcile { context, state, autoscaler: &autoscaler, now: Timestamp::now() };
    let mut conditions = Conditions::new(autoscaler.status.conditions.as_ref(), reconcile.now);
    let began = Instant::now();
    let scaling = reconcile.run(&mut conditions).await;
    let counted = *scaling.as_ref().unwrap_or(&Scaling::Failed);
    context.config.autoscaler_metrics.reconciled(counted, began.elapsed());
    scaling?;
    Ok(Next::After(context.config.autoscaler.sync_period))
}

/// One reconcile of one autoscaler.
struct Reconcile<'a> {
    context: &'a Context,
    /// The state of all autoscalers.
    state: &'a State,
    autoscaler: &'a HorizontalPodAutoscaler,
    now: Timestamp,
}

/// The input of a decision by metrics.
struct DecisionInput {
    pods: Vec<Arc<Pod>>,
    /// The values of each metric, in the order of the spec.
    measured: Vec<Result<Measured, String>>,
    /// The duration of reading each metric.
    took: Vec<Duration>,
}

/// Comparisons of selectors with the labels of pods.
struct Comparisons<'a> {
    labels: &'a [Option<&'a Labels>],
    /// The number of requirements that may still be compared. At zero, no selector matches.
    left: usize,
}

impl Comparisons<'_> {
    /// Whether a selector selects any of the pods.
    fn any(&mut self, selector: &LabelSelector) -> bool {
        let cost = selector.requirements.len().max(1);
        for labels in self.labels {
            let Some(left) = self.left.checked_sub(cost) else {
                self.left = 0;
                return false;
            };
            self.left = left;
            if selector.matches(*labels) {
                return true;
            }
        }
        false
    }
}

/// The pods that a selector selects. Other tasks run between the comparisons.
async fn selected_pods(pods: Vec<Arc<Pod>>, selector: &LabelSelector) -> Vec<Arc<Pod>> {
    let step = (STEP / selector.requirements.len().max(1)).max(1);
    let mut selected = Vec::new();
    for (place, pod) in pods.into_iter().enumerate() {
        if selector.matches(pod.metadata.labels.as_ref()) {
            selected.push(pod);
        }
        if place % step == step - 1 {
            tokio::task::yield_now().await;
        }
    }
    selected
}

/// The new status, without conditions.
struct Outcome {
    current: i32,
    /// The desired replicas. `None` if metrics failed: the last desired replicas are kept.
    desired: Option<i32>,
    metrics: Vec<Value>,
    rescaled: bool,
}

impl Outcome {
    /// The result for the metrics. Without desired replicas, the result is a failure of the metrics or of the update of
    /// the scale.
    fn scaling(&self) -> Scaling {
        match self.desired {
            None => Scaling::Failed,
            Some(_) if !self.rescaled => Scaling::Kept,
            Some(desired) if desired > self.current => Scaling::Up,
            Some(_) => Scaling::Down,
        }
    }
}

impl Reconcile<'_> {
    async fn run(&self, conditions: &mut Conditions) -> Result<Scaling, Error> {
        let (client, namespace) = (&self.context.client, self.autoscaler.namespace());
        let found = match Target::find(client, namespace, &self.autoscaler.spec.scale_target_ref).await {
            Ok(target) => target.scale().await.map(|scale| (target, scale)),
            Err(error) => Err(error),
        };
        let (target, scale) = match found {
            Ok(found) => found,
            Err(error) => {
                self.record(Event::warning("FailedGetScale", error.clone()));
                let message =
                    format!("the HPA controller was unable to get the target's current scale: {error}");
                conditions.set(ABLE, false, "FailedGetScale", &message);
                return self.write(conditions, None).await.map(|()| Scaling::Failed);
            }
        };
        let message = "the HPA controller was able to get the target's current scale";
        conditions.set(ABLE, true, "SucceededGetScale", message);
        let current = scale.spec.as_ref().and_then(|spec| spec.replicas).unwrap_or_default();
        self.with_history(|kept| kept.history.begin(current, self.now));
        let decision = match plan::without_metrics(self.autoscaler, current, conditions) {
            Some(decision) => decision,
            None => self.by_metrics(current, &scale, conditions).await,
        };
        let outcome = self.apply(&target, current, decision, conditions).await;
        let scaling = outcome.scaling();
        self.write(conditions, Some(outcome)).await.map(|()| scaling)
    }

    async fn by_metrics(&self, current: i32, scale: &Scale, conditions: &mut Conditions) -> Decision {
        let input = self.read_input(scale, conditions).await;
        let DecisionInput { pods, measured, took } = match input {
            Ok(input) => input,
            Err(error) => {
                let event = Event::warning("FailedComputeMetricsReplicas", error);
                return Decision { events: vec![event], failed: true, ..Decision::default() };
            }
        };
        let observed = Observed {
            autoscaler: self.autoscaler,
            current,
            status_replicas: scale.status.as_ref().map_or(current, |status| status.replicas),
            pods: &pods,
            measured: &measured,
            options: self.context.config.autoscaler,
            now: self.now,
        };
        let decision = self.with_history(|kept| plan::by_metrics(&observed, &mut kept.history, conditions));
        self.count_computations(&took, &decision.proposals);
        decision
    }

    /// Counts the computations of the metrics. As upstream, a proposal is compared with the replicas in the status.
    fn count_computations(&self, took: &[Duration], proposals: &[Option<i32>]) {
        let replicas = self.autoscaler.status.current_replicas.unwrap_or_default();
        let specs = self.autoscaler.spec.metrics.iter().flatten();
        for ((spec, took), proposal) in specs.zip(took).zip(proposals) {
            let scaling = match proposal {
                None => Scaling::Failed,
                Some(proposal) if *proposal > replicas => Scaling::Up,
                Some(proposal) if *proposal < replicas => Scaling::Down,
                Some(_) => Scaling::Kept,
            };
            self.context.config.autoscaler_metrics.computed(&spec.type_, scaling, *took);
        }
    }

    /// The target's pods and the values of all metrics.
    async fn read_input(&self, scale: &Scale, conditions: &mut Conditions) -> Result<DecisionInput, String> {
        let specs: &[MetricSpec] = self.autoscaler.spec.metrics.as_deref().unwrap_or_default();
        if specs.len() > MAX_METRICS {
            let message = format!("the HPA has {} metrics, which is more than {MAX_METRICS}", specs.len());
            conditions.set(ACTIVE, false, "TooManyMetrics", &message);
            return Err(message);
        }
        let selector =
            scale.status.as_ref().and_then(|status| status.selector.as_deref()).unwrap_or_default();
        let parsed = self.selector(selector, conditions)?;
        let namespace = self.autoscaler.namespace();
        let pods = selected_pods(self.context.caches.pods.in_namespace(namespace), &parsed).await;
        self.check_overlap(selector, parsed, &pods, conditions)?;
        let selected = Selected { client: &self.context.client, namespace, selector };
        let (mut measured, mut took) = (Vec::new(), Vec::new());
        for spec in specs {
            let began = Instant::now();
            measured.push(selected.read(spec).await);
            took.push(began.elapsed());
        }
        Ok(DecisionInput { pods, measured, took })
    }

    fn selector(&self, text: &str, conditions: &mut Conditions) -> Result<LabelSelector, String> {
        if text.is_empty() {
            let message = "the HPA target's scale is missing a selector";
            conditions.set(ACTIVE, false, "InvalidSelector", message);
            self.record(Event::warning("SelectorRequired", "selector is required".to_owned()));
            return Err("selector is required".to_owned());
        }
        LabelSelector::parse(text).map_err(|error| {
            let message =
                format!("couldn't convert selector into a corresponding internal selector object: {error}");
            conditions.set(ACTIVE, false, "InvalidSelector", &message);
            self.record(Event::warning("InvalidSelector", message.clone()));
            message
        })
    }

    /// Checks that no other autoscaler controls one of the pods.
    fn check_overlap(
        &self,
        text: &str,
        selector: LabelSelector,
        pods: &[Arc<Pod>],
        conditions: &mut Conditions,
    ) -> Result<(), String> {
        let key = self.autoscaler.key();
        let mut state = self.state.lock();
        state.entry(key.clone()).or_default().selector = Some(selector);
        // Most pods of a target have the same labels, so each set of labels is checked once.
        let mut labels: Vec<_> = pods.iter().map(|pod| pod.metadata.labels.as_ref()).collect();
        labels.sort_unstable();
        labels.dedup();
        let mut comparisons = Comparisons { labels: &labels, left: MAX_COMPARED };
        let of_namespace = state.iter().filter(|(other, _)| other.namespace == key.namespace);
        let selecting = of_namespace.filter(|(other, kept)| {
            **other == key || kept.selector.as_ref().is_some_and(|selector| comparisons.any(selector))
        });
        let mut all: Vec<&Key> = selecting.map(|(key, _)| key).collect();
        if all.len() < 2 {
            return Ok(());
        }
        all.sort();
        let named = all.iter().take(MAX_NAMES).map(|key| format!("{{{} {}}}", key.name, key.namespace));
        let more = (all.len() > MAX_NAMES).then(|| "and others".to_owned());
        let names: Vec<String> = named.chain(more).collect();
        let text: String = text.chars().take(MAX_SELECTOR).collect();
        let message =
            format!("pods by selector {text} are controlled by multiple HPAs: [{}]", names.join(" "));
        conditions.set(ACTIVE, false, "AmbiguousSelector", &message);
        self.record(Event::warning("AmbiguousSelector", message.clone()));
        Err(message)
    }

    /// Sets the replicas of the target.
    async fn apply(
        &self,
        target: &Target,
        current: i32,
        decision: Decision,
        conditions: &mut Conditions,
    ) -> Outcome {
        for event in decision.events {
            self.record(event);
        }
        let mut outcome = Outcome {
            current,
            desired: (!decision.failed).then_some(current),
            metrics: decision.metrics,
            rescaled: false,
        };
        let Some((replicas, why)) = decision.rescale else { return outcome };
        if let Err(error) = target.set(replicas).await {
            let message = format!("New size: {replicas}; reason: {why}; error: {error}");
            self.record(Event::warning("FailedRescale", message));
            let message = format!("the HPA controller was unable to update the target scale: {error}");
            conditions.set(ABLE, false, "FailedUpdateScale", &message);
            outcome.desired = None;
            return outcome;
        }
        let message = format!("the HPA controller was able to update the target scale to {replicas}");
        conditions.set(ABLE, true, "SucceededRescale", &message);
        self.record(Event::normal("SuccessfulRescale", format!("New size: {replicas}; reason: {why}")));
        let behavior = self.autoscaler.spec.behavior.as_ref();
        self.with_history(|kept| kept.history.scaled(behavior, current, replicas, self.now));
        Outcome { desired: Some(replicas), rescaled: true, ..outcome }
    }

    /// Writes the status if it changed. If the target is unknown, `outcome` is `None` and only the conditions change.
    async fn write(&self, conditions: &Conditions, outcome: Option<Outcome>) -> Result<(), Error> {
        let old = json!(self.autoscaler.status);
        let mut new = old.clone();
        let Some(fields) = new.as_object_mut() else { return Ok(()) };
        fields.insert("conditions".to_owned(), json!(conditions.list));
        if let Some(outcome) = outcome {
            fields.insert("currentReplicas".to_owned(), outcome.current.into());
            if let Some(desired) = outcome.desired {
                fields.insert("desiredReplicas".to_owned(), desired.into());
            }
            fields.insert("currentMetrics".to_owned(), outcome.metrics.into());
            if outcome.rescaled {
                fields.insert("lastScaleTime".to_owned(), whole_seconds(self.now).into());
            }
        }
        let Some(patch) = status_patch(self.autoscaler, &old, &new) else { return Ok(()) };
        let writer = self.context.writer(&self.context.caches.autoscalers);
        writer.merge(&self.autoscaler.key(), Part::Status, patch).await.map(drop)
    }

    fn with_history<R>(&self, change: impl FnOnce(&mut AutoscalerState) -> R) -> R {
        change(self.state.lock().entry(self.autoscaler.key()).or_default())
    }

    fn record(&self, event: Event) {
        self.context.record(self.autoscaler, COMPONENT, event);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_api::TestApi;

    fn autoscaler(name: &str, metrics: usize) -> HorizontalPodAutoscaler {
        let target = json!({"type": "Utilization", "averageUtilization": 50});
        let metric = json!({"type": "Resource", "resource": {"name": "cpu", "target": target}});
        let scaled = json!({"apiVersion": "apps/v1", "kind": "Deployment", "name": "d"});
        let spec = json!({"maxReplicas": 2, "scaleTargetRef": scaled, "metrics": vec![metric; metrics]});
        let metadata = json!({"name": name, "namespace": "n", "uid": name});
        serde_json::from_value(json!({"metadata": metadata, "spec": spec})).unwrap()
    }

    #[tokio::test]
    async fn an_autoscaler_reads_a_limited_number_of_metrics() {
        let (api, state, now) = (TestApi::new(&[]), State::default(), Timestamp::now());
        for (metrics, is_refused) in [(MAX_METRICS, false), (MAX_METRICS + 1, true)] {
            let autoscaler = autoscaler("a", metrics);
            let reconcile = Reconcile { context: &api.context, state: &state, autoscaler: &autoscaler, now };
            let mut conditions = Conditions::new(None, now);
            let error = reconcile.read_input(&Scale::default(), &mut conditions).await.err().unwrap();
            assert_eq!(error.contains("metrics"), is_refused, "{error}");
        }
    }

    #[tokio::test]
    async fn reconciles_are_counted_by_their_result() {
        let (api, state, mut autoscaler) = (TestApi::new(&[]), State::default(), autoscaler("a", 1));
        autoscaler.metadata.resource_version = Some("1".to_owned());
        let key = autoscaler.key();
        api.context.caches.autoscalers.written(autoscaler);
        // The target does not exist.
        let _failed = reconcile(&api.context, &state, key).await;
        let text = api.context.config.autoscaler_metrics.text();
        assert!(text.contains("reconciliations_total{action=\"none\",error=\"internal\"} 1\n"), "{text}");
        let scaling =
            |desired, rescaled| Outcome { current: 2, desired, metrics: Vec::new(), rescaled }.scaling();
        assert_eq!(scaling(Some(2), false), Scaling::Kept);
        assert_eq!(scaling(Some(3), true), Scaling::Up);
        assert_eq!(scaling(Some(1), true), Scaling::Down);
        assert_eq!(scaling(None, false), Scaling::Failed, "metrics are missing");
    }

    #[tokio::test]
    async fn computations_of_metrics_are_counted() {
        // The metrics API does not exist.
        let api = TestApi::new(&[]);
        let (state, now, autoscaler) = (State::default(), Timestamp::now(), autoscaler("a", 1));
        let reconcile = Reconcile { context: &api.context, state: &state, autoscaler: &autoscaler, now };
        let mut scale = Scale::default();
        let status = scale.status.get_or_insert_default();
        (status.replicas, status.selector) = (1, Some("app=a".to_owned()));
        reconcile.by_metrics(1, &scale, &mut Conditions::new(None, now)).await;
        reconcile.count_computations(&[Duration::ZERO], &[Some(1)]);
        let text = api.context.config.autoscaler_metrics.text();
        let name = "horizontal_pod_autoscaler_controller_metric_computation_total";
        for labels in ["action=\"none\",error=\"internal\"", "action=\"scale_up\",error=\"none\""] {
            let line = format!("{name}{{{labels},metric_type=\"Resource\"}} 1");
            assert!(text.lines().any(|other| other == line), "no {line} in\n{text}");
        }
    }

    #[tokio::test]
    async fn a_message_names_a_limited_number_of_autoscalers() {
        let (api, state, now) = (TestApi::new(&[]), State::default(), Timestamp::now());
        let pod: Pod =
            serde_json::from_value(json!({"metadata": {"name": "p", "labels": {"app": "a"}}})).unwrap();
        let pod = Arc::new(pod);
        let mut message = String::new();
        for number in 0..30 {
            let autoscaler = autoscaler(&format!("hpa-{number:02}"), 1);
            let reconcile = Reconcile { context: &api.context, state: &state, autoscaler: &autoscaler, now };
            let selector = LabelSelector::parse("app=a").unwrap();
            let pods = std::slice::from_ref(&pod);
            let checked = reconcile.check_overlap("app=a", selector, pods, &mut Conditions::new(None, now));
            message = checked.err().unwrap_or_default();
        }
        assert!(message.ends_with("{hpa-09 n} and others]"), "{message}");
    }

    #[tokio::test]
    async fn the_pods_of_a_target_are_those_of_the_cache() {
        // The API server has no list of pods.
        let (api, state, now) = (TestApi::new(&[]), State::default(), Timestamp::now());
        for (namespace, name, app) in [("n", "own", "a"), ("n", "other", "b"), ("m", "foreign", "a")] {
            let metadata = json!({"namespace": namespace, "name": name, "uid": name, "resourceVersion": "1",
                "labels": {"app": app}});
            api.context.caches.pods.written(serde_json::from_value(json!({"metadata": metadata})).unwrap());
        }
        let autoscaler = autoscaler("a", 0);
        let reconcile = Reconcile { context: &api.context, state: &state, autoscaler: &autoscaler, now };
        let mut scale = Scale::default();
        scale.status.get_or_insert_default().selector = Some("app=a".to_owned());
        let input = reconcile.read_input(&scale, &mut Conditions::new(None, now)).await;
        let names: Vec<_> = input.unwrap().pods.iter().map(|pod| pod.key()).collect();
        assert_eq!(names, [Key::new("n", "own")]);
    }

    #[tokio::test]
    async fn other_tasks_run_while_the_pods_of_a_target_are_selected() {
        let pod = |app: &str| {
            let metadata = json!({"name": app, "labels": {"app": app}});
            Arc::new(serde_json::from_value::<Pod>(json!({"metadata": metadata})).unwrap())
        };
        let names: Vec<String> = (0..250).map(|number| format!("key{number}!=x")).collect();
        let long = format!("{},app=a", names.join(","));
        for (selector, count) in [("app=a", STEP), (long.as_str(), 10)] {
            let selector = LabelSelector::parse(selector).unwrap();
            let other = tokio::spawn(async {});
            let mut pods = vec![pod("b"); count - 1];
            pods.push(pod("a"));
            assert_eq!(selected_pods(pods, &selector).await.len(), 1);
            assert!(other.is_finished(), "{count} pods");
        }
    }

    #[test]
    fn the_comparisons_for_overlapping_autoscalers_are_limited() {
        // All comparisons would take a minute.
        let labels: Vec<Labels> =
            (0..20_000).map(|number| Labels::from([("n".to_owned(), number.to_string())])).collect();
        let labels: Vec<Option<&Labels>> = labels.iter().map(Some).collect();
        let names: Vec<String> = (0..200).map(|number| format!("key{number}!=x")).collect();
        let long = LabelSelector::parse(&format!("{},n=x", names.join(","))).unwrap();
        let mut comparisons = Comparisons { labels: &labels, left: MAX_COMPARED };
        assert!(comparisons.any(&LabelSelector::parse("n=7").unwrap()));
        for _ in 0..2000 {
            assert!(!comparisons.any(&long));
        }
        assert!(!comparisons.any(&LabelSelector::parse("n=0").unwrap()), "the rest is left out");
    }
}
