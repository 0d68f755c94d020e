//! Feature gates of Kubernetes: `--feature-gates`, and `featureGates` of the kubelet's configuration file.
//!
//! A few gates are switches here. Any other gate may only have the value that describes what this program does. A gate
//! that Kubernetes 1.36 does not have is an error, as upstream.
#![cfg_attr(
    not(feature = "controlplane"),
    allow(dead_code, reason = "the switches belong to the control plane; a node alone checks the gates")
)]

mod known;
mod metrics;

use std::collections::BTreeMap;

use coracle_values::go;

use super::field::ValueKind;
use super::nearest;
use super::table::settings;
use super::value::Value;

settings! {
    /// Settings of all roles.
    pub(crate) struct FeatureSettings = "";

    /// Feature gates of Kubernetes 1.36: entries NAME=true or NAME=false. APIResponseCompression, ConstrainedImpersonation,
    /// WatchList, AllowUnsafeMalformedObjectDeletion and CPUManagerPolicyAlphaOptions are switches. Any other gate may only
    /// have the value that this program implements.
    feature_gates: FeatureGates = default "", "NAME=BOOL";
}

/// The gates that are set, all of them valid.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct FeatureGates(BTreeMap<String, bool>);

// === impl FeatureGates ===

impl FeatureGates {
    /// Whether alpha options of the CPU manager are allowed.
    pub(crate) fn has_alpha_cpu_options(&self) -> bool {
        self.0.get("CPUManagerPolicyAlphaOptions").copied().unwrap_or(false)
    }

    /// The switches of the API server.
    #[cfg(feature = "controlplane")]
    pub(crate) fn of_server(&self) -> coracle_controlplane::ServerFeatures {
        let is_on = |name: &str, default: bool| self.0.get(name).copied().unwrap_or(default);
        coracle_controlplane::ServerFeatures {
            response_compression: is_on("APIResponseCompression", true),
            watch_list: is_on("WatchList", true),
            constrained_impersonation: is_on("ConstrainedImpersonation", true),
            unsafe_deletion: is_on("AllowUnsafeMalformedObjectDeletion", false),
        }
    }
}

impl Value for FeatureGates {
    const VALUE_KIND: ValueKind = ValueKind::Map;

    fn parse(texts: &[String]) -> Result<Self, String> {
        let mut gates = BTreeMap::new();
        for text in texts {
            let (name, value) =
                text.split_once('=').ok_or_else(|| format!("missing bool value for {}", text.trim()))?;
            let (name, value) = (name.trim(), value.trim());
            let wanted = go::parse_bool(value)
                .ok_or_else(|| format!("invalid value of {name}={value}: expected true or false"))?;
            check(name, wanted)?;
            gates.insert(name.to_owned(), wanted);
        }
        Ok(Self(gates))
    }

    fn unset() -> Option<Self> {
        Some(Self::default())
    }
}

/// Refuses gates that do not exist, and values without an effect.
fn check(name: &str, wanted: bool) -> Result<(), String> {
    let is_in = |names: &[&str]| names.contains(&name);
    if is_in(known::SWITCHES_ON_BY_DEFAULT)
        || is_in(known::SWITCHES_OFF_BY_DEFAULT)
        || is_in(known::WITHOUT_EFFECT)
    {
        return Ok(());
    }
    if name == "AllBeta" {
        return Err(format!("cannot set feature gate {name}: set single gates"));
    }
    let (value, is_locked) = if is_in(known::LOCKED_ON) {
        (true, true)
    } else if is_in(known::LOCKED_OFF) {
        (false, true)
    } else if is_in(known::ON) || is_in(known::ALWAYS_ON) {
        (true, false)
    } else if is_in(known::OFF) {
        (false, false)
    } else {
        return Err(format!("unrecognized feature gate: {name}{}", nearest_hint(name)));
    };
    match (value == wanted, is_locked) {
        (true, _) => Ok(()),
        (false, true) => {
            Err(format!("cannot set feature gate {name} to {wanted}, feature is locked to {value}"))
        }
        (false, false) => Err(format!(
            "cannot set feature gate {name} to {wanted}: it is not supported; its only value is {value}"
        )),
    }
}

/// Last part of the error about an unknown gate: the most similar gate, if any is similar.
fn nearest_hint(name: &str) -> String {
    let lists = [
        known::SWITCHES_ON_BY_DEFAULT,
        known::SWITCHES_OFF_BY_DEFAULT,
        known::WITHOUT_EFFECT,
        known::LOCKED_ON,
        known::LOCKED_OFF,
        known::ON,
        known::ALWAYS_ON,
        known::OFF,
    ];
    let nearest = nearest::of(name, lists.into_iter().flatten().copied());
    nearest.map(|known| format!("; did you mean {known}?")).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<FeatureGates, String> {
        FeatureGates::parse(&text.split(',').map(str::to_owned).collect::<Vec<_>>())
    }

    #[test]
    fn values_that_describe_the_program_are_accepted() {
        let all = "WatchList=false,SidecarContainers=true,GitRepoVolumeDriver=false,RotateKubeletServerCertificate=True,\
                   NativeHistograms=0,GenericWorkload=true,MaxUnavailableStatefulSet=true,AllAlpha=false,\
                   CustomCPUCFSQuotaPeriod=true,RuntimeClassInImageCriApi=false";
        assert_eq!(parse(all).unwrap().0.len(), 10);
        assert_eq!(FeatureGates::parse(&[]).unwrap(), FeatureGates::default());
    }

    #[test]
    fn other_values_are_refused_with_their_reason() {
        for (text, part) in [
            ("Sidecar=true", "unrecognized feature gate: Sidecar"),
            (
                "SidecarContainer=true",
                "unrecognized feature gate: SidecarContainer; did you mean SidecarContainers?",
            ),
            (
                "SidecarContainers=false",
                "cannot set feature gate SidecarContainers to false, feature is locked to true",
            ),
            ("GitRepoVolumeDriver=true", "feature is locked to false"),
            ("PodDeletionCost=false", "its only value is true"),
            ("MaxUnavailableStatefulSet=false", "its only value is true"),
            ("HPAScaleToZero=true", "its only value is false"),
            ("ContainerRestartRules=false", "its only value is true"),
            ("RestartAllContainersOnContainerExits=false", "its only value is true"),
            ("AllAlpha=true", "its only value is false"),
            ("AllBeta=true", "set single gates"),
            ("WatchList", "missing bool value for WatchList"),
            ("WatchList=yes", "invalid value of WatchList=yes"),
        ] {
            let reason = parse(text).unwrap_err();
            assert!(reason.contains(part), "{text}: {reason}");
        }
    }

    #[test]
    fn a_gate_is_in_one_list() {
        let lists = [
            known::SWITCHES_ON_BY_DEFAULT,
            known::SWITCHES_OFF_BY_DEFAULT,
            known::WITHOUT_EFFECT,
            known::ALWAYS_ON,
            known::LOCKED_ON,
            known::LOCKED_OFF,
            known::ON,
            known::OFF,
        ];
        let mut names = std::collections::BTreeSet::new();
        assert!(lists.into_iter().flatten().all(|name| names.insert(*name)));
    }

    #[test]
    fn alpha_options_of_the_cpu_manager_are_off_by_default() {
        assert!(!FeatureGates::default().has_alpha_cpu_options());
        assert!(parse("CPUManagerPolicyAlphaOptions=true").unwrap().has_alpha_cpu_options());
        assert!(!parse("CPUManagerPolicyAlphaOptions=false").unwrap().has_alpha_cpu_options());
    }

    #[cfg(feature = "controlplane")]
    #[test]
    fn switches_reach_the_api_server() {
        let server = parse("WatchList=false").unwrap().of_server();
        assert!(server.response_compression && !server.watch_list && !server.unsafe_deletion);
        assert!(parse("AllowUnsafeMalformedObjectDeletion=true").unwrap().of_server().unsafe_deletion);
        let server = parse("APIResponseCompression=false").unwrap().of_server();
        assert!(!server.response_compression && server.watch_list && server.constrained_impersonation);
        let server = parse("ConstrainedImpersonation=false").unwrap().of_server();
        assert!(server.watch_list && !server.constrained_impersonation);
    }
}
