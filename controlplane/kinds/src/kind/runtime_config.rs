//! The built-in versions that are served: upstream's flag `--runtime-config`. Source: `pkg/server/resourceconfig` and
//! `pkg/server/options/api_enablement.go` of k8s.io/apiserver.

use std::collections::BTreeMap;

use coracle_values::go;

use super::built_in;
use crate::resource::{Resource, Resources};

/// Keys that select versions by their stability.
const CLASSES: [&str; 4] = ["api/all", "api/ga", "api/beta", "api/alpha"];
/// Resources without which nodes and controllers cannot work: group and name, in version `v1`.
const NEEDED: [(&str, &str); 14] = [
    ("", "configmaps"),
    ("", "events"),
    ("", "namespaces"),
    ("", "nodes"),
    ("", "persistentvolumeclaims"),
    ("", "persistentvolumes"),
    ("", "pods"),
    ("", "secrets"),
    ("", "serviceaccounts"),
    ("", "services"),
    ("apiextensions.k8s.io", "customresourcedefinitions"),
    ("coordination.k8s.io", "leases"),
    ("discovery.k8s.io", "endpointslices"),
    ("networking.k8s.io", "networkpolicies"),
];

/// The versions that `--runtime-config` enables and disables. The default serves versions without `alpha` or `beta`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RuntimeConfig {
    /// The entries by key: `api/beta`, `group/version`, `group/version/resource`. The name of the core group is empty.
    entries: BTreeMap<String, bool>,
}

/// An entry of `--runtime-config` is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RuntimeConfigError {
    /// The key has none of the allowed forms.
    #[error(
        "the key {0:?} must be api/all, api/ga, api/beta, api/alpha, GROUP/VERSION or GROUP/VERSION/RESOURCE"
    )]
    Key(String),
    /// The value is not a boolean.
    #[error("the value {value:?} of {key} must be true or false")]
    Value {
        /// The key.
        key: String,
        /// The value.
        value: String,
    },
    /// No built-in resource has the group, the version or the name.
    #[error("{0} is not a built-in API")]
    Unknown(String),
    /// The entry `api/all=false` is the only entry.
    #[error("api/all=false needs an entry that enables a version")]
    NothingServed,
}

// === impl RuntimeConfig ===

impl RuntimeConfig {
    /// Reads entries `KEY=VALUE`. A group version without a value is enabled. The last entry of a key counts.
    ///
    /// # Errors
    /// [`RuntimeConfigError`]
    pub fn parse(entries: &[String]) -> Result<RuntimeConfig, RuntimeConfigError> {
        let mut config = RuntimeConfig::default();
        for entry in entries {
            let (key, value) = entry.split_once('=').unwrap_or((entry, ""));
            // Help texts of kube-apiserver name the core group's version without a group.
            let key = if key == "v1" || key.starts_with("v1/") { format!("/{key}") } else { key.to_owned() };
            if !CLASSES.contains(&key.as_str()) {
                check_key(&key)?;
            }
            let enabled = enabled(&key, value)?;
            config.entries.insert(key, enabled);
        }
        if config.entries.len() == 1 && config.entries.get("api/all") == Some(&false) {
            return Err(RuntimeConfigError::NothingServed);
        }
        Ok(config)
    }

    /// The keys of resources that nodes and controllers need, but that are not served.
    pub fn missing(&self) -> Vec<String> {
        let missing = NEEDED.iter().filter(|(group, plural)| !self.serves(group, "v1", plural));
        let key = |(group, plural): &(&str, &str)| format!("{group}/v1/{plural}");
        missing.map(|resource| key(resource).trim_start_matches('/').to_owned()).collect()
    }

    /// Whether a built-in resource is served. The most specific entry decides.
    pub fn serves(&self, group: &str, version: &str, plural: &str) -> bool {
        let class = match stability(version) {
            Stability::Stable => "api/ga",
            Stability::Beta => "api/beta",
            Stability::Alpha => "api/alpha",
        };
        let keys = [
            format!("{group}/{version}/{plural}"),
            format!("{group}/{version}"),
            class.into(),
            "api/all".into(),
        ];
        let found = keys.iter().find_map(|key| self.entries.get(key));
        found.copied().unwrap_or(stability(version) == Stability::Stable)
    }

    /// Whether an entry for the resource or its version disables it. Entries for classes of versions do not count.
    fn disables(&self, kind: &Resource) -> bool {
        let version = kind.api_version();
        let keys = [format!("{version}/{}", kind.plural), version.to_owned()];
        keys.iter().find_map(|key| self.entries.get(key)) == Some(&false)
    }
}

impl Resources {
    /// The built-in resources that this configuration serves. Only an entry for the version `metrics.k8s.io/v1beta1` or
    /// its resources disables the metrics of nodes and pods. A cluster needs this entry if an aggregated server serves
    /// these metrics, as in upstream.
    pub fn served(config: &RuntimeConfig) -> Resources {
        let is_served = |kind: &&std::sync::Arc<Resource>| {
            if kind.group == super::metrics::GROUP {
                return !config.disables(kind);
            }
            config.serves(&kind.group, &kind.version, &kind.plural)
        };
        Resources::new(built_in().iter().filter(is_served).cloned().collect())
    }

    /// Whether pods can belong to groups of pods. Upstream's feature gate `GenericWorkload` has this effect.
    pub fn serves_pod_groups(&self) -> bool {
        self.find("scheduling.k8s.io", "v1alpha2", "podgroups").is_some_and(|kind| kind.is_built_in)
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Stability {
    Stable,
    Beta,
    Alpha,
}

fn stability(version: &str) -> Stability {
    if version.contains("alpha") {
        Stability::Alpha
    } else if version.contains("beta") {
        Stability::Beta
    } else {
        Stability::Stable
    }
}

/// Checks that a key names built-in resources.
fn check_key(key: &str) -> Result<(), RuntimeConfigError> {
    let parts: Vec<&str> = key.split('/').collect();
    let (group, version, plural) = match parts.as_slice() {
        [group, version] => (*group, *version, None),
        [group, version, plural] => (*group, *version, Some(*plural)),
        _ => return Err(RuntimeConfigError::Key(key.to_owned())),
    };
    let is_known = built_in().iter().any(|kind| {
        (&*kind.group, &*kind.version) == (group, version)
            && plural.is_none_or(|plural| kind.plural == plural)
    });
    if is_known { Ok(()) } else { Err(RuntimeConfigError::Unknown(key.to_owned())) }
}

/// The value of an entry, as `strconv.ParseBool` reads it.
fn enabled(key: &str, value: &str) -> Result<bool, RuntimeConfigError> {
    if value.is_empty() && !CLASSES.contains(&key) {
        return Ok(true);
    }
    let invalid = || RuntimeConfigError::Value { key: key.to_owned(), value: value.to_owned() };
    go::parse_bool(value).ok_or_else(invalid)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALPHA: (&str, &str, &str) = ("scheduling.k8s.io", "v1alpha2", "podgroups");
    const BETA: (&str, &str, &str) = ("storagemigration.k8s.io", "v1beta1", "storageversionmigrations");
    const STABLE: (&str, &str, &str) = ("batch", "v1", "jobs");

    fn config(entries: &[&str]) -> Result<RuntimeConfig, RuntimeConfigError> {
        RuntimeConfig::parse(&entries.iter().map(|&entry| entry.to_owned()).collect::<Vec<_>>())
    }

    fn served(entries: &[&str]) -> [bool; 3] {
        let set = Resources::served(&config(entries).unwrap());
        [ALPHA, BETA, STABLE].map(|(group, version, plural)| set.find(group, version, plural).is_some())
    }

    #[test]
    fn the_most_specific_entry_decides() {
        let cases: [(&[&str], [bool; 3]); 11] = [
            (&[], [false, false, true]),
            (&["api/all=true"], [true, true, true]),
            (&["api/alpha=true"], [true, false, true]),
            (&["api/all=true", "api/beta=false"], [true, false, true]),
            (&["api/ga=false", "api/beta=true"], [false, true, false]),
            (&["scheduling.k8s.io/v1alpha2"], [true, false, true]),
            (&["scheduling.k8s.io/v1alpha2=1", "api/alpha=false"], [true, false, true]),
            (&["scheduling.k8s.io/v1alpha2/podgroups=true"], [true, false, true]),
            (&["api/all=true", "scheduling.k8s.io/v1alpha2/podgroups=false"], [false, true, true]),
            (&["batch/v1/jobs=false", "batch/v1=true"], [false, false, false]),
            (&["batch/v1=false", "batch/v1=true"], [false, false, true]),
        ];
        for (entries, expect) in cases {
            assert_eq!(served(entries), expect, "{entries:?}");
        }
        let all = Resources::served(&config(&["api/all=false", "v1=true"]).unwrap());
        assert_eq!(all.groups(), ["metrics.k8s.io"], "only the core group, and metrics");
        assert!(all.find("", "v1", "pods").is_some());
        for (entry, expect) in [
            ("metrics.k8s.io/v1beta1=false", [false, false]),
            ("metrics.k8s.io/v1beta1/pods=false", [true, false]),
            ("api/beta=false", [true, true]),
        ] {
            let set = Resources::served(&config(&[entry]).unwrap());
            let found =
                ["nodes", "pods"].map(|plural| set.find("metrics.k8s.io", "v1beta1", plural).is_some());
            assert_eq!(found, expect, "{entry}");
        }
    }

    #[test]
    fn unknown_names_and_values_are_refused() {
        for entry in ["a=true", "api/all/x/y=true", "", "=true"] {
            assert!(matches!(config(&[entry]), Err(RuntimeConfigError::Key(_))), "{entry:?}");
        }
        for entry in ["nope/v1=true", "batch/v7", "batch/v1/job=true", "api/legacy=true", "/v2"] {
            assert!(matches!(config(&[entry]), Err(RuntimeConfigError::Unknown(_))), "{entry:?}");
        }
        for entry in ["api/all", "api/beta=yes", "batch/v1=yes"] {
            assert!(matches!(config(&[entry]), Err(RuntimeConfigError::Value { .. })), "{entry:?}");
        }
        assert_eq!(config(&["api/all=false"]), Err(RuntimeConfigError::NothingServed));
    }

    #[test]
    fn resources_that_nodes_and_controllers_need_are_missing_when_they_are_off() {
        let missing = |entries: &[&str]| config(entries).unwrap().missing();
        let optional = ["batch/v1=false", "policy/v1=false", "certificates.k8s.io/v1=false", "apps/v1=false"];
        assert!(missing(&optional).is_empty() && missing(&["api/beta=true"]).is_empty());
        assert_eq!(
            missing(&["v1/nodes=false", "coordination.k8s.io/v1=false"]),
            ["v1/nodes", "coordination.k8s.io/v1/leases"]
        );
        let all = Resources::served(&RuntimeConfig::default());
        assert!(NEEDED.iter().all(|(group, plural)| all.find(group, "v1", plural).is_some()));
    }

    #[test]
    fn a_resource_whose_stored_version_is_not_served_is_stored_in_it() {
        let set = Resources::served(&config(&["autoscaling/v2=false"]).unwrap());
        assert!(set.find("autoscaling", "v2", "horizontalpodautoscalers").is_none());
        let stored = set.find_stored("autoscaling", "horizontalpodautoscalers").unwrap();
        assert_eq!(stored.api_version(), "autoscaling/v2");
    }
}
