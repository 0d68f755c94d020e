//! An immutable set of resources with indexes: by path, by kind, and by storage.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, OnceLock};

use super::Resource;

/// Resources by three texts. The maps are nested, so that a look-up does not allocate.
type Index = HashMap<Box<str>, HashMap<Box<str>, HashMap<Box<str>, Arc<Resource>>>>;

/// Values by group and plural.
type ByGroupAndPlural<T> = HashMap<Box<str>, HashMap<Box<str>, T>>;

/// Resources by group and version.
type ByVersion = BTreeMap<(Box<str>, Box<str>), Vec<Arc<Resource>>>;

/// An immutable set of resources.
#[derive(Default)]
pub struct Resources {
    /// Resources by group, version and plural.
    paths: Index,
    /// Resources by group, version and kind.
    kinds: Index,
    /// The stored versions, by group and plural.
    stored: ByGroupAndPlural<Arc<Resource>>,
    /// Group versions in order: the core group first, and the versions of a group in the order of preference.
    versions: Vec<Arc<GroupVersion>>,
    /// The versions in this set of each resource, by group and plural of its stored version, in the order of
    /// `versions`.
    served: ByGroupAndPlural<Vec<Arc<Resource>>>,
}

/// The resources of one group version.
pub struct GroupVersion {
    /// API group. Empty for the core group.
    pub group: Box<str>,
    /// Version.
    pub version: Box<str>,
    /// Resources of the group version, in the order of their names.
    pub resources: Vec<Arc<Resource>>,
    /// Hash of its OpenAPI v3 document.
    pub(crate) openapi_hash: OnceLock<String>,
}

// === impl GroupVersion ===

impl GroupVersion {
    /// The hash of its OpenAPI v3 document. `None` until the hash is computed.
    pub fn openapi_hash(&self) -> Option<&str> {
        self.openapi_hash.get().map(String::as_str)
    }
}

/// A resource with the same group and name is built in.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("cannot add the resource {0}: a built-in resource has this name")]
pub struct Taken(pub String);

// === impl Resources ===

impl Resources {
    /// A set of these resources.
    pub fn new(resources: Vec<Arc<Resource>>) -> Resources {
        Resources::rebuilt(resources, &[])
    }

    /// The resource of a path.
    pub fn find(&self, group: &str, version: &str, plural: &str) -> Option<&Arc<Resource>> {
        self.paths.get(group)?.get(version)?.get(plural)
    }

    /// The resource of a kind.
    pub fn find_kind(&self, group: &str, version: &str, kind: &str) -> Option<&Arc<Resource>> {
        self.kinds.get(group)?.get(version)?.get(kind)
    }

    /// The stored version of a resource.
    pub fn find_stored(&self, group: &str, plural: &str) -> Option<&Arc<Resource>> {
        self.stored.get(group)?.get(plural)
    }

    /// All versions of a resource in this set, by group and in the order of preference. Events have versions in two
    /// groups.
    pub fn served_versions(&self, resource: &Resource) -> &[Arc<Resource>] {
        let stored = resource.stored_as();
        let of_group = self.served.get(&*stored.group);
        of_group.and_then(|group| group.get(&*stored.plural)).map_or(&[], Vec::as_slice)
    }

    /// All resources, by group, version and name.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<Resource>> {
        self.versions.iter().flat_map(|version| &version.resources)
    }

    /// All group versions: the core group first, then the other groups by name. The versions of a group are in the
    /// order of preference.
    pub fn group_versions(&self) -> &[Arc<GroupVersion>] {
        &self.versions
    }

    /// The group versions of one group, in the order of preference.
    pub fn versions_of<'a>(&'a self, group: &'a str) -> impl Iterator<Item = &'a Arc<GroupVersion>> {
        self.versions.iter().filter(move |version| &*version.group == group)
    }

    /// One group version.
    pub fn group_version(&self, group: &str, version: &str) -> Option<&Arc<GroupVersion>> {
        self.versions.iter().find(|known| &*known.group == group && &*known.version == version)
    }

    /// Names of all groups but the core group, in alphabetical order.
    pub fn groups(&self) -> Vec<&str> {
        let mut groups: Vec<&str> = self.versions.iter().map(|version| &*version.group).collect();
        groups.retain(|group| !group.is_empty());
        groups.dedup();
        groups
    }

    /// The set with these resources: all versions of one resource, which replace its former versions.
    ///
    /// # Errors
    /// The name belongs to a built-in resource.
    pub fn with(&self, added: &[Arc<Resource>]) -> Result<Resources, Taken> {
        let replaced = |known: &Resource| added.iter().any(|new| is_same(known, new));
        if let Some(taken) = self.iter().find(|known| known.is_built_in && replaced(known)) {
            return Err(Taken(taken.qualified_resource()));
        }
        let kept = self.iter().filter(|known| !replaced(known));
        Ok(Resources::rebuilt(kept.chain(added).cloned().collect(), &self.versions))
    }

    /// The set without a resource. Built-in resources stay.
    pub fn without(&self, group: &str, plural: &str) -> Resources {
        let kept =
            self.iter().filter(|known| known.is_built_in || known.group != group || known.plural != plural);
        Resources::rebuilt(kept.cloned().collect(), &self.versions)
    }

    /// Builds the indexes. Group versions without a change are shared with the former set.
    fn rebuilt(resources: Vec<Arc<Resource>>, former: &[Arc<GroupVersion>]) -> Resources {
        let mut set = Resources::default();
        let mut versions = ByVersion::new();
        for resource in resources {
            let (group, version): (Box<str>, Box<str>) =
                (resource.group.as_ref().into(), resource.version.as_ref().into());
            insert(&mut set.paths, &resource, &resource.plural);
            insert(&mut set.kinds, &resource, &resource.kind);
            if resource.is_stored() {
                // The stored version may be a version that is not served.
                let stored = resource.storage.as_ref().unwrap_or(&resource);
                let of_group = set.stored.entry(stored.group.as_ref().into()).or_default();
                of_group.entry(stored.plural.as_ref().into()).or_insert_with(|| stored.clone());
            }
            versions.entry((group, version)).or_default().push(resource);
        }
        set.versions = versions
            .into_iter()
            .map(|((group, version), mut resources)| {
                resources.sort_by(|a, b| a.plural.cmp(&b.plural));
                let same = former.iter().find(|known| {
                    known.group == group && known.version == version && are_same(&known.resources, &resources)
                });
                let made =
                    || Arc::new(GroupVersion { group, version, resources, openapi_hash: OnceLock::new() });
                same.cloned().unwrap_or_else(made)
            })
            .collect();
        set.versions.sort_by(|a, b| {
            (&a.group, version_preference(&a.version)).cmp(&(&b.group, version_preference(&b.version)))
        });
        for resource in set.versions.iter().flat_map(|version| &version.resources) {
            let stored = resource.stored_as();
            let of_group = set.served.entry(stored.group.as_ref().into()).or_default();
            of_group.entry(stored.plural.as_ref().into()).or_default().push(resource.clone());
        }
        set
    }
}

fn insert(index: &mut Index, resource: &Arc<Resource>, name: &str) {
    let versions = index.entry(resource.group.as_ref().into()).or_default();
    versions.entry(resource.version.as_ref().into()).or_default().insert(name.into(), resource.clone());
}

fn is_same(a: &Resource, b: &Resource) -> bool {
    a.group == b.group && a.plural == b.plural
}

fn are_same(a: &[Arc<Resource>], b: &[Arc<Resource>]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| Arc::ptr_eq(a, b))
}

/// Sort key of a version, the preferred version first: GA, beta, alpha, each with the highest number first, then other
/// names. Source: `k8s.io/apimachinery/pkg/version.CompareKubeAwareVersionStrings`.
pub fn version_preference(version: &str) -> impl Ord + use<> {
    use std::cmp::Reverse;
    let other = || (3_u8, Reverse(0_u64), Reverse(0_u64), Box::<str>::from(version));
    let Some(rest) = version.strip_prefix('v') else { return other() };
    let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
    let (major, rest) = rest.split_at(digits);
    let Ok(major) = major.parse() else { return other() };
    if rest.is_empty() {
        return (0, Reverse(major), Reverse(0), "".into());
    }
    for (stage, word) in [(1, "beta"), (2, "alpha")] {
        if let Some(minor) = rest.strip_prefix(word).and_then(|minor| minor.parse().ok()) {
            return (stage, Reverse(major), Reverse(minor), "".into());
        }
    }
    other()
}

#[cfg(test)]
mod tests {
    use super::version_preference;

    #[test]
    fn versions_are_ordered_by_stability_and_number() {
        let mut versions = ["v1alpha1", "v1", "foo1", "v11beta2", "v2", "v1beta1", "v10beta3", "v3alpha1"];
        versions.sort_by_key(|version| version_preference(version));
        assert_eq!(versions, ["v2", "v1", "v11beta2", "v10beta3", "v1beta1", "v3alpha1", "v1alpha1", "foo1"]);
    }
}
