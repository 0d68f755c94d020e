//! A pod → when its mark is stale.

use jiff::{SignedDuration, Timestamp};

use crate::object::{Object, Pod};

/// Who marks a pod deletes it in this time: upstream's.
const PATIENCE: SignedDuration = SignedDuration::from_secs(120);

/// When the pod's mark is to be taken back; nothing when it has none or goes.
pub(crate) fn stale_at(pod: &Pod) -> Option<Timestamp> {
    if pod.deleting() || pod.finished() {
        return None;
    }
    let mark = pod.condition("DisruptionTarget").filter(|mark| mark.status == "True")?;
    // A node may take as long as it needs to end a pod of its own accord.
    if mark.reason.as_deref() == Some("TerminationByKubelet") {
        return None;
    }
    mark.last_transition_time.as_ref()?.0.checked_add(PATIENCE).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_mark_is_stale_after_two_minutes_unless_the_pod_goes() {
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
