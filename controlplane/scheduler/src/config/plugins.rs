//! The plugins of a profile.

use serde::Deserialize;

use super::{Profile, QueueSort, Weights};

/// Maximum weight of a score, as upstream.
const MAX_WEIGHT: i64 = i64::MAX / 100 / 64;

/// The plugins that filter and can be disabled, in upstream's order.
pub(crate) const FILTERS: [&str; 13] = [
    "NodeUnschedulable",
    "NodeName",
    "TaintToleration",
    "NodeAffinity",
    "NodePorts",
    "NodeResourcesFit",
    "VolumeRestrictions",
    "NodeVolumeLimits",
    "VolumeBinding",
    "VolumeZone",
    "PodTopologySpread",
    "InterPodAffinity",
    "NodeDeclaredFeatures",
];
/// The plugins that score.
const SCORES: [&str; 8] = [
    "TaintToleration",
    "NodeAffinity",
    "PodTopologySpread",
    "InterPodAffinity",
    "NodeResourcesFit",
    "NodeResourcesBalancedAllocation",
    "ImageLocality",
    DEVICES,
];
/// The plugin for devices. Only its score can be disabled, not the whole plugin.
const DEVICES: &str = "DynamicResources";
/// Plugins that no profile can disable.
const FIXED: [&str; 4] = ["SchedulingGates", PRIORITY_SORT, "DefaultBinder", DEVICES];
/// Upstream's order of waiting pods. If a profile names this plugin, the namespaces do not take turns.
const PRIORITY_SORT: &str = "PrioritySort";
const PREEMPTION: &str = "DefaultPreemption";
const GANGS: &str = "GangScheduling";

/// The field `plugins` of a profile.
#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct Plugins {
    multi_point: PluginSet,
    pre_filter: PluginSet,
    filter: PluginSet,
    post_filter: PluginSet,
    pre_score: PluginSet,
    score: PluginSet,
    pre_enqueue: PluginSet,
    queue_sort: PluginSet,
    permit: PluginSet,
    reserve: PluginSet,
    pre_bind: PluginSet,
    bind: PluginSet,
    post_bind: PluginSet,
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

impl Plugins {
    /// Applies the field. At each extension point the disabled plugins are applied first, then the enabled plugins.
    pub(super) fn apply(&self, profile: &mut Profile) -> Result<(), String> {
        for Plugin { name, .. } in &self.multi_point.disabled {
            if !is_known(name) {
                return Err(format!("plugins.multiPoint.disabled: this scheduler has no plugin {name}"));
            }
            if FIXED.contains(&name.as_str()) {
                return Err(format!("plugins.multiPoint.disabled: {name} cannot be disabled"));
            }
            disable_filter(profile, name);
            disable_score(&mut profile.weights, name);
            profile.preempts &= name != "*" && name != PREEMPTION;
            profile.gangs &= name != "*" && name != GANGS;
        }
        for Plugin { name, weight } in &self.multi_point.enabled {
            if !is_known(name) || name == "*" {
                return Err(format!("plugins.multiPoint.enabled: this scheduler has no plugin {name}"));
            }
            profile.without_filters.remove(name.as_str());
            profile.preempts |= name == PREEMPTION;
            profile.gangs |= name == GANGS;
            if SCORES.contains(&name.as_str()) {
                let default = Weights::default().of(name).copied();
                set_weight(profile, name, weight.filter(|weight| *weight != 0).or(default))?;
            }
        }
        let mut sorts = self.multi_point.enabled.iter().chain(&self.queue_sort.enabled);
        if sorts.any(|plugin| plugin.name == PRIORITY_SORT) {
            profile.queue_sort = QueueSort::Time;
        }
        self.apply_filter(profile)?;
        self.apply_score(profile)?;
        self.check_others()
    }

    fn apply_filter(&self, profile: &mut Profile) -> Result<(), String> {
        let known = |name: &str| FILTERS.contains(&name);
        for Plugin { name, .. } in &self.filter.disabled {
            if name != "*" && !known(name) {
                return Err(format!("plugins.filter: this scheduler has no filter {name}"));
            }
            disable_filter(profile, name);
        }
        for Plugin { name, .. } in &self.filter.enabled {
            if !known(name) {
                return Err(format!("plugins.filter: this scheduler has no filter {name}"));
            }
            profile.without_filters.remove(name.as_str());
        }
        for (set, enabled) in [(&self.post_filter.disabled, false), (&self.post_filter.enabled, true)] {
            for Plugin { name, .. } in set {
                if name != PREEMPTION && (enabled || name != "*") {
                    return Err(format!("plugins.postFilter: this scheduler has no plugin {name}"));
                }
                profile.preempts = enabled;
            }
        }
        Ok(())
    }

    fn apply_score(&self, profile: &mut Profile) -> Result<(), String> {
        for Plugin { name, .. } in &self.score.disabled {
            if name != "*" && !SCORES.contains(&name.as_str()) {
                return Err(format!("plugins.score: this scheduler has no score {name}"));
            }
            disable_score(&mut profile.weights, name);
        }
        for Plugin { name, weight } in &self.score.enabled {
            set_weight(profile, name, weight.filter(|weight| *weight != 0))?;
        }
        Ok(())
    }

    /// Refuses changes that have no effect in this scheduler. For example, a PreFilter cannot be disabled without its
    /// filter.
    fn check_others(&self) -> Result<(), String> {
        let sets = [
            ("queueSort", &self.queue_sort),
            ("permit", &self.permit),
            ("reserve", &self.reserve),
            ("preBind", &self.pre_bind),
            ("bind", &self.bind),
            ("postBind", &self.post_bind),
            ("preEnqueue", &self.pre_enqueue),
            ("preFilter", &self.pre_filter),
            ("preScore", &self.pre_score),
        ];
        for (point, set) in sets {
            if let Some(Plugin { name, .. }) = set.disabled.first() {
                let hint = if FIXED.contains(&name.as_str()) { "" } else { " alone; use multiPoint" };
                return Err(format!("plugins.{point}: {name} cannot be disabled{hint}"));
            }
            if let Some(Plugin { name, .. }) = set.enabled.iter().find(|plugin| !is_known(&plugin.name)) {
                return Err(format!("plugins.{point}: this scheduler has no plugin {name}"));
            }
        }
        Ok(())
    }
}

fn is_known(name: &str) -> bool {
    name == "*"
        || name == PREEMPTION
        || name == GANGS
        || FIXED.contains(&name)
        || FILTERS.contains(&name)
        || SCORES.contains(&name)
}

fn disable_filter(profile: &mut Profile, name: &str) {
    profile.without_filters.extend(FILTERS.iter().filter(|filter| name == "*" || name == **filter));
}

fn disable_score(weights: &mut Weights, name: &str) {
    for score in SCORES.iter().filter(|score| name == "*" || name == **score) {
        if let Some(weight) = weights.of(score) {
            *weight = 0;
        }
    }
}

/// Sets the weight of a score. The default is 1.
pub(super) fn set_weight(profile: &mut Profile, name: &str, weight: Option<i64>) -> Result<(), String> {
    let weight = weight.unwrap_or(1);
    if !(1..=MAX_WEIGHT).contains(&weight) {
        return Err(format!("plugins.score.enabled {name}: invalid weight {weight}"));
    }
    let own = profile.weights.of(name);
    *own.ok_or_else(|| format!("plugins.score: this scheduler has no score {name}"))? = weight;
    Ok(())
}

impl Weights {
    /// Weights of 0 for all scores.
    pub(super) const NONE: Self = Self {
        taints: 0,
        node_affinity: 0,
        spread: 0,
        pod_affinity: 0,
        fit: 0,
        balanced: 0,
        images: 0,
        devices: 0,
    };

    /// The weight of a plugin that scores. `None` for other plugins.
    pub(super) fn of(&mut self, plugin: &str) -> Option<&mut i64> {
        match plugin {
            "TaintToleration" => Some(&mut self.taints),
            "NodeAffinity" => Some(&mut self.node_affinity),
            "PodTopologySpread" => Some(&mut self.spread),
            "InterPodAffinity" => Some(&mut self.pod_affinity),
            "NodeResourcesFit" => Some(&mut self.fit),
            "NodeResourcesBalancedAllocation" => Some(&mut self.balanced),
            "ImageLocality" => Some(&mut self.images),
            DEVICES => Some(&mut self.devices),
            _ => None,
        }
    }
}
