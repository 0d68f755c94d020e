//! A node's taints and a pod's tolerations → when the pod has to go. Pure.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Taint, Toleration};

/// When a pod has to go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Due {
    Never,
    At(Timestamp),
}

/// The taints that drive pods away.
pub(crate) fn evicting(taints: &[Taint]) -> impl Iterator<Item = &Taint> {
    taints.iter().filter(|taint| taint.effect == "NoExecute")
}

/// When a pod with these tolerations has to go, which is on the node since `bound`. A taint that does not say since when
/// it is there is taken as new. A pod that came later than the taint tolerates it from then on: counted from the taint,
/// it would have to go at once, and so would whoever comes in its place.
pub(crate) fn due(
    taints: &[Taint],
    tolerations: &[Toleration],
    (bound, now): (Option<Timestamp>, Timestamp),
) -> Due {
    let ends = evicting(taints).filter_map(|taint| {
        let since = taint.time_added.as_ref().map_or(now, |time| time.0);
        end(taint, tolerations, bound.map_or(since, |bound| bound.max(since)))
    });
    ends.min().map_or(Due::Never, Due::At)
}

/// When one taint is not tolerated any more; nothing when it is for ever.
fn end(taint: &Taint, tolerations: &[Toleration], since: Timestamp) -> Option<Timestamp> {
    let matching: Vec<&Toleration> =
        tolerations.iter().filter(|toleration| tolerates(toleration, taint)).collect();
    if matching.is_empty() {
        return Some(since);
    }
    // Of several the shortest counts; one without an end leaves the others' end as it is.
    let seconds = matching.iter().filter_map(|toleration| toleration.toleration_seconds).min()?;
    let lasts = Duration::from_secs(u64::try_from(seconds).unwrap_or(0));
    Some(since.checked_add(lasts).unwrap_or(Timestamp::MAX))
}

fn tolerates(toleration: &Toleration, taint: &Taint) -> bool {
    let text = |field: &Option<String>| field.clone().unwrap_or_default();
    let (effect, key) = (text(&toleration.effect), text(&toleration.key));
    if !(effect.is_empty() || effect == taint.effect) || !(key.is_empty() || key == taint.key) {
        return false;
    }
    match text(&toleration.operator).as_str() {
        "Exists" => true,
        "" | "Equal" => !key.is_empty() && text(&toleration.value) == taint.value.clone().unwrap_or_default(),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    fn since(bound: Option<Timestamp>, taints: Value, tolerations: Value) -> Due {
        let taints: Vec<Taint> = serde_json::from_value(taints).unwrap();
        let tolerations: Vec<Toleration> = serde_json::from_value(tolerations).unwrap();
        due(&taints, &tolerations, (bound, at(1000)))
    }

    fn of(taints: Value, tolerations: Value) -> Due {
        since(None, taints, tolerations)
    }

    #[test]
    fn a_pod_that_came_after_the_taint_has_its_time_too() {
        let taint = json!([{"key": "a", "effect": "NoExecute", "timeAdded": "1970-01-01T00:05:00Z"}]);
        let tolerates = json!([{"key": "a", "operator": "Exists", "tolerationSeconds": 300}]);
        let ends = |bound| since(Some(at(bound)), taint.clone(), tolerates.clone());
        assert_eq!(ends(100), Due::At(at(600)), "it was there before");
        assert_eq!(ends(900), Due::At(at(1200)));
        assert_eq!(since(Some(at(900)), taint.clone(), json!([])), Due::At(at(900)), "not tolerated at all");
    }

    #[test]
    fn a_pod_stays_for_as_long_as_it_tolerates_every_taint() {
        let taint =
            |key: &str| json!({"key": key, "effect": "NoExecute", "timeAdded": "1970-01-01T00:15:00Z"});
        let tolerates = |key: &str, seconds: Value| json!({"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": seconds});
        assert_eq!(of(json!([]), json!([])), Due::Never);
        assert_eq!(of(json!([{"key": "a", "effect": "NoSchedule"}]), json!([])), Due::Never);
        assert_eq!(of(json!([taint("a")]), json!([])), Due::At(at(900)));
        assert_eq!(of(json!([taint("a")]), json!([tolerates("a", json!(300))])), Due::At(at(1200)));
        assert_eq!(of(json!([taint("a")]), json!([tolerates("a", Value::Null)])), Due::Never);
        assert_eq!(of(json!([taint("a")]), json!([{"operator": "Exists"}])), Due::Never);
        assert_eq!(
            of(json!([taint("a")]), json!([tolerates("a", json!(0)), tolerates("a", json!(60))])),
            Due::At(at(900))
        );
        let two = json!([taint("a"), taint("b")]);
        assert_eq!(of(two.clone(), json!([tolerates("a", json!(300))])), Due::At(at(900)));
        assert_eq!(
            of(two, json!([tolerates("a", json!(300)), tolerates("b", Value::Null)])),
            Due::At(at(1200))
        );
        assert_eq!(
            of(
                json!([{"key": "a", "value": "x", "effect": "NoExecute"}]),
                json!([{"key": "a", "value": "y"}])
            ),
            Due::At(at(1000))
        );
    }
}
