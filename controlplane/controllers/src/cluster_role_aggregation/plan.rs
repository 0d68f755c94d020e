//! The desired rules of one aggregated role, from all roles.

use std::sync::Arc;

use coracle_values::label_selector::LabelSelector;
use serde_json::Value;

use crate::object::{ClusterRole, ObjectExt};

/// The rules of all selected roles, ordered by role name, without duplicates. `None` for a role that is not aggregated.
pub(crate) fn rules(role: &ClusterRole, all: &[Arc<ClusterRole>]) -> Option<Vec<Value>> {
    let aggregation = role.aggregation_rule.as_ref()?;
    let mut rules: Vec<Value> = Vec::new();
    for selector in &aggregation.cluster_role_selectors {
        let Ok(selector) = LabelSelector::try_from(selector) else { continue };
        let fits = |other: &&Arc<ClusterRole>| {
            other.name() != role.name() && selector.matches(other.metadata.labels.as_ref())
        };
        let mut parts: Vec<_> = all.iter().filter(fits).collect();
        parts.sort_by_key(|other| other.name());
        for rule in parts.into_iter().flat_map(|other| other.rules.iter().flatten()) {
            if !rules.contains(rule) {
                rules.push(rule.clone());
            }
        }
    }
    Some(rules)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn role(name: &str, label: &str, verbs: &[&str]) -> Arc<ClusterRole> {
        let rules: Vec<Value> = verbs.iter().map(|verb| json!({"verbs": [verb]})).collect();
        let metadata = json!({"name": name, "labels": {"to": label}});
        Arc::new(serde_json::from_value(json!({"metadata": metadata, "rules": rules})).unwrap())
    }

    #[test]
    fn an_aggregated_role_has_the_rules_of_all_selected_roles() {
        let selectors = json!([{"matchLabels": {"to": "x"}}, {"matchLabels": {"to": "y"}}]);
        let own: ClusterRole =
            serde_json::from_value(json!({"metadata": {"name": "own", "labels": {"to": "x"}},
            "rules": [{"verbs": ["old"]}], "aggregationRule": {"clusterRoleSelectors": selectors}}))
            .unwrap();
        let all = [
            role("b", "x", &["two", "one"]),
            role("a", "x", &["one"]),
            role("c", "y", &["three"]),
            role("d", "z", &["four"]),
            Arc::new(own.clone()),
        ];
        let expect = ["one", "two", "three"].map(|verb| json!({"verbs": [verb]}));
        assert_eq!(rules(&own, &all).unwrap(), expect);
        assert_eq!(rules(&all[0], &all), None);
    }
}
