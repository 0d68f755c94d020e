//! Pods of replica sets that failed soon after their creation.
//!
//! Each pod is recorded when it fails, because another controller may delete the pod before its set is reconciled. For
//! example, the pods of a node with a `NoExecute` taint are deleted. Without the record, the set would replace such
//! pods without end and without a delay. With the record, a set also need not read all of its pods before it creates a
//! pod.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use jiff::Timestamp;

use crate::cache::Cache;
use crate::object::{ObjectExt, Pod, controller_of};

/// Time after the creation of a pod during which its failure counts as immediate.
pub(crate) const FAILURE_WINDOW: Duration = Duration::from_secs(60);
/// Maximum number of recorded pods of a set.
const MAX_PODS: usize = 16 << 10;
/// Minimum number of sets at which outdated records are removed.
const MANY_SETS: usize = 64;

/// The creation times of failed pods, by the uid of their set.
#[derive(Clone, Debug, Default)]
pub(crate) struct FailedPods(Arc<Mutex<Records>>);

#[derive(Debug, Default)]
struct Records {
    by_set: HashMap<String, Vec<Timestamp>>,
    /// Number of sets after the last removal of outdated records.
    kept: usize,
}

fn has_failed(pod: &Pod) -> bool {
    pod.status.phase.as_deref() == Some("Failed")
}

/// The rest of [`FAILURE_WINDOW`]. `None` if the window is over. Timestamps in the future are ignored: the clock was
/// set back.
pub(crate) fn remaining(created: Timestamp, now: Timestamp) -> Option<Duration> {
    let age = Duration::try_from(now.duration_since(created)).ok()?;
    FAILURE_WINDOW.checked_sub(age).filter(|remaining| !remaining.is_zero())
}

impl FailedPods {
    /// Starts to record failed pods. After a start of the controllers, the first list contains the failed pods that
    /// still exist.
    pub(crate) fn follow(&self, pods: &Cache<Pod>) {
        let records = self.clone();
        pods.on_change(move |change| {
            let Some(new) = change.new.filter(|pod| has_failed(pod)) else { return };
            let is_known = change.old.is_some_and(|old| old.uid() == new.uid() && has_failed(old));
            if !is_known {
                records.failed(new, Timestamp::now());
            }
        });
    }

    fn failed(&self, pod: &Pod, now: Timestamp) {
        let owner = controller_of(&pod.metadata)
            .filter(|owner| matches!(owner.kind.as_str(), "ReplicaSet" | "ReplicationController"));
        let created = pod.metadata.creation_timestamp.as_ref().map(|time| time.0);
        let is_recent = |created: &Timestamp| remaining(*created, now).is_some();
        let (Some(owner), Some(created)) = (owner, created.filter(is_recent)) else { return };
        let mut records = self.lock();
        if records.by_set.len() >= MANY_SETS.max(records.kept * 2) {
            records.by_set.retain(|_, pods| pods.iter().any(is_recent));
            records.kept = records.by_set.len();
        }
        let pods = records.by_set.entry(owner.uid.clone()).or_default();
        pods.retain(is_recent);
        if pods.len() < MAX_PODS {
            pods.push(created);
        }
    }

    /// The creation times of the recorded pods of a set.
    pub(crate) fn of_set(&self, uid: &str) -> Vec<Timestamp> {
        self.lock().by_set.get(uid).cloned().unwrap_or_default()
    }

    fn lock(&self) -> MutexGuard<'_, Records> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use coracle_watch::Event;
    use serde_json::json;

    use super::*;

    fn pod(set: &str, phase: &str, created: Timestamp) -> Pod {
        let owner = json!({"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": set, "uid": set, "controller": true});
        serde_json::from_value(json!({
            "metadata": {"name": set, "namespace": "d", "uid": set, "resourceVersion": "1",
                "creationTimestamp": created.to_string(), "ownerReferences": [owner]},
            "status": {"phase": phase},
        }))
        .unwrap()
    }

    #[test]
    fn deletions_of_pods_that_failed_at_once_are_recorded() {
        let (cache, failed, now) = (Cache::new(), FailedPods::default(), Timestamp::now());
        failed.follow(&cache);
        let counts = || ["a", "b", "c"].map(|set| failed.of_set(set).len());
        let old = now.checked_sub(FAILURE_WINDOW).unwrap();
        let version = |mut pod: Pod, version: &str| {
            pod.metadata.resource_version = Some(version.to_owned());
            pod
        };
        cache.apply(Event::Apply(version(pod("a", "Running", now), "1")));
        assert_eq!(counts(), [0, 0, 0]);
        let pods = [pod("a", "Failed", now), pod("b", "Running", now), pod("c", "Failed", old)];
        for pod in &pods {
            cache.apply(Event::Apply(version(pod.clone(), "2")));
            cache.apply(Event::Apply(version(pod.clone(), "3")));
        }
        assert_eq!(counts(), [1, 0, 0], "each pod counts once");
        for pod in pods {
            cache.apply(Event::Delete(version(pod, "4")));
        }
        assert_eq!(counts(), [1, 0, 0], "also after its deletion");
    }

    #[test]
    fn records_of_many_sets_are_removed_after_the_window() {
        let (failed, now) = (FailedPods::default(), Timestamp::now());
        for number in 0..MANY_SETS {
            failed.failed(&pod(&number.to_string(), "Failed", now), now);
        }
        let later = now.checked_add(FAILURE_WINDOW).unwrap();
        failed.failed(&pod("last", "Failed", later), later);
        assert_eq!(failed.lock().by_set.len(), 1);
    }
}
