//! Validation of object metadata.

use std::collections::HashSet;

use serde_json::Value;

use super::format;
use super::initializers;
use super::value::{entries, items, text};
use crate::Resource;
use crate::cause::{Causes, Path};
use crate::resource::NameRule;

/// Maximum size of all annotations together, in bytes.
const MAX_ANNOTATIONS: usize = 256 * 1024;

/// The properties of a kind on which the rules for metadata depend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct MetadataRules {
    name: NameRule,
    namespaced: bool,
    /// Whether finalizers must have a domain. Standard finalizers need none.
    finalizers_with_domain: bool,
}

// === impl MetadataRules ===

impl MetadataRules {
    const OF_PODS: Self =
        Self { name: NameRule::Dns1123Subdomain, namespaced: true, finalizers_with_domain: true };

    fn of(kind: &Resource) -> Self {
        Self {
            name: kind.name_rule,
            namespaced: kind.namespaced,
            finalizers_with_domain: kind.is_built_in && !PLAIN_FINALIZER_GROUPS.contains(&&*kind.group),
        }
    }
}

/// Rules for every write.
pub(super) fn create(causes: &mut Causes, kind: &Resource, object: &Value) {
    every_write(causes, MetadataRules::of(kind), object);
}

/// Does the same as [`create`] for a pod, without the table of kinds.
pub(super) fn pod(causes: &mut Causes, pod: &Value) {
    every_write(causes, MetadataRules::OF_PODS, pod);
}

fn every_write(causes: &mut Causes, rules: MetadataRules, object: &Value) {
    let (path, metadata) = (Path::root("metadata"), &object["metadata"]);
    names(causes, rules, &path, metadata);
    causes.not_negative(&path.field("generation"), &metadata["generation"]);
    labels(causes, &path.field("labels"), &metadata["labels"]);
    annotations(causes, &path.field("annotations"), &metadata["annotations"]);
    owners(causes, &path.field("ownerReferences"), &metadata["ownerReferences"]);
    initializers::of_object(causes, &path.field("initializers"), object);
    finalizers(causes, rules, &path.field("finalizers"), &metadata["finalizers"]);
}

/// The message about a finalizer that has no domain and is not a standard finalizer.
pub(super) const PLAIN_FINALIZER: &str =
    "name is neither a standard finalizer name nor is it fully qualified";

/// Whether a finalizer has no domain and is not a standard finalizer.
pub(super) fn is_plain_finalizer(name: &str) -> bool {
    !name.contains('/') && !["kubernetes", "foregroundDeletion", "orphan"].contains(&name)
}

/// Groups whose finalizers need no domain: upstream validates them with the rules of the API machinery alone.
const PLAIN_FINALIZER_GROUPS: [&str; 5] = [
    "admissionregistration.k8s.io",
    "apiextensions.k8s.io",
    "apiregistration.k8s.io",
    "coordination.k8s.io",
    "node.k8s.io",
];

/// Checks finalizers. Finalizers of most built-in kinds must have a domain. Standard finalizers need none.
fn finalizers(causes: &mut Causes, rules: MetadataRules, path: &Path, list: &Value) {
    for (index, finalizer) in items(list) {
        let name = text(finalizer);
        let problems = format::qualified_name(name);
        let is_plain = problems.is_empty() && is_plain_finalizer(name);
        causes.format(path, name, problems);
        if is_plain && rules.finalizers_with_domain {
            causes.invalid(&path.index(index), finalizer, PLAIN_FINALIZER);
        }
    }
    // These finalizers exclude each other: dependents are either deleted first or orphaned.
    if ["orphan", "foregroundDeletion"].iter().all(|name| items(list).any(|(_, one)| one == name)) {
        let detail = "finalizer orphan and foregroundDeletion cannot be both set";
        causes.invalid(path, list, detail);
    }
}

/// Rules for updates: immutable metadata.
pub(super) fn update(causes: &mut Causes, new: &Value, old: &Value) {
    let path = Path::root("metadata");
    let fields =
        ["name", "namespace", "uid", "creationTimestamp", "deletionTimestamp", "deletionGracePeriodSeconds"];
    for name in fields {
        let (new, old) = (&new["metadata"][name], &old["metadata"][name]);
        if new != old {
            causes.invalid(&path.field(name), new, "field is immutable");
        }
    }
    initializers::update(causes, &path.field("initializers"), new, old);
    if old["metadata"]["deletionTimestamp"].is_string() {
        let before = &old["metadata"]["finalizers"];
        let known: HashSet<&Value> = items(before).map(|(_, finalizer)| finalizer).collect();
        let added = items(&new["metadata"]["finalizers"]).map(|(_, finalizer)| finalizer);
        let added: Vec<String> =
            added.filter(|finalizer| !known.contains(*finalizer)).map(Value::to_string).collect();
        if !added.is_empty() {
            let detail = format!(
                "no new finalizers can be added if the object is being deleted, found new finalizers []string{{{}}}",
                added.join(", ")
            );
            causes.forbidden(&path.field("finalizers"), &detail);
        }
    }
}

fn names(causes: &mut Causes, rules: MetadataRules, path: &Path, metadata: &Value) {
    let rule: fn(&str) -> Vec<String> = match rules.name {
        NameRule::Dns1123Label => format::dns1123_label,
        NameRule::Dns1123Subdomain => format::dns1123_subdomain,
        NameRule::PathSegment => format::path_segment,
    };
    let (name, prefix) = (text(&metadata["name"]), text(&metadata["generateName"]));
    if !prefix.is_empty() {
        // A trailing dash is valid, because the generated suffix follows it.
        let sample = format!("{}a", prefix);
        causes.format(&path.field("generateName"), prefix, rule(&sample));
    }
    if name.is_empty() {
        causes.required(&path.field("name"), "name or generateName is required");
    } else {
        causes.format(&path.field("name"), name, rule(name));
    }
    let namespace = text(&metadata["namespace"]);
    match (rules.namespaced, namespace) {
        (true, "") => causes.required(&path.field("namespace"), ""),
        (true, name) => causes.format(&path.field("namespace"), name, format::dns1123_label(name)),
        (false, "") => {}
        (false, _) => causes.forbidden(&path.field("namespace"), "not allowed on this type"),
    }
}

/// Checks a map of labels.
pub(super) fn labels(causes: &mut Causes, path: &Path, labels: &Value) {
    for (key, value) in entries(labels) {
        causes.format(path, key, format::qualified_name(key));
        causes.format(path, text(value), format::label_value(text(value)));
    }
}

/// Checks annotations.
pub(super) fn annotations(causes: &mut Causes, path: &Path, annotations: &Value) {
    let mut total = 0;
    for (key, value) in entries(annotations) {
        causes.format(path, key, format::qualified_name(&key.to_lowercase()));
        total += key.len() + text(value).len();
    }
    if total > MAX_ANNOTATIONS {
        causes.too_long(path, MAX_ANNOTATIONS);
    }
}

fn owners(causes: &mut Causes, path: &Path, owners: &Value) {
    for (_, owner) in items(owners) {
        // As upstream, the paths of violations lack the index of the owner.
        let here = path;
        let version = text(&owner["apiVersion"]);
        let is_malformed = version.matches('/').count() > 1 || version.ends_with('/') || version.is_empty();
        if is_malformed {
            causes.invalid(&here.field("apiVersion"), &version.into(), "version must not be empty");
        }
        for name in ["kind", "name", "uid"] {
            if text(&owner[name]).is_empty() {
                causes.invalid(&here.field(name), &"".into(), "must not be empty");
            }
        }
        if owner["kind"] == "Event" && version == "v1" {
            causes.invalid(here, owner, "/v1, Kind=Event is disallowed from being an owner");
        }
    }
    let mut controllers = items(owners).map(|(_, owner)| owner).filter(|owner| owner["controller"] == true);
    let name = |owner: &Value| format!("{}/{}", text(&owner["kind"]), text(&owner["name"]));
    let Some(first) = controllers.next() else { return };
    for other in controllers {
        let detail = format!(
            "Only one reference can have Controller set to true. Found \"true\" in references for {} and {}",
            name(first),
            name(other)
        );
        causes.invalid(path, owners, &detail);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kind::by_kind;

    #[test]
    fn the_rules_of_pods_are_those_of_the_table() {
        assert_eq!(MetadataRules::of(by_kind("v1", "Pod").unwrap()), MetadataRules::OF_PODS);
    }
}
