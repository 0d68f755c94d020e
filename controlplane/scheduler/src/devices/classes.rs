//! Device classes, and the extended resources that they provide. Source: `deviceclass/extendedresourcecache` of
//! `dynamic-resource-allocation`.

use std::cmp::Reverse;
use std::collections::{BTreeSet, HashMap, HashSet};

use coracle_values::object::ObjectExt;
use jiff::Timestamp;

use super::object::Class;

/// Prefix of the extended resource that each class provides. The name of the class follows.
pub(super) const CLASS_PREFIX: &str = "deviceclass.resource.kubernetes.io/";

/// All classes.
#[derive(Debug, Default)]
pub(super) struct Classes {
    by_name: HashMap<String, Class>,
    /// The classes by their `extendedResourceName`, in the order of precedence: the newest class first, then by name.
    by_resource: HashMap<String, BTreeSet<Rank>>,
}

/// Time of creation and name of a class.
type Rank = (Reverse<Option<Timestamp>>, String);

// === impl Classes ===

impl Classes {
    pub(super) fn by_name(&self) -> &HashMap<String, Class> {
        &self.by_name
    }

    pub(super) fn get(&self, name: &str) -> Option<&Class> {
        self.by_name.get(name)
    }

    /// The name of the class that provides an extended resource.
    pub(super) fn of_resource(&self, resource: &str) -> Option<&str> {
        if let Some(name) = resource.strip_prefix(CLASS_PREFIX) {
            return self.by_name.get_key_value(name).map(|(name, _)| name.as_str());
        }
        self.by_resource.get(resource)?.first().map(|(_, name)| name.as_str())
    }

    /// Adds or replaces a class.
    pub(super) fn insert(&mut self, class: Class) {
        self.remove(class.name());
        if let Some(resource) = &class.spec.extended_resource_name {
            self.by_resource.entry(resource.clone()).or_default().insert(rank(&class));
        }
        self.by_name.insert(class.name().to_owned(), class);
    }

    pub(super) fn remove(&mut self, name: &str) {
        let Some(class) = self.by_name.remove(name) else { return };
        let Some(resource) = &class.spec.extended_resource_name else { return };
        if let Some(ranks) = self.by_resource.get_mut(resource) {
            ranks.remove(&rank(&class));
            if ranks.is_empty() {
                self.by_resource.remove(resource);
            }
        }
    }

    /// Removes all classes that a complete list does not have.
    pub(super) fn retain(&mut self, listed: &HashSet<String>) {
        let removed: Vec<String> =
            self.by_name.keys().filter(|name| !listed.contains(*name)).cloned().collect();
        for name in removed {
            self.remove(&name);
        }
    }
}

fn rank(class: &Class) -> Rank {
    let created = class.metadata.creation_timestamp.as_ref().map(|time| time.0);
    (Reverse(created), class.name().to_owned())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn class(name: &str, created: &str, resource: Option<&str>) -> Class {
        let metadata = json!({"name": name, "creationTimestamp": created});
        serde_json::from_value(json!({"metadata": metadata, "spec": {"extendedResourceName": resource}}))
            .unwrap()
    }

    #[test]
    fn the_newest_class_provides_a_resource_and_every_class_the_resource_with_its_name() {
        let (old, new) = ("2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z");
        let mut classes = Classes::default();
        for (name, created) in [("c", old), ("b", new), ("a", new)] {
            classes.insert(class(name, created, Some("example.com/gpu")));
        }
        assert_eq!(classes.of_resource("example.com/gpu"), Some("a"));
        assert_eq!(classes.of_resource("deviceclass.resource.kubernetes.io/c"), Some("c"));
        classes.insert(class("a", new, Some("example.com/other")));
        assert_eq!(classes.of_resource("example.com/gpu"), Some("b"));
        assert_eq!(classes.of_resource("example.com/other"), Some("a"));
        classes.retain(&HashSet::from(["c".to_owned()]));
        assert_eq!(classes.of_resource("example.com/gpu"), Some("c"));
        classes.remove("c");
        assert_eq!(classes.of_resource("deviceclass.resource.kubernetes.io/c"), None);
        assert!(classes.by_name.is_empty() && classes.by_resource.is_empty());
    }
}
