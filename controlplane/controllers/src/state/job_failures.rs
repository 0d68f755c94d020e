//! The last failed pods of jobs, including pods that do not exist any more. Without this record, a job whose failed
//! pods are deleted would replace these pods without a back-off. Source: `backoffStore` of upstream's job controller.
//!
//! After a restart of the controller only the existing pods are known.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Mutex, MutexGuard, PoisonError};

use coracle_values::CollectMap;
use jiff::Timestamp;

use crate::object::{Job, Key, ObjectExt};

/// Maximum number of failed pods of a job. With this number the back-off has its maximum.
const MAX_PODS: usize = 8;

/// Failed pods of a job after its last success.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct FailedPods {
    last_success: Option<Timestamp>,
    /// Times at which the pods ended, by uid.
    ends: BTreeMap<String, Timestamp>,
}

/// Failed pods by job. Jobs without pods that have ended are absent.
#[derive(Debug, Default)]
pub(crate) struct JobFailures(Mutex<HashMap<Key, Entry>>);

#[derive(Debug)]
struct Entry {
    uid: String,
    failed: FailedPods,
}

// === impl FailedPods ===

impl FailedPods {
    /// `ends` has the uids of failed pods, and the times at which they ended.
    pub(crate) fn new<'a>(
        last_success: Option<Timestamp>,
        ends: impl Iterator<Item = (&'a str, Timestamp)>,
    ) -> Self {
        let ends = ends.filter(|(_, end)| last_success.is_none_or(|success| *end > success));
        let mut ends: Vec<(&str, Timestamp)> = ends.collect();
        ends.sort_by_key(|(_, end)| std::cmp::Reverse(*end));
        ends.truncate(MAX_PODS);
        Self { last_success, ends: ends.into_iter().map(|(uid, end)| (uid.to_owned(), end)).collect_map() }
    }

    /// Merges these failed pods with newer failed pods.
    pub(crate) fn and(&self, newer: &Self) -> Self {
        let mut ends: BTreeMap<&str, Timestamp> = BTreeMap::new();
        for (uid, end) in self.ends.iter().chain(&newer.ends) {
            ends.insert(uid, *end);
        }
        Self::new(self.last_success.max(newer.last_success), ends.into_iter())
    }

    /// The number of failed pods, and the time at which the last of these pods ended. `None` without failed pods.
    pub(crate) fn count_and_last(&self) -> Option<(i32, Timestamp)> {
        let last = self.ends.values().max()?;
        Some((i32::try_from(self.ends.len()).unwrap_or(i32::MAX), *last))
    }
}

// === impl JobFailures ===

impl JobFailures {
    /// The failed pods of a job that earlier reconciles have observed.
    pub(crate) fn of(&self, job: &Job) -> FailedPods {
        let entries = self.entries();
        let own = entries.get(&job.key()).filter(|entry| entry.uid == job.uid());
        own.map(|entry| entry.failed.clone()).unwrap_or_default()
    }

    /// Keeps the failed pods of a job for later reconciles. The last success is kept, too. Otherwise earlier failed
    /// pods would count again after the succeeded pod is deleted.
    pub(crate) fn keep(&self, job: &Job, failed: &FailedPods) {
        if *failed == FailedPods::default() {
            return self.forget(&job.key());
        }
        let entry = Entry { uid: job.uid().to_owned(), failed: failed.clone() };
        self.entries().insert(job.key(), entry);
    }

    /// Removes the failed pods of a job that has finished or does not exist.
    pub(crate) fn forget(&self, job: &Key) {
        self.entries().remove(job);
    }

    fn entries(&self) -> MutexGuard<'_, HashMap<Key, Entry>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    fn failed(success: Option<i64>, ends: &[(&'static str, i64)]) -> FailedPods {
        FailedPods::new(success.map(at), ends.iter().map(|(uid, end)| (*uid, at(*end))))
    }

    #[test]
    fn pods_count_once_until_a_success() {
        let first = failed(None, &[("a", 1), ("b", 2)]);
        assert_eq!(first.count_and_last(), Some((2, at(2))));
        assert_eq!(first.and(&failed(None, &[("b", 3), ("c", 5)])).count_and_last(), Some((3, at(5))));
        assert_eq!(first.and(&failed(Some(1), &[])).count_and_last(), Some((1, at(2))));
        assert_eq!(first.and(&failed(Some(2), &[])).count_and_last(), None);
    }

    #[test]
    fn only_the_last_pods_are_kept() {
        let names: Vec<String> = (0..100).map(|number| format!("{number:03}")).collect();
        let ends = names.iter().zip(0..).map(|(name, end)| (name.as_str(), at(end)));
        assert_eq!(FailedPods::new(None, ends).count_and_last(), Some((8, at(99))));
    }

    #[test]
    fn a_job_with_the_same_name_begins_without_failures() {
        let job = |uid: &str| -> Job {
            serde_json::from_value(json!({"metadata": {"name": "j", "namespace": "n", "uid": uid}})).unwrap()
        };
        let (failures, one) = (JobFailures::default(), failed(None, &[("a", 1)]));
        failures.keep(&job("1"), &one);
        assert_eq!((failures.of(&job("1")), failures.of(&job("2"))), (one, FailedPods::default()));
        failures.keep(&job("1"), &FailedPods::default());
        assert!(failures.entries().is_empty());
    }

    #[test]
    fn failures_before_a_success_do_not_count_after_its_pod_is_gone() {
        let job: Job = serde_json::from_value(json!({"metadata": {"name": "j", "uid": "j"}})).unwrap();
        let (failures, before) = (JobFailures::default(), [("a", 1), ("b", 2)]);
        failures.keep(&job, &failed(Some(3), &before));
        assert_eq!(failures.of(&job).and(&failed(None, &before)).count_and_last(), None);
        let later = failed(None, &[("a", 1), ("b", 2), ("c", 4)]);
        assert_eq!(failures.of(&job).and(&later).count_and_last(), Some((1, at(4))));
    }
}
