//! Configuration of the scheduler.

mod extenders;
mod file;
mod plugins;
mod policy;
mod weights;

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

use jiff::SignedDuration;
use k8s_openapi::api::core::v1::{NodeAffinity, TopologySpreadConstraint};

use crate::extender::Extender;
use crate::metrics::SchedulerMetrics;

#[cfg(test)]
pub(crate) use plugins::FILTERS;

/// Configuration of the scheduler.
#[derive(Clone, Debug, PartialEq)]
pub struct SchedulerConfig {
    /// Back-off of a refused pod after its first refusal. It doubles with each refusal.
    pub(crate) first_backoff: Duration,
    /// Maximum back-off of a refused pod.
    pub(crate) longest_backoff: Duration,
    /// The profiles; at least one. The profile with the `spec.schedulerName` of a pod handles the pod.
    pub(crate) profiles: Vec<Profile>,
    pub(crate) extenders: Vec<Extender>,
    /// The metrics of the scheduler. A clone of the configuration shares them.
    pub metrics: SchedulerMetrics,
}

/// The configuration file cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("cannot use the scheduler configuration {path}: {reason}")]
pub struct ConfigError {
    path: String,
    /// The invalid field, or the read error.
    reason: String,
}

/// The configuration for the pods of one scheduler name.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Profile {
    /// The scheduler name of the profile's pods.
    pub(crate) name: String,
    pub(crate) weights: Weights,
    pub(crate) fit: Fit,
    /// Node affinity that applies to every pod in addition to the pod's own node affinity.
    pub(crate) added_affinity: Option<NodeAffinity>,
    /// Plugins whose filter does not run.
    pub(crate) without_filters: BTreeSet<&'static str>,
    /// Whether preemption is enabled.
    pub(crate) preempts: bool,
    /// Whether the pods of a group wait until the group is complete, and are scheduled together.
    pub(crate) gangs: bool,
    pub(crate) spread: SpreadDefaults,
    pub(crate) affinity: AffinityArgs,
    /// The resources of NodeResourcesBalancedAllocation.
    pub(crate) balanced: Vec<String>,
    /// Maximum time that a pod waits for the binding conditions of its devices.
    pub(crate) device_timeout: SignedDuration,
    /// Maximum time that a pod waits for its volumes.
    pub(crate) volume_timeout: Duration,
    /// The search ends when this percentage of the nodes fit, but not before [`MIN_FEASIBLE_NODES`] fit. 0 means
    /// upstream's percentage: 50, minus 1 for each 125 nodes, but at least 5.
    pub(crate) percentage: u8,
    pub(crate) queue_sort: QueueSort,
}

/// Order of waiting pods of equal priority.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum QueueSort {
    /// The namespaces take turns. The pods of one namespace are in the order of upstream.
    #[default]
    Turns,
    /// The pod that was added or refused earlier is first, as in upstream's `PrioritySort`.
    Time,
}

/// Default of [`Profile::device_timeout`], as upstream (`DynamicResourcesBindingTimeoutDefault`).
pub(crate) const DEVICE_TIMEOUT: SignedDuration = SignedDuration::from_secs(600);

/// Default of [`Profile::volume_timeout`], as upstream.
pub(crate) const VOLUME_TIMEOUT: Duration = Duration::from_secs(600);

/// Minimum number of fitting nodes before a search ends early, as upstream.
pub(crate) const MIN_FEASIBLE_NODES: usize = 100;

/// Default spread constraints, for pods without constraints.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum SpreadDefaults {
    /// Upstream's constraints, by node and zone.
    System,
    /// The constraints of the configuration.
    List(Vec<TopologySpreadConstraint>),
}

/// Arguments of InterPodAffinity.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct AffinityArgs {
    /// Weight of another pod's required affinity term that selects the pod (`hardPodAffinityWeight`).
    pub(crate) required_weight: i64,
    /// Whether the score ignores the terms of other pods, for a pod without preferred terms
    /// (`ignorePreferredTermsOfExistingPods`). As upstream, this includes required terms.
    pub(crate) ignores_others: bool,
}

/// Weights of the scores. 0 disables a score.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Weights {
    pub(crate) taints: i64,
    pub(crate) node_affinity: i64,
    pub(crate) spread: i64,
    pub(crate) pod_affinity: i64,
    pub(crate) fit: i64,
    pub(crate) balanced: i64,
    pub(crate) images: i64,
    pub(crate) devices: i64,
}

/// The settings of NodeResourcesFit.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Fit {
    pub(crate) strategy: Strategy,
    /// Resources with their weights.
    pub(crate) resources: Vec<(String, i64)>,
    /// Extended resources that the filter ignores.
    pub(crate) ignored: BTreeSet<String>,
    /// Prefixes of extended resources that the filter ignores.
    pub(crate) ignored_groups: BTreeSet<String>,
}

/// The function from the utilization of a resource to its score.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Strategy {
    /// Strategy LeastAllocated: more free resources give a higher score.
    Least,
    /// Strategy MostAllocated: fewer free resources give a higher score.
    Most,
    /// Strategy RequestedToCapacityRatio: the points of the function, sorted by utilization.
    Ratio(Vec<ShapePoint>),
}

/// A point of the function from the utilization of a resource to its score.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ShapePoint {
    /// Utilization in percent.
    pub(crate) utilization: i64,
    /// Score, from 0 to 10.
    pub(crate) score: i64,
}

impl Default for SchedulerConfig {
    fn default() -> Self {
        Self {
            first_backoff: Duration::from_secs(1),
            longest_backoff: Duration::from_secs(10),
            profiles: vec![Profile::default()],
            extenders: Vec::new(),
            metrics: SchedulerMetrics::default(),
        }
    }
}

impl Default for Profile {
    fn default() -> Self {
        Self {
            name: "default-scheduler".to_owned(),
            weights: Weights::default(),
            fit: Fit::default(),
            added_affinity: None,
            without_filters: BTreeSet::new(),
            preempts: true,
            gangs: true,
            spread: SpreadDefaults::System,
            affinity: AffinityArgs { required_weight: 1, ignores_others: false },
            balanced: vec!["cpu".to_owned(), "memory".to_owned()],
            device_timeout: DEVICE_TIMEOUT,
            volume_timeout: VOLUME_TIMEOUT,
            percentage: 0,
            queue_sort: QueueSort::default(),
        }
    }
}

impl Default for Weights {
    fn default() -> Self {
        let (taints, node_affinity, spread, pod_affinity) = (3, 2, 2, 2);
        Self { taints, node_affinity, spread, pod_affinity, fit: 1, balanced: 1, images: 1, devices: 2 }
    }
}

impl Default for Fit {
    fn default() -> Self {
        Self {
            strategy: Strategy::Least,
            resources: vec![("cpu".to_owned(), 1), ("memory".to_owned(), 1)],
            ignored: BTreeSet::new(),
            ignored_groups: BTreeSet::new(),
        }
    }
}

impl SchedulerConfig {
    /// Reads a `KubeSchedulerConfiguration` of version v1, or the older `Policy`, from a YAML or JSON file.
    ///
    /// # Errors
    /// The file cannot be read, is invalid, or has a field that this scheduler does not support.
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        let failed = |reason: String| ConfigError { path: path.display().to_string(), reason };
        let text = std::fs::read_to_string(path).map_err(|error| failed(error.to_string()))?;
        Self::parse(&text).map_err(failed)
    }

    /// Reads the text of a configuration file. The error names the invalid field.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        file::parse(text)
    }

    /// The order of waiting pods. All profiles share one queue, so upstream's order applies if one profile names the
    /// plugin of that order.
    pub(crate) fn queue_sort(&self) -> QueueSort {
        let by_time = self.profiles.iter().any(|profile| profile.queue_sort == QueueSort::Time);
        if by_time { QueueSort::Time } else { QueueSort::Turns }
    }

    /// The profile of a scheduler name.
    pub(crate) fn profile(&self, scheduler: &str) -> Option<&Profile> {
        self.profiles.iter().find(|profile| profile.name == scheduler)
    }
}

impl Profile {
    /// Whether the filter of a plugin runs.
    pub(crate) fn filters_by(&self, plugin: &str) -> bool {
        !self.without_filters.contains(plugin)
    }
}

impl Fit {
    /// Whether the filter ignores a resource.
    pub(crate) fn ignores(&self, resource: &str) -> bool {
        let group = resource.split_once('/').map(|(group, _)| group);
        self.ignored.contains(resource) || group.is_some_and(|group| self.ignored_groups.contains(group))
    }
}
