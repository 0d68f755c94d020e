//! The file form of the configuration: `KubeSchedulerConfiguration` of `kubescheduler.config.k8s.io/v1`.
//!
//! A field that the scheduler does not support is an error, because it would have no effect.

use std::time::Duration;

use k8s_openapi::api::core::v1::NodeAffinity;
use serde::Deserialize;
use serde_json::Value;

use super::{Fit, Profile, SchedulerConfig, Strategy, Weights};

const API: &str = "kubescheduler.config.k8s.io/v1";
const KIND: &str = "KubeSchedulerConfiguration";
/// Maximum of a score's weight, as upstream.
const LARGEST_WEIGHT: i64 = i64::MAX / 100 / 64;

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
    profiles: Vec<FileProfile>,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase", deny_unknown_fields)]
struct FileProfile {
    scheduler_name: Option<String>,
    plugins: Plugins,
    plugin_config: Vec<PluginConfig>,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase", deny_unknown_fields)]
struct Plugins {
    score: PluginSet,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase", deny_unknown_fields)]
struct PluginSet {
    enabled: Vec<Plugin>,
    disabled: Vec<Plugin>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Plugin {
    name: String,
    weight: Option<i64>,
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
struct ResourceWeight {
    name: String,
    weight: Option<i64>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Ratio {
    shape: Vec<Point>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Point {
    utilization: i64,
    score: i64,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase", deny_unknown_fields)]
struct AffinityArgs {
    api_version: Option<String>,
    kind: Option<String>,
    added_affinity: Option<NodeAffinity>,
}

/// Parses the file. The error names the invalid field.
pub(super) fn parse(text: &str) -> Result<SchedulerConfig, String> {
    let file: File = serde_yaml_ng::from_str(text).map_err(|error| error.to_string())?;
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
    if !file.profiles.is_empty() {
        config.profiles = file.profiles.into_iter().map(profile).collect::<Result<_, _>>()?;
    }
    for (place, profile) in config.profiles.iter().enumerate() {
        if config.profiles[..place].iter().any(|other| other.name == profile.name) {
            return Err(format!("profiles[{place}].schedulerName: Duplicate value: \"{}\"", profile.name));
        }
    }
    Ok(config)
}

fn profile(file: FileProfile) -> Result<Profile, String> {
    let mut profile = Profile::default();
    match file.scheduler_name {
        Some(name) if name.is_empty() => return Err("schedulerName must not be empty".to_owned()),
        Some(name) => profile.name = name,
        None => {}
    }
    profile.weights = weights(&file.plugins.score)?;
    for PluginConfig { name, args } in file.plugin_config {
        let invalid = |error: serde_json::Error| format!("pluginConfig {name}: {error}");
        match name.as_str() {
            "NodeResourcesFit" => {
                let args: FitArgs = serde_json::from_value(args).map_err(invalid)?;
                check_args(&name, (args.api_version, args.kind))?;
                if let Some(strategy) = args.scoring_strategy {
                    profile.fit = fit(strategy)?;
                }
            }
            "NodeAffinity" => {
                let args: AffinityArgs = serde_json::from_value(args).map_err(invalid)?;
                check_args(&name, (args.api_version, args.kind))?;
                profile.added_affinity = args.added_affinity;
            }
            _ => return Err(format!("pluginConfig {name}: this scheduler has no arguments for this plugin")),
        }
    }
    Ok(profile)
}

fn check_args(plugin: &str, (version, kind): (Option<String>, Option<String>)) -> Result<(), String> {
    let is_right = version.is_none_or(|version| version == API)
        && kind.is_none_or(|kind| kind == format!("{plugin}Args"));
    if is_right { Ok(()) } else { Err(format!("pluginConfig {plugin}: args must be {plugin}Args of {API}")) }
}

/// The weights after the plugins that the file disables, then enables.
fn weights(set: &PluginSet) -> Result<Weights, String> {
    let mut weights = Weights::default();
    for Plugin { name, .. } in &set.disabled {
        if name == "*" {
            weights = Weights {
                taints: 0,
                node_affinity: 0,
                spread: 0,
                pod_affinity: 0,
                fit: 0,
                balanced: 0,
                images: 0,
            };
        } else {
            *weights.of(name)? = 0;
        }
    }
    for Plugin { name, weight } in &set.enabled {
        let weight = weight.filter(|weight| *weight != 0).unwrap_or(1);
        if !(1..=LARGEST_WEIGHT).contains(&weight) {
            return Err(format!("plugins.score.enabled {name}: invalid weight {weight}"));
        }
        *weights.of(name)? = weight;
    }
    Ok(weights)
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
        let weight = |one: ResourceWeight| match one.weight.unwrap_or(1) {
            weight @ 1..=100 => Ok((one.name, weight)),
            weight => Err(format!("scoringStrategy.resources: weight {weight} must be from 1 to 100")),
        };
        fit.resources = file.resources.into_iter().map(weight).collect::<Result<_, _>>()?;
    }
    Ok(fit)
}

fn points(shape: &[Point]) -> Result<Vec<(i64, i64)>, String> {
    let points: Vec<(i64, i64)> = shape.iter().map(|point| (point.utilization, point.score)).collect();
    let in_range = points.iter().all(|(used, score)| (0..=100).contains(used) && (0..=10).contains(score));
    let is_sorted = points.windows(2).all(|pair| pair[0].0 < pair[1].0);
    if points.is_empty() || !in_range || !is_sorted {
        let range = "utilization from 0 to 100 in rising order and score from 0 to 10";
        return Err(format!("requestedToCapacityRatio.shape must have points with {range}"));
    }
    Ok(points)
}

impl Weights {
    fn of(&mut self, plugin: &str) -> Result<&mut i64, String> {
        match plugin {
            "TaintToleration" => Ok(&mut self.taints),
            "NodeAffinity" => Ok(&mut self.node_affinity),
            "PodTopologySpread" => Ok(&mut self.spread),
            "InterPodAffinity" => Ok(&mut self.pod_affinity),
            "NodeResourcesFit" => Ok(&mut self.fit),
            "NodeResourcesBalancedAllocation" => Ok(&mut self.balanced),
            "ImageLocality" => Ok(&mut self.images),
            other => Err(format!("plugins.score: this scheduler has no score {other}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
        assert_eq!(packer.fit, Fit { strategy: Strategy::Most, resources: vec![("cpu".to_owned(), 3)] });
        assert!(packer.added_affinity.is_some());
        assert_eq!(with("").unwrap(), SchedulerConfig::default());
    }

    #[test]
    fn unsupported_fields_are_refused() {
        let error = |rest: &str| with(rest).unwrap_err();
        assert!(error("extenders: []").contains("extenders"));
        assert!(error("profiles: [{plugins: {filter: {}}}]").contains("filter"));
        let unknown = error("profiles: [{plugins: {score: {enabled: [{name: Mine}]}}}]");
        assert_eq!(unknown, "plugins.score: this scheduler has no score Mine");
        let twice = error("profiles: [{schedulerName: a}, {schedulerName: a}]");
        assert_eq!(twice, "profiles[1].schedulerName: Duplicate value: \"a\"");
        assert!(error("podInitialBackoffSeconds: 11").contains("podInitialBackoffSeconds"));
        let ratio = "profiles: [{pluginConfig: [{name: NodeResourcesFit, args: {scoringStrategy:
            {type: RequestedToCapacityRatio}}}]}]";
        assert!(error(ratio).contains("scoringStrategy"));
        assert!(parse("apiVersion: v1\nkind: Policy").unwrap_err().contains("apiVersion and kind must be"));
    }
}
