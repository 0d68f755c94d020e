//! The metric `kubernetes_feature_enabled`, in the text format of Prometheus. Source:
//! `k8s.io/component-base/metrics/prometheus/feature`.

use std::fmt::Write as _;
use std::sync::Arc;

use super::{FeatureGates, known};

/// The lists of gates. For each list: the stage of most of its gates, and the default value of all its gates.
const LISTS: [(&[&str], &str, bool); 8] = [
    (known::SWITCHES_ON_BY_DEFAULT, "BETA", true),
    (known::SWITCHES_OFF_BY_DEFAULT, "ALPHA", false),
    (known::WITHOUT_EFFECT, "ALPHA", false),
    (known::ALWAYS_ON, "BETA", true),
    (known::LOCKED_ON, GENERAL, true),
    (known::LOCKED_OFF, "DEPRECATED", false),
    (known::ON, "BETA", true),
    (known::OFF, "ALPHA", false),
];
/// The stage of generally available features.
const GENERAL: &str = "";

// === impl FeatureGates ===

impl FeatureGates {
    /// The metric: 1 for each gate that is on. Gates for all features of a stage are left out, as upstream.
    pub(crate) fn metrics(&self) -> Arc<str> {
        let mut text =
            "# HELP kubernetes_feature_enabled 1 for each feature that is enabled, by name and stage.\n\
                        # TYPE kubernetes_feature_enabled gauge\n"
                .to_owned();
        for (names, stage, default) in LISTS {
            for name in names.iter().filter(|name| **name != "AllAlpha") {
                let stage = known::STAGES
                    .iter()
                    .find(|(_, names)| names.contains(name))
                    .map_or(stage, |(stage, _)| *stage);
                let value = u8::from(self.0.get(*name).copied().unwrap_or(default));
                // Writing to memory cannot fail.
                let _ =
                    writeln!(text, "kubernetes_feature_enabled{{name=\"{name}\",stage=\"{stage}\"}} {value}");
            }
        }
        text.into()
    }
}

#[cfg(test)]
mod tests {
    use super::super::Value as _;
    use super::*;

    #[test]
    fn gates_have_their_stage_and_their_value() {
        let gates = ["WatchList=false", "StorageVersionMigrator=true"].map(str::to_owned);
        let text = FeatureGates::parse(&gates).unwrap().metrics();
        for line in [
            "# TYPE kubernetes_feature_enabled gauge",
            "kubernetes_feature_enabled{name=\"WatchList\",stage=\"BETA\"} 0",
            "kubernetes_feature_enabled{name=\"APIResponseCompression\",stage=\"BETA\"} 1",
            "kubernetes_feature_enabled{name=\"StorageVersionMigrator\",stage=\"BETA\"} 1",
            "kubernetes_feature_enabled{name=\"GangScheduling\",stage=\"ALPHA\"} 0",
            "kubernetes_feature_enabled{name=\"SidecarContainers\",stage=\"\"} 1",
            "kubernetes_feature_enabled{name=\"MutatingAdmissionPolicy\",stage=\"\"} 1",
            "kubernetes_feature_enabled{name=\"KMSv1\",stage=\"DEPRECATED\"} 0",
            "kubernetes_feature_enabled{name=\"PodCertificateRequest\",stage=\"BETA\"} 0",
        ] {
            assert!(text.lines().any(|other| other == line), "no {line} in\n{text}");
        }
        assert!(!text.contains("AllAlpha"), "{text}");
    }

    #[test]
    fn each_exception_is_a_gate() {
        let known: Vec<&str> = LISTS.iter().flat_map(|(names, ..)| *names).copied().collect();
        for name in known::STAGES.iter().flat_map(|(_, names)| *names) {
            assert!(known.contains(name), "{name}");
        }
    }
}
