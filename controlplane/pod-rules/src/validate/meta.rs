//! Validation of object metadata.

use std::borrow::Cow;
use std::collections::HashSet;

use serde_json::Value;

use super::format;
use super::initializers;
use super::value::{entries, items, text};
use crate::cause::{Causes, Path};

/// Maximum size of all annotations together, in bytes.
const MAX_ANNOTATIONS: usize = 256 * 1024;

/// Rule for `metadata.name`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NameRule {
    /// DNS label (RFC 1123).
    Dns1123Label,
    /// DNS subdomain (RFC 1123).
    Dns1123Subdomain,
    /// One segment of a URL path.
    PathSegment,
}

/// The properties of a kind on which the rules for metadata depend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MetadataRules {
    /// Rule for names.
    pub name: NameRule,
    /// Whether objects of the kind are in namespaces.
    pub namespaced: bool,
    /// Whether finalizers must have a domain. Standard finalizers need none.
    pub finalizers_with_domain: bool,
}

// === impl MetadataRules ===

impl MetadataRules {
    /// The rules of pods.
    pub const OF_PODS: Self =
        Self { name: NameRule::Dns1123Subdomain, namespaced: true, finalizers_with_domain: true };
}

/// Rules for every write.
pub fn every_write(causes: &mut Causes, rules: MetadataRules, object: &Value) {
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
pub const PLAIN_FINALIZER: &str = "name is neither a standard finalizer name nor is it fully qualified";

/// Whether a finalizer has no domain and is not a standard finalizer.
pub fn is_plain_finalizer(name: &str) -> bool {
    !name.contains('/') && !["kubernetes", "foregroundDeletion", "orphan"].contains(&name)
}

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
pub fn update(causes: &mut Causes, new: &Value, old: &Value) {
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
        let sample = match rules.name {
            // A prefix of a path segment may be `.` or `..`. Source: `IsPathSegmentPrefix`.
            NameRule::PathSegment => Cow::Owned(format!("{prefix}a")),
            NameRule::Dns1123Label | NameRule::Dns1123Subdomain => format::masked_prefix(prefix),
        };
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
pub fn labels(causes: &mut Causes, path: &Path, labels: &Value) {
    for (key, value) in entries(labels) {
        causes.format(path, key, format::qualified_name(key));
        causes.format(path, text(value), format::label_value(text(value)));
    }
}

/// Checks annotations.
pub fn annotations(causes: &mut Causes, path: &Path, annotations: &Value) {
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
    use serde_json::json;

    use super::*;
    use crate::validate::tests::found;

    #[test]
    fn a_prefix_of_names_is_valid_if_it_is_a_name_after_the_masking_of_its_dash() {
        let is_valid = |name: NameRule, prefix: &str| {
            let rules = MetadataRules { name, namespaced: false, finalizers_with_domain: false };
            let object = json!({"metadata": {"name": "a", "generateName": prefix}});
            found(|causes| every_write(causes, rules, &object)).is_empty()
        };
        let (label, subdomain) = ("a".repeat(63), "a".repeat(253));
        for prefix in ["ab-", "ab--", "ab.-", "a.b", &subdomain, &format!("{subdomain}-")] {
            assert!(is_valid(NameRule::Dns1123Subdomain, prefix), "{prefix}");
        }
        for prefix in ["ab.", "-", &format!("{subdomain}a"), &format!("{subdomain}a-")] {
            assert!(!is_valid(NameRule::Dns1123Subdomain, prefix), "{prefix}");
        }
        assert!(is_valid(NameRule::Dns1123Label, &label));
        assert!(is_valid(NameRule::Dns1123Label, &format!("{label}-")));
        assert!(!is_valid(NameRule::Dns1123Label, &format!("{label}a")));
        for prefix in [".", "..", "a:"] {
            assert!(is_valid(NameRule::PathSegment, prefix), "{prefix}");
        }
        assert!(!is_valid(NameRule::PathSegment, "a/"));
    }
}
