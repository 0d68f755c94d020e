//! The pods of a target with their requests. The pods are listed for each reconcile and not cached.

use std::collections::{BTreeMap, HashSet};
use std::time::Duration;

use coracle_values::quantity::millis_of;
use coracle_values::resource;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{PodCondition, ResourceRequirements};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use serde::Deserialize;

use crate::config::AutoscalerOptions;

/// The value of a metric for one pod.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PodValue {
    pub(crate) time: Timestamp,
    /// Duration over which the value is averaged.
    pub(crate) window: Duration,
    pub(crate) millis: i64,
}

/// Values by pod name.
pub(crate) type PodValues = BTreeMap<String, PodValue>;

/// A pod.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Pod {
    pub(crate) metadata: ObjectMeta,
    pub(crate) spec: PodSpec,
    pub(crate) status: PodStatus,
}

/// The containers of a pod.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct PodSpec {
    containers: Vec<Container>,
    init_containers: Vec<Container>,
    resources: Option<ResourceRequirements>,
}

/// A container with its requests.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct Container {
    name: String,
    resources: ResourceRequirements,
    restart_policy: Option<String>,
}

/// The state of a pod.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct PodStatus {
    phase: String,
    start_time: Option<Time>,
    conditions: Vec<PodCondition>,
}

resource!(Pod, "", "pods", NamespaceResourceScope);

/// The pods, grouped by how they count for a metric.
#[derive(Debug, Default)]
pub(super) struct Groups {
    pub(super) ready: usize,
    pub(super) unready: HashSet<String>,
    /// Running pods without metrics.
    pub(super) missing: HashSet<String>,
    /// Terminating or failed pods.
    pub(super) ignored: HashSet<String>,
}

impl Groups {
    /// Groups pods. `cpu` has the options for values of the CPU usage. The values of starting pods are ignored, because
    /// they are not typical. `None` for other metrics.
    pub(super) fn of(
        pods: &[Pod],
        values: &PodValues,
        cpu: Option<&AutoscalerOptions>,
        now: Timestamp,
    ) -> Self {
        let mut groups = Self::default();
        for pod in pods {
            let name = pod.name().to_owned();
            if pod.metadata.deletion_timestamp.is_some() || pod.status.phase == "Failed" {
                groups.ignored.insert(name);
            } else if pod.status.phase == "Pending" {
                groups.unready.insert(name);
            } else if let Some(value) = values.get(&name) {
                if cpu.is_some_and(|options| pod.is_initializing(value, options, now)) {
                    groups.unready.insert(name);
                } else {
                    groups.ready += 1;
                }
            } else {
                groups.missing.insert(name);
            }
        }
        groups
    }
}

impl Pod {
    pub(super) fn name(&self) -> &str {
        self.metadata.name.as_deref().unwrap_or_default()
    }

    fn ready(&self) -> Option<&PodCondition> {
        self.status.conditions.iter().find(|condition| condition.type_ == "Ready")
    }

    /// Whether the pod runs and is ready.
    pub(super) fn is_ready(&self) -> bool {
        self.status.phase == "Running" && self.ready().is_some_and(|ready| ready.status == "True")
    }

    /// Whether a value of the CPU usage belongs to a starting pod.
    fn is_initializing(&self, value: &PodValue, options: &AutoscalerOptions, now: Timestamp) -> bool {
        let (Some(ready), Some(started)) = (self.ready(), &self.status.start_time) else { return true };
        let changed = ready.last_transition_time.as_ref().map_or(Timestamp::UNIX_EPOCH, |time| time.0);
        let age = now.as_second() - started.0.as_second();
        if age < whole_seconds(options.cpu_initialization) {
            let window = jiff::SignedDuration::try_from(value.window).unwrap_or_default();
            let is_early = changed.checked_add(window).is_ok_and(|counted| value.time < counted);
            return ready.status == "False" || is_early;
        }
        let never = changed.as_second() - started.0.as_second() < whole_seconds(options.initial_readiness);
        ready.status == "False" && never
    }

    /// The request of a resource in thousandths: of one container, or of the pod with its sidecars.
    pub(super) fn request(&self, resource: &str, container: Option<&str>) -> Result<i64, String> {
        let of = |resources: &ResourceRequirements| {
            resources.requests.as_ref().and_then(|requests| requests.get(resource)).map(millis_of)
        };
        let pod_level = self.spec.resources.as_ref().filter(|resources| {
            container.is_none() && resources.requests.as_ref().is_some_and(|requests| !requests.is_empty())
        });
        if let Some(request) = pod_level.and_then(of) {
            return Ok(request);
        }
        let sidecars = self.spec.init_containers.iter();
        let sidecars = sidecars.filter(|one| one.restart_policy.as_deref() == Some("Always"));
        let mut sum = 0_i64;
        for one in self.spec.containers.iter().chain(sidecars) {
            if container.is_some_and(|wanted| wanted != one.name) {
                continue;
            }
            let request = of(&one.resources).ok_or_else(|| {
                format!("missing request for {resource} in container {} of Pod {}", one.name, self.name())
            })?;
            sum = sum.saturating_add(request);
            if container.is_some() {
                return Ok(sum);
            }
        }
        match container {
            Some(container) => Err(format!("container {container} not found in Pod {}", self.name())),
            None => Ok(sum),
        }
    }
}

fn whole_seconds(duration: Duration) -> i64 {
    i64::try_from(duration.as_secs()).unwrap_or(i64::MAX)
}
