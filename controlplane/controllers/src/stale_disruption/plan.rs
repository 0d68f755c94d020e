//! The time at which a pod's condition DisruptionTarget becomes stale.

use jiff::{SignedDuration, Timestamp};

use crate::object::{ObjectExt, Pod};

/// Time within which a client that sets the condition must delete the pod, as upstream.
const DELETION_TIMEOUT: SignedDuration = SignedDuration::from_secs(120);

/// The time at which the condition becomes stale. `None` without the condition, or if the pod is terminating or
/// finished.
pub(crate) fn stale_at(pod: &Pod) -> Option<Timestamp> {
    if pod.is_being_deleted() || pod.finished() {
        return None;
    }
    let condition = pod.condition("DisruptionTarget").filter(|condition| condition.status == "True")?;
    // After an eviction by its node, the termination of a pod has no time limit.
    if condition.reason.as_deref() == Some("TerminationByKubelet") {
        return None;
    }
    condition.last_transition_time.as_ref()?.0.checked_add(DELETION_TIMEOUT).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_condition_is_stale_after_two_minutes_unless_the_pod_ends() {
        let pod = |change: &dyn Fn(&mut serde_json::Value)| {
            let mark = json!({"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI",
                "lastTransitionTime": "2026-01-01T00:00:00Z"});
            let mut pod = json!({"metadata": {}, "status": {"phase": "Running", "conditions": [mark]}});
            change(&mut pod);
            stale_at(&serde_json::from_value::<Pod>(pod).unwrap())
        };
        assert_eq!(pod(&|_| {}), Some("2026-01-01T00:02:00Z".parse().unwrap()));
        for change in [
            &|pod: &mut serde_json::Value| {
                pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:01Z".into()
            },
            &|pod: &mut serde_json::Value| pod["status"]["phase"] = "Failed".into(),
            &|pod: &mut serde_json::Value| pod["status"]["conditions"][0]["status"] = "False".into(),
            &|pod: &mut serde_json::Value| {
                pod["status"]["conditions"][0]["reason"] = "TerminationByKubelet".into()
            },
            &|pod: &mut serde_json::Value| pod["status"]["conditions"] = json!([]),
        ] as [&dyn Fn(&mut serde_json::Value); 5]
        {
            assert_eq!(pod(change), None);
        }
    }
}
