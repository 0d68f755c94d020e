//! Taints and tolerations.

use k8s_openapi::api::core::v1::{Taint, Toleration};

/// Whether the taint (`NoSchedule` or `NoExecute`) keeps the scheduler from placing pods without a matching toleration
/// on the node.
pub fn forbids_scheduling(taint: &Taint) -> bool {
    matches!(taint.effect.as_str(), "NoSchedule" | "NoExecute")
}

/// Whether the taint (`NoExecute`) evicts running pods without a matching toleration.
pub fn evicts(taint: &Taint) -> bool {
    taint.effect == "NoExecute"
}

/// Whether at least one of the tolerations matches the taint.
pub fn is_tolerated(taint: &Taint, tolerations: &[Toleration]) -> bool {
    tolerations.iter().any(|toleration| tolerates(toleration, taint))
}

/// Whether the toleration matches the taint.
///
/// An empty effect matches every effect and an empty key every key. An empty key needs `Exists`: the API server refuses
/// the other operators for it. `Lt` and `Gt` compare the values of the taint and the toleration as integers (feature
/// gate `TaintTolerationComparisonOperators`).
pub fn tolerates(toleration: &Toleration, taint: &Taint) -> bool {
    let effect = toleration.effect.as_deref().unwrap_or_default();
    let key = toleration.key.as_deref().unwrap_or_default();
    if !(effect.is_empty() || effect == taint.effect) || !(key.is_empty() || key == taint.key) {
        return false;
    }
    let own = toleration.value.as_deref().unwrap_or_default();
    let value = taint.value.as_deref().unwrap_or_default();
    let integers = || Some((value.parse::<i64>().ok()?, own.parse::<i64>().ok()?));
    match toleration.operator.as_deref().unwrap_or_default() {
        "Exists" => true,
        "" | "Equal" => !key.is_empty() && own == value,
        "Lt" => !key.is_empty() && integers().is_some_and(|(value, bound)| value < bound),
        "Gt" => !key.is_empty() && integers().is_some_and(|(value, bound)| value > bound),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn matches(taint: Value, toleration: Value) -> bool {
        tolerates(&serde_json::from_value(toleration).unwrap(), &serde_json::from_value(taint).unwrap())
    }

    #[test]
    fn key_operator_value_and_effect_must_match() {
        let taint = json!({"key": "k", "value": "v", "effect": "NoSchedule"});
        let cases = [
            (json!({"operator": "Exists"}), true),
            (json!({"operator": "Exists", "effect": "NoExecute"}), false),
            (json!({"key": "k", "operator": "Exists"}), true),
            (json!({"key": "k", "operator": "Exists", "effect": ""}), true),
            (json!({"key": "k", "value": "v", "effect": "NoSchedule"}), true),
            (json!({"key": "k", "value": "v", "effect": "NoExecute"}), false),
            (json!({"key": "k", "operator": "Equal", "value": "v"}), true),
            (json!({"key": "k", "operator": "", "value": "v"}), true),
            (json!({"key": "k", "value": "w"}), false),
            (json!({"key": "k"}), false),
            (json!({"key": "other", "operator": "Exists"}), false),
            (json!({"value": "v"}), false),
            (json!({"key": "k", "operator": "In", "value": "v"}), false),
        ];
        for (toleration, expected) in cases {
            assert_eq!(matches(taint.clone(), toleration.clone()), expected, "for {toleration}");
        }
        assert!(
            matches(json!({"key": "k", "effect": "NoSchedule"}), json!({"key": "k"})),
            "both values empty"
        );
    }

    #[test]
    fn comparison_operators_compare_integers() {
        let taint = |value: &str| json!({"key": "k", "value": value, "effect": "NoSchedule"});
        let toleration =
            |operator: &str, value: &str| json!({"key": "k", "operator": operator, "value": value});
        assert!(matches(taint("900"), toleration("Lt", "1000")));
        assert!(!matches(taint("1000"), toleration("Lt", "1000")));
        assert!(matches(taint("1001"), toleration("Gt", "1000")));
        assert!(!matches(taint("many"), toleration("Gt", "1000")));
    }

    #[test]
    fn one_matching_toleration_of_several_is_enough() {
        let taint: Taint = serde_json::from_value(json!({"key": "k", "effect": "NoExecute"})).unwrap();
        let list = |value: Value| serde_json::from_value::<Vec<Toleration>>(value).unwrap();
        assert!(!is_tolerated(&taint, &[]));
        assert!(is_tolerated(&taint, &list(json!([{"key": "a"}, {"key": "k", "operator": "Exists"}]))));
    }

    #[test]
    fn effects_decide_on_scheduling_and_eviction() {
        let of = |effect: &str| Taint { effect: effect.to_owned(), ..Taint::default() };
        let effects = ["NoSchedule", "NoExecute", "PreferNoSchedule"];
        assert_eq!(effects.map(|effect| forbids_scheduling(&of(effect))), [true, true, false]);
        assert_eq!(effects.map(|effect| evicts(&of(effect))), [false, true, false]);
    }
}
