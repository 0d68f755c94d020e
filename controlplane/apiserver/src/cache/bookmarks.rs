//! The bookmarks that watches get about once a minute.

use std::time::Duration;

use super::Cache;

/// Maximum time after a change until a watch with bookmarks gets an event or a bookmark of at least the revision of the
/// change. Source: `defaultBookmarkFrequency` of upstream's cacher.
const INTERVAL: Duration = Duration::from_secs(60);

// === impl Cache ===

impl Cache {
    /// Sends a bookmark to each watch with bookmarks that has got no event of the newest change of its kind. All
    /// watches share one timer. It runs only while a watch may need a bookmark: an idle server sends none. Upstream
    /// also sends bookmarks of a revision that its clients already know.
    pub(super) async fn send_bookmarks(&self) {
        loop {
            // The notification alone is not enough: it may have woken an earlier future of this function, which was
            // dropped before it sent the bookmarks.
            if !self.all().iter().any(|one| one.lock().may_watches_lag()) {
                self.lagging.notified().await;
            }
            tokio::time::sleep(INTERVAL).await;
            for collection in self.all() {
                collection.lock().send_bookmarks();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use coracle_kinds::{kind::by_kind, selector::FieldSelector};
    use coracle_store::Commit;
    use serde_json::json;

    use super::*;
    use crate::cache::{Event, Events, Scope, Watcher, encode, key_of, prefix_of};

    /// Commits a new ConfigMap.
    fn commit(cache: &Cache, name: &str, revision: u64) {
        let kind = by_kind("v1", "ConfigMap").unwrap();
        let value = encode(kind, &json!({"metadata": {"name": name, "namespace": "ns"}}));
        let key = key_of(kind, "ns", name).into();
        cache.apply(&Commit { key, revision, value: Some(value), created: revision, guard_follows: false });
    }

    /// A watch of one ConfigMap from the current objects on.
    fn watch(cache: &Cache, name: &str, bookmarks: bool) -> Events {
        let kind = by_kind("v1", "ConfigMap").unwrap();
        let fields = FieldSelector::parse(kind, &format!("metadata.name={name}")).unwrap();
        let scope = Scope { prefix: prefix_of(kind, "ns"), fields, ..Scope::default() };
        let (watcher, events) = Watcher::new(scope, bookmarks);
        cache.of(kind).unwrap().lock().watch_from_now(watcher, cache.revision());
        events
    }

    /// The revisions of the queued bookmarks. The queue must have no other events.
    fn bookmarks(events: &mut Events) -> Vec<u64> {
        let received = std::iter::from_fn(|| events.try_recv().ok());
        let revision = |event: Event| match event {
            Event::Bookmark(revision) => revision,
            other => panic!("{other:?}"),
        };
        received.map(revision).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn a_watch_gets_one_bookmark_for_the_changes_of_others_in_a_minute() {
        let cache = Arc::new(Cache::new(1));
        let sending = cache.clone();
        tokio::spawn(async move { sending.send_bookmarks().await });
        let mut other = watch(&cache, "other", true);
        let mut without = watch(&cache, "other", false);
        let mut own = watch(&cache, "c3", true);
        tokio::time::sleep(INTERVAL * 10).await;
        assert_eq!(bookmarks(&mut other), [0; 0], "without a change");
        commit(&cache, "c2", 2);
        tokio::time::sleep(INTERVAL / 2).await;
        commit(&cache, "c3", 3);
        assert_eq!(bookmarks(&mut other), [0; 0], "before the end of the interval");
        tokio::time::sleep(INTERVAL).await;
        assert_eq!(bookmarks(&mut other), [3]);
        assert!(matches!(own.try_recv(), Ok(Event::Added(object)) if object.revision == 3));
        assert_eq!(bookmarks(&mut own), [0; 0], "its event has the newest revision");
        tokio::time::sleep(INTERVAL * 10).await;
        assert_eq!(bookmarks(&mut other), [0; 0], "without a further change");
        commit(&cache, "c4", 4);
        tokio::time::sleep(INTERVAL * 2).await;
        assert_eq!([bookmarks(&mut other), bookmarks(&mut own)], [[4], [4]]);
        assert_eq!(bookmarks(&mut without), [0; 0]);
    }

    #[tokio::test(start_paused = true)]
    async fn bookmarks_are_sent_after_the_watch_of_the_store_is_lost() {
        let cache = Cache::new(1);
        let mut other = watch(&cache, "other", true);
        commit(&cache, "c2", 2);
        // The first future is dropped during its sleep.
        for duration in [INTERVAL / 2, INTERVAL * 2] {
            assert!(tokio::time::timeout(duration, cache.send_bookmarks()).await.is_err());
        }
        assert_eq!(bookmarks(&mut other), [2]);
    }

    #[test]
    fn the_last_bookmark_of_a_watch_repeats_its_revision_without_a_change() {
        let cache = Cache::new(1);
        commit(&cache, "c5", 5);
        let (mut with, mut without) = (watch(&cache, "c9", true), watch(&cache, "c9", false));
        let kind = by_kind("v1", "ConfigMap").unwrap();
        let (watcher, mut resumed) = Watcher::new(Scope::default(), true);
        cache.of(kind).unwrap().lock().watch_after(watcher, 5).unwrap();
        for events in [&with, &without, &resumed] {
            events.handle().send_bookmark();
        }
        commit(&cache, "c6", 6);
        with.handle().send_bookmark();
        assert_eq!((bookmarks(&mut with), bookmarks(&mut without)), (vec![5, 6], Vec::new()));
        assert!(matches!(resumed.try_recv(), Ok(Event::Bookmark(5))));
        assert!(matches!(resumed.try_recv(), Ok(Event::Added(object)) if object.revision == 6));
    }
}
