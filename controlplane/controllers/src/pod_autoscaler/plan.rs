//! Plans the replicas of one target from its scale, its pods and its metrics. No I/O.

use std::sync::Arc;

use coracle_events::Event;
use coracle_values::quantity::{Quantity, millis_of};
use jiff::Timestamp;
use k8s_openapi::api::autoscaling::v2::{MetricSpec, MetricTarget};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as ApiQuantity;
use serde_json::{Value, json};

use super::behavior::{History, Normalized, Range};
use super::condition::Conditions;
use super::metrics::Measured;
use super::replicas::{Proposal, Target, TargetUsage, Tolerance, by_average, by_pods, by_value};
use crate::config::AutoscalerOptions;
use crate::object::{HorizontalPodAutoscaler, Pod};

/// The type of the condition for valid metrics.
pub(super) const ACTIVE: &str = "ScalingActive";
/// The type of the condition for a target that can be scaled.
pub(super) const ABLE: &str = "AbleToScale";
const LIMITED: &str = "ScalingLimited";

/// The state of the target.
pub(super) struct Observed<'a> {
    pub(super) autoscaler: &'a HorizontalPodAutoscaler,
    /// `spec.replicas` of the scale.
    pub(super) current: i32,
    /// `status.replicas` of the scale.
    pub(super) status_replicas: i32,
    pub(super) pods: &'a [Arc<Pod>],
    /// The values of each metric, in the order of the spec.
    pub(super) measured: &'a [Result<Measured, String>],
    pub(super) options: AutoscalerOptions,
    pub(super) now: Timestamp,
}

/// The decision about the target.
#[derive(Debug, Default)]
pub(super) struct Decision {
    /// The replicas to set, with the reason. `None` if the target does not change.
    pub(super) rescale: Option<(i32, String)>,
    /// `status.currentMetrics`.
    pub(super) metrics: Vec<Value>,
    pub(super) events: Vec<Event>,
    /// Whether no decision was possible because metrics failed.
    pub(super) failed: bool,
    /// The replicas that each metric proposes. `None` for a metric that failed.
    pub(super) proposals: Vec<Option<i32>>,
}

/// A metric's proposal, name and status.
struct Evaluated {
    proposal: Proposal,
    name: String,
    status: Value,
}

/// A metric that could not be used: reason and message of the condition, and the error in the summary of all metrics.
struct Failed {
    reason: &'static str,
    cause: String,
    whole: String,
}

/// The decision if the replicas are 0 or outside of the limits. `None` if the decision needs the metrics.
pub(super) fn without_metrics(
    autoscaler: &HorizontalPodAutoscaler,
    current: i32,
    conditions: &mut Conditions,
) -> Option<Decision> {
    let (min, max) = (min_replicas(autoscaler), autoscaler.spec.max_replicas);
    let rescale = if current == 0 && min != 0 {
        let message = "scaling is disabled since the replica count of the target is zero";
        conditions.set(ACTIVE, false, "ScalingDisabled", message);
        None
    } else if current > max {
        Some((max, "Current number of replicas above Spec.MaxReplicas".to_owned()))
    } else if current < min {
        Some((min, "Current number of replicas below Spec.MinReplicas".to_owned()))
    } else {
        return None;
    };
    Some(Decision { rescale, ..Decision::default() })
}

/// Decides by metrics.
pub(super) fn by_metrics(
    observed: &Observed<'_>,
    history: &mut History,
    conditions: &mut Conditions,
) -> Decision {
    let spec = &observed.autoscaler.spec;
    let mut decision = Decision::default();
    let specs = spec.metrics.as_deref().unwrap_or_default();
    let (mut best, mut name, mut failures) = (0, String::new(), Vec::new());
    for (spec, measured) in specs.iter().zip(observed.measured) {
        match evaluate(observed, spec, measured) {
            Ok(evaluated) => {
                decision.metrics.push(evaluated.status);
                decision.proposals.push(Some(evaluated.proposal.replicas));
                if best == 0 || evaluated.proposal.replicas > best {
                    (best, name) = (evaluated.proposal.replicas, evaluated.name);
                }
            }
            Err(failed) => {
                decision.proposals.push(None);
                decision.events.push(Event::warning(failed.reason, failed.cause.clone()));
                failures.push(failed);
            }
        }
    }
    // If a metric is missing, the target may grow but not shrink.
    if let Some(first) = failures.first()
        && (failures.len() == specs.len() || best < observed.current)
    {
        let message = format!("the HPA was unable to compute the replica count: {}", first.cause);
        conditions.set(ACTIVE, false, first.reason, &message);
        let whole = format!(
            "invalid metrics ({} invalid out of {}), first error is: {}",
            failures.len(),
            specs.len(),
            first.whole
        );
        decision.events.push(Event::warning("FailedComputeMetricsReplicas", whole));
        decision.failed = true;
        return decision;
    }
    let message = format!("the HPA was able to successfully calculate a replica count from {name}");
    conditions.set(ACTIVE, true, "ValidMetricFound", &message);
    decision.rescale = limited(observed, best, &name, history, conditions);
    decision
}

/// Applies behavior and limits to the proposal of the metrics.
fn limited(
    observed: &Observed<'_>,
    desired: i32,
    name: &str,
    history: &mut History,
    conditions: &mut Conditions,
) -> Option<(i32, String)> {
    let current = observed.current;
    let reason = match desired.cmp(&current) {
        std::cmp::Ordering::Greater => format!("{name} above target"),
        std::cmp::Ordering::Less => "All metrics below target".to_owned(),
        std::cmp::Ordering::Equal => String::new(),
    };
    let (min, max) = (min_replicas(observed.autoscaler), observed.autoscaler.spec.max_replicas);
    let down_window = observed.options.downscale_stabilization;
    let range = Range { current, desired, min, max, down_window };
    let behavior = observed.autoscaler.spec.behavior.as_ref();
    let normalized = history.normalize(behavior, range, observed.now);
    let Normalized { stabilized, limited } = normalized;
    conditions.set(ABLE, true, stabilized.why.reason, stabilized.why.message);
    conditions.set(LIMITED, limited.is_limited, limited.why.reason, limited.why.message);
    let replicas = limited.replicas;
    (replicas != current).then_some((replicas, reason))
}

/// The minimum replicas. The default is 1.
fn min_replicas(autoscaler: &HorizontalPodAutoscaler) -> i32 {
    autoscaler.spec.min_replicas.unwrap_or(1)
}

/// The tolerance of an autoscaler. `default` applies to directions without their own tolerance.
fn tolerance(autoscaler: &HorizontalPodAutoscaler, default: f64) -> Tolerance {
    let of = |rules: Option<&k8s_openapi::api::autoscaling::v2::HPAScalingRules>| {
        let own = rules.and_then(|rules| rules.tolerance.as_ref());
        own.map_or(default, |own| millis_of(own) as f64 / 1000.0)
    };
    let behavior = autoscaler.spec.behavior.as_ref();
    Tolerance {
        down: of(behavior.and_then(|behavior| behavior.scale_down.as_ref())),
        up: of(behavior.and_then(|behavior| behavior.scale_up.as_ref())),
    }
}

fn evaluate(
    observed: &Observed<'_>,
    spec: &MetricSpec,
    measured: &Result<Measured, String>,
) -> Result<Evaluated, Failed> {
    let target = Target {
        replicas: observed.current,
        observed: observed.status_replicas,
        pods: observed.pods,
        tolerance: tolerance(observed.autoscaler, observed.options.tolerance),
        options: observed.options,
        now: observed.now,
    };
    if let Some(source) = &spec.resource {
        let failed = failure("FailedGetResourceMetric", format!("{} resource metric value", source.name));
        let compared = by_resource(target, &source.name, None, &source.target, measured);
        let (proposal, current) = compared.map_err(failed)?;
        let name = resource_name(&source.name, "resource", &source.target);
        let status = json!({"name": source.name, "current": current});
        return Ok(Evaluated { proposal, name, status: json!({"type": "Resource", "resource": status}) });
    }
    if let Some(source) = &spec.container_resource {
        let what = format!("{} container metric value", source.container);
        let failed = failure("FailedGetContainerResourceMetric", what);
        let container = Some(source.container.as_str());
        let compared = by_resource(target, &source.name, container, &source.target, measured);
        let (proposal, current) = compared.map_err(failed)?;
        let name = resource_name(&source.name, "container resource", &source.target);
        let status = json!({"name": source.name, "container": source.container, "current": current});
        let status = json!({"type": "ContainerResource", "containerResource": status});
        return Ok(Evaluated { proposal, name, status });
    }
    if let Some(source) = &spec.pods {
        let failed = failure("FailedGetPodsMetric", "pods metric value".to_owned());
        let metric = &source.metric.name;
        let values = match measured {
            Ok(Measured::Pods(values)) => Ok(values.clone()),
            other => Err(format!("unable to get metric {metric}: {}", cause(other))),
        };
        let wanted = source.target.average_value.as_ref().map_or(0, millis_of);
        let proposal = values.and_then(|values| by_pods(target, TargetUsage::Mean(wanted), values, false));
        let proposal = proposal.map_err(failed)?;
        let current = json!({"averageValue": quantity(proposal.usage, false)});
        let status = json!({"type": "Pods", "pods": {"metric": source.metric, "current": current}});
        return Ok(Evaluated { proposal, name: format!("pods metric {metric}"), status });
    }
    of_value(target, spec, measured)
}

/// Evaluates an object metric or an external metric: one value for all pods.
fn of_value(
    target: Target<'_>,
    spec: &MetricSpec,
    measured: &Result<Measured, String>,
) -> Result<Evaluated, Failed> {
    let value = match measured {
        Ok(Measured::Value(value)) => Ok(*value),
        other => Err(cause(other)),
    };
    if let Some(source) = &spec.object {
        let failed = failure("FailedGetObjectMetric", "object metric value".to_owned());
        let (object, metric) = (&source.described_object, &source.metric.name);
        let value = value.map_err(|error| {
            format!("unable to get metric {metric}: {error} on {} {}", object.kind, object.name)
        });
        let (proposal, current) = value
            .and_then(|value| by_value_or_average(target, &source.target, value, "object"))
            .map_err(failed)?;
        let status = json!({"describedObject": object, "metric": source.metric, "current": current});
        let status = json!({"type": "Object", "object": status});
        return Ok(Evaluated { proposal, name: format!("{} metric {metric}", object.kind), status });
    }
    let Some(source) = &spec.external else {
        let why = format!("unknown metric source type \"{}\"", spec.type_);
        return Err(Failed { reason: "InvalidMetricSourceType", cause: why.clone(), whole: why });
    };
    let metric = &source.metric.name;
    let failed = failure("FailedGetExternalMetric", format!("{metric} external metric value"));
    let value = value.map_err(|error| format!("unable to get external metric {metric}: {error}"));
    let (proposal, current) = value
        .and_then(|value| by_value_or_average(target, &source.target, value, "external"))
        .map_err(failed)?;
    let status = json!({"type": "External", "external": {"metric": source.metric, "current": current}});
    Ok(Evaluated { proposal, name: format!("external metric {metric}"), status })
}

/// Compares a metric's value with the target value, or its average per replica with the target average.
fn by_value_or_average(
    target: Target<'_>,
    wanted: &MetricTarget,
    value: i64,
    source: &str,
) -> Result<(Proposal, Value), String> {
    if let Some(mean) = wanted.average_value.as_ref().filter(|_| wanted.type_ != "Value") {
        let proposal = by_average(target, millis_of(mean), value);
        return Ok((proposal, json!({"averageValue": quantity(proposal.usage, false)})));
    }
    if let Some(whole) = &wanted.value {
        let proposal = by_value(target, millis_of(whole), value)?;
        return Ok((proposal, json!({"value": quantity(proposal.usage, false)})));
    }
    Err(format!("invalid {source} metric source: neither a value target nor an average value target was set"))
}

/// Compares the usage of CPU or memory with a target average or with the pods' requests.
fn by_resource(
    target: Target<'_>,
    resource: &str,
    container: Option<&str>,
    wanted: &MetricTarget,
    measured: &Result<Measured, String>,
) -> Result<(Proposal, Value), String> {
    let what = if wanted.average_value.is_some() { "usage" } else { "utilization" };
    let compared = match (&wanted.average_value, wanted.average_utilization) {
        (Some(mean), _) => TargetUsage::Mean(millis_of(mean)),
        (None, Some(percent)) => TargetUsage::Utilization { percent, resource, container },
        (None, None) => {
            let missing = "neither an average utilization target nor an average value (usage) target was set";
            return Err(format!("invalid resource metric source: {missing}"));
        }
    };
    let values = match measured {
        Ok(Measured::Pods(values)) => Ok(values.clone()),
        other => Err(format!("unable to get metrics for resource {resource}: {}", cause(other))),
    };
    let proposal = values.and_then(|values| by_pods(target, compared, values, resource == "cpu"));
    let proposal = proposal.map_err(|error| format!("failed to get {resource} {what}: {error}"))?;
    let mut current = json!({"averageValue": quantity(proposal.usage, resource == "memory")});
    if let (Some(share), Some(current)) = (proposal.utilization, current.as_object_mut()) {
        current.insert("averageUtilization".to_owned(), share.into());
    }
    Ok((proposal, current))
}

fn resource_name(resource: &str, what: &str, target: &MetricTarget) -> String {
    if target.average_value.is_some() {
        format!("{resource} resource")
    } else {
        format!("{resource} {what} utilization (percentage of request)")
    }
}

fn failure(reason: &'static str, what: String) -> impl FnOnce(String) -> Failed {
    move |cause| Failed { reason, whole: format!("failed to get {what}: {cause}"), cause }
}

fn cause(measured: &Result<Measured, String>) -> String {
    match measured {
        Ok(_) => "the metrics API sent a value of another type".to_owned(),
        Err(error) => error.clone(),
    }
}

/// A quantity of thousandths in canonical form. Memory has a binary suffix if one leaves a whole number.
fn quantity(millis: i64, is_memory: bool) -> ApiQuantity {
    let unit = if is_memory { Quantity::of_bytes(0) } else { Quantity::default() };
    let text = unit.with_thousandths(millis.into()).to_string();
    // A number of bytes without a binary suffix has no decimal suffix: 3000 becomes 3k.
    ApiQuantity(Quantity::parse(&text).map_or(text, |parsed| parsed.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::object::Object as _;
    use crate::pod_autoscaler::pod::{PodValue, PodValues};

    fn now() -> Timestamp {
        "2024-01-01T01:00:00Z".parse().unwrap()
    }

    fn autoscaler(metrics: Value) -> HorizontalPodAutoscaler {
        let spec = json!({"minReplicas": 1, "maxReplicas": 10, "metrics": metrics,
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": "web"}});
        serde_json::from_value(json!({"metadata": {"name": "web"}, "spec": spec})).unwrap()
    }

    fn cpu(percent: i32) -> Value {
        json!({"type": "Resource", "resource": {"name": "cpu",
            "target": {"type": "Utilization", "averageUtilization": percent}}})
    }

    fn pods(count: usize) -> Vec<Arc<Pod>> {
        let pod = |number: usize| {
            let container = json!({"name": "c", "resources": {"requests": {"cpu": "100m"}}});
            let ready =
                json!({"type": "Ready", "status": "True", "lastTransitionTime": "2024-01-01T00:00:10Z"});
            let status =
                json!({"phase": "Running", "startTime": "2024-01-01T00:00:00Z", "conditions": [ready]});
            let pod = json!({"metadata": {"name": format!("p{number}")}, "spec": {"containers": [container]},
                "status": status});
            let mut pod: Pod = serde_json::from_value(pod).unwrap();
            pod.slim();
            Arc::new(pod)
        };
        (0..count).map(pod).collect()
    }

    fn used(count: usize, millis: i64) -> Result<Measured, String> {
        let value = PodValue { time: now(), window: std::time::Duration::from_secs(15), millis };
        Ok(Measured::Pods((0..count).map(|number| (format!("p{number}"), value)).collect::<PodValues>()))
    }

    fn decide(metrics: Value, measured: &[Result<Measured, String>]) -> (Decision, Conditions) {
        let (autoscaler, pods) = (autoscaler(metrics), pods(2));
        let observed = Observed {
            autoscaler: &autoscaler,
            current: 2,
            status_replicas: 2,
            pods: &pods,
            measured,
            options: AutoscalerOptions::default(),
            now: now(),
        };
        let mut conditions = Conditions::new(None, now());
        let decision = by_metrics(&observed, &mut History::default(), &mut conditions);
        (decision, conditions)
    }

    fn condition(conditions: &Conditions, type_: &str) -> (String, String, String) {
        let found = conditions.list.iter().find(|one| one.type_ == type_).unwrap().clone();
        (found.status, found.reason.unwrap(), found.message.unwrap())
    }

    #[test]
    fn the_highest_proposal_wins() {
        let external = json!({"type": "External", "external": {"metric": {"name": "jobs"},
            "target": {"type": "AverageValue", "averageValue": "10"}}});
        let measured = [used(2, 100), Ok(Measured::Value(30_000))];
        let (decision, conditions) = decide(json!([cpu(50), external]), &measured);
        let reason = "cpu resource utilization (percentage of request) above target";
        assert_eq!(decision.rescale, Some((4, reason.to_owned())));
        let current = json!({"averageUtilization": 100, "averageValue": "100m"});
        assert_eq!(decision.metrics[0]["resource"], json!({"name": "cpu", "current": current}));
        assert_eq!(decision.metrics[1]["external"]["current"], json!({"averageValue": "15"}));
        assert_eq!(condition(&conditions, ACTIVE).1, "ValidMetricFound");
        assert_eq!(condition(&conditions, LIMITED).0, "False");
    }

    #[test]
    fn the_default_tolerance_applies_without_a_tolerance_of_the_behavior() {
        let mut autoscaler = autoscaler(json!([cpu(50)]));
        let of = |autoscaler: &HorizontalPodAutoscaler| {
            let Tolerance { down, up } = tolerance(autoscaler, 0.3);
            format!("{down} {up}")
        };
        assert_eq!(of(&autoscaler), "0.3 0.3");
        let behavior = json!({"scaleUp": {"tolerance": "500m"}});
        autoscaler.spec.behavior = serde_json::from_value(behavior).unwrap();
        assert_eq!(of(&autoscaler), "0.3 0.5");
    }

    #[test]
    fn a_missing_metric_prevents_a_decrease_only() {
        let absent = || Err("no metrics returned from resource metrics API".to_owned());
        let (decision, conditions) = decide(json!([cpu(50), cpu(50)]), &[used(2, 10), absent()]);
        assert!(decision.failed && decision.rescale.is_none());
        let cause = "failed to get cpu utilization: unable to get metrics for resource cpu: no metrics returned from \
                     resource metrics API";
        let message = format!("the HPA was unable to compute the replica count: {cause}");
        assert_eq!(
            condition(&conditions, ACTIVE),
            ("False".into(), "FailedGetResourceMetric".into(), message)
        );
        let (decision, _) = decide(json!([cpu(50), cpu(50)]), &[used(2, 100), absent()]);
        assert_eq!(decision.rescale.map(|(replicas, _)| replicas), Some(4));
    }

    #[test]
    fn replicas_outside_of_the_limits_need_no_metrics() {
        let autoscaler = autoscaler(json!([]));
        let decide = |current: i32| {
            let mut conditions = Conditions::new(None, now());
            without_metrics(&autoscaler, current, &mut conditions)
                .map(|decision| decision.rescale.map(|(replicas, _)| replicas))
        };
        assert_eq!((decide(0), decide(12), decide(5)), (Some(None), Some(Some(10)), None));
    }

    #[test]
    fn memory_has_binary_suffixes() {
        assert_eq!(quantity(3 * 1024 * 1024 * 1000, true).0, "3Mi");
        assert_eq!(quantity(3_000_000, true).0, "3k");
        assert_eq!(quantity(1500, false).0, "1500m");
    }
}
