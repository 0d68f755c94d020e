//! Opens the store: embedded in the state directory, or on etcd.

use std::{
    fs::{File, Permissions, TryLockError},
    os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
    sync::Arc,
};

use coracle_encryption::Encryption;
use coracle_sealing::Keys;
use coracle_store::{
    Embedded, EmbeddedOptions, Entry, Error as StoreError, Etcd, EtcdIdentity, EtcdOptions, EtcdTls, Expect,
    Range, Sealing, Store, Tier, Write,
};

use crate::{
    config::{ControlPlaneConfig, EncryptionFile, EtcdConfig},
    pki::{Pki, PkiError},
};

/// The key file, below the state directory.
pub(crate) const KEY_FILE: &str = "sealing.key";
/// Prefix of the store's keys of Secrets: the API group, which is empty, and the resource.
const SECRETS: &str = "/secrets/";
/// The key of the authority's fingerprint in etcd. It has no `/`, so no object has this key.
const AUTHORITY: &str = "authority";
/// The key of a value in etcd that is encrypted with the key file. A server that cannot decrypt it has another key
/// file, so these servers could not read each other's Secrets.
const KEY_CHECK: &str = "sealing-check";
/// Page size of the list that checks whether this server can decrypt all Secrets.
const SECRETS_PAGE: usize = 500;

/// The store cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum OpenStoreError {
    /// The store cannot be opened: it is in use or damaged, its disk cannot be written, or etcd does not answer.
    #[error("cannot open the store")]
    Store(#[source] StoreError),
    /// The key file for Secrets cannot be used.
    #[error("cannot use the encryption keys")]
    Keys(#[source] coracle_sealing::Error),
    /// The process ends before the encryption keys are read.
    #[error("cannot read the encryption keys: {0}")]
    Interrupted(String),
    /// The cluster's keys cannot be read.
    #[error("cannot read the cluster's keys")]
    Pki(#[source] PkiError),
    /// The lock file of the state directory cannot be used.
    #[error("cannot lock {path}")]
    Lock {
        /// The lock file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// This server and the cluster in etcd have different authorities.
    #[error(
        "the cluster in etcd belongs to another certificate authority: copy pki/ and sealing.key from the state directory \
         of one of its servers, or use another --etcd-prefix"
    )]
    OtherCluster,
    /// This server and the cluster in etcd have different encryption keys.
    #[error(
        "the Secrets of the cluster in etcd are encrypted with another key: copy sealing.key from the state directory of \
         one of its servers"
    )]
    OtherKeys(#[source] StoreError),
}

/// An open store.
pub(crate) struct Opened {
    pub(crate) store: Arc<dyn Store>,
    /// The lock of the state directory. `None` for the embedded store, which has its own lock.
    pub(crate) lock: Option<File>,
    /// The providers of the encryption configuration.
    pub(crate) encryption: Option<Arc<Encryption>>,
}

/// Opens the store, with encryption of Secrets.
pub(crate) async fn open(config: &ControlPlaneConfig) -> Result<Opened, OpenStoreError> {
    let lock = match &config.etcd {
        Some(_) => Some(lock(&config.state_dir)?),
        None => None,
    };
    let keys = match &config.encryption_key_file {
        Some(path) => Keys::load(path),
        None => Keys::load_or_create(&config.state_dir.join(KEY_FILE)),
    };
    let keys = keys.map_err(OpenStoreError::Keys)?;
    let encryption = match config.encryption_config.clone() {
        // Loading blocks, because it may call a key management service.
        Some(EncryptionFile { path, .. }) => {
            let loaded = tokio::task::spawn_blocking(move || Encryption::load(&path)).await;
            let loaded = loaded.map_err(|error| OpenStoreError::Interrupted(error.to_string()))?;
            Some(Arc::new(loaded.map_err(OpenStoreError::Keys)?))
        }
        None => None,
    };
    let sealing = Some(sealing(keys, encryption.clone()));
    let store: Arc<dyn Store> = match &config.etcd {
        Some(etcd) => Arc::new(connect(etcd, sealing).await?),
        None => {
            let options = EmbeddedOptions { sealing, ..EmbeddedOptions::default() };
            let opened = Embedded::open(&config.state_dir.join("store"), options);
            Arc::new(opened.map_err(OpenStoreError::Store)?)
        }
    };
    Ok(Opened { store, lock, encryption })
}

/// The encryption of Secrets with these keys, and of the resources that the configuration names.
pub(crate) fn sealing(keys: Keys, encryption: Option<Arc<Encryption>>) -> Sealing {
    Sealing { keys, prefixes: vec![SECRETS.to_owned(), KEY_CHECK.to_owned()], encryption }
}

/// Locks the state directory, so that only one process writes certificates and key files into it.
fn lock(state_dir: &Path) -> Result<File, OpenStoreError> {
    let path = state_dir.join("controlplane.lock");
    let made = std::fs::create_dir_all(state_dir);
    made.map_err(|source| OpenStoreError::Lock { path: state_dir.to_owned(), source })?;
    let locked = File::options().create(true).append(true).mode(0o600).open(&path).and_then(|file| {
        match file.try_lock() {
            // Local users must not be able to hold the lock.
            Ok(()) => file.set_permissions(Permissions::from_mode(0o600)).map(|()| file),
            Err(TryLockError::WouldBlock) => {
                Err(std::io::Error::other("another control plane uses the directory"))
            }
            Err(TryLockError::Error(error)) => Err(error),
        }
    });
    locked.map_err(|source| OpenStoreError::Lock { path, source })
}

async fn connect(config: &EtcdConfig, sealing: Option<Sealing>) -> Result<Etcd, OpenStoreError> {
    let identity = config
        .identity
        .as_ref()
        .map(|files| EtcdIdentity { certificate: files.certificate.clone(), key: files.key.clone() });
    let tls = config.ca_file.clone().map(|authority| EtcdTls { authority, identity });
    let (servers, prefix) = (config.servers.clone(), config.prefix.clone());
    let EtcdConfig { compaction, size_max_age, .. } = *config;
    let options = EtcdOptions { servers, prefix, tls, sealing, compaction, size_max_age };
    Etcd::connect(options).await.map_err(OpenStoreError::Store)
}

/// Checks that the cluster in a shared store has this server's authority and encryption keys. The first server records
/// its own authority and keys.
pub(crate) async fn check_cluster(
    store: &dyn Store,
    pki: &Pki,
    encryption: Option<&Encryption>,
) -> Result<(), OpenStoreError> {
    if !store.is_shared() {
        return Ok(());
    }
    let own = pki.fingerprint().map_err(OpenStoreError::Pki)?;
    let found = recorded(store, AUTHORITY, &own).await.map_err(OpenStoreError::Store)?;
    if found.value != own.as_bytes() {
        return Err(OpenStoreError::OtherCluster);
    }
    let found = match store.get(KEY_CHECK).await.map_err(other_keys)? {
        Some(found) => found,
        // The key file is not used for encryption, so the servers may have different key files.
        None if encryption.is_some_and(|encryption| encryption.covers(SECRETS)) => return Ok(()),
        None => match record_keys(store).await? {
            Some(found) => found,
            None => return Ok(()),
        },
    };
    // After a rotation the value must be encrypted with the new key before the administrator removes the old key.
    if !store.is_current(KEY_CHECK).await.map_err(OpenStoreError::Store)? {
        let expect = Expect::Revision(found.modified);
        match store.write(record(KEY_CHECK, KEY_CHECK, expect)).await {
            // A conflict means that another server has already written the value.
            Ok(_) | Err(StoreError::Conflict { .. }) => {}
            Err(error) => tracing::warn!(%error, "cannot encrypt the check of the keys with the first key"),
        }
    }
    Ok(())
}

/// Records the keys of this server for a cluster that has no check yet. Returns the check; `None` if the store is full.
/// A cluster of an earlier version may have Secrets. A server that cannot decrypt them must not record its keys,
/// because it would exclude the servers with the right keys.
async fn record_keys(store: &dyn Store) -> Result<Option<Entry>, OpenStoreError> {
    let mut range = Range { prefix: SECRETS.to_owned(), limit: SECRETS_PAGE, ..Range::default() };
    loop {
        let page = store.list(range.clone()).await.map_err(other_keys)?;
        match page.entries.last().filter(|_| page.more) {
            Some(last) => range.start = format!("{}\0", last.key),
            None => break,
        }
    }
    match recorded(store, KEY_CHECK, KEY_CHECK).await {
        Ok(found) => Ok(Some(found)),
        Err(error @ StoreError::Quota) => {
            tracing::warn!(%error, "cannot record the check of the keys yet");
            Ok(None)
        }
        Err(error) => Err(other_keys(error)),
    }
}

/// The error of a value that cannot be read. A failure of a key management service does not mean that the key file is
/// wrong.
fn other_keys(error: StoreError) -> OpenStoreError {
    let is_undecryptable = match &error {
        StoreError::Sealed { source, .. } => !matches!(source, coracle_sealing::Error::Kms { .. }),
        _ => false,
    };
    if is_undecryptable { OpenStoreError::OtherKeys(error) } else { OpenStoreError::Store(error) }
}

/// The entry with this key. Creates it with the value of this server if it is missing. A full store accepts no write,
/// so an existing entry is not written.
async fn recorded(store: &dyn Store, key: &'static str, own: &str) -> Result<Entry, StoreError> {
    if let Some(found) = store.get(key).await? {
        return Ok(found);
    }
    let revision = match store.write(record(key, own, Expect::Absent)).await {
        Ok(revision) => revision,
        // Another server has created the entry first.
        Err(StoreError::Conflict { at, .. }) => at,
        Err(error) => return Err(error),
    };
    let found = store.get(key).await?;
    found.ok_or(StoreError::Conflict { found: None, at: revision })
}

fn record(key: &'static str, value: &str, expect: Expect) -> Write {
    Write { key: key.into(), expect, value: Some(value.to_owned().into()), tier: Tier::Durable, guard: None }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use coracle_store::{Backup, Health, Page, Watch};
    use futures::future::BoxFuture;

    use super::*;

    /// A store that other servers share.
    struct SharedStore {
        store: Embedded,
        is_full: AtomicBool,
        has_other_keys: AtomicBool,
        has_other_secrets: AtomicBool,
    }

    /// The error of a value that another key encrypts.
    fn sealed<T>(key: &str) -> BoxFuture<'static, Result<T, StoreError>>
    where
        T: Send + 'static,
    {
        let source = coracle_sealing::Error::UnknownProvider;
        let error = StoreError::Sealed { key: key.to_owned(), source };
        Box::pin(std::future::ready(Err(error)))
    }

    impl Store for SharedStore {
        fn get<'a>(&'a self, key: &'a str) -> BoxFuture<'a, Result<Option<Entry>, StoreError>> {
            if key == KEY_CHECK && self.has_other_keys.load(Ordering::SeqCst) {
                return sealed(key);
            }
            Store::get(&self.store, key)
        }

        fn list(&self, range: Range) -> BoxFuture<'_, Result<Page, StoreError>> {
            if range.prefix == SECRETS && self.has_other_secrets.load(Ordering::SeqCst) {
                return sealed(SECRETS);
            }
            Store::list(&self.store, range)
        }

        fn write(&self, write: Write) -> BoxFuture<'_, Result<u64, StoreError>> {
            if self.is_full.load(Ordering::SeqCst) {
                return Box::pin(async { Err(StoreError::Quota) });
            }
            self.store.write(write)
        }

        fn watch<'a>(&'a self, prefix: &'a str, after: u64) -> BoxFuture<'a, Result<Watch, StoreError>> {
            self.store.watch(prefix, after)
        }

        fn compact(&self, revision: u64) -> BoxFuture<'_, Result<(), StoreError>> {
            self.store.compact(revision)
        }

        fn revision(&self) -> BoxFuture<'_, Result<u64, StoreError>> {
            self.store.revision()
        }

        fn health(&self) -> Health {
            self.store.health()
        }

        fn is_shared(&self) -> bool {
            true
        }

        fn is_current<'a>(&'a self, key: &'a str) -> BoxFuture<'a, Result<bool, StoreError>> {
            self.store.is_current(key)
        }

        fn backup(&self) -> Result<Backup, StoreError> {
            self.store.backup()
        }
    }

    /// Options with the keys of this file, which is created.
    fn options(keys: &Path) -> EmbeddedOptions {
        let keys = Keys::load_or_create(keys).unwrap();
        EmbeddedOptions { sealing: Some(sealing(keys, None)), ..EmbeddedOptions::default() }
    }

    fn shared(directory: &Path) -> SharedStore {
        SharedStore {
            store: Embedded::open(&directory.join("store"), options(&directory.join("keys"))).unwrap(),
            is_full: AtomicBool::new(false),
            has_other_keys: AtomicBool::new(false),
            has_other_secrets: AtomicBool::new(false),
        }
    }

    #[tokio::test]
    async fn a_server_needs_the_authority_and_the_keys_of_the_cluster_but_no_space() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        let pki = |name: &str| Pki::open(&path(name)).unwrap();
        let store = shared(directory.path());
        check_cluster(&store, &pki("pki"), None).await.unwrap();
        assert!(store.is_current(KEY_CHECK).await.unwrap());
        store.is_full.store(true, Ordering::SeqCst);
        check_cluster(&store, &pki("pki"), None).await.unwrap();
        let other = check_cluster(&store, &pki("other"), None).await;
        assert!(matches!(other, Err(OpenStoreError::OtherCluster)), "{other:?}");
        store.has_other_keys.store(true, Ordering::SeqCst);
        let other = check_cluster(&store, &pki("pki"), None).await;
        assert!(matches!(other, Err(OpenStoreError::OtherKeys(_))), "{other:?}");
        drop(store);
        // The keys of another server do not decrypt the check.
        let refused = Embedded::open(&path("store"), options(&path("foreign"))).err().unwrap();
        assert!(matches!(refused, StoreError::Sealed { .. }), "{refused}");
    }

    #[tokio::test]
    async fn a_cluster_of_an_earlier_version_gets_the_check_of_a_server_that_reads_its_secrets() {
        let directory = tempfile::tempdir().unwrap();
        let pki = Pki::open(&directory.path().join("pki")).unwrap();
        let store = shared(directory.path());
        let is_recorded = async || store.get(KEY_CHECK).await.unwrap().is_some();
        store.has_other_secrets.store(true, Ordering::SeqCst);
        let refused = check_cluster(&store, &pki, None).await;
        assert!(matches!(refused, Err(OpenStoreError::OtherKeys(_))), "{refused:?}");
        assert!(!is_recorded().await);
        // With providers for Secrets, the key file is not used.
        let file = directory.path().join("encryption.yaml");
        let text = "apiVersion: apiserver.config.k8s.io/v1\nkind: EncryptionConfiguration\nresources:\n\
            - resources: [secrets]\n  providers: [{secretbox: {keys: [{name: k, secret: \
            AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=}]}}]\n";
        std::fs::write(&file, text).unwrap();
        std::fs::set_permissions(&file, Permissions::from_mode(0o600)).unwrap();
        let encryption = Encryption::load(&file).unwrap();
        check_cluster(&store, &pki, Some(&encryption)).await.unwrap();
        assert!(!is_recorded().await);
        store.has_other_secrets.store(false, Ordering::SeqCst);
        store.is_full.store(true, Ordering::SeqCst);
        check_cluster(&store, &pki, None).await.unwrap();
        assert!(!is_recorded().await, "the store is full");
        store.is_full.store(false, Ordering::SeqCst);
        let secret = |name: &str| record_of(&format!("{SECRETS}ns/{name}"));
        for name in ["a", "b"] {
            store.write(secret(name)).await.unwrap();
        }
        check_cluster(&store, &pki, None).await.unwrap();
        assert!(is_recorded().await);
    }

    fn record_of(key: &str) -> Write {
        let value = Some("{}".into());
        Write { key: key.into(), expect: Expect::Absent, value, tier: Tier::Durable, guard: None }
    }
}
