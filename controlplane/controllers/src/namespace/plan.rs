//! The conditions of a namespace that is being deleted, from its remaining contents.

use std::collections::BTreeMap;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::NamespaceCondition;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};

/// The remaining contents after one attempt to delete all objects.
#[derive(Debug, Default)]
pub(crate) struct RemainingContent {
    /// Group versions whose server does not respond. They may have objects in the namespace.
    pub(crate) undiscovered: Vec<String>,
    /// Objects by kind.
    pub(crate) objects: BTreeMap<String, usize>,
    /// Objects by finalizer.
    pub(crate) finalizers: BTreeMap<String, usize>,
    /// The errors of failed deletions.
    pub(crate) failures: Vec<String>,
}

impl RemainingContent {
    /// Counts the objects of a kind.
    pub(crate) fn count<'a>(&mut self, kind: &str, objects: impl Iterator<Item = &'a ObjectMeta>) {
        for object in objects {
            *self.objects.entry(kind.to_owned()).or_default() += 1;
            for finalizer in object.finalizers.iter().flatten() {
                *self.finalizers.entry(finalizer.clone()).or_default() += 1;
            }
        }
    }

    fn undiscovered(&self) -> Option<(&'static str, String)> {
        let each = |version: &String| format!("{version}: stale GroupVersion discovery: {version}");
        // As upstream, the message does not depend on the priorities of the groups.
        let mut all: Vec<String> = self.undiscovered.iter().map(each).collect();
        all.sort();
        let all = all.join(", ");
        let message = format!(
            "Discovery failed for some groups, {} failing: unable to retrieve the complete list of server APIs: {all}",
            self.undiscovered.len()
        );
        (!self.undiscovered.is_empty()).then_some(("DiscoveryFailed", message))
    }

    fn failure(&self) -> Option<(&'static str, String)> {
        let (count, all) = (self.failures.len(), self.failures.join(", "));
        let message = format!("Failed to delete all resource types, {count} remaining: {all}");
        (count > 0).then_some(("ContentDeletionFailed", message))
    }

    fn remaining(&self) -> Option<(&'static str, String)> {
        let message = format!("Some resources are remaining: {}", list(&self.objects, "has"));
        (!self.objects.is_empty()).then_some(("SomeResourcesRemain", message))
    }

    fn finalizing(&self) -> Option<(&'static str, String)> {
        let all = list(&self.finalizers, "in");
        let message = format!("Some content in the namespace has finalizers remaining: {all}");
        (!self.finalizers.is_empty()).then_some(("SomeFinalizersRemain", message))
    }

    /// Whether the namespace is known to be empty.
    pub(crate) fn is_empty(&self) -> bool {
        self.objects.is_empty() && self.failures.is_empty() && self.undiscovered.is_empty()
    }
}

/// The desired conditions. Unchanged conditions keep their transition times.
pub(crate) fn conditions(
    old: &[NamespaceCondition],
    left: &RemainingContent,
    now: Timestamp,
) -> Vec<NamespaceCondition> {
    let time = Timestamp::from_second(now.as_second()).unwrap_or(now);
    let condition = |(type_, problem, fine): (&str, Option<(&str, String)>, (&str, &str))| {
        let status = if problem.is_some() { "True" } else { "False" };
        let (reason, message) = problem.unwrap_or((fine.0, fine.1.to_owned()));
        let before = old.iter().find(|old| old.type_ == type_ && old.status == status);
        NamespaceCondition {
            type_: type_.to_owned(),
            status: status.to_owned(),
            reason: Some(reason.to_owned()),
            message: Some(message),
            last_transition_time: before.map_or(Some(Time(time)), |old| old.last_transition_time.clone()),
        }
    };
    let fine = "All resources successfully discovered";
    let discovery = ("NamespaceDeletionDiscoveryFailure", left.undiscovered(), ("ResourcesDiscovered", fine));
    let fine = "All legacy kube types successfully parsed";
    let parsing = ("NamespaceDeletionGroupVersionParsingFailure", None, ("ParsedGroupVersions", fine));
    let fine = "All content successfully deleted, may be waiting on finalization";
    let content = ("NamespaceDeletionContentFailure", left.failure(), ("ContentDeleted", fine));
    let fine = "All content successfully removed";
    let remaining = ("NamespaceContentRemaining", left.remaining(), ("ContentRemoved", fine));
    let fine = "All content-preserving finalizers finished";
    let finalizers = ("NamespaceFinalizersRemaining", left.finalizing(), ("ContentHasNoFinalizers", fine));
    [discovery, parsing, content, remaining, finalizers].map(condition).into()
}

/// Maximum number of names in the message of a condition. A tenant chooses the names of finalizers, and an object that
/// is too large cannot be written.
const MAX_NAMES: usize = 50;

fn list(counts: &BTreeMap<String, usize>, word: &str) -> String {
    let part = |(name, count): (&String, &usize)| format!("{name} {word} {count} resource instances");
    let shown = counts.iter().take(MAX_NAMES).map(part).collect::<Vec<_>>().join(", ");
    match counts.len().saturating_sub(MAX_NAMES) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_namespace_with_an_unknown_group_version_is_not_empty() {
        let left =
            RemainingContent { undiscovered: vec!["far.io/v1".to_owned()], ..RemainingContent::default() };
        assert!(!left.is_empty());
        let all = conditions(&[], &left, "2026-01-01T00:00:00Z".parse().unwrap());
        let failed = all.iter().find(|c| c.status == "True").unwrap();
        assert_eq!(
            (failed.type_.as_str(), failed.reason.as_deref()),
            ("NamespaceDeletionDiscoveryFailure", Some("DiscoveryFailed"))
        );
        let message = "Discovery failed for some groups, 1 failing: unable to retrieve the complete list of server APIs: \
            far.io/v1: stale GroupVersion discovery: far.io/v1";
        assert_eq!(failed.message.as_deref(), Some(message));
        let of = |versions: [&str; 2]| {
            let undiscovered = versions.map(str::to_owned).to_vec();
            RemainingContent { undiscovered, ..RemainingContent::default() }.undiscovered()
        };
        assert_eq!(of(["b.io/v1", "a.io/v1"]), of(["a.io/v1", "b.io/v1"]));
    }

    #[test]
    fn remaining_objects_are_named_and_counted() {
        let mut left = RemainingContent::default();
        assert!(left.is_empty());
        let pod = ObjectMeta { finalizers: Some(vec!["x.io/wait".into()]), ..ObjectMeta::default() };
        left.count("pods", [&pod, &ObjectMeta::default()].into_iter());
        assert!(!left.is_empty());
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

    #[test]
    fn a_condition_names_a_limited_number_of_finalizers() {
        let counts: BTreeMap<String, usize> = (0..1000).map(|n| (format!("x.io/f{n}"), 1)).collect();
        let text = list(&counts, "in");
        assert!(text.ends_with(" and 950 more") && text.len() < 5000, "{text}");
    }
}
