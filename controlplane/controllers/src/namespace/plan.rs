//! What is left in a namespace → what its conditions say.

use std::collections::BTreeMap;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::NamespaceCondition;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};

/// What a pass has left behind.
#[derive(Debug, Default)]
pub(crate) struct Left {
    /// Objects by kind.
    pub(crate) objects: BTreeMap<String, usize>,
    /// Objects by finalizer.
    pub(crate) finalizers: BTreeMap<String, usize>,
    /// What could not be deleted, and why.
    pub(crate) failures: Vec<String>,
}

impl Left {
    /// Counts objects of a kind.
    pub(crate) fn count<'a>(&mut self, kind: &str, objects: impl Iterator<Item = &'a ObjectMeta>) {
        for object in objects {
            *self.objects.entry(kind.to_owned()).or_default() += 1;
            for finalizer in object.finalizers.iter().flatten() {
                *self.finalizers.entry(finalizer.clone()).or_default() += 1;
            }
        }
    }

    /// Whether the namespace is empty, for certain.
    pub(crate) fn is_nothing(&self) -> bool {
        self.objects.is_empty() && self.failures.is_empty()
    }
}

/// The conditions that a namespace should show; those that are unchanged keep their times.
pub(crate) fn conditions(old: &[NamespaceCondition], left: &Left, now: Timestamp) -> Vec<NamespaceCondition> {
    let list = |counts: &BTreeMap<String, usize>, word: &str| {
        let parts: Vec<_> =
            counts.iter().map(|(name, count)| format!("{name}{word}{count} resource instances")).collect();
        parts.join(", ")
    };
    let failed = !left.failures.is_empty();
    let entries = [
        (
            "NamespaceDeletionDiscoveryFailure",
            false,
            "ResourcesDiscovered",
            "All resources successfully discovered".to_owned(),
        ),
        (
            "NamespaceDeletionGroupVersionParsingFailure",
            false,
            "ParsedGroupVersions",
            "All legacy kube types successfully parsed".to_owned(),
        ),
        if failed {
            (
                "NamespaceDeletionContentFailure",
                true,
                "ContentDeletionFailed",
                format!(
                    "Failed to delete all resource types, {} remaining: {}",
                    left.failures.len(),
                    left.failures.join(", ")
                ),
            )
        } else {
            (
                "NamespaceDeletionContentFailure",
                false,
                "ContentDeleted",
                "All content successfully deleted, may be waiting on finalization".to_owned(),
            )
        },
        if left.objects.is_empty() {
            (
                "NamespaceContentRemaining",
                false,
                "ContentRemoved",
                "All content successfully removed".to_owned(),
            )
        } else {
            (
                "NamespaceContentRemaining",
                true,
                "SomeResourcesRemain",
                format!("Some resources are remaining: {}", list(&left.objects, " has ")),
            )
        },
        if left.finalizers.is_empty() {
            (
                "NamespaceFinalizersRemaining",
                false,
                "ContentHasNoFinalizers",
                "All content-preserving finalizers finished".to_owned(),
            )
        } else {
            (
                "NamespaceFinalizersRemaining",
                true,
                "SomeFinalizersRemain",
                format!(
                    "Some content in the namespace has finalizers remaining: {}",
                    list(&left.finalizers, " in ")
                ),
            )
        },
    ];
    let time = Timestamp::from_second(now.as_second()).unwrap_or(now);
    entries
        .into_iter()
        .map(|(type_, holds, reason, message)| {
            let status = if holds { "True" } else { "False" };
            let before = old.iter().find(|old| old.type_ == type_ && old.status == status);
            NamespaceCondition {
                type_: type_.to_owned(),
                status: status.to_owned(),
                reason: Some(reason.to_owned()),
                message: Some(message),
                last_transition_time: before.map_or(Some(Time(time)), |old| old.last_transition_time.clone()),
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_is_named_and_counted() {
        let mut left = Left::default();
        assert!(left.is_nothing());
        let pod = ObjectMeta { finalizers: Some(vec!["x.io/wait".into()]), ..ObjectMeta::default() };
        left.count("pods", [&pod, &ObjectMeta::default()].into_iter());
        assert!(!left.is_nothing());
        let now = "2026-01-01T00:00:00Z".parse().unwrap();
        let first = conditions(&[], &left, now);
        let messages: Vec<_> =
            first.iter().filter(|c| c.status == "True").filter_map(|c| c.message.clone()).collect();
        assert_eq!(
            messages,
            [
                "Some resources are remaining: pods has 2 resource instances",
                "Some content in the namespace has finalizers remaining: x.io/wait in 1 resource instances",
            ]
        );
        let later = "2026-01-02T00:00:00Z".parse().unwrap();
        assert_eq!(conditions(&first, &left, later), first);
    }
}
