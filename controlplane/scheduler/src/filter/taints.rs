//! A tainted node takes only pods that tolerate every taint that forbids scheduling.

use k8s_openapi::api::core::v1::{Taint, Toleration};

use super::Refusal;
use crate::object::Pod;
use crate::snapshot::Candidate;

pub(crate) fn refuse(pod: &Pod, node: Candidate<'_>) -> Vec<Refusal> {
    let mut forbidding =
        node.facts.taints.iter().filter(|taint| matches!(taint.effect.as_str(), "NoSchedule" | "NoExecute"));
    if forbidding.all(|taint| tolerates(pod, taint)) {
        return Vec::new();
    }
    vec!["node(s) had untolerated taint(s)".to_owned()]
}

/// Whether one of the pod's tolerations covers the taint.
pub(crate) fn tolerates(pod: &Pod, taint: &Taint) -> bool {
    pod.spec.tolerations.iter().flatten().any(|toleration| covers(toleration, taint))
}

fn covers(toleration: &Toleration, taint: &Taint) -> bool {
    let text = |value: &Option<String>| value.clone().unwrap_or_default();
    let (key, effect) = (text(&toleration.key), text(&toleration.effect));
    if !effect.is_empty() && effect != taint.effect {
        return false;
    }
    if !key.is_empty() && key != taint.key {
        return false;
    }
    let (own, value) = (text(&toleration.value), text(&taint.value));
    let numbers = || Some((value.parse::<i64>().ok()?, own.parse::<i64>().ok()?));
    match toleration.operator.as_deref() {
        None | Some("" | "Equal") => !key.is_empty() && own == value,
        Some("Exists") => true,
        Some("Lt") => numbers().is_some_and(|(taint, bound)| taint < bound),
        Some("Gt") => numbers().is_some_and(|(taint, bound)| taint > bound),
        Some(_) => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture;
    use serde_json::{Value, json};

    fn refused(taint: Value, tolerations: Value) -> bool {
        let snapshot = fixture::snapshot(&[fixture::node("a", json!({"/spec/taints": [taint]}))]);
        let pod = fixture::pod("p", json!({"tolerations": tolerations}));
        !refuse(&pod, snapshot.candidates().next().unwrap()).is_empty()
    }

    #[test]
    fn tolerations_cover_taints_by_key_value_and_effect() {
        let taint = |effect: &str| json!({"key": "k", "value": "v", "effect": effect});
        assert!(refused(taint("NoSchedule"), json!([])));
        assert!(refused(taint("NoExecute"), json!([])));
        assert!(!refused(taint("PreferNoSchedule"), json!([])));
        assert!(!refused(taint("NoSchedule"), json!([{"operator": "Exists"}])));
        assert!(!refused(taint("NoSchedule"), json!([{"key": "k", "operator": "Exists"}])));
        assert!(!refused(taint("NoSchedule"), json!([{"key": "k", "value": "v", "effect": "NoSchedule"}])));
        assert!(refused(taint("NoSchedule"), json!([{"key": "k", "value": "w"}])));
        assert!(refused(taint("NoSchedule"), json!([{"key": "k", "value": "v", "effect": "NoExecute"}])));
        assert!(refused(taint("NoSchedule"), json!([{"key": "other", "operator": "Exists"}])));
    }
}
