//! The objects at earlier revisions: from the history of changes, or from a snapshot.

use std::{collections::HashMap, sync::Arc};

use super::{Collection, too_old};
use crate::{
    cache::{Cache, Object, snapshots::LIFETIME},
    error::Result,
};

// === impl Cache ===

impl Cache {
    /// Drops snapshots above their maximum age. While there are no snapshots, no timer runs.
    pub(in crate::cache) async fn drop_old_snapshots(&self) {
        loop {
            // The notification alone is not enough: after a pass, the collections may still have younger snapshots.
            if !self.all().iter().any(|one| one.lock().has_snapshots()) {
                self.snapshots_taken.notified().await;
            }
            tokio::time::sleep(LIFETIME / 2).await;
            for collection in self.all() {
                collection.lock().drop_old_snapshots();
            }
        }
    }

    /// Keeps the objects under a prefix as they are at a revision, for the later pages of a list.
    pub(crate) fn take_snapshot(&self, objects: &mut Collection, prefix: &str, revision: u64, owner: &str) {
        if objects.take_snapshot(prefix, revision, owner) {
            self.snapshots_taken.notify_one();
        }
    }
}

// === impl Collection ===

impl Collection {
    /// Keeps the objects under a prefix as they are at a revision, for the later pages of a list. `owner` is the user
    /// of the list; all service accounts of a namespace are one owner. Returns false if the history does not have all
    /// changes after the revision, or if the resource was removed.
    fn take_snapshot(&mut self, prefix: &str, revision: u64, owner: &str) -> bool {
        if revision < self.compacted || self.is_closed {
            return false;
        }
        self.snapshots.take(revision, prefix, owner, &self.superseded);
        true
    }

    fn has_snapshots(&self) -> bool {
        !self.snapshots.is_empty()
    }

    /// Drops snapshots above the maximum age.
    fn drop_old_snapshots(&mut self) {
        self.snapshots.drop_old(&self.superseded);
    }

    /// The objects under a prefix as they were at a revision, in key order, from the key `start` on.
    pub(crate) fn under_at(&self, prefix: &str, start: &str, revision: u64) -> Result<Vec<Arc<Object>>> {
        if revision < self.compacted && !self.snapshots.covers(prefix, revision) {
            return Err(too_old(revision, self.compacted));
        }
        let start = prefix.max(start);
        // The former states of the objects that have changed since this revision. If an object changed several times,
        // its oldest change counts.
        let mut former: HashMap<&str, Option<&Arc<Object>>> = HashMap::new();
        let later = self.changes.iter().rev().take_while(|change| change.revision > revision);
        for change in later.filter(|change| change.new.key.starts_with(prefix) && *change.new.key >= *start) {
            former.insert(&*change.new.key, change.old.as_ref());
        }
        let dropped = self.snapshots.former_after(revision, start);
        for (key, state) in dropped.filter(|(key, _)| key.starts_with(prefix)) {
            former.insert(key, state.as_ref());
        }
        let is_unchanged = |object: &&Arc<Object>| !former.contains_key(&*object.key);
        let mut objects: Vec<Arc<Object>> =
            self.under_from(prefix, start).filter(is_unchanged).cloned().collect();
        if !former.is_empty() {
            objects.extend(former.into_values().flatten().cloned());
            objects.sort_by(|one, other| one.key.cmp(&other.key));
        }
        Ok(objects)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use coracle_kinds::kind::by_kind;
    use coracle_store::Commit;
    use serde_json::json;

    use super::*;
    use crate::cache::{RECENT, encode, key_of, prefix_of, tests::commit_large};

    /// Changes a ConfigMap of a namespace; without a size, deletes it.
    fn change(cache: &Cache, name: &str, revision: u64, size: Option<usize>) {
        let kind = by_kind("v1", "ConfigMap").unwrap();
        let value = size.map(|size| {
            let metadata = json!({"name": name, "namespace": "ns"});
            encode(kind, &json!({"metadata": metadata, "data": {"a": "x".repeat(size)}}))
        });
        let key = key_of(kind, "ns", name).into();
        cache.apply(&Commit { key, revision, value, created: revision, guard_follows: false });
    }

    fn snapshot(cache: &Cache, namespace: &str, revision: u64, owner: &str) {
        let kind = by_kind("v1", "ConfigMap").unwrap();
        let shared = cache.of(kind).unwrap();
        cache.take_snapshot(&mut shared.lock(), &prefix_of(kind, namespace), revision, owner);
    }

    /// Names and revisions of the ConfigMaps of a namespace at a revision; empty if the revision is too old.
    fn states(cache: &Cache, revision: u64) -> String {
        let kind = by_kind("v1", "ConfigMap").unwrap();
        let found = cache.of(kind).unwrap().lock().under_at(&prefix_of(kind, "ns"), "", revision);
        let found = found.unwrap_or_default();
        let states = found.iter().map(|object| format!("{}{}", object.name(), object.revision));
        states.collect::<Vec<_>>().join(" ")
    }

    fn bytes(cache: &Cache) -> usize {
        cache.snapshot_bytes.load(Ordering::Relaxed)
    }

    /// Makes 1,500 changes, so that the history drops all changes before them. Returns the last revision.
    async fn fill_history(cache: &Cache, after: u64) -> u64 {
        (after + 1..=after + 1499).for_each(|revision| change(cache, "other", revision, Some(1000)));
        tokio::time::advance(RECENT * 2).await;
        change(cache, "other", after + 1500, Some(1000));
        after + 1500
    }

    #[tokio::test(start_paused = true)]
    async fn a_snapshot_has_the_objects_of_its_revision_for_five_minutes() {
        let cache = Arc::new(Cache::new(0));
        let dropping = cache.clone();
        tokio::spawn(async move { dropping.drop_old_snapshots().await });
        for (revision, name) in [(1, "a"), (2, "b"), (3, "c")] {
            change(&cache, name, revision, Some(1000));
        }
        snapshot(&cache, "", 3, "bob");
        change(&cache, "a", 4, None);
        change(&cache, "d", 5, Some(1000));
        (6..=20).for_each(|revision| change(&cache, "b", revision, Some(1000)));
        let last = fill_history(&cache, 20).await;
        assert_eq!(states(&cache, 3), "a1 b2 c3");
        assert_eq!(states(&cache, 4), "", "no snapshot has this revision");
        assert_eq!(states(&cache, last), format!("b20 c3 d5 other{last}"));
        assert!((1000..6000).contains(&bytes(&cache)), "only the first states: {}", bytes(&cache));
        assert_eq!(cache.superseded.bytes(), 0, "no response refers to the former states");
        tokio::time::sleep(LIFETIME - RECENT * 4).await;
        assert_eq!(states(&cache, 3), "a1 b2 c3");
        tokio::time::sleep(LIFETIME).await;
        assert_eq!((states(&cache, 3).as_str(), bytes(&cache)), ("", 0));
    }

    #[tokio::test(start_paused = true)]
    async fn snapshots_are_dropped_after_the_watch_of_the_store_is_lost() {
        let cache = Cache::new(0);
        change(&cache, "a", 1, Some(1000));
        snapshot(&cache, "ns", 1, "bob");
        change(&cache, "a", 2, None);
        fill_history(&cache, 2).await;
        assert!(bytes(&cache) > 0);
        // The first future is dropped during its sleep.
        for duration in [LIFETIME / 4, LIFETIME * 2] {
            assert!(tokio::time::timeout(duration, cache.drop_old_snapshots()).await.is_err());
        }
        assert_eq!(bytes(&cache), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn an_owner_with_many_snapshots_loses_its_own() {
        let cache = Cache::new(0);
        change(&cache, "a", 1, Some(1));
        change(&cache, "b", 2, Some(1));
        snapshot(&cache, "ns", 2, "bob");
        change(&cache, "a", 3, Some(1));
        snapshot(&cache, "ns", 3, "eve");
        change(&cache, "b", 4, Some(1));
        let mut last = fill_history(&cache, 4).await;
        assert_eq!((states(&cache, 2).as_str(), states(&cache, 3).as_str()), ("a1 b2", "a3 b2"));
        for _ in 0..100 {
            last += 1;
            change(&cache, "other", last, Some(1));
            snapshot(&cache, "ns", last, "eve");
        }
        assert_eq!(states(&cache, 2), "a1 b2", "it needs a state of the dropped snapshot");
        assert_eq!(states(&cache, 3), "");
    }

    #[tokio::test(start_paused = true)]
    async fn changes_of_other_namespaces_cost_no_memory() {
        let cache = Cache::new(0);
        change(&cache, "a", 1, Some(1));
        snapshot(&cache, "another", 1, "bob");
        fill_history(&cache, 1).await;
        assert_eq!(bytes(&cache), 0);
        assert_eq!(states(&cache, 1), "", "the snapshot is of another namespace");
    }

    #[tokio::test(start_paused = true)]
    async fn many_changed_bytes_end_a_snapshot() {
        let cache = Cache::new(0);
        let name = |number: u64| format!("m{number}");
        (1..=25).for_each(|number| commit_large(&cache, &name(number), number, number));
        snapshot(&cache, "ns", 25, "bob");
        for number in 1..=25 {
            commit_large(&cache, &name(number), 25 + number, number);
            assert!(bytes(&cache) <= 16 << 20, "{}", bytes(&cache));
            assert_eq!(states(&cache, 25).is_empty(), number > 18, "{number}: {}", bytes(&cache));
        }
        assert_eq!(bytes(&cache), 0);
    }
}
