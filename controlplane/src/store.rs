//! Opens the store: embedded in the state directory, or on etcd.

use std::{
    fs::{File, Permissions, TryLockError},
    os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
    sync::Arc,
};

use coracle_sealing::{Encryption, Keys};
use coracle_store::{
    Embedded, EmbeddedOptions, Error as StoreError, Etcd, EtcdIdentity, EtcdOptions, EtcdTls, Expect,
    Sealing, Store, Tier, Write,
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
    Sealing { keys, prefixes: vec![SECRETS.to_owned()], encryption }
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
    let options = EtcdOptions { servers, prefix, tls, sealing, compaction: config.compaction };
    Etcd::connect(options).await.map_err(OpenStoreError::Store)
}

/// Checks that the cluster in a shared store has this server's authority. The first server records its own.
pub(crate) async fn check_authority(store: &dyn Store, pki: &Pki) -> Result<(), OpenStoreError> {
    if !store.is_shared() {
        return Ok(());
    }
    let own = pki.fingerprint().map_err(OpenStoreError::Pki)?;
    let first = Write {
        key: AUTHORITY.into(),
        expect: Expect::Absent,
        value: Some(own.clone().into()),
        tier: Tier::Durable,
        guard: None,
    };
    match store.write(first).await {
        Ok(_) => return Ok(()),
        Err(StoreError::Conflict { .. }) => {}
        Err(error) => return Err(OpenStoreError::Store(error)),
    }
    let found = store.get(AUTHORITY).await.map_err(OpenStoreError::Store)?;
    match found.is_some_and(|entry| entry.value == own.as_bytes()) {
        true => Ok(()),
        false => Err(OpenStoreError::OtherCluster),
    }
}
