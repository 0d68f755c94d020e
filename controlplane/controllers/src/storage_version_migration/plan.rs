//! Decides about one migration. Pure. Source: `pkg/controller/storageversionmigrator`.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use serde_json::{Value, json};

use crate::object::{GroupResource, ObjectExt, StorageVersionMigration};

pub(super) const RUNNING: &str = "Running";
pub(super) const SUCCEEDED: &str = "Succeeded";
pub(super) const FAILED: &str = "Failed";
/// Time after the creation of a migration in which its resource may still appear, as that of a new definition.
const APPEARS: Duration = Duration::from_secs(60);
/// Maximum bytes of the message of a condition. The API allows 32,768.
const MAX_MESSAGE: usize = 8192;

/// The next step of a migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Nothing until a migration of the resource changes.
    Wait,
    /// Sets the condition Running.
    Begin,
    /// Records the resource version of a list.
    Record,
    /// Writes the objects again.
    Migrate,
    /// Removes the condition Running after the end.
    Finish,
}

/// The next step. `all` returns the migrations of the same resource, this one included. It is called only for a migration
/// that may begin.
pub(super) fn step(
    migration: &StorageVersionMigration,
    all: impl FnOnce() -> Vec<Arc<StorageVersionMigration>>,
) -> Step {
    match (migration.is(RUNNING), has_ended(migration)) {
        (true, true) => Step::Finish,
        (false, true) => Step::Wait,
        (true, false) if migration.status.resource_version.is_empty() => Step::Record,
        (true, false) => Step::Migrate,
        (false, false) => {
            let all = all();
            let waiting = || all.iter().filter(|other| !other.is(RUNNING) && !has_ended(other));
            let is_busy = all.iter().any(|other| other.is(RUNNING) && !has_ended(other));
            let is_first = waiting()
                .min_by_key(|other| order(other))
                .is_none_or(|first| first.name() == migration.name());
            if is_busy || !is_first { Step::Wait } else { Step::Begin }
        }
    }
}

fn has_ended(migration: &StorageVersionMigration) -> bool {
    migration.is(SUCCEEDED) || migration.is(FAILED)
}

/// The unfinished migrations of each resource, in their order.
#[derive(Default)]
pub(super) struct Unfinished(BTreeMap<GroupResource, BTreeSet<(Option<Timestamp>, String)>>);

// === impl Unfinished ===

impl Unfinished {
    /// Applies a change of a migration. If it has ended or was deleted, returns the name of the next one of its resource.
    pub(super) fn change(&mut self, migration: &StorageVersionMigration, exists: bool) -> Option<String> {
        let (resource, (created, name)) = (&migration.spec.resource, order(migration));
        let entry = (created, name.to_owned());
        if exists && !has_ended(migration) {
            self.0.entry(resource.clone()).or_default().insert(entry);
            return None;
        }
        let unfinished = self.0.get_mut(resource)?;
        let was_unfinished = unfinished.remove(&entry);
        let next = unfinished.first().map(|(_, name)| name.clone());
        if next.is_none() {
            self.0.remove(resource);
        }
        next.filter(|_| was_unfinished)
    }
}

fn order(migration: &StorageVersionMigration) -> (Option<Timestamp>, &str) {
    (migration.metadata.creation_timestamp.as_ref().map(|time| time.0), migration.name())
}

/// How long to wait for a resource that is not served. None: it will not appear.
pub(super) fn patience(migration: &StorageVersionMigration, now: Timestamp) -> Option<Duration> {
    let created = migration.metadata.creation_timestamp.as_ref()?.0;
    let age = Duration::try_from(now.duration_since(created)).unwrap_or_default();
    APPEARS.checked_sub(age).filter(|left| !left.is_zero())
}

/// The effect of the response to the rewrite of one object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// The object was written again, by this request or by a later one, or it does not exist any more.
    Done,
    /// The request is repeated later.
    Retry,
    /// The migration fails.
    Fail,
}

/// Judges an error of the API server by its code and reason.
pub(super) fn verdict(code: u16, reason: &str) -> Verdict {
    match (code, reason) {
        (_, "Conflict" | "NotFound") | (409, _) => Verdict::Done,
        (_, "ServerTimeout" | "TooManyRequests" | "ServiceUnavailable" | "InternalError" | "Timeout")
        // Not the object is missing then but its resource: the next attempt finds out whether it is served.
        | (404 | 429 | 500..=599, _) => Verdict::Retry,
        _ => Verdict::Fail,
    }
}

/// Whether an object may be stored in an earlier form: it was not written after the recorded resource version.
pub(super) fn may_be_outdated(version: Option<&str>, recorded: &str) -> bool {
    let number = |text: &str| text.parse::<u64>().ok();
    match (version.and_then(number), number(recorded)) {
        (Some(version), Some(recorded)) => version <= recorded,
        _ => true,
    }
}

/// A condition of a migration: its type, whether it holds, its reason and its message.
pub(super) type Outcome<'a> = (&'a str, bool, &'a str, &'a str);

/// The outcome of a migration that cannot go on.
pub(super) fn failed(message: &str) -> Outcome<'_> {
    (FAILED, true, "StorageVersionMigrationFailed", message)
}

/// The patch of the status that sets one condition. It applies to this version of the migration only, because the list of
/// conditions is replaced.
pub(super) fn condition_patch(
    migration: &StorageVersionMigration,
    (type_, holds, reason, message): Outcome<'_>,
    now: Timestamp,
) -> Value {
    let message = message.get(..message.floor_char_boundary(MAX_MESSAGE)).unwrap_or_default();
    let own = json!({
        "type": type_,
        "status": if holds { "True" } else { "False" },
        "reason": reason,
        "message": message,
        "lastTransitionTime": time(now),
    });
    let others = migration.status.conditions.iter().flatten().filter(|other| other.type_ != type_);
    let conditions: Vec<Value> = others.map(|other| json!(other)).chain([own]).collect();
    status_patch(migration, &json!({"conditions": conditions}))
}

/// The patch of the status for this version of the migration only.
pub(super) fn status_patch(migration: &StorageVersionMigration, status: &Value) -> Value {
    let metadata = json!({"uid": migration.uid(), "resourceVersion": migration.metadata.resource_version});
    json!({"metadata": metadata, "status": status})
}

pub(super) fn time(now: Timestamp) -> String {
    now.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn migration(name: &str, second: u32, status: Value) -> Arc<StorageVersionMigration> {
        let created = format!("2026-01-01T00:00:{second:02}Z");
        let metadata =
            json!({"name": name, "uid": name, "resourceVersion": "5", "creationTimestamp": created});
        let spec = json!({"resource": {"group": "", "resource": "secrets"}});
        let value = json!({"metadata": metadata, "spec": spec, "status": status});
        Arc::new(serde_json::from_value(value).unwrap())
    }

    fn conditions(held: &[&str]) -> Value {
        let one = |type_: &&str| {
            json!({"type": type_, "status": "True", "reason": "R", "message": "",
                "lastTransitionTime": "2026-01-01T00:00:00Z"})
        };
        json!({"conditions": held.iter().map(one).collect::<Vec<_>>()})
    }

    #[test]
    fn one_migration_of_a_resource_runs_at_a_time_the_oldest_first() {
        let (old, new) = (migration("b", 1, json!({})), migration("a", 2, json!({})));
        let all = [new.clone(), old.clone()];
        assert_eq!((step(&old, || all.to_vec()), step(&new, || all.to_vec())), (Step::Begin, Step::Wait));
        let running = migration("b", 1, conditions(&[RUNNING]));
        let all = [new.clone(), running.clone()];
        assert_eq!(
            (step(&running, || all.to_vec()), step(&new, || all.to_vec())),
            (Step::Record, Step::Wait)
        );
        let ended = migration("b", 1, conditions(&[RUNNING, SUCCEEDED]));
        let all = [new.clone(), ended.clone()];
        assert_eq!((step(&ended, || all.to_vec()), step(&new, || all.to_vec())), (Step::Finish, Step::Begin));
        let failed = migration("b", 1, conditions(&[FAILED]));
        assert_eq!(step(&failed, Vec::new), Step::Wait);
        let mut status = conditions(&[RUNNING]);
        status["resourceVersion"] = "7".into();
        let recorded = migration("b", 1, status);
        assert_eq!(step(&recorded, Vec::new), Step::Migrate);
    }

    #[test]
    fn the_end_of_a_migration_leads_to_the_next_one_alone() {
        let mut unfinished = Unfinished::default();
        let ended = || migration("a", 1, conditions(&[SUCCEEDED]));
        assert_eq!(unfinished.change(&ended(), true), None, "it had ended before");
        for (name, second) in [("a", 1), ("c", 2), ("b", 3)] {
            assert_eq!(unfinished.change(&migration(name, second, json!({})), true), None);
        }
        assert_eq!(unfinished.change(&migration("a", 1, conditions(&[RUNNING])), true), None);
        assert_eq!(unfinished.change(&ended(), true).as_deref(), Some("c"));
        assert_eq!(unfinished.change(&ended(), true), None, "a later change");
        assert_eq!(unfinished.change(&migration("c", 2, json!({})), false).as_deref(), Some("b"));
        assert_eq!(unfinished.change(&migration("b", 3, json!({})), false), None);
        assert!(unfinished.0.is_empty());
    }

    #[test]
    fn a_condition_replaces_its_former_state_and_keeps_the_others() {
        let now = Timestamp::from_second(0).unwrap();
        let ended = migration("a", 1, conditions(&[RUNNING, SUCCEEDED]));
        let patch =
            condition_patch(&ended, (RUNNING, false, "MigrationCompleted", "Migration completed"), now);
        let list = patch["status"]["conditions"].as_array().unwrap();
        let types: Vec<_> = list.iter().map(|one| (one["type"].as_str(), one["status"].as_str())).collect();
        assert_eq!(types, [(Some(SUCCEEDED), Some("True")), (Some(RUNNING), Some("False"))]);
        assert_eq!(list[1]["lastTransitionTime"], "1970-01-01T00:00:00Z");
        assert_eq!(patch["metadata"], json!({"uid": "a", "resourceVersion": "5"}));
        let long = "\u{e9}".repeat(MAX_MESSAGE);
        let patch = condition_patch(&ended, failed(&long), now);
        assert_eq!(patch["status"]["conditions"][2]["message"].as_str().unwrap().len(), MAX_MESSAGE);
    }

    #[test]
    fn objects_that_were_written_since_or_deleted_are_done() {
        assert_eq!((verdict(409, "Conflict"), verdict(404, "NotFound")), (Verdict::Done, Verdict::Done));
        let repeated =
            [(429, "TooManyRequests"), (500, "InternalError"), (503, ""), (504, "Timeout"), (404, "")];
        for (code, reason) in repeated {
            assert_eq!(verdict(code, reason), Verdict::Retry, "{code}");
        }
        assert_eq!((verdict(422, "Invalid"), verdict(403, "Forbidden")), (Verdict::Fail, Verdict::Fail));
        assert!(may_be_outdated(Some("9"), "10") && may_be_outdated(Some("10"), "10"));
        assert!(!may_be_outdated(Some("11"), "10") && may_be_outdated(None, "10"));
    }

    #[test]
    fn a_resource_may_appear_within_a_minute() {
        let at = |second: i64| Timestamp::from_second(1_767_225_600 + second).unwrap();
        let new = migration("a", 0, json!({}));
        assert_eq!(patience(&new, at(20)), Some(Duration::from_secs(40)));
        assert_eq!((patience(&new, at(60)), patience(&new, at(90))), (None, None));
    }
}
