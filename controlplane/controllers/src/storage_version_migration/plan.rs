//! Decides on the next step of a migration. No I/O. Source: `pkg/controller/storageversionmigrator`.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use jiff::Timestamp;
use serde_json::{Value, json};

use crate::object::{GroupResource, ObjectExt, StorageVersionMigration};

pub(super) const RUNNING: &str = "Running";
pub(super) const SUCCEEDED: &str = "Succeeded";
pub(super) const FAILED: &str = "Failed";
/// Time after the creation of a migration during which its resource may still be added, for example by a new
/// definition.
const DISCOVERY_TIMEOUT: Duration = Duration::from_secs(60);
/// Maximum size of a condition's message, in bytes. The API allows 32,768.
const MAX_MESSAGE: usize = 8192;

/// The next step of a migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// No action until a migration of the resource changes.
    Wait,
    /// Sets the condition Running.
    Begin,
    /// Records the resource version of a list.
    Record,
    /// Rewrites the objects.
    Migrate,
    /// Removes the condition Running after the end.
    Finish,
}

/// The next step. `is_next` returns whether the migration is the next migration of its resource. The function is called
/// only if the migration could begin.
pub(super) fn step(migration: &StorageVersionMigration, is_next: impl FnOnce() -> bool) -> Step {
    match (migration.is(RUNNING), has_ended(migration)) {
        (true, true) => Step::Finish,
        (false, true) => Step::Wait,
        (true, false) if migration.status.resource_version.is_empty() => Step::Record,
        (true, false) => Step::Migrate,
        (false, false) if is_next() => Step::Begin,
        (false, false) => Step::Wait,
    }
}

fn has_ended(migration: &StorageVersionMigration) -> bool {
    migration.is(SUCCEEDED) || migration.is(FAILED)
}

/// Migrations ordered by creation time and name.
type Ordered = BTreeSet<(Option<Timestamp>, String)>;

/// The unfinished migrations of each resource.
#[derive(Default)]
pub(crate) struct Unfinished(BTreeMap<GroupResource, OfResource>);

/// The unfinished migrations of one resource.
#[derive(Default)]
struct OfResource {
    waiting: Ordered,
    running: Ordered,
}

// === impl Unfinished ===

impl Unfinished {
    /// Applies a change of the object with one name. Returns the names of migrations that may begin now.
    ///
    /// After an interruption of the watch, a list reports a deleted and a new migration of the same name as one change.
    pub(super) fn follow(
        &mut self,
        old: Option<&StorageVersionMigration>,
        new: Option<&StorageVersionMigration>,
    ) -> Vec<String> {
        let gone = old.filter(|old| new.is_none_or(|new| new.uid() != old.uid()));
        let freed = gone.and_then(|old| self.change(old, false));
        let next = new.and_then(|new| self.change(new, true));
        freed.into_iter().chain(next).collect()
    }

    /// Applies a change of a migration. If the migration has ended or was deleted, returns the name of the next
    /// migration of its resource.
    pub(super) fn change(&mut self, migration: &StorageVersionMigration, exists: bool) -> Option<String> {
        let (resource, (created, name)) = (&migration.spec.resource, order(migration));
        let entry = (created, name.to_owned());
        if exists && !has_ended(migration) {
            let all = self.0.entry(resource.clone()).or_default();
            let (from, to) = match migration.is(RUNNING) {
                true => (&mut all.waiting, &mut all.running),
                false => (&mut all.running, &mut all.waiting),
            };
            from.remove(&entry);
            to.insert(entry);
            return None;
        }
        let all = self.0.get_mut(resource)?;
        let (was_waiting, was_running) = (all.waiting.remove(&entry), all.running.remove(&entry));
        let next = all.next().map(str::to_owned);
        if all.waiting.is_empty() && all.running.is_empty() {
            self.0.remove(resource);
        }
        next.filter(|_| was_waiting || was_running)
    }

    /// Whether a waiting migration is the next migration of its resource.
    pub(super) fn is_next(&self, migration: &StorageVersionMigration) -> bool {
        let of_resource = self.0.get(&migration.spec.resource);
        of_resource.and_then(OfResource::next) == Some(migration.name())
    }
}

// === impl OfResource ===

impl OfResource {
    /// The first waiting migration. `None` while another migration runs.
    fn next(&self) -> Option<&str> {
        self.waiting.first().filter(|_| self.running.is_empty()).map(|(_, name)| name.as_str())
    }
}

fn order(migration: &StorageVersionMigration) -> (Option<Timestamp>, &str) {
    (migration.metadata.creation_timestamp.as_ref().map(|time| time.0), migration.name())
}

/// The remaining time to wait for a resource that is not served. `None` after the timeout.
pub(super) fn remaining_wait(migration: &StorageVersionMigration, now: Timestamp) -> Option<Duration> {
    let created = migration.metadata.creation_timestamp.as_ref()?.0;
    let age = Duration::try_from(now.duration_since(created)).unwrap_or_default();
    DISCOVERY_TIMEOUT.checked_sub(age).filter(|left| !left.is_zero())
}

/// The effect of the response to one rewrite.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// The object was rewritten by this request or a later request, or it no longer exists.
    Done,
    /// The request must be repeated later.
    Retry,
    /// The migration fails.
    Fail,
}

/// Classifies an error of the API server by its code and reason.
pub(super) fn verdict(code: u16, reason: &str) -> Verdict {
    match (code, reason) {
        (_, "Conflict" | "NotFound") | (409, _) => Verdict::Done,
        (_, "ServerTimeout" | "TooManyRequests" | "ServiceUnavailable" | "InternalError" | "Timeout")
        // The resource is missing, not the object. The next attempt checks whether the resource is served.
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

/// A condition of a migration.
pub(super) struct Outcome<'a> {
    pub(super) type_: &'a str,
    /// Whether the condition is true.
    pub(super) holds: bool,
    pub(super) reason: &'a str,
    pub(super) message: &'a str,
}

/// The outcome of a migration that cannot continue.
pub(super) fn failed(message: &str) -> Outcome<'_> {
    Outcome { type_: FAILED, holds: true, reason: "StorageVersionMigrationFailed", message }
}

/// The patch that sets one condition of the status. It applies only to this version of the migration, because the list
/// of conditions is replaced.
pub(super) fn condition_patch(
    migration: &StorageVersionMigration,
    outcome: Outcome<'_>,
    now: Timestamp,
) -> Value {
    let Outcome { type_, holds, reason, message } = outcome;
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

/// The patch of the status. It applies only to this version of the migration.
pub(super) fn status_patch(migration: &StorageVersionMigration, status: &Value) -> Value {
    let metadata = json!({"uid": migration.uid(), "resourceVersion": migration.metadata.resource_version});
    json!({"metadata": metadata, "status": status})
}

pub(super) fn time(now: Timestamp) -> String {
    now.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

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
        let mut unfinished = Unfinished::default();
        let mut steps = |changed: &[&StorageVersionMigration], of: [&StorageVersionMigration; 2]| {
            changed.iter().for_each(|migration| drop(unfinished.change(migration, true)));
            of.map(|migration| step(migration, || unfinished.is_next(migration)))
        };
        assert_eq!(steps(&[&new, &old], [&old, &new]), [Step::Begin, Step::Wait]);
        let running = migration("b", 1, conditions(&[RUNNING]));
        assert_eq!(steps(&[&running], [&running, &new]), [Step::Record, Step::Wait]);
        let ended = migration("b", 1, conditions(&[RUNNING, SUCCEEDED]));
        assert_eq!(steps(&[&ended], [&ended, &new]), [Step::Finish, Step::Begin]);
        let failed = migration("b", 1, conditions(&[FAILED]));
        assert_eq!(step(&failed, || true), Step::Wait);
        let mut status = conditions(&[RUNNING]);
        status["resourceVersion"] = "7".into();
        let recorded = migration("b", 1, status);
        assert_eq!(step(&recorded, || true), Step::Migrate);
    }

    #[test]
    fn a_migration_that_replaces_another_one_of_its_name_does_not_stop_later_ones() {
        let mut unfinished = Unfinished::default();
        let running = migration("a", 1, conditions(&[RUNNING]));
        let waiting = migration("b", 2, json!({}));
        assert!(unfinished.follow(None, Some(&running)).is_empty());
        assert!(unfinished.follow(None, Some(&waiting)).is_empty());
        let mut other = (*migration("a", 3, conditions(&[SUCCEEDED]))).clone();
        other.metadata.uid = Some("other".to_owned());
        assert_eq!(unfinished.follow(Some(&running), Some(&other)), ["b"]);
        assert!(unfinished.is_next(&waiting));
        assert_eq!(unfinished.follow(Some(&waiting), None), Vec::<String>::new());
    }

    #[test]
    fn an_older_migration_that_comes_later_waits_for_the_running_one() {
        let mut unfinished = Unfinished::default();
        unfinished.change(&migration("b", 1, conditions(&[RUNNING])), true);
        let (late, last) = (migration("a", 1, json!({})), migration("c", 2, json!({})));
        unfinished.change(&late, true);
        unfinished.change(&last, true);
        assert!(!unfinished.is_next(&late) && !unfinished.is_next(&last));
        let next = unfinished.change(&migration("b", 1, conditions(&[FAILED])), true);
        assert_eq!(next.as_deref(), Some("a"));
        assert!(unfinished.is_next(&late) && !unfinished.is_next(&last));
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
        let (reason, message) = ("MigrationCompleted", "Migration completed");
        let outcome = Outcome { type_: RUNNING, holds: false, reason, message };
        let patch = condition_patch(&ended, outcome, now);
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
        assert_eq!(remaining_wait(&new, at(20)), Some(Duration::from_secs(40)));
        assert_eq!((remaining_wait(&new, at(60)), remaining_wait(&new, at(90))), (None, None));
    }
}
