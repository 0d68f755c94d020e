//! The encoded bytes of all objects in each namespace, and in all namespaces except the system namespaces.
//!
//! The cache counts an object when it is added, replaced or removed, in constant time. A write reserves the growth of
//! its object until the cache has the commit. So concurrent writes on one server do not exceed the limit together.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
};

/// Namespaces of the system. Users cannot write to them with the default roles, so the limit of all namespaces does not
/// count system namespaces. The components of the cluster therefore work even if users have reached this limit.
const SYSTEM: [&str; 3] = ["kube-system", "kube-public", "kube-node-lease"];

/// Encoded bytes up to which a namespace may grow while the limit of all namespaces is reached. So a few full
/// namespaces do not prevent writes to other namespaces.
const GUARANTEED: usize = 1 << 20;

/// Maximum encoded bytes of objects in namespaces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ByteLimits {
    /// In one namespace. `usize::MAX`: no limit.
    pub(crate) namespace: usize,
    /// In all namespaces except the system namespaces. `usize::MAX`: no limit.
    pub(crate) all: usize,
    /// In all namespaces except the system namespaces, for writes after which their namespace has at most
    /// [`GUARANTEED`] bytes.
    pub(crate) all_if_small: usize,
}

/// The limit that a write would exceed, with the bytes that count already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Full {
    Namespace(usize),
    All(usize),
}

/// Encoded bytes by namespace. Its lock is the last in the lock order: no other lock is taken while this lock is held.
#[derive(Default)]
pub(crate) struct NamespaceBytes {
    counts: Mutex<Counts>,
}

#[derive(Default)]
struct Counts {
    /// A namespace without objects has no entry.
    namespaces: HashMap<Box<str>, Count>,
    /// Stored and reserved bytes of all namespaces except the system namespaces.
    all: usize,
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
struct Count {
    /// Bytes of the objects in the cache.
    stored: usize,
    /// Bytes by which objects may grow through writes in progress.
    reserved: usize,
}

/// The growth of an object through a write in progress. The bytes count until this value is dropped.
pub(crate) struct ReservedBytes {
    all: Arc<NamespaceBytes>,
    key: Arc<str>,
    bytes: usize,
}

/// Whether a namespace with `used` bytes may grow. `all` is the number of bytes in all namespaces except the system
/// namespaces. The error is the limit that would be exceeded.
fn decide(namespace: &str, used: usize, all: usize, growth: usize, limits: ByteLimits) -> Result<(), Full> {
    let grown = used.saturating_add(growth);
    if grown > limits.namespace {
        return Err(Full::Namespace(used));
    }
    let most = if grown <= GUARANTEED { limits.all_if_small } else { limits.all };
    let is_full = !SYSTEM.contains(&namespace) && all.saturating_add(growth) > most;
    if is_full { Err(Full::All(all)) } else { Ok(()) }
}

/// The namespace in a key of the store. `None` for objects without a namespace.
fn namespace_of(key: &str) -> Option<&str> {
    let mut parts = key.split('/').skip(2);
    let namespace = parts.next()?;
    parts.next().map(|_name| namespace)
}

// === impl ByteLimits ===

impl ByteLimits {
    /// The limits of one namespace and of all namespaces. Small namespaces together may exceed the second limit by a
    /// quarter.
    pub(crate) fn new(namespace: usize, all: usize) -> Self {
        Self { namespace, all, all_if_small: all.saturating_add(all / 4) }
    }

    /// The limits for writes that help the deletion of an object. The limits for components are higher than these
    /// limits.
    pub(crate) fn of_deletions(self) -> Self {
        let all = self.all.max(self.all_if_small).saturating_add(self.all / 16);
        Self { namespace: self.namespace.saturating_add(self.namespace / 8), all, all_if_small: all }
    }

    /// The limits for updates by the components of the cluster. They are higher than the limits for small namespaces,
    /// so that small namespaces cannot use up the bytes for components.
    pub(crate) fn of_components(self) -> Self {
        let all = self.all.saturating_add(self.all / 8 * 3);
        Self { namespace: self.namespace.saturating_add(self.namespace / 4), all, all_if_small: all }
    }
}

// === impl Count ===

impl Count {
    fn total(self) -> usize {
        self.stored.saturating_add(self.reserved)
    }
}

// === impl NamespaceBytes ===

impl NamespaceBytes {
    /// Counts the change of one object: its encoded bytes before and after. 0 for an object that does not exist.
    pub(super) fn count(&self, key: &str, before: usize, after: usize) {
        if before != after {
            self.update(key, |count, _all| count.stored = (count.stored + after).saturating_sub(before));
        }
    }

    /// Reserves bytes for the object with this key. The error is the limit that would be exceeded.
    pub(crate) fn reserve(
        self: &Arc<Self>,
        key: &Arc<str>,
        bytes: usize,
        limits: ByteLimits,
    ) -> Result<ReservedBytes, Full> {
        let mut decision = Ok(());
        self.update(key, |count, all| {
            let namespace = namespace_of(key).unwrap_or_default();
            decision = decide(namespace, count.total(), all, bytes, limits);
            if decision.is_ok() {
                count.reserved += bytes;
            }
        });
        decision.map(|()| ReservedBytes { all: self.clone(), key: key.clone(), bytes })
    }

    /// Changes the count of the namespace of a key, and removes the count if it becomes zero. `update` also gets the
    /// bytes of all namespaces except the system namespaces.
    fn update(&self, key: &str, update: impl FnOnce(&mut Count, usize)) {
        let Some(namespace) = namespace_of(key) else { return };
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        let before = counts.namespaces.get(namespace).copied().unwrap_or_default();
        let mut count = before;
        update(&mut count, counts.all);
        if !SYSTEM.contains(&namespace) {
            counts.all = counts.all.saturating_add(count.total()).saturating_sub(before.total());
        }
        if count == Count::default() {
            counts.namespaces.remove(namespace);
        } else if let Some(known) = counts.namespaces.get_mut(namespace) {
            *known = count;
        } else {
            counts.namespaces.insert(namespace.into(), count);
        }
    }

    /// The stored and reserved bytes of a namespace. `None` if the namespace has no entry.
    #[cfg(test)]
    pub(crate) fn of(&self, namespace: &str) -> Option<[usize; 2]> {
        let counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        counts.namespaces.get(namespace).map(|count| [count.stored, count.reserved])
    }

    /// The stored and reserved bytes of all namespaces except the system namespaces.
    #[cfg(test)]
    fn all(&self) -> usize {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner).all
    }
}

impl Drop for ReservedBytes {
    fn drop(&mut self) {
        let bytes = self.bytes;
        self.all.update(&self.key, |count, _all| count.reserved = count.reserved.saturating_sub(bytes));
    }
}

#[cfg(test)]
mod tests {
    use coracle_kinds::kind::by_kind;
    use coracle_store::{Commit, Entry, Page, UnreadableEntry};
    use serde_json::json;

    use super::*;
    use crate::cache::{Cache, encode, key_of};

    /// The encoding of an object with an annotation of this length.
    fn encoded(kind: &str, name: &str, length: usize) -> (Arc<str>, bytes::Bytes) {
        let kind = by_kind("v1", kind).unwrap();
        let metadata = json!({"name": name, "annotations": {"a": "x".repeat(length)}});
        (key_of(kind, "ns", name).into(), encode(kind, &json!({"metadata": metadata})))
    }

    fn apply(cache: &Cache, revision: u64, key: &Arc<str>, value: Option<&bytes::Bytes>) {
        let (key, value) = (key.clone(), value.cloned());
        cache.apply(&Commit { key, revision, value, created: revision, guard_follows: false });
    }

    #[test]
    fn the_bytes_of_a_namespace_are_those_of_its_objects_of_all_kinds() {
        let cache = Cache::new(1);
        let stored = || cache.namespace_bytes.of("ns").map(|[stored, _reserved]| stored);
        let (map, small) = encoded("ConfigMap", "a", 10);
        let (_map, large) = encoded("ConfigMap", "a", 1000);
        let (secret, other) = encoded("Secret", "a", 50);
        let (node, cluster_scoped) = encoded("Node", "ns", 50);
        apply(&cache, 2, &map, Some(&small));
        assert_eq!(stored(), Some(small.len()), "a create");
        apply(&cache, 3, &map, Some(&large));
        assert_eq!(stored(), Some(large.len()), "an update");
        apply(&cache, 4, &secret, Some(&other));
        apply(&cache, 5, &node, Some(&cluster_scoped));
        assert_eq!(stored(), Some(large.len() + other.len()), "another kind");
        let entry = Entry { key: secret.clone(), value: other.clone(), created: 4, modified: 4 };
        let kept = UnreadableEntry { key: map.clone(), modified: 6, service: None };
        cache.resync(Page { entries: vec![entry], revision: 6, more: false }, &[kept]);
        assert_eq!(stored(), Some(large.len() + other.len()), "objects that are loaded again or kept");
        apply(&cache, 7, &map, None);
        assert_eq!(stored(), Some(other.len()), "a deletion");
        apply(&cache, 8, &map, None);
        apply(&cache, 9, &secret, None);
        assert_eq!(stored(), None, "an empty namespace has no entry");
        apply(&cache, 10, &secret, Some(&other));
        cache.remove("", "secrets");
        assert_eq!(stored(), None, "a removed resource");
    }

    #[test]
    fn all_namespaces_share_a_limit_that_leaves_the_system_its_own() {
        let counts = Arc::<NamespaceBytes>::default();
        let key = |namespace: &str| Arc::<str>::from(format!("/configmaps/{namespace}/a"));
        let limits = ByteLimits { all_if_small: 100, ..ByteLimits::new(60, 100) };
        let reserve = |namespace: &str, bytes| counts.reserve(&key(namespace), bytes, limits);
        counts.count(&key("a"), 0, 50);
        counts.count(&key("kube-system"), 0, 50);
        let second = reserve("b", 40);
        assert!(second.is_ok());
        assert_eq!(reserve("a", 20).err(), Some(Full::Namespace(50)));
        assert_eq!(reserve("c", 20).err(), Some(Full::All(90)));
        assert!(reserve("c", 10).is_ok(), "exactly the limit");
        assert!(reserve("kube-node-lease", 60).is_ok() && reserve("kube-system", 10).is_ok());
        assert_eq!(reserve("kube-system", 20).err(), Some(Full::Namespace(50)));
        drop(second);
        assert_eq!(counts.all(), 50);
        counts.count(&key("a"), 50, 0);
        assert_eq!(counts.all(), 0);
    }

    #[test]
    fn a_small_namespace_may_grow_while_all_namespaces_are_full() {
        let limits = ByteLimits::new(32 << 20, 100 << 20);
        let decide = |used, all, growth| decide("ns", used, all, growth, limits);
        let (all, full) = (limits.all, limits.all + limits.all / 4);
        assert_eq!(decide(0, all, GUARANTEED), Ok(()), "up to the guaranteed bytes");
        assert_eq!(decide(0, all, GUARANTEED + 1), Err(Full::All(all)));
        assert_eq!(decide(GUARANTEED, all, 1), Err(Full::All(all)));
        assert_eq!(decide(2 * GUARANTEED, all - 1, 1), Ok(()), "the common limit is not reached");
        assert_eq!(decide(0, full - 1, 1), Ok(()), "a quarter above the common limit");
        assert_eq!(decide(0, full, 1), Err(Full::All(full)));
        assert_eq!(super::decide("kube-system", 0, full, 2 * GUARANTEED, limits), Ok(()));
        let small = ByteLimits::new(100, usize::MAX);
        assert_eq!(super::decide("ns", 0, 0, 101, small), Err(Full::Namespace(0)), "its own limit");
    }

    #[test]
    fn components_update_objects_when_small_namespaces_have_used_up_their_part() {
        let limits = ByteLimits::new(32 << 20, 100 << 20);
        let (full, of_components) = (limits.all_if_small, limits.of_components());
        assert_eq!(decide("ns", 0, full, 1, limits), Err(Full::All(full)));
        assert_eq!(decide("ns", 0, full, 1, of_components), Ok(()));
        assert_eq!(decide("ns", 40 << 20, full, 1, of_components), Err(Full::Namespace(40 << 20)));
        let none = ByteLimits::new(usize::MAX, usize::MAX);
        assert_eq!(none.of_components(), none);
    }

    #[test]
    fn writes_that_help_deletions_leave_components_their_part() {
        let limits = ByteLimits::new(32 << 20, 100 << 20);
        let (of_deletions, of_components) = (limits.of_deletions(), limits.of_components());
        let (full, namespace) = (limits.all_if_small, limits.namespace);
        assert_eq!(decide("ns", namespace, 0, 1, limits), Err(Full::Namespace(namespace)));
        assert_eq!(decide("ns", namespace, full, 1, of_deletions), Ok(()));
        assert!(decide("ns", of_deletions.namespace, 0, 1, of_deletions).is_err());
        assert!(of_deletions.namespace < of_components.namespace);
        assert!(of_deletions.all < of_components.all);
        let none = ByteLimits::new(usize::MAX, usize::MAX);
        assert_eq!(none.of_deletions(), none);
    }

    #[test]
    fn writes_in_progress_count_until_they_end() {
        let all = Arc::<NamespaceBytes>::default();
        let limits = ByteLimits::new(100, usize::MAX);
        let key: Arc<str> = "/configmaps/ns/a".into();
        all.count(&key, 0, 60);
        let first = all.reserve(&key, 30, limits);
        assert!(first.is_ok());
        assert_eq!(all.reserve(&key, 11, limits).err(), Some(Full::Namespace(90)));
        assert!(all.reserve(&"/configmaps/other/a".into(), 100, limits).is_ok());
        assert!(all.reserve(&key, 10, limits).is_ok(), "exactly the limit");
        drop(first);
        assert_eq!(all.of("ns"), Some([60, 0]));
        assert!(all.reserve(&key, 40, limits).is_ok());
        all.count(&key, 60, 0);
        assert_eq!((all.of("ns"), all.of("other")), (None, None));
    }
}
