//! Tests of the migration of a store of an earlier version.

use std::{fs, path::Path};

use coracle_testing::{killed_dir, run_until_killed_in};

use super::{
    Embedded,
    disk_tests::{has, sealed},
    migrate::sibling,
};
use crate::{Range, Store};

/// A text in each value. No part of it repeats, so compression does not change its first copy.
const PLAIN: &str = "plain-text";
/// Number of entries of the store of the first version, which are several batches of the migration.
const ENTRIES: u64 = 5;
/// The end of the reserved revisions of the store of the first version.
const RESERVED_UNTIL: u64 = 70_000;

/// Writes a store as the first version did: revisions in big-endian and the value, without encryption.
fn write_first_layout(path: &Path) {
    let database = fjall::Database::builder(path).open().unwrap();
    let options = || fjall::KeyspaceCreateOptions::default().max_memtable_size(2 << 20);
    let entries = database.keyspace("entries", options).unwrap();
    let meta = database.keyspace("meta", options).unwrap();
    for n in 1..=ENTRIES {
        let mut bytes = [n.to_be_bytes(), (n + 100).to_be_bytes()].concat();
        bytes.extend_from_slice(value(n).as_bytes());
        entries.insert(key(n).as_str(), bytes).unwrap();
    }
    meta.insert("reserved-revision", RESERVED_UNTIL.to_be_bytes()).unwrap();
    database.persist(fjall::PersistMode::SyncAll).unwrap();
}

fn key(n: u64) -> String {
    format!("/secrets/ns/{n}")
}

fn value(n: u64) -> String {
    format!("{PLAIN} {n} {}", "x".repeat(400 << 10))
}

/// Opens the store, and checks that it has all entries, and that no plain value is left on the disk.
async fn check_migrated(directory: &Path) {
    let path = directory.join("store");
    let store = Embedded::open(&path, sealed(&directory.join("key"))).unwrap();
    assert!(!sibling(&path, ".sealing").exists());
    assert!(!has(directory, PLAIN), "a plain value is left on disk");
    assert!(store.revision().await.unwrap() >= RESERVED_UNTIL);
    let found = store.list(Range::default()).await.unwrap().entries;
    assert_eq!(found.len() as u64, ENTRIES);
    for (entry, n) in found.iter().zip(1..) {
        assert_eq!((&*entry.key, entry.created, entry.modified), (&*key(n), n, n + 100));
        assert!(*entry.value == *value(n).as_bytes(), "the value of {n} has changed");
    }
}

#[tokio::test]
async fn a_store_in_the_layout_of_the_first_version_is_migrated() {
    let dir = tempfile::tempdir().unwrap();
    write_first_layout(&dir.path().join("store"));
    assert!(has(dir.path(), PLAIN));
    check_migrated(dir.path()).await;
}

#[tokio::test]
async fn a_migration_that_is_killed_at_any_step_is_completed_by_the_next_start() {
    if let Some(dir) = killed_dir() {
        drop(Embedded::open(&dir.join("store"), sealed(&dir.join("key"))));
        return;
    }
    let test =
        "embedded::migrate_tests::a_migration_that_is_killed_at_any_step_is_completed_by_the_next_start";
    for step in ["created", "batch", "filled", "exchanged", "synced", "opened", "removed"] {
        let dir = tempfile::tempdir().unwrap();
        write_first_layout(&dir.path().join("store"));
        run_until_killed_in(test, &format!("store.migrate.{step}"), dir.path());
        let copy = sibling(&dir.path().join("store"), ".sealing");
        assert_eq!(copy.exists(), step != "removed", "{step}");
        if step == "opened" {
            // The replaced store, of which the killed process has removed a part.
            fs::remove_dir_all(copy.join("keyspaces")).unwrap();
        }
        check_migrated(dir.path()).await;
    }
}
