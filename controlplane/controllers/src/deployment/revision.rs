//! The history of a deployment: its replica sets, their revisions and their annotations.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::sync::Arc;

use coracle_values::CollectMap;

use crate::object::{Deployment, Object, ObjectExt, ReplicaSet};

pub(crate) const REVISION: &str = "deployment.kubernetes.io/revision";
pub(crate) const REVISION_HISTORY: &str = "deployment.kubernetes.io/revision-history";
pub(crate) const DESIRED_REPLICAS: &str = "deployment.kubernetes.io/desired-replicas";
pub(crate) const MAX_REPLICAS: &str = "deployment.kubernetes.io/max-replicas";

/// Maximum length of the list of earlier revisions in bytes. Source: `maxRevHistoryLengthInChars`.
const MAX_HISTORY: usize = 2000;

/// Annotations of a deployment that its replica sets do not inherit.
const OWN: [&str; 6] = [
    "kubectl.kubernetes.io/last-applied-configuration",
    REVISION,
    REVISION_HISTORY,
    DESIRED_REPLICAS,
    MAX_REPLICAS,
    "deprecated.deployment.rollback.to",
];

/// The replica sets of a deployment, oldest first.
pub(crate) struct History {
    pub(crate) new: Option<Arc<ReplicaSet>>,
    pub(crate) old: Vec<Arc<ReplicaSet>>,
}

impl History {
    /// Splits the sets into the set with the deployment's template (the oldest of several) and the other sets.
    pub(crate) fn of(deployment: &Deployment, mut sets: Vec<Arc<ReplicaSet>>) -> Self {
        sets.sort_by(|one, other| by_age(one, other));
        let place =
            sets.iter().position(|set| set.spec.template.equals_ignoring_hash(&deployment.spec.template));
        let new = place.map(|place| sets.remove(place));
        Self { new, old: sets }
    }

    /// All sets.
    pub(crate) fn all(&self) -> impl Iterator<Item = &Arc<ReplicaSet>> {
        self.old.iter().chain(&self.new)
    }

    /// The revision of the new set: one more than the highest revision of the old sets.
    pub(crate) fn next_revision(&self) -> i64 {
        self.old.iter().map(|set| revision(set)).max().unwrap_or_default() + 1
    }
}

/// Orders older sets first.
pub(crate) fn by_age(one: &ReplicaSet, other: &ReplicaSet) -> Ordering {
    (&one.metadata.creation_timestamp, one.name()).cmp(&(&other.metadata.creation_timestamp, other.name()))
}

/// The value of an annotation as a number.
pub(crate) fn number<K: Object>(object: &K, name: &str) -> Option<i32> {
    object.annotation(name)?.parse().ok()
}

/// The revision of a set; 0 without the annotation.
pub(crate) fn revision(set: &ReplicaSet) -> i64 {
    set.annotation(REVISION).and_then(|text| text.parse().ok()).unwrap_or_default()
}

/// The annotations of a new set, without the annotations for its size.
pub(crate) fn first_annotations(deployment: &Deployment, revision: i64) -> BTreeMap<String, String> {
    let mut annotations = inherited(deployment);
    annotations.insert(REVISION.to_owned(), revision.to_string());
    annotations
}

fn inherited(deployment: &Deployment) -> BTreeMap<String, String> {
    let all = deployment.metadata.annotations.iter().flatten();
    all.filter(|(name, _)| !OWN.contains(&name.as_str())).map(|(n, v)| (n.clone(), v.clone())).collect_map()
}

/// The missing annotations of the new set. If an old set becomes the new set again (rollback), one annotation keeps the
/// earlier revisions of the set.
pub(crate) fn missing_annotations(
    deployment: &Deployment,
    set: &ReplicaSet,
    next: i64,
) -> BTreeMap<String, String> {
    let mut missing = inherited(deployment);
    missing.retain(|name, value| set.annotation(name) != Some(value));
    let before = revision(set);
    if before < next {
        missing.insert(REVISION.to_owned(), next.to_string());
        if before > 0 {
            let history = with_revision(set.annotation(REVISION_HISTORY).unwrap_or_default(), before);
            missing.insert(REVISION_HISTORY.to_owned(), history);
        }
    }
    missing
}

/// Appends a revision to a list of revisions. If the list is too long, the oldest revisions are removed.
fn with_revision(list: &str, revision: i64) -> String {
    let last = revision.to_string();
    let mut first = list;
    while !first.is_empty() && first.len() + 1 + last.len() > MAX_HISTORY {
        first = first.split_once(',').map_or("", |(_, rest)| rest);
    }
    if first.is_empty() { last } else { format!("{first},{last}") }
}

/// The annotations for a set's share of the deployment's size, where they differ from the current annotations.
pub(crate) fn size_annotations(set: Option<&ReplicaSet>, desired: i32, max: i32) -> BTreeMap<String, String> {
    [(DESIRED_REPLICAS, desired), (MAX_REPLICAS, max)]
        .into_iter()
        .filter(|(name, value)| set.and_then(|set| number(set, name)) != Some(*value))
        .map(|(name, value)| (name.to_owned(), value.to_string()))
        .collect_map()
}

/// The old sets above the history limit that can be deleted, oldest revision first.
pub(crate) fn to_clean(deployment: &Deployment, history: &History) -> Vec<Arc<ReplicaSet>> {
    let Some(limit) = deployment.spec.revision_history_limit.and_then(|limit| usize::try_from(limit).ok())
    else {
        return Vec::new();
    };
    let mut sets: Vec<_> = history.old.iter().filter(|set| !set.is_being_deleted()).cloned().collect();
    let excess = sets.len().saturating_sub(limit);
    sets.sort_by(|one, other| revision(one).cmp(&revision(other)).then_with(|| by_age(one, other)));
    sets.truncate(excess);
    sets.retain(|set| {
        set.status.replicas == 0
            && set.spec.replicas == Some(0)
            && set.metadata.generation <= set.status.observed_generation
    });
    sets
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_list_of_revisions_loses_its_oldest() {
        assert_eq!(with_revision("", 3), "3");
        assert_eq!(with_revision("1,2", 3), "1,2,3");
        let list = vec!["1234567"; 250].join(",");
        assert_eq!(list.len(), 1999);
        let longer = with_revision(&list, 8);
        assert_eq!((longer.len(), longer.ends_with(",1234567,8")), (1993, true));
        assert_eq!(with_revision(&"9".repeat(2000), 8), "8");
    }
}
