//! The times at which pods that are being deleted stop counting for quotas, although they still exist.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Bound,
    sync::Arc,
};

use jiff::Timestamp;

/// The end of the grace period of each pod that is being deleted, in namespaces with quotas.
#[derive(Default)]
pub(super) struct GraceEnds {
    by_time: BTreeSet<(Timestamp, Arc<str>)>,
    /// The ends by the store key of the pod.
    by_pod: BTreeMap<Arc<str>, Timestamp>,
}

// === impl GraceEnds ===

impl GraceEnds {
    /// Sets or removes the end of a pod's grace period. Returns whether this end is the earliest of all pods.
    pub(super) fn set(&mut self, pod: &Arc<str>, end: Option<Timestamp>) -> bool {
        if let Some(known) = self.by_pod.remove(pod) {
            self.by_time.remove(&(known, pod.clone()));
        }
        let Some(end) = end else { return false };
        self.by_pod.insert(pod.clone(), end);
        self.by_time.insert((end, pod.clone()));
        self.first() == Some(end)
    }

    /// The earliest end of all pods.
    pub(super) fn first(&self) -> Option<Timestamp> {
        self.by_time.first().map(|(end, _pod)| *end)
    }

    /// Removes a pod whose grace period ended before `now`, and returns the key of the pod.
    pub(super) fn pop_before(&mut self, now: Timestamp) -> Option<Arc<str>> {
        if self.first()? >= now {
            return None;
        }
        let (_end, pod) = self.by_time.pop_first()?;
        self.by_pod.remove(&pod);
        Some(pod)
    }

    /// Whether the key of a pod has this prefix.
    pub(super) fn has_under(&self, prefix: &str) -> bool {
        self.under(prefix).next().is_some()
    }

    /// Removes the pods whose keys have this prefix.
    pub(super) fn remove_under(&mut self, prefix: &str) {
        let pods: Vec<Arc<str>> = self.under(prefix).cloned().collect();
        for pod in pods {
            self.set(&pod, None);
        }
    }

    fn under<'a>(&'a self, prefix: &'a str) -> impl Iterator<Item = &'a Arc<str>> {
        let range = self.by_pod.range::<str, _>((Bound::Included(prefix), Bound::Unbounded));
        range.map(|(pod, _end)| pod).take_while(move |pod| pod.starts_with(prefix))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pod_has_one_time_until_it_is_removed() {
        let (mut ends, pod) = (GraceEnds::default(), |name: &str| Arc::<str>::from(name));
        let time = |second: i64| Timestamp::from_second(second).unwrap();
        assert!(ends.set(&pod("/pods/a/x"), Some(time(9))));
        assert!(!ends.set(&pod("/pods/a/y"), Some(time(10))));
        assert!(ends.set(&pod("/pods/b/z"), Some(time(3))));
        ends.set(&pod("/pods/a/x"), Some(time(20)));
        assert!(ends.has_under("/pods/a/") && ends.has_under("/pods/b/") && !ends.has_under("/pods/0/"));
        ends.remove_under("/pods/b/");
        assert!(!ends.has_under("/pods/b/"));
        assert_eq!((ends.first(), ends.pop_before(time(10))), (Some(time(10)), None));
        assert_eq!(ends.pop_before(time(30)), Some(pod("/pods/a/y")));
        ends.set(&pod("/pods/a/x"), None);
        assert!(ends.first().is_none() && ends.by_pod.is_empty());
    }
}
