//! The suite on the embedded store, and tests of its own guarantees.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use coracle_sealing::Keys;
use coracle_testing::eventually;

use super::{Embedded, EmbeddedOptions, RESERVED};
use crate::{
    Error, Expect, Range, ReadablePage, Sealing, Store, Tier, Unreadable, UnreadableEntry, Write,
    codec::tests::{SEALED_BY_SERVICE, with_absent_service},
    suite::{self, put},
};

/// The path of a store in a new directory. The store has files beside its path.
pub(super) struct StoreDir {
    _parent: tempfile::TempDir,
    path: PathBuf,
}

impl StoreDir {
    pub(super) fn new() -> Self {
        let parent = tempfile::tempdir().unwrap();
        Self { path: parent.path().join("store"), _parent: parent }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }
}

fn open(path: &Path) -> Embedded {
    Embedded::open(path, EmbeddedOptions::default()).unwrap()
}

#[tokio::test]
async fn passes_the_suite() {
    let root = tempfile::tempdir().unwrap();
    let count = std::sync::atomic::AtomicU32::new(0);
    suite::all(async || {
        let n = count.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        Arc::new(open(&root.path().join(n.to_string()))) as Arc<dyn Store>
    })
    .await;
}

#[tokio::test]
async fn durable_entries_survive_a_restart_volatile_ones_do_not_and_revisions_continue() {
    let dir = StoreDir::new();
    let store = open(dir.path());
    let durable = store.write(put("/d", Expect::Absent, "kept", Tier::Durable)).await.unwrap();
    let tier = Tier::Volatile { ttl: None };
    let mut last = store.write(put("/v", Expect::Absent, "lost", tier)).await.unwrap();
    for n in 0..100 {
        last = store.write(put("/v", Expect::Revision(last), &n.to_string(), tier)).await.unwrap();
    }
    drop(store);
    let store = open(dir.path());
    assert!(store.size().unwrap() > 0);
    assert!(store.revision().await.unwrap() > last);
    let page = store.list(Range::default()).await.unwrap();
    assert_eq!(page.entries.len(), 1);
    assert_eq!(page.entries[0].modified, durable);
    assert!(matches!(store.watch("", last).await, Err(Error::Compacted { .. })));
}

/// Entries that a key management service has encrypted do not prevent the start of a store whose service is away.
#[tokio::test]
async fn a_store_opens_without_its_key_management_service() {
    let (dir, keys) = (StoreDir::new(), tempfile::tempdir().unwrap());
    // Without encryption the values are stored as they are.
    let store = open(dir.path());
    let sealed = |key: &str, value: &[u8]| Write {
        value: Some(value.to_vec().into()),
        ..put(key, Expect::Absent, "", Tier::Durable)
    };
    for key in ["/secrets/n/a", "/secrets/n/b"] {
        store.write(sealed(key, SEALED_BY_SERVICE)).await.unwrap();
    }
    store.write(put("/pods/n/a", Expect::Absent, "{}", Tier::Durable)).await.unwrap();
    drop(store);
    let with_service = || {
        let sealing = Some(with_absent_service(keys.path()));
        Embedded::open(dir.path(), EmbeddedOptions { sealing, ..EmbeddedOptions::default() })
    };
    let store = with_service().unwrap();
    let ReadablePage { page, unreadable } = store.list_readable(Range::default()).await.unwrap();
    assert_eq!(page.entries.iter().map(|entry| &*entry.key).collect::<Vec<_>>(), ["/pods/n/a"]);
    let keys_of: Vec<&str> = unreadable.iter().map(|one| &*one.key).collect();
    assert_eq!(keys_of, ["/secrets/n/a", "/secrets/n/b"]);
    assert!(unreadable.iter().all(|one| one.error.is_of_service()));
    let refused = store.list(Range::default()).await.unwrap_err();
    assert!(refused.is_of_service(), "{refused}");
    drop(store);
    // After a failure of the service, its other values are not read in the same pass. So the damaged value is the
    // first.
    let damaged = [SEALED_BY_SERVICE, b"\xff"].concat();
    let store = open(dir.path());
    store.write(sealed("/secrets/a/damaged", &damaged)).await.unwrap();
    drop(store);
    let refused = with_service().err().unwrap();
    assert!(matches!(refused, Error::Sealed { .. }) && !refused.is_of_service(), "{refused}");
}

/// The consumer of the store decides whether it needs an entry with an unknown key.
#[tokio::test]
async fn an_unknown_key_of_an_entry_outside_the_key_file_does_not_prevent_the_start() {
    const FOO: &str = "example.com/foos/n/a";
    let (dir, keys) = (StoreDir::new(), tempfile::tempdir().unwrap());
    let store = open(dir.path());
    let damaged = [SEALED_BY_SERVICE, b"\xff"].concat();
    let write = Write { value: Some(damaged.into()), ..put(FOO, Expect::Absent, "", Tier::Durable) };
    let modified = store.write(write).await.unwrap();
    store.write(put("/pods/n/a", Expect::Absent, "{}", Tier::Durable)).await.unwrap();
    drop(store);
    // Without a provider, the provider of the value is unknown. With the provider, the value is damaged.
    let with_service = with_absent_service(keys.path());
    let own_keys = Keys::load_or_create(&keys.path().join("keys")).unwrap();
    let without = Sealing { keys: own_keys, prefixes: vec!["/secrets/".to_owned()], encryption: None };
    for sealing in [without, with_service] {
        let options = EmbeddedOptions { sealing: Some(sealing), ..EmbeddedOptions::default() };
        let store = Embedded::open(dir.path(), options).unwrap();
        let ReadablePage { page, unreadable } = store.list_readable(Range::default()).await.unwrap();
        assert_eq!(page.entries.iter().map(|entry| &*entry.key).collect::<Vec<_>>(), ["/pods/n/a"]);
        let expect = UnreadableEntry { key: FOO.into(), modified, service: None };
        assert_eq!(unreadable.iter().map(Unreadable::entry).collect::<Vec<_>>(), [expect]);
        assert!(store.list(Range::default()).await.is_err() && store.get(FOO).await.is_err());
        assert_eq!(store.revision_of(FOO).await.unwrap(), Some(modified));
    }
    let store = open(dir.path());
    let expect = Expect::Revision(modified);
    let deletion = Write { value: None, ..put(FOO, expect, "", Tier::Durable) };
    store.write(deletion).await.unwrap();
    assert_eq!(store.revision_of(FOO).await.unwrap(), None);
}

#[tokio::test]
async fn revisions_stay_reserved_when_volatile_writes_use_up_a_block() {
    let dir = StoreDir::new();
    let store = open(dir.path());
    let start = store.revision().await.unwrap();
    let tier = Tier::Volatile { ttl: None };
    let mut last = store.write(put("/v", Expect::Absent, "", tier)).await.unwrap();
    while last <= start + RESERVED + 10 {
        last = store.write(put("/v", Expect::Revision(last), "", tier)).await.unwrap();
    }
    drop(store);
    assert!(open(dir.path()).revision().await.unwrap() > last);
}

#[tokio::test]
async fn a_copy_taken_under_load_opens_with_every_acknowledged_write() {
    let (dir, copy) = (StoreDir::new(), tempfile::tempdir().unwrap());
    let store = open(dir.path());
    let mut acknowledged = Vec::new();
    for n in 0..200 {
        let key = format!("/k/{n:04}");
        store.write(put(&key, Expect::Absent, &"x".repeat(1500), Tier::Durable)).await.unwrap();
        acknowledged.push(key);
    }
    let target = copy.path().join("store");
    let status = std::process::Command::new("cp").arg("-a").arg(dir.path()).arg(&target).status().unwrap();
    assert!(status.success());
    let page = open(&target).list(Range::default()).await.unwrap();
    let keys: Vec<_> = page.entries.iter().map(|entry| entry.key.to_string()).collect();
    assert_eq!(keys, acknowledged);
}

#[tokio::test]
async fn opening_a_store_in_use_is_an_error() {
    let dir = StoreDir::new();
    let _held = open(dir.path());
    let Err(error) = Embedded::open(dir.path(), EmbeddedOptions::default()) else { panic!("opened twice") };
    assert!(matches!(error, Error::Locked { .. }));
    assert!(error.to_string().contains("in use by another process"));
}

#[tokio::test]
async fn a_damaged_file_is_named_as_corrupt() {
    let dir = StoreDir::new();
    drop(open(dir.path()));
    std::fs::write(dir.path().join("version"), b"not a store").unwrap();
    let Err(error) = Embedded::open(dir.path(), EmbeddedOptions::default()) else { panic!("opened") };
    assert!(matches!(error, Error::Corrupt { .. }), "{error:?}");
}

#[tokio::test]
async fn a_directory_that_cannot_be_made_is_an_error_of_opening() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let Err(error) = Embedded::open(&file.path().join("store"), EmbeddedOptions::default()) else {
        panic!("opened")
    };
    assert!(matches!(error, Error::Open { .. }));
}

#[test]
fn entries_expire_unless_they_changed_since() {
    let mut state = super::state::State::new(1, 100, 10);
    let commit = |revision, key: &str| crate::Commit {
        revision,
        key: key.into(),
        value: Some(bytes::Bytes::new()),
        created: 2,
        guard_follows: false,
    };
    let ttl = Some(Duration::from_secs(5));
    state.apply_volatile(&commit(2, "/old"), ttl);
    state.apply_volatile(&commit(3, "/renewed"), ttl);
    state.apply_volatile(&commit(4, "/renewed"), None);
    let at = state.next_expiry().unwrap();
    assert!(state.take_expired(at - Duration::from_secs(1)).is_empty());
    assert_eq!(state.take_expired(at), [("/old".into(), 2)]);
    assert_eq!(state.next_expiry(), None);
}

/// Creates a store with one entry, damages it, and returns the result of opening it.
async fn damaged(damage: impl FnOnce(&Path)) -> Result<usize, Error> {
    let dir = StoreDir::new();
    let store = open(dir.path());
    for n in 0..20 {
        store.write(put(&format!("/{n}"), Expect::Absent, "kept", Tier::Durable)).await.unwrap();
    }
    drop(store);
    damage(dir.path());
    let store = Embedded::open(dir.path(), EmbeddedOptions::default())?;
    Ok(store.list(Range::default()).await?.entries.len())
}

fn overwrite(path: &Path, at: u64, bytes: &[u8]) {
    use std::os::unix::fs::FileExt as _;
    std::fs::File::options().write(true).open(path).unwrap().write_all_at(bytes, at).unwrap();
}

#[tokio::test]
async fn a_damaged_store_does_not_open_as_an_empty_one() {
    use std::fs;
    let journal = |path: &Path| path.join("0.jnl");
    assert_eq!(damaged(|_| {}).await.unwrap(), 20);
    for (what, outcome) in [
        ("head", damaged(|p| overwrite(&journal(p), 0, &[0xa5; 64])).await),
        ("middle", damaged(|p| overwrite(&journal(p), 300, &[0xa5; 64])).await),
        ("no journal", damaged(|p| fs::remove_file(journal(p)).unwrap()).await),
        ("no version", damaged(|p| fs::remove_file(p.join("version")).unwrap()).await),
        ("empty version", damaged(|p| fs::write(p.join("version"), "").unwrap()).await),
        ("other version", damaged(|p| fs::write(p.join("version"), "FJL\x09").unwrap()).await),
    ] {
        assert!(matches!(outcome, Err(Error::Corrupt { .. })), "{what}: {outcome:?}");
    }
}

#[tokio::test]
async fn a_torn_end_loses_only_unacknowledged_writes() {
    let file = |path: &Path| path.join("0.jnl");
    let whole = |path: &Path| {
        let bytes = std::fs::read(file(path)).unwrap();
        bytes.iter().rposition(|byte| *byte != 0).unwrap() as u64 + 1
    };
    // The beginning of a further batch, which was not written completely. Zeros follow it.
    let begun = [1, 1, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 2, 0, 0, 0];
    for length in [1, 2, 13, 14, begun.len()] {
        let outcome = damaged(|path| overwrite(&file(path), whole(path), &begun[..length])).await;
        assert_eq!(outcome.unwrap(), 20, "{length}");
    }
    let cut = damaged(|path| {
        let journal = std::fs::File::options().write(true).open(file(path)).unwrap();
        journal.set_len(whole(path)).unwrap();
    });
    assert_eq!(cut.await.unwrap(), 20);
}

#[test]
fn an_interrupted_first_start_is_repeated() {
    for version in [None, Some("")] {
        let dir = StoreDir::new();
        std::fs::create_dir_all(dir.path().join("keyspaces")).unwrap();
        for name in ["lock", "0.jnl"] {
            std::fs::write(dir.path().join(name), "").unwrap();
        }
        version.inspect(|text| std::fs::write(dir.path().join("version"), text).unwrap());
        open(dir.path());
    }
}

/// Restores a store that is not in use. A process that another test starts has a copy of the lock of an earlier
/// restore, until it executes its program.
fn restored(path: &Path, backup: &[u8]) -> Result<crate::BackupSummary, Error> {
    eventually("the lock of an earlier restore is free", 10, || match super::restore(path, None, backup) {
        Err(Error::Locked { .. }) => None,
        outcome => Some(outcome),
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_backup_under_writes_has_every_write_up_to_its_revision() {
    let (dir, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let store = Arc::new(open(&dir.path().join("store")));
    let writer = {
        let store = store.clone();
        tokio::spawn(async move {
            let mut written = Vec::new();
            for n in 0..400 {
                let key = format!("/k/{n:04}");
                let revision = store.write(put(&key, Expect::Absent, &"x".repeat(1500), Tier::Durable)).await;
                written.push((key, revision.unwrap()));
            }
            written
        })
    };
    let begun = async {
        while store.get("/k/0020").await.unwrap().is_none() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(std::time::Duration::from_secs(60), begun).await.expect("the first writes");
    let backup = store.backup().unwrap();
    let bytes: Vec<u8> = backup.flat_map(|chunk| chunk.unwrap().to_vec()).collect();
    let written = writer.await.unwrap();
    let path = other.path().join("store");
    let summary = restored(&path, &bytes).unwrap();
    let expected: Vec<_> = written.iter().filter(|(_, revision)| *revision <= summary.revision).collect();
    assert!(expected.len() > 20);
    let store = open(&path);
    let page = store.list(Range { prefix: "/k/".to_owned(), ..Range::default() }).await.unwrap();
    let found: Vec<_> = page.entries.iter().map(|entry| (entry.key.to_string(), entry.modified)).collect();
    assert!(found.iter().eq(expected), "{} entries at {}", found.len(), summary.revision);
    assert!(page.revision > written.last().unwrap().1, "revisions that clients have seen are not used again");
}

#[tokio::test]
async fn a_restore_replaces_the_store_or_leaves_it_alone() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("store");
    let store = open(&path);
    store.write(put("/a", Expect::Absent, "old", Tier::Durable)).await.unwrap();
    let bytes: Vec<u8> = store.backup().unwrap().flat_map(|chunk| chunk.unwrap().to_vec()).collect();
    store.write(put("/b", Expect::Absent, "new", Tier::Durable)).await.unwrap();
    assert!(matches!(super::restore(&path, None, &*bytes), Err(Error::Locked { .. })));
    drop(store);
    let cut = &bytes[..bytes.len() - 1];
    assert!(matches!(restored(&path, cut), Err(Error::Backup { .. })));
    assert_eq!(open(&path).list(Range::default()).await.unwrap().entries.len(), 2);
    // The remains of an interrupted restore.
    std::fs::create_dir(dir.path().join("store.restoring")).unwrap();
    assert_eq!(restored(&path, &bytes).unwrap().entries, 1);
    assert_eq!(open(&path).list(Range::default()).await.unwrap().entries.len(), 1);
    assert_eq!(
        open(&dir.path().join("store.replaced")).list(Range::default()).await.unwrap().entries.len(),
        2
    );
    // A damaged store can be replaced, too.
    std::fs::write(path.join("version"), "damaged").unwrap();
    assert_eq!(restored(&path, &bytes).unwrap().entries, 1);
    assert_eq!(open(&path).list(Range::default()).await.unwrap().entries.len(), 1);
}

#[tokio::test]
async fn two_restores_of_one_backup_do_not_use_a_revision_twice() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("store");
    let store = open(&path);
    store.write(put("/a", Expect::Absent, "old", Tier::Durable)).await.unwrap();
    let bytes: Vec<u8> = store.backup().unwrap().flat_map(|chunk| chunk.unwrap().to_vec()).collect();
    drop(store);
    restored(&path, &bytes).unwrap();
    let store = open(&path);
    let seen = store.write(put("/b", Expect::Absent, "new", Tier::Durable)).await.unwrap();
    drop(store);
    // The file with the revision helps also if the store is damaged.
    std::fs::write(path.join("version"), "damaged").unwrap();
    restored(&path, &bytes).unwrap();
    let store = open(&path);
    assert!(store.revision().await.unwrap() > seen);
    assert!(matches!(store.watch("", seen).await, Err(Error::Compacted { .. })));
    drop(store);
    std::fs::write(dir.path().join("store.restored"), "damaged").unwrap();
    assert!(matches!(restored(&path, &bytes), Err(Error::Open { .. })));
}

#[test]
fn a_start_during_a_restore_does_not_remove_its_files() {
    let dir = tempfile::tempdir().unwrap();
    let (path, copy) = (dir.path().join("store"), dir.path().join("store.restoring"));
    drop(open(&path));
    let lock = super::restore::lock(&path).unwrap().expect("a lock file");
    std::fs::create_dir(&copy).unwrap();
    assert!(matches!(Embedded::open(&path, EmbeddedOptions::default()), Err(Error::Locked { .. })));
    assert!(copy.exists());
    // A close may not be enough: a process that another test starts has a copy of the file, until it executes its
    // program.
    lock.unlock().unwrap();
    drop(open(&path));
    assert!(!copy.exists());
}

#[tokio::test]
async fn a_restore_without_a_store_keeps_the_store_that_was_replaced_before() {
    let dir = tempfile::tempdir().unwrap();
    let (path, replaced) = (dir.path().join("store"), dir.path().join("store.replaced"));
    let store = open(&path);
    let bytes: Vec<u8> = store.backup().unwrap().flat_map(|chunk| chunk.unwrap().to_vec()).collect();
    store.write(put("/a", Expect::Absent, "kept", Tier::Durable)).await.unwrap();
    drop(store);
    std::fs::rename(&path, &replaced).unwrap();
    assert!(restored(&path, &bytes[1..]).is_err());
    restored(&path, &bytes).unwrap();
    assert!(open(&path).get("/a").await.unwrap().is_none());
    assert!(open(&replaced).get("/a").await.unwrap().is_some());
    assert!(!dir.path().join("store.restoring").exists());
}

#[test]
fn an_entry_with_a_revision_above_the_newest_one_is_not_restored() {
    let dir = tempfile::tempdir().unwrap();
    let restore_of = |created: u64, modified: u64| {
        let value = [created.to_be_bytes(), modified.to_be_bytes()].concat();
        let record = Ok((b"/a".as_slice().into(), value.into()));
        let backup =
            crate::Backup::new(crate::BackupHead { revision: 7, reserved: 9 }, std::iter::once(record));
        let bytes: Vec<u8> = backup.flat_map(|chunk| chunk.unwrap().to_vec()).collect();
        restored(&dir.path().join("store"), &bytes)
    };
    for (created, modified) in [(8, 8), (7, 6), (1, u64::MAX)] {
        let refused = restore_of(created, modified);
        assert!(matches!(refused, Err(Error::Backup { .. })), "{created} {modified}: {refused:?}");
    }
    assert_eq!(restore_of(7, 7).unwrap().entries, 1);
}

#[test]
fn the_lock_of_a_replaced_store_does_not_lock_its_successor() {
    let (dir, other) = (StoreDir::new(), StoreDir::new());
    drop(open(other.path()));
    let store = open(dir.path());
    super::restore::check_locked(dir.path()).unwrap();
    // As a restore that ends while the engine waits for the lock.
    super::migrate::exchange(dir.path(), other.path()).unwrap();
    assert!(matches!(super::restore::check_locked(dir.path()), Err(Error::Locked { .. })));
    super::migrate::exchange(dir.path(), other.path()).unwrap();
    drop(store);
    assert!(super::restore::lock(dir.path()).unwrap().is_some());
}

#[test]
fn a_restore_does_not_write_through_a_link_beside_the_store() {
    let dir = tempfile::tempdir().unwrap();
    let (path, other) = (dir.path().join("store"), dir.path().join("other"));
    let store = open(&path);
    let bytes: Vec<u8> = store.backup().unwrap().flat_map(|chunk| chunk.unwrap().to_vec()).collect();
    drop(store);
    std::fs::write(&other, "kept").unwrap();
    std::os::unix::fs::symlink(&other, dir.path().join("store.restored.new")).unwrap();
    restored(&path, &bytes).unwrap();
    assert_eq!(std::fs::read(&other).unwrap(), b"kept");
    let restored = dir.path().join("store.restored");
    assert!(std::fs::symlink_metadata(restored).unwrap().is_file());
}
