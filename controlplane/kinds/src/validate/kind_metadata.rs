//! Validation of metadata by the properties of a kind.

use coracle_pod_rules::validate::meta::{self, MetadataRules};
use serde_json::Value;

use super::Causes;
use crate::Resource;

/// Groups whose finalizers need no domain: upstream validates them with the rules of the API machinery alone.
const PLAIN_FINALIZER_GROUPS: [&str; 5] = [
    "admissionregistration.k8s.io",
    "apiextensions.k8s.io",
    "apiregistration.k8s.io",
    "coordination.k8s.io",
    "node.k8s.io",
];

/// Rules for every write.
pub(super) fn every_write(causes: &mut Causes, kind: &Resource, object: &Value) {
    meta::every_write(causes, rules(kind), object);
}

fn rules(kind: &Resource) -> MetadataRules {
    MetadataRules {
        name: kind.name_rule,
        namespaced: kind.namespaced,
        finalizers_with_domain: kind.is_built_in && !PLAIN_FINALIZER_GROUPS.contains(&&*kind.group),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kind::by_kind;

    #[test]
    fn the_rules_of_pods_are_those_of_the_table() {
        assert_eq!(rules(by_kind("v1", "Pod").unwrap()), MetadataRules::OF_PODS);
    }
}
