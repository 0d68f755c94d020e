//! The condition `PodGroupScheduled` of a group.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::api::{Api, Patch, PatchParams};
use kube::{Client, Error};
use serde_json::{Value, json};

use super::object::PodGroup;
use coracle_values::object::Key;

const TYPE: &str = "PodGroupScheduled";
/// Maximum number of attempts of a write.
const ATTEMPTS: u32 = 4;
const FIRST_DELAY: std::time::Duration = std::time::Duration::from_millis(100);

/// The result of scheduling a group, for its condition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Verdict {
    result: GroupResult,
    pub(crate) message: String,
}

/// The status and the reason of the condition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum GroupResult {
    Scheduled,
    /// The pods of the group do not fit.
    Unschedulable,
    /// An error prevented the scheduling. More nodes would not help.
    SchedulerError,
}

// === impl Verdict ===

impl Verdict {
    /// The group was scheduled.
    pub(crate) fn scheduled() -> Self {
        Self { result: GroupResult::Scheduled, message: String::new() }
    }

    /// The pods of the group do not fit.
    pub(crate) fn refused(message: impl Into<String>) -> Self {
        Self { result: GroupResult::Unschedulable, message: message.into() }
    }

    /// An error prevented the scheduling of the group.
    pub(crate) fn failed(message: impl Into<String>) -> Self {
        Self { result: GroupResult::SchedulerError, message: message.into() }
    }

    /// Whether the group was scheduled.
    pub(crate) fn is_scheduled(&self) -> bool {
        self.result == GroupResult::Scheduled
    }

    /// Whether an error prevented the scheduling.
    pub(crate) fn is_error(&self) -> bool {
        self.result == GroupResult::SchedulerError
    }
}

/// A write of the condition.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Write {
    pub(crate) key: Key,
    /// The uid of the group.
    pub(crate) uid: String,
    pub(crate) condition: Value,
}

/// Whether the group has the condition with the status `True`.
pub(super) fn is_scheduled(group: &PodGroup) -> bool {
    find(group).is_some_and(|condition| condition.status == "True")
}

/// The condition to write. `None` if the group already has this condition.
pub(super) fn condition(group: &PodGroup, verdict: &Verdict, now: jiff::Timestamp) -> Option<Value> {
    let (status, reason) = match verdict.result {
        GroupResult::Scheduled => ("True", "Scheduled"),
        GroupResult::Unschedulable => ("False", "Unschedulable"),
        GroupResult::SchedulerError => ("False", "SchedulerError"),
    };
    let generation = group.metadata.generation;
    let old = find(group);
    let is_same = |old: &Condition| {
        old.status == status
            && old.reason == reason
            && old.message == verdict.message
            && old.observed_generation == generation
    };
    if old.is_some_and(is_same) {
        return None;
    }
    let now = jiff::Timestamp::from_second(now.as_second()).unwrap_or(now);
    let since = old.filter(|old| old.status == status).map_or(now, |old| old.last_transition_time.0);
    let mut condition = json!({
        "type": TYPE,
        "status": status,
        "reason": reason,
        "message": verdict.message,
        "lastTransitionTime": since.to_string(),
    });
    // Kubernetes 1.36 does not set the generation of groups.
    if let Some(generation) = generation {
        condition["observedGeneration"] = generation.into();
    }
    Some(condition)
}

fn find(group: &PodGroup) -> Option<&Condition> {
    group.status.conditions.iter().find(|condition| condition.type_ == TYPE)
}

/// Writes the condition. Temporary errors are retried.
pub(crate) async fn write(client: Client, write: &Write) -> Result<(), Error> {
    let api: Api<PodGroup> = Api::namespaced(client, &write.key.namespace);
    let patch = json!({"metadata": {"uid": write.uid}, "status": {"conditions": [write.condition]}});
    let (mut attempt, mut delay) = (1, FIRST_DELAY);
    loop {
        let patched =
            api.patch_status(&write.key.name, &PatchParams::default(), &Patch::Strategic(&patch)).await;
        match patched {
            Err(error) if attempt < ATTEMPTS && coracle_events::is_unavailable(&error) => {
                tokio::time::sleep(delay).await;
                (attempt, delay) = (attempt + 1, delay * 2);
            }
            other => return other.map(drop),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn group(status: Value) -> PodGroup {
        serde_json::from_value(json!({"metadata": {"name": "g", "generation": 3}, "status": status})).unwrap()
    }

    #[test]
    fn the_condition_is_written_only_if_it_changes_and_keeps_its_time() {
        let now = jiff::Timestamp::from_second(2_000_000_000).unwrap();
        let (refused, scheduled) = (Verdict::refused("pod group is unschedulable"), Verdict::scheduled());
        let first = condition(&group(json!({})), &refused, now).unwrap();
        assert_eq!(first["lastTransitionTime"], "2033-05-18T03:33:20Z");
        assert_eq!((&first["reason"], &first["observedGeneration"]), (&json!("Unschedulable"), &json!(3)));
        let known = group(json!({"conditions": [first]}));
        let later = jiff::Timestamp::from_second(2_000_000_100).unwrap();
        assert_eq!(condition(&known, &refused, later), None);
        let waits = Verdict { message: "other".to_owned(), ..refused };
        let changed = condition(&known, &waits, later).unwrap();
        assert_eq!(changed["lastTransitionTime"], "2033-05-18T03:33:20Z", "the status did not change");
        let failed = condition(&known, &Verdict::failed("why"), later).unwrap();
        assert_eq!((&failed["status"], &failed["reason"]), (&json!("False"), &json!("SchedulerError")));
        let done = condition(&known, &scheduled, later).unwrap();
        assert_eq!((&done["status"], &done["reason"]), (&json!("True"), &json!("Scheduled")));
        assert_eq!(done["lastTransitionTime"], "2033-05-18T03:35:00Z");
        assert!(is_scheduled(&group(json!({"conditions": [done]}))) && !is_scheduled(&known));
    }
}
