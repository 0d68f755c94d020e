//! The older file format: `Policy` of version v1, with predicates and priorities by name. Upstream removed it in v1.23.

use serde::Deserialize;

use super::extenders::{self, FileExtender};
use super::plugins::{FILTERS, set_weight};
use super::weights::{FitShape, Point, ResourceWeight, points, resources};
use super::{Profile, SchedulerConfig, Strategy, Weights};

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Policy {
    #[serde(rename = "apiVersion")]
    _api_version: String,
    #[serde(rename = "kind")]
    _kind: String,
    predicates: Option<Vec<Predicate>>,
    priorities: Option<Vec<Priority>>,
    hard_pod_affinity_symmetric_weight: Option<i64>,
    #[serde(default)]
    extenders: Vec<FileExtender>,
    /// The field `alwaysCheckAllPredicates`, which has no effect: the scheduler always reports all reasons of a filter.
    #[serde(rename = "alwaysCheckAllPredicates")]
    _check_all: Option<bool>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Predicate {
    name: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Priority {
    name: String,
    weight: i64,
    argument: Option<Argument>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Argument {
    requested_to_capacity_ratio_arguments: Ratio,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Ratio {
    shape: Vec<Point>,
    #[serde(default)]
    resources: Vec<ResourceWeight>,
}

/// Parses the file. The error names the invalid field.
pub(super) fn parse(text: &str) -> Result<SchedulerConfig, String> {
    let policy: Policy = serde_yaml_ng::from_str(text).map_err(|error| error.to_string())?;
    let mut profile = Profile::default();
    if let Some(predicates) = policy.predicates {
        // As in upstream, TaintToleration and NodeUnschedulable always run. NodeDeclaredFeatures always runs because a
        // policy has no name for it.
        let mut wanted = vec!["TaintToleration", "NodeUnschedulable", "NodeDeclaredFeatures"];
        for Predicate { name } in &predicates {
            wanted.extend(
                filters(name).ok_or_else(|| format!("predicates: this scheduler has no predicate {name}"))?,
            );
        }
        profile.without_filters = FILTERS.into_iter().filter(|filter| !wanted.contains(filter)).collect();
    }
    if let Some(priorities) = policy.priorities {
        profile.weights = Weights::NONE;
        for priority in priorities {
            prioritize(&mut profile, priority)?;
        }
    }
    if let Some(weight) = policy.hard_pod_affinity_symmetric_weight {
        if !(0..=100).contains(&weight) {
            return Err(format!("hardPodAffinitySymmetricWeight: {weight} is not in the range 0-100"));
        }
        profile.affinity.required_weight = weight;
    }
    let mut config = SchedulerConfig { profiles: vec![profile], ..SchedulerConfig::default() };
    extenders::apply(policy.extenders, &mut config)?;
    Ok(config)
}

/// The plugins that replace a predicate.
fn filters(predicate: &str) -> Option<&'static [&'static str]> {
    Some(match predicate {
        "GeneralPredicates" => &["NodeResourcesFit", "NodeName", "NodePorts", "NodeAffinity"],
        "PodFitsResources" => &["NodeResourcesFit"],
        "HostName" => &["NodeName"],
        "PodFitsHostPorts" | "PodFitsPorts" => &["NodePorts"],
        "MatchNodeSelector" => &["NodeAffinity"],
        "NoDiskConflict" => &["VolumeRestrictions"],
        "MaxCSIVolumeCountPred"
        | "MaxEBSVolumeCount"
        | "MaxGCEPDVolumeCount"
        | "MaxAzureDiskVolumeCount"
        | "MaxCinderVolumeCount" => &["NodeVolumeLimits"],
        "CheckVolumeBinding" => &["VolumeBinding"],
        "NoVolumeZoneConflict" => &["VolumeZone"],
        "EvenPodsSpread" => &["PodTopologySpread"],
        "MatchInterPodAffinity" => &["InterPodAffinity"],
        "PodToleratesNodeTaints" => &["TaintToleration"],
        "CheckNodeUnschedulable" => &["NodeUnschedulable"],
        _ => return None,
    })
}

fn prioritize(profile: &mut Profile, priority: Priority) -> Result<(), String> {
    let Priority { name, weight, argument } = priority;
    if weight <= 0 {
        return Err(format!("priorities {name}: the weight must be above 0"));
    }
    let plugin = match name.as_str() {
        // EqualPriority has no effect, because each node gets the same score. Upstream removed the plugin of
        // NodePreferAvoidPodsPriority in v1.24: nodes have no annotation `preferAvoidPods` any more.
        "EqualPriority" | "NodePreferAvoidPodsPriority" => return Ok(()),
        "LeastRequestedPriority" | "MostRequestedPriority" | "RequestedToCapacityRatioPriority" => {
            "NodeResourcesFit"
        }
        "BalancedResourceAllocation" => "NodeResourcesBalancedAllocation",
        "SelectorSpreadPriority" | "ServiceSpreadingPriority" | "EvenPodsSpreadPriority" => {
            "PodTopologySpread"
        }
        "InterPodAffinityPriority" => "InterPodAffinity",
        "NodeAffinityPriority" => "NodeAffinity",
        "TaintTolerationPriority" => "TaintToleration",
        "ImageLocalityPriority" => "ImageLocality",
        _ => return Err(format!("priorities: this scheduler has no priority {name}")),
    };
    if profile.weights.of(plugin).is_some_and(|weight| *weight > 0) {
        return Err(format!("priorities {name}: another priority has the same plugin {plugin}"));
    }
    match (name.as_str(), argument) {
        ("MostRequestedPriority", None) => profile.fit.strategy = Strategy::Most,
        ("RequestedToCapacityRatioPriority", Some(argument)) => {
            let FitShape { shape, resources: listed } = argument.requested_to_capacity_ratio_arguments.into();
            profile.fit.strategy = Strategy::Ratio(points(&shape)?);
            if !listed.is_empty() {
                profile.fit.resources = resources(listed)?;
            }
        }
        ("RequestedToCapacityRatioPriority", None) | (_, Some(_)) => {
            return Err(format!("priorities {name}: argument is missing or not allowed"));
        }
        (_, None) => {}
    }
    set_weight(profile, plugin, Some(weight))
}

impl From<Ratio> for FitShape {
    fn from(ratio: Ratio) -> Self {
        Self { shape: ratio.shape, resources: ratio.resources }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(rest: &str) -> Result<Profile, String> {
        parse(&format!("apiVersion: v1\nkind: Policy\n{rest}")).map(|mut config| config.profiles.remove(0))
    }

    #[test]
    fn predicates_and_priorities_become_plugins() {
        let profile = with(
            "
predicates: [{name: GeneralPredicates}, {name: MatchInterPodAffinity}]
priorities: [{name: MostRequestedPriority, weight: 3}, {name: TaintTolerationPriority, weight: 1}]
hardPodAffinitySymmetricWeight: 7
",
        )
        .unwrap();
        assert!(profile.filters_by("NodePorts") && profile.filters_by("TaintToleration"));
        assert!(!profile.filters_by("VolumeBinding") && !profile.filters_by("PodTopologySpread"));
        assert_eq!(profile.weights, Weights { fit: 3, taints: 1, ..Weights::NONE });
        assert_eq!((profile.fit.strategy, profile.affinity.required_weight), (Strategy::Most, 7));
        assert_eq!(with(""), Ok(Profile::default()));
    }

    #[test]
    fn extenders_have_the_names_and_units_of_the_older_form() {
        let text = "apiVersion: v1
kind: Policy
extenders:
- {urlPrefix: 'https://127.0.0.1:8000/x', filterVerb: filter, weight: 1, enableHttps: true, httpTimeout: 30000000000,
  managedResources: [{name: x.io/gpu, ignoredByScheduler: true}]}
";
        let config = parse(text).unwrap();
        assert_eq!(config.extenders[0].timeout, std::time::Duration::from_secs(30));
        assert!(config.extenders[0].tls.insecure, "enableHttps without authorities");
        assert!(config.profiles[0].fit.ignores("x.io/gpu"));
    }

    #[test]
    fn priorities_that_are_equal_for_all_nodes_have_no_effect() {
        let without = with("priorities: [{name: ImageLocalityPriority, weight: 2}]").unwrap();
        for name in ["EqualPriority", "NodePreferAvoidPodsPriority"] {
            let more = format!(
                "priorities: [{{name: {name}, weight: 10000}}, {{name: ImageLocalityPriority, weight: 2}}]"
            );
            assert_eq!(with(&more), Ok(without.clone()), "{name}");
        }
    }

    #[test]
    fn unknown_names_are_refused() {
        let error = |rest: &str| with(rest).unwrap_err();
        assert_eq!(error("predicates: [{name: X}]"), "predicates: this scheduler has no predicate X");
        assert_eq!(
            error("priorities: [{name: X, weight: 1}]"),
            "priorities: this scheduler has no priority X"
        );
        assert!(error("priorities: [{name: EqualPriority, weight: 0}]").contains("weight"));
        assert!(error("extenders: [{urlPrefix: 'file:///x'}]").contains("extenders[0]: urlPrefix"));
        assert!(error("colour: red").contains("colour"));
        let twice = "priorities: [{name: LeastRequestedPriority, weight: 1}, {name: MostRequestedPriority, weight: 1}]";
        assert!(error(twice).contains("same plugin"));
    }
}
