//! Counts the active pods of each group. The cost of a pod's change does not depend on the number of pods.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use crate::cache::Change;
use crate::object::{Key, Pod};

/// Numbers of active pods by group. Groups without active pods are absent.
#[derive(Default)]
pub(crate) struct GroupMembers(Mutex<HashMap<Key, usize>>);

// === impl GroupMembers ===

impl GroupMembers {
    /// Counts a change of a pod. Returns the group that lost its last active pod.
    pub(crate) fn count(&self, change: &Change<'_, Pod>) -> Option<Key> {
        let (old, new) =
            (change.old.and_then(|pod| pod.active_group()), change.new.and_then(|pod| pod.active_group()));
        if old == new {
            return None;
        }
        let mut numbers = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(new) = new {
            *numbers.entry(new).or_default() += 1;
        }
        let old = old?;
        let number = numbers.get_mut(&old)?;
        *number -= 1;
        if *number > 0 {
            return None;
        }
        numbers.remove(&old);
        Some(old)
    }

    /// Whether a group has active pods.
    pub(crate) fn has(&self, group: &Key) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).contains_key(group)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use serde_json::json;

    use super::*;

    fn pod(name: &str, group: &str, phase: &str) -> Arc<Pod> {
        let spec = json!({"schedulingGroup": {"podGroupName": group}});
        let metadata = json!({"name": name, "namespace": "n"});
        let value = json!({"metadata": metadata, "spec": spec, "status": {"phase": phase}});
        Arc::new(serde_json::from_value(value).unwrap())
    }

    #[test]
    fn the_last_pod_that_ends_or_is_deleted_releases_the_group() {
        let (members, group) = (GroupMembers::default(), Key::new("n", "g"));
        let change = |old: Option<&Arc<Pod>>, new: Option<&Arc<Pod>>| members.count(&Change { old, new });
        let (first, second) = (pod("a", "g", "Running"), pod("b", "g", "Pending"));
        assert_eq!((change(None, Some(&first)), change(None, Some(&second))), (None, None));
        assert_eq!(change(Some(&first), Some(&first)), None);
        assert_eq!(change(Some(&first), Some(&pod("a", "g", "Succeeded"))), None);
        assert!(members.has(&group));
        assert_eq!(change(Some(&second), None), Some(group.clone()));
        assert!(!members.has(&group));
        assert_eq!(
            change(Some(&pod("a", "g", "Succeeded")), None),
            None,
            "a pod that has ended is not counted"
        );
        assert_eq!(change(None, Some(&Arc::default())), None);
        // A pod may replace another pod of the same name in one event.
        assert_eq!(change(None, Some(&first)), None);
        assert_eq!(change(Some(&first), Some(&pod("a", "h", "Running"))), Some(group));
    }
}
