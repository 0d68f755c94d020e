//! The store on a full disk, and the encryption of values on disk. The tests mount a small tmpfs, so they need root.

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use coracle_sealing::Keys;
use coracle_testing::eventually_async;
use nix::{
    mount::{MsFlags, mount},
    sched::{CloneFlags, unshare},
};

use super::{Embedded, EmbeddedOptions, Sealing, migrate::sibling, tests::StoreDir};
use crate::{Entry, Error, Expect, Health, Range, Store, Tier, Write, suite::put};

/// Runs the test on a disk of this many MiB, in its own mount namespace.
fn on_disk<F: Future<Output = ()>>(megabytes: u32, test: impl FnOnce(PathBuf) -> F + Send) {
    let dir = tempfile::tempdir().unwrap();
    std::thread::scope(|scope| {
        let path = dir.path();
        let thread = scope.spawn(move || {
            unshare(CloneFlags::CLONE_NEWNS).expect("root");
            let none = None::<&str>;
            mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none).unwrap();
            let options = format!("size={megabytes}m");
            mount(Some("tmpfs"), path, Some("tmpfs"), MsFlags::empty(), Some(options.as_str())).unwrap();
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(test(path.to_owned()));
        });
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    });
}

fn open(path: &Path) -> Embedded {
    Embedded::open(path, EmbeddedOptions::default()).unwrap()
}

/// Writes until the disk has no room left.
fn fill(path: &Path) {
    use std::io::Write as _;
    let mut file = fs::File::options().create(true).append(true).open(path).unwrap();
    while file.write_all(&[7; 4096]).is_ok() {}
}

fn delete(key: &str, revision: u64) -> Write {
    Write {
        key: key.into(),
        expect: Expect::Revision(revision),
        value: None,
        tier: Tier::Durable,
        guard: None,
    }
}

async fn all(store: &Embedded) -> Vec<Entry> {
    store.list(Range::default()).await.unwrap().entries
}

#[test]
fn a_full_disk_refuses_new_objects_deletes_old_ones_and_recovers_by_itself() {
    on_disk(64, async |disk| {
        let (path, filler) = (disk.join("store"), disk.join("filler"));
        let store = open(&path);
        assert_eq!(store.health(), Health::Good);
        let mut revisions = Vec::new();
        for n in 0..100 {
            let write = put(&format!("/{n:03}"), Expect::Absent, &"x".repeat(1000), Tier::Durable);
            revisions.push(store.write(write).await.unwrap());
        }
        fill(&filler);
        assert!(matches!(store.health(), Health::Full { .. }), "{:?}", store.health());
        let refused = store.write(put("/new", Expect::Absent, "refused", Tier::Durable)).await;
        assert!(matches!(refused, Err(Error::Full { .. })), "{refused:?}");
        let volatile = put("/lease", Expect::Absent, "kept", Tier::Volatile { ttl: None });
        store.write(volatile).await.unwrap();
        for (n, revision) in revisions.iter().take(50).enumerate() {
            store.write(delete(&format!("/{n:03}"), *revision)).await.unwrap();
        }
        // On a full disk an update that removes a finalizer also succeeds.
        store.write(put("/050", Expect::Revision(revisions[50]), "less", Tier::Durable)).await.unwrap();
        assert_eq!(all(&store).await.len(), 51);
        // Simulate a power cut in this state.
        drop(store);
        let store = open(&path);
        assert_eq!(all(&store).await.len(), 50);
        fs::remove_file(&filler).unwrap();
        store.write(put("/new", Expect::Absent, "taken", Tier::Durable)).await.unwrap();
        assert_eq!(store.health(), Health::Good);
    });
}

/// The test deletes more entries than the reserve has room for, so that the write to the journal fails.
#[test]
fn acknowledged_writes_stay_and_refused_writes_have_no_effect() {
    on_disk(24, async |disk| {
        let (path, filler) = (disk.join("store"), disk.join("filler"));
        let store = open(&path);
        let long = |n: usize| format!("/{n:05}/{}", "k".repeat(2000));
        let mut revisions = Vec::new();
        for n in 0..2500 {
            let write = put(&long(n), Expect::Absent, "x", Tier::Durable);
            revisions.push(store.write(write).await.unwrap());
        }
        fill(&filler);
        let (mut deleted, mut refused) = (0, 0);
        while deleted < 2400 && refused < 20 {
            // The filler takes the space that the store has freed, such as the reserve.
            fill(&filler);
            match store.write(delete(&long(deleted), revisions[deleted])).await {
                Ok(_) => (deleted, refused) = (deleted + 1, 0),
                Err(Error::Disk { detail }) => {
                    assert!(
                        !detail.contains("cannot write to its disk"),
                        "the message is repeated: {detail}"
                    );
                    refused += 1;
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
                Err(other) => panic!("{other}"),
            }
        }
        assert_eq!(refused, 20, "the disk did not fail");
        assert_ne!(store.health(), Health::Good);
        let volatile = put("/lease", Expect::Absent, "kept", Tier::Volatile { ttl: None });
        store.write(volatile).await.unwrap();
        let page = all(&store).await;
        assert_eq!(page.len(), 2500 - deleted + 1, "reads go on, without the refused deletion");
        fs::remove_file(&filler).unwrap();
        let key = long(deleted);
        let revision = eventually_async("a write", 10, async || {
            store.write(delete(&key, revisions[deleted])).await.ok()
        })
        .await;
        assert!(revision > page.iter().map(|entry| entry.modified).max().unwrap());
        assert_eq!(store.health(), Health::Good);
        assert_eq!(all(&store).await.len(), 2500 - deleted);
        drop(store);
        assert_eq!(all(&open(&path)).await.len(), 2500 - deleted - 1);
    });
}

#[test]
fn a_store_opens_on_a_full_disk() {
    on_disk(64, async |disk| {
        let path = disk.join("store");
        let store = open(&path);
        let revision = store.write(put("/a", Expect::Absent, "x", Tier::Durable)).await.unwrap();
        drop(store);
        fill(&disk.join("filler"));
        let store = open(&path);
        store.write(delete("/a", revision)).await.unwrap();
        assert_eq!(all(&store).await, []);
    });
}

pub(super) fn sealed(keys: &Path) -> EmbeddedOptions {
    let sealing = Sealing {
        keys: Keys::load_or_create(keys).unwrap(),
        prefixes: vec!["/secrets/".to_owned()],
        encryption: None,
    };
    EmbeddedOptions { sealing: Some(sealing), ..EmbeddedOptions::default() }
}

/// Whether a file below the directory has the text.
pub(super) fn has(directory: &Path, text: &str) -> bool {
    let is_in = |file: &Path| match fs::read(file) {
        Ok(content) => content.windows(text.len()).any(|bytes| bytes == text.as_bytes()),
        // An open store removes files in the background.
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => false,
        Err(error) => panic!("{}: {error}", file.display()),
    };
    fs::read_dir(directory).unwrap().flatten().any(|entry| match entry.file_type().unwrap().is_dir() {
        true => has(&entry.path(), text),
        false => is_in(&entry.path()),
    })
}

#[tokio::test]
async fn values_of_the_prefix_are_encrypted_on_disk_and_plain_in_memory() {
    let dir = tempfile::tempdir().unwrap();
    let (path, keys) = (dir.path().join("store"), dir.path().join("key"));
    let store = Embedded::open(&path, sealed(&keys)).unwrap();
    let mut watch = store.watch("", store.revision().await.unwrap()).await.unwrap();
    store.write(put("/secrets/ns/a", Expect::Absent, "hush-hush", Tier::Durable)).await.unwrap();
    store.write(put("/configmaps/ns/a", Expect::Absent, "plain-text", Tier::Durable)).await.unwrap();
    assert_eq!(crate::suite::commit(&mut watch).await.value.as_deref(), Some(b"hush-hush".as_slice()));
    assert_eq!(store.get("/secrets/ns/a").await.unwrap().unwrap().value, "hush-hush");
    drop(store);
    assert!(!has(&path, "hush-hush") && has(&path, "plain-text"));
    let store = Embedded::open(&path, sealed(&keys)).unwrap();
    assert_eq!(all(&store).await.iter().filter(|entry| entry.value == "hush-hush").count(), 1);
    drop(store);
    let other = Embedded::open(&path, sealed(&dir.path().join("other")));
    assert!(matches!(other, Err(Error::Sealed { .. })), "another key opens the store");
}

#[tokio::test]
async fn a_value_of_an_earlier_key_is_outdated_until_its_next_write() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("encryption.yaml");
    let configure = |keys: &[(&str, &str)]| {
        let keys: Vec<String> =
            keys.iter().map(|(name, secret)| format!("{{name: {name}, secret: {secret}}}")).collect();
        let text = format!(
            "apiVersion: apiserver.config.k8s.io/v1\nkind: EncryptionConfiguration\nresources:\n\
             - resources: [secrets]\n  providers: [{{secretbox: {{keys: [{}]}}}}]\n",
            keys.join(", ")
        );
        fs::write(&file, text).unwrap();
        fs::set_permissions(&file, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    };
    let [first, second] = [
        ("a", "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA="),
        ("b", "BBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBA="),
    ];
    configure(&[first]);
    let encryption = std::sync::Arc::new(coracle_encryption::Encryption::load(&file).unwrap());
    let mut options = sealed(&dir.path().join("key"));
    options.sealing.as_mut().unwrap().encryption = Some(encryption.clone());
    let store = Embedded::open(&dir.path().join("store"), options).unwrap();
    let key = "/secrets/ns/a";
    let revision = store.write(put(key, Expect::Absent, "x", Tier::Durable)).await.unwrap();
    assert!(store.is_current(key).await.unwrap() && store.is_current("/secrets/ns/none").await.unwrap());
    configure(&[second, first]);
    encryption.reload().unwrap();
    assert!(!store.is_current(key).await.unwrap());
    store.write(put(key, Expect::Revision(revision), "x", Tier::Durable)).await.unwrap();
    assert!(store.is_current(key).await.unwrap());
}

#[tokio::test]
async fn a_store_of_an_earlier_version_is_encrypted_and_a_second_key_takes_over() {
    let dir = tempfile::tempdir().unwrap();
    let (path, keys) = (dir.path().join("store"), dir.path().join("key"));
    let store = open(&path);
    let mut revisions = Vec::new();
    for n in 0..300 {
        let write = put(&format!("/secrets/ns/{n}"), Expect::Absent, "hush-hush", Tier::Durable);
        revisions.push(store.write(write).await.unwrap());
    }
    let plain = store.write(put("/pods/a", Expect::Absent, "x", Tier::Durable)).await.unwrap();
    drop(store);
    assert!(has(&path, "hush-hush"));
    // The incomplete copy that a crash leaves.
    fs::create_dir(sibling(&path, ".sealing")).unwrap();
    fs::write(sibling(&path, ".sealing").join("half"), "x").unwrap();
    let store = Embedded::open(&path, sealed(&keys)).unwrap();
    assert!(!has(dir.path(), "hush-hush"), "a plain value is left on disk");
    assert!(!sibling(&path, ".sealing").exists());
    let mode = std::os::unix::fs::PermissionsExt::mode(&fs::metadata(&path).unwrap().permissions());
    assert_eq!(mode & 0o777, 0o700, "the copy is as private as the store");
    assert!(store.revision().await.unwrap() > plain);
    let entry = store.get("/secrets/ns/7").await.unwrap().unwrap();
    assert_eq!((entry.value.as_ref(), entry.modified), (b"hush-hush".as_slice(), revisions[7]));
    assert_eq!(store.get("/pods/a").await.unwrap().unwrap().modified, plain);
    drop(store);
    let old = fs::read_to_string(&keys).unwrap();
    let id = old.split(' ').next().unwrap().to_owned();
    assert!(has(&path, &id));
    Keys::load_or_create(&dir.path().join("second")).unwrap();
    fs::write(&keys, fs::read_to_string(dir.path().join("second")).unwrap() + &old).unwrap();
    let store = Embedded::open(&path, sealed(&keys)).unwrap();
    assert_eq!(all(&store).await.len(), 301);
    assert!(!has(&path, &id), "the first key is still in use");
    drop(store);
    fs::copy(dir.path().join("second"), &keys).unwrap();
    assert_eq!(all(&Embedded::open(&path, sealed(&keys)).unwrap()).await.len(), 301);
}

#[tokio::test]
async fn a_store_behind_a_symbolic_link_is_encrypted_where_it_is() {
    let dir = tempfile::tempdir().unwrap();
    let (disk, link) = (dir.path().join("disk"), dir.path().join("link"));
    fs::create_dir(&disk).unwrap();
    drop(open(&disk.join("store")));
    std::os::unix::fs::symlink(disk.join("store"), &link).unwrap();
    let store = open(&link);
    store.write(put("/secrets/ns/a", Expect::Absent, "hush-hush", Tier::Durable)).await.unwrap();
    drop(store);
    assert!(has(&disk, "hush-hush"));
    let store = Embedded::open(&link, sealed(&dir.path().join("key"))).unwrap();
    assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
    assert!(!has(&disk, "hush-hush"), "a plain value is left on disk");
    assert_eq!(all(&store).await.len(), 1);
}

#[tokio::test]
async fn a_corrupt_table_is_an_error_of_reading() {
    let dir = StoreDir::new();
    let store = open(dir.path());
    for n in 0..3000 {
        let write = put(&format!("/{n:05}"), Expect::Absent, &"x".repeat(2000), Tier::Durable);
        store.write(write).await.unwrap();
    }
    drop(store);
    let mut tables = 0;
    for keyspace in fs::read_dir(dir.path().join("keyspaces")).unwrap().flatten() {
        for table in fs::read_dir(keyspace.path().join("tables")).into_iter().flatten().flatten() {
            use std::os::unix::fs::FileExt as _;
            let file = fs::File::options().write(true).open(table.path()).unwrap();
            file.write_all_at(&[0xa5; 64], 200).unwrap();
            tables += 1;
        }
    }
    assert!(tables > 0, "there is no table");
    let outcome = match Embedded::open(dir.path(), EmbeddedOptions::default()) {
        Ok(store) => store.list(Range::default()).await.map(drop),
        Err(error) => Err(error),
    };
    let text = outcome.unwrap_err().to_string();
    assert!(!text.contains("write") && (text.contains("read") || text.contains("damaged")), "{text}");
}
