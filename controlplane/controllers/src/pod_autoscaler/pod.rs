//! The pods of a target: their state, their requests, and their values of a metric.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::PodCondition;

use crate::config::AutoscalerOptions;
use crate::object::{ObjectExt, Pod};

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
        pods: &[Arc<Pod>],
        values: &PodValues,
        cpu: Option<&AutoscalerOptions>,
        now: Timestamp,
    ) -> Self {
        let mut groups = Self::default();
        for pod in pods {
            let name = pod.name().to_owned();
            if pod.is_being_deleted() || pod.phase() == "Failed" {
                groups.ignored.insert(name);
            } else if pod.phase() == "Pending" {
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

/// The functions of pods that only autoscalers need.
impl Pod {
    fn phase(&self) -> &str {
        self.status.phase.as_deref().unwrap_or_default()
    }

    fn ready(&self) -> Option<&PodCondition> {
        self.condition("Ready")
    }

    /// Whether the pod runs and is ready.
    pub(super) fn is_ready(&self) -> bool {
        self.phase() == "Running" && self.ready().is_some_and(|ready| ready.status == "True")
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
        self.spec.requests.as_deref().map_or(Ok(0), |requests| requests.get(self.name(), resource, container))
    }
}

fn whole_seconds(duration: Duration) -> i64 {
    i64::try_from(duration.as_secs()).unwrap_or(i64::MAX)
}
