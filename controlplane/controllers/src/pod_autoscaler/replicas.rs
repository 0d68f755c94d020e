//! The number of replicas that one metric proposes. Source: upstream's `replica_calculator.go`.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;

use super::pod::{Groups, PodValue, PodValues};
use crate::config::AutoscalerOptions;
use crate::object::{ObjectExt, Pod};

/// Tolerance as a fraction of the target. Smaller deviations of the usage are ignored.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tolerance {
    pub(super) down: f64,
    pub(super) up: f64,
}

impl Tolerance {
    fn covers(self, ratio: f64) -> bool {
        1.0 - self.down <= ratio && ratio <= 1.0 + self.up
    }
}

/// The scale of the target and its pods.
#[derive(Clone, Copy, Debug)]
pub(super) struct Target<'a> {
    /// `spec.replicas`.
    pub(super) replicas: i32,
    /// `status.replicas`.
    pub(super) observed: i32,
    pub(super) pods: &'a [Arc<Pod>],
    pub(super) tolerance: Tolerance,
    pub(super) options: AutoscalerOptions,
    pub(super) now: Timestamp,
}

/// Proposed replicas, and the usage from which they result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Proposal {
    pub(super) replicas: i32,
    /// Usage in thousandths: the average of a pod, or the value of the object.
    pub(super) usage: i64,
    /// Usage in percent of the requests.
    pub(super) utilization: Option<i32>,
}

/// The target value of the pods' usage.
#[derive(Clone, Copy, Debug)]
pub(super) enum TargetUsage<'a> {
    /// A mean in thousandths.
    Mean(i64),
    /// A percentage of the requests of all containers, or of one container.
    Utilization { percent: i32, resource: &'a str, container: Option<&'a str> },
}

/// Proposes replicas from a metric with a value for each pod. If `is_cpu`, the usage of starting pods is ignored.
pub(super) fn by_pods(
    target: Target<'_>,
    wanted: TargetUsage<'_>,
    mut values: PodValues,
    is_cpu: bool,
) -> Result<Proposal, String> {
    if target.pods.is_empty() {
        return Err("no pods returned by selector while calculating replica count".to_owned());
    }
    let cpu = is_cpu.then_some(&target.options);
    let groups = Groups::of(target.pods, &values, cpu, target.now);
    values.retain(|pod, _| !groups.ignored.contains(pod) && !groups.unready.contains(pod));
    if values.is_empty() {
        return Err("did not receive metrics for targeted pods (pods might be unready)".to_owned());
    }
    let requests = match wanted {
        TargetUsage::Mean(_) => HashMap::new(),
        TargetUsage::Utilization { resource, container, .. } => {
            let of = |pod: &Arc<Pod>| Ok((pod.name().to_owned(), pod.request(resource, container)?));
            target.pods.iter().map(of).collect::<Result<_, String>>()?
        }
    };
    let UsageRatio { ratio, usage, utilization } = wanted.ratio(&values, &requests)?;
    let proposal = |replicas: i32| Proposal { replicas, usage, utilization };
    let grows_with_unready = !groups.unready.is_empty() && ratio > 1.0;
    if !grows_with_unready && groups.missing.is_empty() {
        let same = target.tolerance.covers(ratio);
        return Ok(proposal(if same { target.replicas } else { ceil(ratio * groups.ready as f64) }));
    }
    // Pods without metrics get the assumed usage that makes the change smaller.
    if ratio != 1.0 {
        for pod in &groups.missing {
            let millis = if ratio < 1.0 { wanted.full_usage(requests.get(pod)) } else { 0 };
            values.insert(pod.clone(), assumed(millis, target.now));
        }
    }
    if grows_with_unready {
        values.extend(groups.unready.iter().map(|pod| (pod.clone(), assumed(0, target.now))));
    }
    let again = wanted.ratio(&values, &requests)?.ratio;
    let turned = (ratio < 1.0 && again > 1.0) || (ratio > 1.0 && again < 1.0);
    if target.tolerance.covers(again) || turned {
        return Ok(proposal(target.replicas));
    }
    let replicas = ceil(again * values.len() as f64);
    let opposite = (again < 1.0 && replicas > target.replicas) || (again > 1.0 && replicas < target.replicas);
    Ok(proposal(if opposite { target.replicas } else { replicas }))
}

/// Proposes replicas from one value for the whole target and a target value, both in thousandths.
pub(super) fn by_value(target: Target<'_>, wanted: i64, value: i64) -> Result<Proposal, String> {
    let ratio = value as f64 / wanted as f64;
    let proposal = |replicas: i32| Proposal { replicas, usage: value, utilization: None };
    if target.replicas == 0 {
        return Ok(proposal(ceil(ratio)));
    }
    if target.tolerance.covers(ratio) {
        return Ok(proposal(target.replicas));
    }
    if target.pods.is_empty() {
        let why = "no pods returned by selector while calculating replica count";
        return Err(format!("unable to calculate ready pods: {why}"));
    }
    let ready = target.pods.iter().filter(|pod| pod.is_ready()).count();
    Ok(proposal(ceil(ratio * ready as f64)))
}

/// Proposes replicas from one value for the whole target. The value per replica is compared with a target average. Both
/// are in thousandths.
pub(super) fn by_average(target: Target<'_>, wanted: i64, value: i64) -> Proposal {
    let observed = f64::from(target.observed);
    let ratio = value as f64 / (wanted as f64 * observed);
    let same = target.tolerance.covers(ratio);
    let replicas = if same { target.observed } else { ceil(value as f64 / wanted as f64) };
    let usage = if target.observed == 0 { value } else { (value as f64 / observed).ceil() as i64 };
    Proposal { replicas, usage, utilization: None }
}

/// Rounds up. Values out of range are capped, and NaN (0 divided by 0) becomes 0.
fn ceil(value: f64) -> i32 {
    value.ceil() as i32
}

fn assumed(millis: i64, time: Timestamp) -> PodValue {
    PodValue { time, window: Duration::ZERO, millis }
}

/// The usage of pods, compared with a target.
struct UsageRatio {
    /// Ratio of the usage to the target.
    ratio: f64,
    /// Mean usage of a pod.
    usage: i64,
    /// The usage in percent of the requests. `None` if the target is a mean.
    utilization: Option<i32>,
}

impl TargetUsage<'_> {
    /// Compares the usage of pods with the target.
    fn ratio(self, values: &PodValues, requests: &HashMap<String, i64>) -> Result<UsageRatio, String> {
        match self {
            TargetUsage::Mean(wanted) => {
                let sum: i128 = values.values().map(|value| i128::from(value.millis)).sum();
                let mean = mean(sum, values.len());
                Ok(UsageRatio { ratio: mean as f64 / wanted as f64, usage: mean, utilization: None })
            }
            TargetUsage::Utilization { percent, .. } => {
                let known = values.iter().filter_map(|(pod, value)| Some((value.millis, requests.get(pod)?)));
                let known: Vec<(i64, &i64)> = known.collect();
                let used: i128 = known.iter().map(|(used, _)| i128::from(*used)).sum();
                let requested: i128 = known.iter().map(|(_, requested)| i128::from(**requested)).sum();
                let share = (used * 100).checked_div(requested);
                let share = share.ok_or("no metrics returned matched known pods")?;
                let share = i32::try_from(share).unwrap_or(i32::MAX);
                let ratio = f64::from(share) / f64::from(percent);
                Ok(UsageRatio { ratio, usage: mean(used, known.len()), utilization: Some(share) })
            }
        }
    }

    /// The assumed usage of a pod without metrics when the target shrinks.
    fn full_usage(self, request: Option<&i64>) -> i64 {
        match self {
            TargetUsage::Mean(wanted) => wanted,
            TargetUsage::Utilization { percent, .. } => {
                let request = i128::from(request.copied().unwrap_or_default());
                i64::try_from(request * i128::from(percent.max(100)) / 100).unwrap_or(i64::MAX)
            }
        }
    }
}

fn mean(sum: i128, count: usize) -> i64 {
    let mean = sum.checked_div(i128::try_from(count).unwrap_or_default()).unwrap_or_default();
    i64::try_from(mean).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::object::Object as _;
    use serde_json::{Value, json};

    const NOW: &str = "2024-01-01T01:00:00Z";

    fn now() -> Timestamp {
        NOW.parse().unwrap()
    }

    fn pod(name: &str, phase: &str, ready: &str) -> Arc<Pod> {
        let container = json!({"name": "c", "resources": {"requests": {"cpu": "1"}}});
        let condition =
            json!({"type": "Ready", "status": ready, "lastTransitionTime": "2024-01-01T00:00:10Z"});
        let status = json!({"phase": phase, "startTime": "2024-01-01T00:00:00Z", "conditions": [condition]});
        let pod: Value =
            json!({"metadata": {"name": name}, "spec": {"containers": [container]}, "status": status});
        let mut pod: Pod = serde_json::from_value(pod).unwrap();
        pod.slim();
        Arc::new(pod)
    }

    fn running(count: usize) -> Vec<Arc<Pod>> {
        (0..count).map(|number| pod(&format!("p{number}"), "Running", "True")).collect()
    }

    fn values(millis: &[i64]) -> PodValues {
        let value = |millis: &i64| PodValue { time: now(), window: Duration::from_secs(15), millis: *millis };
        millis.iter().enumerate().map(|(number, millis)| (format!("p{number}"), value(millis))).collect()
    }

    fn target(pods: &[Arc<Pod>], replicas: i32) -> Target<'_> {
        let tolerance = Tolerance { down: 0.1, up: 0.1 };
        let options = AutoscalerOptions::default();
        Target { replicas, observed: replicas, pods, tolerance, options, now: now() }
    }

    fn at(percent: i32) -> TargetUsage<'static> {
        TargetUsage::Utilization { percent, resource: "cpu", container: None }
    }

    fn proposed(pods: &[Arc<Pod>], replicas: i32, percent: i32, millis: &[i64]) -> i32 {
        by_pods(target(pods, replicas), at(percent), values(millis), true).unwrap().replicas
    }

    #[test]
    fn replicas_follow_the_utilization() {
        let pods = running(3);
        assert_eq!(proposed(&pods, 3, 30, &[300, 500, 700]), 5);
        assert_eq!(proposed(&pods, 3, 50, &[100, 100, 100]), 1);
        assert_eq!(proposed(&pods, 3, 50, &[520, 480, 500]), 3);
        let proposal = by_pods(target(&pods, 3), at(30), values(&[300, 500, 700]), true).unwrap();
        assert_eq!((proposal.utilization, proposal.usage), (Some(50), 500));
    }

    #[test]
    fn pods_without_metrics_counteract_the_change() {
        // Upstream's TestReplicaCalcMissingMetrics: 295 % of 100 %, one of four pods missing.
        let pods = running(4);
        assert_eq!(proposed(&pods, 4, 24, &[400, 500, 700]), 7);
        assert_eq!(proposed(&pods, 4, 50, &[100, 100, 100]), 3);
        assert_eq!(proposed(&pods, 4, 100, &[1000, 1000, 1000]), 4);
    }

    #[test]
    fn the_options_decide_how_long_a_pod_counts_as_starting() {
        // The pods are not ready, since 10 seconds after their start an hour ago.
        let pods: Vec<_> = (0..2).map(|number| pod(&format!("p{number}"), "Running", "False")).collect();
        let proposed = |options: AutoscalerOptions| {
            let target = Target { options, ..target(&pods, 2) };
            by_pods(target, at(30), values(&[600, 600]), true).map(|proposal| proposal.replicas)
        };
        let default = AutoscalerOptions::default();
        assert!(proposed(default).is_err(), "they count as never ready");
        let short = AutoscalerOptions { initial_readiness: Duration::from_secs(5), ..default };
        assert_eq!(proposed(short), Ok(4));
        let long = AutoscalerOptions { cpu_initialization: Duration::from_secs(2 * 3600), ..short };
        assert!(proposed(long).is_err(), "they still start");
    }

    #[test]
    fn unready_pods_count_as_idle_when_the_target_grows() {
        let mut pods = running(3);
        pods.push(pod("p3", "Pending", "False"));
        assert_eq!(proposed(&pods, 4, 30, &[300, 500, 700]), 5);
        let pending = [pod("p0", "Pending", "False")];
        let error = by_pods(target(&pending, 1), at(30), values(&[]), true).unwrap_err();
        assert_eq!(error, "did not receive metrics for targeted pods (pods might be unready)");
    }

    #[test]
    fn single_values_are_compared_as_a_whole_or_per_replica() {
        let pods = running(2);
        assert_eq!(by_value(target(&pods, 2), 1000, 3000).unwrap().replicas, 6);
        assert_eq!(by_value(target(&pods, 2), 1000, 1050).unwrap().replicas, 2);
        assert_eq!(by_value(target(&[], 0), 1000, 2500).unwrap().replicas, 3);
        let proposal = by_average(target(&pods, 2), 1000, 5000);
        assert_eq!((proposal.replicas, proposal.usage), (5, 2500));
        assert_eq!(by_value(target(&pods, 2), 1, i64::MAX).unwrap().replicas, i32::MAX);
    }

    #[test]
    fn a_container_without_request_has_no_utilization() {
        let pods = running(1);
        let memory = TargetUsage::Utilization { percent: 50, resource: "memory", container: None };
        let error = by_pods(target(&pods, 1), memory, values(&[1]), false).unwrap_err();
        assert_eq!(error, "missing request for memory in container c of Pod p0");
        let other = TargetUsage::Utilization { percent: 50, resource: "cpu", container: Some("x") };
        let error = by_pods(target(&pods, 1), other, values(&[1]), true).unwrap_err();
        assert_eq!(error, "container x not found in Pod p0");
    }
}
