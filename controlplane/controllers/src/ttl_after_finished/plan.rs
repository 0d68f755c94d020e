//! The deletion time of a finished job.

use jiff::Timestamp;

use crate::object::{Job, ObjectExt};

/// The time at which the job must be deleted. `None` if the job has no TTL, has not finished or is already being
/// deleted.
pub(super) fn due(job: &Job) -> Option<Timestamp> {
    let ttl = job.spec.ttl_seconds_after_finished?;
    if job.is_being_deleted() {
        return None;
    }
    let end = job.condition("Complete").or_else(|| job.condition("Failed"))?;
    let end = end.last_transition_time.as_ref()?.0;
    Timestamp::from_second(end.as_second().saturating_add(ttl.into())).ok()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn only_a_finished_job_with_a_ttl_is_due() {
        let job = |ttl: Option<i32>, condition: &str| -> Job {
            serde_json::from_value(
                json!({"spec": {"ttlSecondsAfterFinished": ttl}, "status": {"conditions": [
                {"type": condition, "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}]}}),
            )
            .unwrap()
        };
        let at = |seconds: i64| Some(Timestamp::from_second(1_767_225_600 + seconds).unwrap());
        assert_eq!(due(&job(Some(10), "Complete")), at(10));
        assert_eq!(due(&job(Some(0), "Failed")), at(0));
        assert_eq!(due(&job(None, "Complete")), None);
        assert_eq!(due(&job(Some(10), "Suspended")), None);
    }
}
