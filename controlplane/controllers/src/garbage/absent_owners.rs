//! Owners that the API server did not have, as upstream's `absentOwnerCache`.
//!
//! Many objects can have one absent owner that the graph does not know, for example after a restart. Only the first of
//! these objects needs a request. An owner that is created later has another uid. But while a server does not serve a
//! kind, it also reports objects of that kind as absent. So a change of the served kinds clears all entries.

use std::collections::VecDeque;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;

/// Capacity, as upstream.
const MAX_OWNERS: usize = 500;
/// Maximum bytes of all texts of a reference. A longer reference is not stored. The limit is needed, because the API
/// server does not limit all of these texts.
const MAX_TEXT: usize = 1024;

/// The most recent absent owners, the oldest first.
#[derive(Debug, Default)]
pub(crate) struct AbsentOwners(VecDeque<Reference>);

/// A reference with the namespace in which its owner was looked up. All fields count: a reference with a wrong name
/// must not hide an owner that exists.
#[derive(Debug, PartialEq, Eq)]
struct Reference {
    namespace: Box<str>,
    api_version: Box<str>,
    kind: Box<str>,
    name: Box<str>,
    uid: Box<str>,
}

impl Reference {
    fn is(&self, namespace: &str, owner: &OwnerReference) -> bool {
        *self.uid == owner.uid
            && *self.name == owner.name
            && *self.kind == owner.kind
            && *self.api_version == owner.api_version
            && *self.namespace == *namespace
    }
}

// === impl AbsentOwners ===

impl AbsentOwners {
    /// Whether the owner was looked up in this namespace, and did not exist.
    pub(crate) fn has(&self, namespace: &str, owner: &OwnerReference) -> bool {
        self.0.iter().any(|known| known.is(namespace, owner))
    }

    /// Removes all entries.
    pub(crate) fn clear(&mut self) {
        self.0.clear();
    }

    /// Records that an owner does not exist.
    pub(crate) fn add(&mut self, namespace: &str, owner: &OwnerReference) {
        let OwnerReference { api_version, kind, name, uid, .. } = owner;
        let length = namespace.len() + api_version.len() + kind.len() + name.len() + uid.len();
        if length > MAX_TEXT || self.has(namespace, owner) {
            return;
        }
        if self.0.len() == MAX_OWNERS {
            self.0.pop_front();
        }
        self.0.push_back(Reference {
            namespace: namespace.into(),
            api_version: api_version.as_str().into(),
            kind: kind.as_str().into(),
            name: name.as_str().into(),
            uid: uid.as_str().into(),
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn owner(name: &str, uid: &str) -> OwnerReference {
        OwnerReference {
            api_version: "v1".to_owned(),
            kind: "Thing".to_owned(),
            name: name.to_owned(),
            uid: uid.to_owned(),
            ..OwnerReference::default()
        }
    }

    #[test]
    fn an_absent_owner_is_known_by_all_parts_of_its_reference() {
        let mut absent = AbsentOwners::default();
        absent.add("n", &owner("a", "1"));
        assert!(absent.has("n", &owner("a", "1")));
        assert!(!absent.has("m", &owner("a", "1")), "another namespace");
        assert!(!absent.has("n", &owner("b", "1")) && !absent.has("n", &owner("a", "2")));
    }

    #[test]
    fn a_limited_number_of_absent_owners_is_known() {
        let mut absent = AbsentOwners::default();
        absent.add("n", &owner("a", &"x".repeat(MAX_TEXT)));
        assert!(absent.0.is_empty(), "a long reference");
        for number in 0..=MAX_OWNERS {
            absent.add("n", &owner("a", &number.to_string()));
            absent.add("n", &owner("a", &number.to_string()));
        }
        assert_eq!(absent.0.len(), MAX_OWNERS);
        assert!(!absent.has("n", &owner("a", "0")) && absent.has("n", &owner("a", "1")));
    }
}
