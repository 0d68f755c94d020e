//! The file format of the configuration: `KubeSchedulerConfiguration` of `kubescheduler.config.k8s.io/v1`.
//!
//! A field that the scheduler does not support is an error, because it would have no effect.

use std::collections::BTreeSet;
use std::time::Duration;

use jiff::SignedDuration;
use k8s_openapi::api::core::v1::{NodeAffinity, TopologySpreadConstraint};
use serde::Deserialize;
use serde_json::Value;

use super::extenders::{self, FileExtender};
use super::plugins::Plugins;
use super::weights::{Point, ResourceWeight, points, resources};
use super::{AffinityArgs, Fit, Profile, SchedulerConfig, SpreadDefaults, Strategy, policy};

const API: &str = "kubescheduler.config.k8s.io/v1";
const KIND: &str = "KubeSchedulerConfiguration";
/// Fields that only a separate scheduler process needs. The control plane has its own settings for these purposes.
const WITHOUT_EFFECT: [&str; 6] = [
    "clientConnection",
    "delayCacheUntilActive",
    "enableContentionProfiling",
    "enableProfiling",
    "leaderElection",
    "parallelism",
];

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct File {
    api_version: String,
    kind: String,
    #[serde(default)]
    pod_initial_backoff_seconds: Option<u64>,
    #[serde(default)]
    pod_max_backoff_seconds: Option<u64>,
    #[serde(default)]
    percentage_of_nodes_to_score: Option<u8>,
    #[serde(default)]
    profiles: Vec<FileProfile>,
    #[serde(default)]
    extenders: Vec<FileExtender>,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase", deny_unknown_fields)]
struct FileProfile {
    scheduler_name: Option<String>,
    percentage_of_nodes_to_score: Option<u8>,
    plugins: Plugins,
    plugin_config: Vec<PluginConfig>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PluginConfig {
    name: String,
    args: Value,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase", deny_unknown_fields)]
struct FitArgs {
    api_version: Option<String>,
    kind: Option<String>,
    scoring_strategy: Option<ScoringStrategy>,
    ignored_resources: BTreeSet<String>,
    ignored_resource_groups: BTreeSet<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct ScoringStrategy {
    #[serde(rename = "type")]
    type_: String,
    #[serde(default)]
    resources: Vec<ResourceWeight>,
    requested_to_capacity_ratio: Option<Ratio>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Ratio {
    shape: Vec<Point>,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase", deny_unknown_fields)]
struct NodeAffinityArgs {
    api_version: Option<String>,
    kind: Option<String>,
    added_affinity: Option<NodeAffinity>,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase", deny_unknown_fields)]
struct SpreadArgs {
    api_version: Option<String>,
    kind: Option<String>,
    default_constraints: Vec<TopologySpreadConstraint>,
    defaulting_type: Option<String>,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase", deny_unknown_fields)]
struct PodAffinityArgs {
    api_version: Option<String>,
    kind: Option<String>,
    hard_pod_affinity_weight: Option<i64>,
    ignore_preferred_terms_of_existing_pods: bool,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase", deny_unknown_fields)]
struct BalancedArgs {
    api_version: Option<String>,
    kind: Option<String>,
    resources: Vec<ResourceWeight>,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase", deny_unknown_fields)]
struct DeviceArgs {
    api_version: Option<String>,
    kind: Option<String>,
    filter_timeout: Option<kube::core::Duration>,
    binding_timeout: Option<kube::core::Duration>,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase", deny_unknown_fields)]
struct VolumeArgs {
    api_version: Option<String>,
    kind: Option<String>,
    bind_timeout_seconds: Option<i64>,
}

/// Limits of the number of nodes that upstream examines for a preemption. This scheduler examines all nodes.
#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase", deny_unknown_fields)]
struct PreemptionArgs {
    api_version: Option<String>,
    kind: Option<String>,
    min_candidate_nodes_percentage: Option<i32>,
    min_candidate_nodes_absolute: Option<i32>,
}

/// Parses the text of a file. The error names the invalid field.
pub(super) fn parse(text: &str) -> Result<SchedulerConfig, String> {
    let mut value: Value = serde_yaml_ng::from_str(text).map_err(|error| error.to_string())?;
    if value["kind"] == "Policy" && value["apiVersion"] == "v1" {
        return policy::parse(text);
    }
    for field in WITHOUT_EFFECT {
        if value.as_object_mut().and_then(|file| file.remove(field)).is_some() {
            tracing::warn!(
                field,
                "ignoring a field of the scheduler configuration; use the control plane's settings"
            );
        }
    }
    let file: File = serde_json::from_value(value).map_err(|error| error.to_string())?;
    if file.api_version != API || file.kind != KIND {
        return Err(format!("apiVersion and kind must be {API} and {KIND}"));
    }
    let mut config = SchedulerConfig::default();
    let seconds = |given: Option<u64>, default: Duration| given.map_or(default, Duration::from_secs);
    config.first_backoff = seconds(file.pod_initial_backoff_seconds, config.first_backoff);
    config.longest_backoff = seconds(file.pod_max_backoff_seconds, config.longest_backoff);
    if config.first_backoff.is_zero() || config.longest_backoff < config.first_backoff {
        return Err("podInitialBackoffSeconds must be above 0 and at most podMaxBackoffSeconds".to_owned());
    }
    let percentage = percentage(file.percentage_of_nodes_to_score, 0)?;
    config.profiles[0].percentage = percentage;
    if !file.profiles.is_empty() {
        config.profiles =
            file.profiles.into_iter().map(|one| profile(one, percentage)).collect::<Result<_, _>>()?;
    }
    for (place, profile) in config.profiles.iter().enumerate() {
        if config.profiles[..place].iter().any(|other| other.name == profile.name) {
            return Err(format!("profiles[{place}].schedulerName: Duplicate value: \"{}\"", profile.name));
        }
    }
    extenders::apply(file.extenders, &mut config)?;
    Ok(config)
}

fn percentage(given: Option<u8>, default: u8) -> Result<u8, String> {
    match given.unwrap_or(default) {
        percentage @ 0..=100 => Ok(percentage),
        other => Err(format!("percentageOfNodesToScore: {other} is not in the range 0-100")),
    }
}

fn profile(file: FileProfile, default_percentage: u8) -> Result<Profile, String> {
    let mut profile = Profile {
        percentage: percentage(file.percentage_of_nodes_to_score, default_percentage)?,
        ..Profile::default()
    };
    match file.scheduler_name {
        Some(name) if name.is_empty() => return Err("schedulerName must not be empty".to_owned()),
        Some(name) => profile.name = name,
        None => {}
    }
    file.plugins.apply(&mut profile)?;
    for plugin in file.plugin_config {
        configure(&mut profile, plugin)?;
    }
    Ok(profile)
}

/// Applies the arguments of a plugin.
fn configure(profile: &mut Profile, PluginConfig { name, args }: PluginConfig) -> Result<(), String> {
    let invalid = |error: serde_json::Error| format!("pluginConfig {name}: {error}");
    match name.as_str() {
        "NodeResourcesFit" => {
            let args: FitArgs = serde_json::from_value(args).map_err(invalid)?;
            check_args(&name, args.api_version, args.kind)?;
            if let Some(strategy) = args.scoring_strategy {
                profile.fit = fit(strategy)?;
            }
            profile.fit.ignored = args.ignored_resources;
            profile.fit.ignored_groups = args.ignored_resource_groups;
        }
        "NodeAffinity" => {
            let args: NodeAffinityArgs = serde_json::from_value(args).map_err(invalid)?;
            check_args(&name, args.api_version, args.kind)?;
            profile.added_affinity = args.added_affinity;
        }
        "PodTopologySpread" => {
            let args: SpreadArgs = serde_json::from_value(args).map_err(invalid)?;
            check_args(&name, args.api_version, args.kind)?;
            profile.spread = spread_defaults(args.defaulting_type.as_deref(), args.default_constraints)?;
        }
        "InterPodAffinity" => {
            let args: PodAffinityArgs = serde_json::from_value(args).map_err(invalid)?;
            check_args(&name, args.api_version, args.kind)?;
            let required_weight = args.hard_pod_affinity_weight.unwrap_or(1);
            if !(0..=100).contains(&required_weight) {
                return Err(format!("hardPodAffinityWeight: {required_weight} is not in the range 0-100"));
            }
            let ignores_others = args.ignore_preferred_terms_of_existing_pods;
            profile.affinity = AffinityArgs { required_weight, ignores_others };
        }
        "NodeResourcesBalancedAllocation" => {
            let args: BalancedArgs = serde_json::from_value(args).map_err(invalid)?;
            check_args(&name, args.api_version, args.kind)?;
            if !args.resources.is_empty() {
                let listed = resources(args.resources)?;
                if listed.iter().any(|(_, weight)| *weight != 1) {
                    return Err(
                        "NodeResourcesBalancedAllocationArgs.resources: the weight must be 1".to_owned()
                    );
                }
                profile.balanced = listed.into_iter().map(|(name, _)| name).collect();
            }
        }
        _ => configure_binding(profile, &name, args)?,
    }
    Ok(())
}

/// Applies the arguments of a plugin that does more than filter and score.
fn configure_binding(profile: &mut Profile, name: &str, args: Value) -> Result<(), String> {
    let invalid = |error: serde_json::Error| format!("pluginConfig {name}: {error}");
    match name {
        "VolumeBinding" => {
            let args: VolumeArgs = serde_json::from_value(args).map_err(invalid)?;
            check_args(name, args.api_version, args.kind)?;
            if let Some(seconds) = args.bind_timeout_seconds {
                let seconds = u64::try_from(seconds).ok();
                let seconds = seconds.ok_or_else(|| "bindTimeoutSeconds: must not be negative".to_owned())?;
                profile.volume_timeout = Duration::from_secs(seconds);
            }
        }
        "DefaultPreemption" => {
            let args: PreemptionArgs = serde_json::from_value(args).map_err(invalid)?;
            check_preemption(&args)?;
            check_args(name, args.api_version, args.kind)?;
        }
        "DynamicResources" => {
            let args: DeviceArgs = serde_json::from_value(args).map_err(invalid)?;
            check_args(name, args.api_version, args.kind)?;
            if args.filter_timeout.is_some() {
                tracing::warn!(
                    "ignoring filterTimeout of DynamicResources: the search has a limit of its own"
                );
            }
            if let Some(timeout) = args.binding_timeout {
                profile.device_timeout = device_timeout(timeout)?;
            }
        }
        _ => return Err(format!("pluginConfig {name}: this scheduler has no arguments for this plugin")),
    }
    Ok(())
}

fn check_preemption(args: &PreemptionArgs) -> Result<(), String> {
    let percentage = args.min_candidate_nodes_percentage.unwrap_or(10);
    let absolute = args.min_candidate_nodes_absolute.unwrap_or(100);
    if !(0..=100).contains(&percentage) {
        return Err(format!("minCandidateNodesPercentage: {percentage} is not in the range 0-100"));
    }
    if absolute < 0 || (absolute == 0 && percentage == 0) {
        return Err(
            "minCandidateNodesAbsolute: must not be negative, and not 0 if the percentage is 0".to_owned()
        );
    }
    Ok(())
}

fn device_timeout(given: kube::core::Duration) -> Result<SignedDuration, String> {
    let is_negative = given.is_negative();
    let timeout = SignedDuration::try_from(Duration::from(given)).ok();
    let timeout = timeout.filter(|timeout| !is_negative && *timeout >= SignedDuration::from_secs(1));
    timeout.ok_or_else(|| "bindingTimeout: must be at least 1 second".to_owned())
}

fn spread_defaults(
    kind: Option<&str>,
    constraints: Vec<TopologySpreadConstraint>,
) -> Result<SpreadDefaults, String> {
    match kind {
        None | Some("System") if constraints.is_empty() => Ok(SpreadDefaults::System),
        None | Some("List") => {
            if constraints.iter().any(|one| one.label_selector.is_some()) {
                return Err("defaultConstraints: labelSelector must not be set".to_owned());
            }
            Ok(SpreadDefaults::List(constraints))
        }
        Some("System") => Err("defaultConstraints: not allowed when defaultingType is System".to_owned()),
        Some(other) => Err(format!("defaultingType: invalid value \"{other}\"")),
    }
}

fn check_args(plugin: &str, version: Option<String>, kind: Option<String>) -> Result<(), String> {
    let is_valid = version.is_none_or(|version| version == API)
        && kind.is_none_or(|kind| kind == format!("{plugin}Args"));
    if is_valid { Ok(()) } else { Err(format!("pluginConfig {plugin}: args must be {plugin}Args of {API}")) }
}

fn fit(file: ScoringStrategy) -> Result<Fit, String> {
    let strategy = match (file.type_.as_str(), file.requested_to_capacity_ratio) {
        ("LeastAllocated", None) => Strategy::Least,
        ("MostAllocated", None) => Strategy::Most,
        ("RequestedToCapacityRatio", Some(Ratio { shape })) => Strategy::Ratio(points(&shape)?),
        (other, _) => {
            return Err(format!(
                "scoringStrategy: invalid type \"{other}\", or its requestedToCapacityRatio is missing or not allowed"
            ));
        }
    };
    let mut fit = Fit { strategy, ..Fit::default() };
    if !file.resources.is_empty() {
        fit.resources = resources(file.resources)?;
    }
    Ok(fit)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::QueueSort;

    fn with(rest: &str) -> Result<SchedulerConfig, String> {
        parse(&format!("apiVersion: {API}\nkind: {KIND}\n{rest}"))
    }

    #[test]
    fn profiles_have_weights_and_arguments() {
        let config = with(
            "
podMaxBackoffSeconds: 30
profiles:
- schedulerName: default-scheduler
- schedulerName: packer
  plugins:
    score:
      disabled: [{name: '*'}]
      enabled: [{name: NodeResourcesFit, weight: 5}]
  pluginConfig:
  - name: NodeResourcesFit
    args:
      scoringStrategy: {type: MostAllocated, resources: [{name: cpu, weight: 3}]}
  - name: NodeAffinity
    args:
      addedAffinity:
        requiredDuringSchedulingIgnoredDuringExecution:
          nodeSelectorTerms: [{matchExpressions: [{key: pool, operator: Exists}]}]
",
        )
        .unwrap();
        assert_eq!(config.longest_backoff, Duration::from_secs(30));
        assert_eq!(config.profile("default-scheduler"), Some(&Profile::default()));
        let packer = config.profile("packer").unwrap();
        assert_eq!((packer.weights.fit, packer.weights.taints), (5, 0));
        assert_eq!(
            packer.fit,
            Fit { strategy: Strategy::Most, resources: vec![("cpu".to_owned(), 3)], ..Fit::default() }
        );
        assert!(packer.added_affinity.is_some());
        assert_eq!(with("").unwrap(), SchedulerConfig::default());
    }

    #[test]
    fn plugins_are_disabled_at_all_points_or_at_one() {
        let config = with(
            "
parallelism: 4
leaderElection: {leaderElect: false}
percentageOfNodesToScore: 30
profiles:
- plugins:
    multiPoint: {disabled: [{name: InterPodAffinity}, {name: DefaultPreemption}], enabled: [{name: ImageLocality, weight: 9}]}
    filter: {disabled: [{name: NodePorts}]}
  pluginConfig:
  - {name: NodeResourcesFit, args: {ignoredResources: [x.io/a], ignoredResourceGroups: [y.io]}}
  - {name: InterPodAffinity, args: {hardPodAffinityWeight: 5}}
  - {name: PodTopologySpread, args: {defaultingType: List, defaultConstraints: [{maxSkew: 1, topologyKey: zone, whenUnsatisfiable: ScheduleAnyway}]}}
- {schedulerName: bare, percentageOfNodesToScore: 50, plugins: {multiPoint: {disabled: [{name: '*'}], enabled: [{name: NodeName}]}}}
",
        )
        .unwrap();
        let [first, bare] = config.profiles.as_slice() else { panic!("two profiles") };
        assert!(!first.filters_by("InterPodAffinity") && !first.filters_by("NodePorts") && !first.preempts);
        assert_eq!((first.weights.pod_affinity, first.weights.images, first.percentage), (0, 9, 30));
        assert!(first.fit.ignores("x.io/a") && first.fit.ignores("y.io/b") && !first.fit.ignores("z.io/c"));
        assert_eq!(first.affinity.required_weight, 5);
        assert!(matches!(&first.spread, SpreadDefaults::List(list) if list.len() == 1));
        assert!(bare.filters_by("NodeName") && !bare.filters_by("NodeResourcesFit"));
        assert_eq!(bare.percentage, 50);
    }

    /// The form of `kube-scheduler --write-config-to`, which has all defaults.
    #[test]
    fn the_defaults_that_kube_scheduler_writes_are_accepted() {
        let config = with(
            "
delayCacheUntilActive: false
parallelism: 16
percentageOfNodesToScore: 0
podInitialBackoffSeconds: 1
podMaxBackoffSeconds: 10
profiles:
- schedulerName: default-scheduler
  plugins:
    bind: {}
    filter: {}
    multiPoint:
      enabled:
      - {name: SchedulingGates, weight: 0}
      - {name: PrioritySort, weight: 0}
      - {name: TaintToleration, weight: 3}
      - {name: VolumeBinding, weight: 0}
      - {name: DefaultPreemption, weight: 0}
      - {name: DefaultBinder, weight: 0}
    permit: {}
    postBind: {}
    postFilter: {}
    preBind: {}
    preEnqueue: {}
    preFilter: {}
    preScore: {}
    queueSort: {}
    reserve: {}
    score: {}
  pluginConfig:
  - name: DefaultPreemption
    args: {apiVersion: kubescheduler.config.k8s.io/v1, kind: DefaultPreemptionArgs, minCandidateNodesAbsolute: 100,
      minCandidateNodesPercentage: 10}
  - name: VolumeBinding
    args: {apiVersion: kubescheduler.config.k8s.io/v1, kind: VolumeBindingArgs, bindTimeoutSeconds: 600}
",
        );
        let mut expected = SchedulerConfig::default();
        expected.profiles[0].queue_sort = QueueSort::Time;
        assert_eq!(config, Ok(expected));
    }

    #[test]
    fn a_profile_that_names_upstreams_order_of_pods_has_it() {
        let sort = |plugins: &str| {
            with(&format!("profiles: [{{schedulerName: a}}, {{plugins: {{{plugins}}}}}]"))
                .unwrap()
                .queue_sort()
        };
        assert_eq!(sort("queueSort: {enabled: [{name: PrioritySort}]}"), QueueSort::Time);
        assert_eq!(sort("multiPoint: {enabled: [{name: PrioritySort}]}"), QueueSort::Time);
        assert_eq!(sort("multiPoint: {enabled: [{name: ImageLocality}]}"), QueueSort::Turns);
    }

    #[test]
    fn arguments_of_volumes_and_preemption_are_checked() {
        let with = |plugin: &str, args: &str| {
            with(&format!("profiles: [{{pluginConfig: [{{name: {plugin}, args: {{{args}}}}}]}}]"))
        };
        let volumes =
            |args: &str| with("VolumeBinding", args).map(|config| config.profiles[0].volume_timeout);
        assert_eq!(volumes("bindTimeoutSeconds: 5"), Ok(Duration::from_secs(5)));
        assert_eq!(
            volumes("bindTimeoutSeconds: -1"),
            Err("bindTimeoutSeconds: must not be negative".to_owned())
        );
        for refused in [
            "minCandidateNodesPercentage: 101",
            "minCandidateNodesAbsolute: -1",
            "minCandidateNodesPercentage: 0, minCandidateNodesAbsolute: 0",
        ] {
            assert!(
                with("DefaultPreemption", refused).unwrap_err().starts_with("minCandidateNodes"),
                "{refused}"
            );
        }
    }

    #[test]
    fn devices_have_a_timeout_of_at_least_a_second() {
        let timeout = |args: &str| {
            with(&format!("profiles: [{{pluginConfig: [{{name: DynamicResources, args: {{{args}}}}}]}}]"))
                .map(|config| config.profiles[0].device_timeout)
        };
        assert_eq!(timeout("bindingTimeout: 1m30s, filterTimeout: 10s"), Ok(SignedDuration::from_secs(90)));
        assert_eq!(timeout("filterTimeout: 10s"), Ok(crate::config::DEVICE_TIMEOUT));
        for refused in ["bindingTimeout: 999ms", "bindingTimeout: -10s"] {
            assert_eq!(timeout(refused), Err("bindingTimeout: must be at least 1 second".to_owned()));
        }
    }

    #[test]
    fn gang_scheduling_is_a_plugin_that_can_be_disabled() {
        let gangs = |point: &str| {
            let plugin =
                format!("profiles: [{{plugins: {{multiPoint: {{{point}: [{{name: GangScheduling}}]}}}}}}]");
            with(&plugin).unwrap().profiles[0].gangs
        };
        assert!(gangs("enabled") && !gangs("disabled"));
    }

    #[test]
    fn unsupported_fields_are_refused() {
        let error = |rest: &str| with(rest).unwrap_err();
        assert!(error("extenders: [{urlPrefix: 'file:///x'}]").contains("extenders[0]: urlPrefix"));
        let own = error("profiles: [{plugins: {postBind: {enabled: [{name: Mine}]}}}]");
        assert_eq!(own, "plugins.postBind: this scheduler has no plugin Mine");
        let alone = "profiles: [{plugins: {permit: {disabled: [{name: GangScheduling}]}}}]";
        assert!(error(alone).contains("use multiPoint"));
        let fixed = error("profiles: [{plugins: {queueSort: {disabled: [{name: PrioritySort}]}}}]");
        assert_eq!(fixed, "plugins.queueSort: PrioritySort cannot be disabled");
        assert!(error("percentageOfNodesToScore: 101").contains("range 0-100"));
        assert!(
            error("profiles: [{plugins: {filter: {disabled: [{name: Mine}]}}}]").contains("no filter Mine")
        );
        assert!(
            error("profiles: [{plugins: {preFilter: {disabled: [{name: NodePorts}]}}}]").contains("alone")
        );
        let unknown = error("profiles: [{plugins: {score: {enabled: [{name: Mine}]}}}]");
        assert_eq!(unknown, "plugins.score: this scheduler has no score Mine");
        let twice = error("profiles: [{schedulerName: a}, {schedulerName: a}]");
        assert_eq!(twice, "profiles[1].schedulerName: Duplicate value: \"a\"");
        assert!(error("podInitialBackoffSeconds: 11").contains("podInitialBackoffSeconds"));
        let ratio = "profiles: [{pluginConfig: [{name: NodeResourcesFit, args: {scoringStrategy:
            {type: RequestedToCapacityRatio}}}]}]";
        assert!(error(ratio).contains("scoringStrategy"));
        assert!(parse("apiVersion: v2\nkind: Policy").unwrap_err().contains("apiVersion and kind must be"));
    }
}
