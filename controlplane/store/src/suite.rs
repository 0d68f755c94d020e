//! Tests that every implementation of the store must pass.

use std::sync::Arc;

use bytes::Bytes;

use crate::{Commit, Entry, Error, Event, Expect, Guard, Range, Store, Tier, Watch, Write};

pub(crate) const TIERS: [Tier; 2] = [Tier::Durable, Tier::Volatile { ttl: None }];

pub(crate) fn put(key: &str, expect: Expect, value: &str, tier: Tier) -> Write {
    Write {
        key: key.into(),
        expect,
        value: Some(Bytes::copy_from_slice(value.as_bytes())),
        tier,
        guard: None,
    }
}

/// The next commit of a watch.
pub(crate) async fn commit(watch: &mut Watch) -> Arc<Commit> {
    loop {
        match watch.next().await.unwrap() {
            Event::Commit(commit) => return commit,
            Event::Progress(_) => {}
            Event::Unreadable(entry) => panic!("cannot decrypt {}", entry.key),
            Event::Resync { page, .. } => panic!("resync at {}", page.revision),
        }
    }
}

/// Runs every test, each on a new store.
pub(crate) async fn all(make: impl AsyncFn() -> Arc<dyn Store>) {
    for tier in TIERS {
        writes_are_compare_and_swap(make().await, tier).await;
        revisions_rise_over_all_keys(make().await, tier).await;
        lists_are_ordered_and_paged(make().await, tier).await;
        a_watch_gets_each_commit_once_in_order(make().await, tier).await;
        watches_that_begin_before_a_compaction_are_refused(make().await, tier).await;
        one_of_many_concurrent_writers_wins(make().await, tier).await;
        a_guard_is_checked_and_touched_with_the_entry(make().await, tier).await;
    }
}

async fn writes_are_compare_and_swap(store: Arc<dyn Store>, tier: Tier) {
    let first = store.write(put("/a", Expect::Absent, "1", tier)).await.unwrap();
    let again = store.write(put("/a", Expect::Absent, "2", tier)).await.unwrap_err();
    assert!(matches!(again, Error::Conflict { found: Some(found), .. } if found == first));
    let stale = store.write(put("/a", Expect::Revision(first + 9), "2", tier)).await.unwrap_err();
    assert!(matches!(stale, Error::Conflict { .. }));
    let second = store.write(put("/a", Expect::Revision(first), "2", tier)).await.unwrap();
    let entry = store.get("/a").await.unwrap().unwrap();
    let value = Bytes::from_static(b"2");
    assert_eq!(entry, Entry { key: "/a".into(), value, created: first, modified: second });
    assert_eq!(store.revision_of("/a").await.unwrap(), Some(second));
    let delete =
        |at| Write { key: "/a".into(), expect: Expect::Revision(at), value: None, tier, guard: None };
    assert!(matches!(store.write(delete(first)).await, Err(Error::Conflict { .. })));
    store.write(delete(second)).await.unwrap();
    assert_eq!(store.get("/a").await.unwrap(), None);
    assert_eq!(store.revision_of("/a").await.unwrap(), None);
    assert!(matches!(store.write(delete(second)).await, Err(Error::Conflict { found: None, .. })));
    assert!(store.write(put("/a", Expect::Absent, "3", tier)).await.unwrap() > second);
}

async fn revisions_rise_over_all_keys(store: Arc<dyn Store>, tier: Tier) {
    let mut last = store.revision().await.unwrap();
    for key in ["/x", "/y", "/z"] {
        let revision = store.write(put(key, Expect::Absent, "v", tier)).await.unwrap();
        assert!(revision > last);
        assert_eq!(store.revision().await.unwrap(), revision);
        last = revision;
    }
}

async fn lists_are_ordered_and_paged(store: Arc<dyn Store>, tier: Tier) {
    for key in ["/b/2", "/a/1", "/b/1", "/b/3", "/c/1"] {
        store.write(put(key, Expect::Absent, key, tier)).await.unwrap();
    }
    let keys = |entries: Vec<Entry>| entries.iter().map(|entry| entry.key.to_string()).collect::<Vec<_>>();
    let all = store.list(Range { prefix: "/b/".into(), ..Range::default() }).await.unwrap();
    assert!(!all.more);
    assert_eq!(all.revision, store.revision().await.unwrap());
    assert_eq!(keys(all.entries), ["/b/1", "/b/2", "/b/3"]);
    let page = Range { prefix: "/b/".into(), start: String::new(), limit: 2 };
    let page = store.list(page).await.unwrap();
    assert!(page.more);
    assert_eq!(keys(page.entries), ["/b/1", "/b/2"]);
    let rest = Range { prefix: "/b/".into(), start: "/b/2\0".into(), limit: 2 };
    let rest = store.list(rest).await.unwrap();
    assert!(!rest.more);
    assert_eq!(keys(rest.entries), ["/b/3"]);
}

async fn a_watch_gets_each_commit_once_in_order(store: Arc<dyn Store>, tier: Tier) {
    let before = store.revision().await.unwrap();
    let first = store.write(put("/w/a", Expect::Absent, "1", tier)).await.unwrap();
    let mut watch = store.watch("/w/", before).await.unwrap();
    let mut late = store.watch("/w/", first).await.unwrap();
    store.write(put("/v/a", Expect::Absent, "no", tier)).await.unwrap();
    let second = store.write(put("/w/a", Expect::Revision(first), "2", tier)).await.unwrap();
    let write =
        Write { key: "/w/a".into(), expect: Expect::Revision(second), value: None, tier, guard: None };
    let third = store.write(write).await.unwrap();
    for (revision, value) in [(first, Some("1")), (second, Some("2")), (third, None)] {
        let commit = commit(&mut watch).await;
        assert_eq!(commit.revision, revision);
        assert!(commit.created == first || commit.value.is_none());
        assert_eq!(commit.value.as_deref(), value.map(str::as_bytes));
    }
    assert_eq!(commit(&mut late).await.revision, second);
    let marker = store.write(put("/w/b", Expect::Absent, "1", tier)).await.unwrap();
    assert_eq!(commit(&mut watch).await.revision, marker, "no commit is sent again");
}

async fn watches_that_begin_before_a_compaction_are_refused(store: Arc<dyn Store>, tier: Tier) {
    let first = store.write(put("/k", Expect::Absent, "1", tier)).await.unwrap();
    let second = store.write(put("/k", Expect::Revision(first), "2", tier)).await.unwrap();
    store.compact(second).await.unwrap();
    assert!(matches!(store.watch("/", first).await, Err(Error::Compacted { .. })));
    assert!(store.watch("/", second).await.is_ok());
    assert!(matches!(store.watch("/", second + 1).await, Err(Error::Future { .. })));
    assert_eq!(store.get("/k").await.unwrap().unwrap().modified, second);
}

async fn one_of_many_concurrent_writers_wins(store: Arc<dyn Store>, tier: Tier) {
    let base = store.write(put("/race", Expect::Absent, "0", tier)).await.unwrap();
    let writes = (0..50).map(|n| {
        let store = store.clone();
        async move { store.write(put("/race", Expect::Revision(base), &n.to_string(), tier)).await }
    });
    let outcomes = futures::future::join_all(writes).await;
    assert_eq!(outcomes.iter().filter(|outcome| outcome.is_ok()).count(), 1);
}

async fn a_guard_is_checked_and_touched_with_the_entry(store: Arc<dyn Store>, tier: Tier) {
    let guarded = |key: &str, expect| {
        let guard = Some(Guard { key: "guard".into(), expect });
        Write { guard, ..put(key, Expect::Absent, "v", tier) }
    };
    let mut watch = store.watch("", store.revision().await.unwrap()).await.unwrap();
    let first = store.write(guarded("/g/a", Expect::Absent)).await.unwrap();
    for (key, guard_follows) in [("/g/a", true), ("guard", false)] {
        let commit = commit(&mut watch).await;
        assert_eq!((&*commit.key, commit.revision, commit.guard_follows), (key, first, guard_follows));
    }
    let late = store.write(guarded("/g/b", Expect::Absent)).await.unwrap_err();
    assert!(matches!(late, Error::Guard { at } if at >= first), "{late:?}");
    assert_eq!(store.get("/g/b").await.unwrap(), None);
    let conflict = store.write(guarded("/g/a", Expect::Revision(first))).await.unwrap_err();
    assert!(matches!(conflict, Error::Conflict { found: Some(found), .. } if found == first), "{conflict:?}");
    let second = store.write(guarded("/g/b", Expect::Revision(first))).await.unwrap();
    assert_eq!(store.get("guard").await.unwrap().unwrap().modified, second);
}
