//! The eviction time of a pod, from the node's taints and the pod's tolerations. No I/O.

use std::time::Duration;

use coracle_values::toleration::{evicts, tolerates};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Taint, Toleration};

/// The eviction time of a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Due {
    Never,
    At(Timestamp),
}

/// The eviction time of a pod with these tolerations. `bound` is the time at which the pod was bound to the node.
///
/// A taint without `timeAdded` counts as new. `tolerationSeconds` are counted from `bound` if the taint is older. If
/// they were counted from the taint, such a pod, and each pod that replaces it, could be evicted immediately.
pub(crate) fn due(
    taints: &[Taint],
    tolerations: &[Toleration],
    bound: Option<Timestamp>,
    now: Timestamp,
) -> Due {
    let ends = taints.iter().filter(|taint| evicts(taint)).filter_map(|taint| {
        let since = taint.time_added.as_ref().map_or(now, |time| time.0);
        end(taint, tolerations, bound.map_or(since, |bound| bound.max(since)))
    });
    ends.min().map_or(Due::Never, Due::At)
}

/// The time at which the toleration of one taint expires. `None` if it does not expire.
fn end(taint: &Taint, tolerations: &[Toleration], since: Timestamp) -> Option<Timestamp> {
    let matching: Vec<&Toleration> =
        tolerations.iter().filter(|toleration| tolerates(toleration, taint)).collect();
    if matching.is_empty() {
        return Some(since);
    }
    // The shortest tolerationSeconds apply. Tolerations without the field do not extend them.
    let seconds = matching.iter().filter_map(|toleration| toleration.toleration_seconds).min()?;
    let lasts = Duration::from_secs(u64::try_from(seconds).unwrap_or(0));
    Some(since.checked_add(lasts).unwrap_or(Timestamp::MAX))
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
        due(&taints, &tolerations, bound, at(1000))
    }

    fn of(taints: Value, tolerations: Value) -> Due {
        since(None, taints, tolerations)
    }

    #[test]
    fn toleration_seconds_count_from_the_binding_of_a_pod_younger_than_the_taint() {
        let taint = json!([{"key": "a", "effect": "NoExecute", "timeAdded": "1970-01-01T00:05:00Z"}]);
        let tolerates = json!([{"key": "a", "operator": "Exists", "tolerationSeconds": 300}]);
        let ends = |bound| since(Some(at(bound)), taint.clone(), tolerates.clone());
        assert_eq!(ends(100), Due::At(at(600)), "it was there before");
        assert_eq!(ends(900), Due::At(at(1200)));
        assert_eq!(since(Some(at(900)), taint.clone(), json!([])), Due::At(at(900)), "not tolerated at all");
    }

    #[test]
    fn a_pod_is_evicted_when_its_first_toleration_expires() {
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
