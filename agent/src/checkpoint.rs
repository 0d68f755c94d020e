//! Checkpoint: the API objects that this node's pods need, on disk, so that pods start without the API server.
//!
//! One encrypted file for each object, `<state>/agent/checkpoint/<kind>/<digest of its name>.sealed`. A record is
//! written only when its content changed. One background task writes all due records as one batch (temporary files,
//! their fsyncs and renames, one fsync of each directory). A record that cannot be decrypted or parsed is renamed to
//! `*.bad` with a warning. A record of another kind than pods and names of services, for example a config map,
//! belongs to pods ([`Checkpoint::own`]). Such a record is removed with the last pod that needs it.

mod files;
mod key;
mod owners;
mod plain;
mod record;
mod references;
mod writer;

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use coracle_sealing::Keys;
use serde::Serialize;
use serde::de::DeserializeOwned;
use sha2::{Digest, Sha256};
use tokio::sync::Notify;

pub(crate) use key::{Key, Kind};
pub(crate) use references::{TOKEN_SECONDS, account, references, runtime_class, token_key};

use owners::Owners;
use record::{Opened, Record, VERSION};

/// Maximum time that a caller waits for its change to reach the disk.
const CHANGE_TIMEOUT: Duration = Duration::from_secs(2);

/// The reason why the checkpoint cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// A directory cannot be created.
    #[error("cannot create {path}")]
    Directory {
        /// The directory.
        path: PathBuf,
        /// Cause.
        #[source]
        source: io::Error,
    },
    /// The key file of the records cannot be used.
    #[error("cannot open the checkpoint of pods")]
    Key(#[source] coracle_sealing::Error),
}

/// Handle of the checkpoint; cheap to clone.
#[derive(Clone)]
pub(crate) struct Checkpoint {
    shared: Arc<Shared>,
}

struct Shared {
    dir: PathBuf,
    keys: Keys,
    state: Mutex<State>,
    /// Held while files are written: orders the background task and [`Checkpoint::flush`].
    disk: Mutex<()>,
    due: Notify,
    written: Notify,
}

#[derive(Default)]
struct State {
    /// SHA-256 of the content of each record that is stored or due.
    digests: HashMap<Key, [u8; 32]>,
    due: BTreeMap<Key, Arc<Change>>,
    owners: Owners,
    /// Whether a caller waits for a due change. The writer then does not wait for further changes.
    is_awaited: bool,
    /// A record of a pod could not be read, so the other records that the pod needs are not known.
    is_pod_unread: bool,
}

#[derive(Debug)]
enum Change {
    Write {
        content: Vec<u8>,
        /// Whether to compare the content with the file: an earlier agent may have stored the same content.
        compare: bool,
    },
    Remove,
}

// === impl Checkpoint ===

impl Checkpoint {
    /// Opens the checkpoint in `<agent_dir>/checkpoint` with the keys of a file, which is created if it is absent.
    /// Encrypts the plain records of earlier versions.
    ///
    /// # Errors
    /// When a directory or the key file cannot be used. Unreadable records are not an error.
    pub(crate) fn open(agent_dir: &Path, key_file: &Path) -> Result<Self, CheckpointError> {
        let dir = agent_dir.join("checkpoint");
        for dir in std::iter::once(dir.clone()).chain(Kind::ALL.map(|kind| dir.join(kind.directory()))) {
            files::make_dir(&dir)
                .map_err(|source| CheckpointError::Directory { path: dir.clone(), source })?;
            files::remove_temporary(&dir);
        }
        let keys = Keys::load_or_create(key_file).map_err(CheckpointError::Key)?;
        let shared = Shared {
            dir,
            keys,
            state: Mutex::default(),
            disk: Mutex::default(),
            due: Notify::new(),
            written: Notify::new(),
        };
        let checkpoint = Self { shared: Arc::new(shared) };
        plain::take_over(&checkpoint, agent_dir);
        Ok(checkpoint)
    }

    /// Stores a value, unless it is stored already or no pod needs it.
    pub(crate) fn put<T: Serialize>(&self, key: Key, value: &T) {
        let mut state = self.state();
        if key.kind().is_owned() && !state.owners.has(&key) {
            return;
        }
        let record = Record { version: VERSION, name: key.name().to_owned(), value };
        let content = match serde_json::to_vec(&record) {
            Ok(content) => content,
            Err(error) => {
                tracing::warn!(%error, ?key, "cannot encode a checkpoint record");
                return;
            }
        };
        let digest: [u8; 32] = Sha256::digest(&content).into();
        let before = state.digests.insert(key.clone(), digest);
        if before == Some(digest) {
            return;
        }
        state.due.insert(key, Arc::new(Change::Write { content, compare: before.is_none() }));
        drop(state);
        self.shared.due.notify_one();
    }

    /// Whether a pod needs the record, so that [`put`](Self::put) stores it.
    pub(crate) fn is_needed(&self, key: &Key) -> bool {
        self.state().owners.has(key)
    }

    /// Whether the record is stored or due.
    pub(crate) fn has(&self, key: &Key) -> bool {
        self.state().digests.contains_key(key)
    }

    /// The stored value.
    pub(crate) fn get<T: DeserializeOwned>(&self, key: &Key) -> Option<T> {
        let due = self.state().due.get(key).cloned();
        match due.as_deref() {
            Some(Change::Remove) => None,
            Some(Change::Write { content, .. }) => {
                self.parse(&self.path(key), content).map(|(_, value)| value)
            }
            None => {
                let Opened { name, value, digest } = self.read(key.kind(), &self.path(key)).ok()??;
                if name != key.name() {
                    return None;
                }
                self.state().digests.entry(key.clone()).or_insert(digest);
                Some(value)
            }
        }
    }

    /// All stored values of a kind.
    pub(crate) fn all<T: DeserializeOwned>(&self, kind: Kind) -> Vec<T> {
        // Due records are written first.
        self.flush();
        let paths = self.list(kind).unwrap_or_else(|_logged| {
            self.state().is_pod_unread |= kind == Kind::Pod;
            Vec::new()
        });
        let mut values = Vec::with_capacity(paths.len());
        for path in paths {
            let Opened { name, value, digest } = match self.read(kind, &path) {
                Ok(Some(record)) => record,
                Ok(None) => continue,
                Err(_logged) => {
                    self.state().is_pod_unread |= kind == Kind::Pod;
                    continue;
                }
            };
            self.state().digests.insert(Key::new(kind, name), digest);
            values.push(value);
        }
        values
    }

    /// Removes a record. Succeeds if it does not exist.
    pub(crate) fn remove(&self, key: &Key) {
        let mut state = self.state();
        state.digests.remove(key);
        state.due.insert(key.clone(), Arc::new(Change::Remove));
        drop(state);
        self.shared.due.notify_one();
    }

    /// Waits until the last change of a record is on disk, for two seconds at most.
    pub(crate) async fn written(&self, key: &Key) {
        let wait = async {
            loop {
                let written = self.shared.written.notified();
                if !self.request_write(key) {
                    return;
                }
                written.await;
            }
        };
        let _late = tokio::time::timeout(CHANGE_TIMEOUT, wait).await;
    }

    /// Ends the collection of writes if a change of the record is due. Returns whether such a change is due.
    fn request_write(&self, key: &Key) -> bool {
        let mut state = self.state();
        let is_due = state.due.contains_key(key);
        state.is_awaited |= is_due;
        drop(state);
        if is_due {
            self.shared.due.notify_one();
        }
        is_due
    }

    /// Sets the records that a pod needs. Records that no pod needs are not stored.
    pub(crate) fn own(&self, uid: &str, keys: Vec<Key>) {
        let dropped = self.state().owners.set(uid, keys);
        dropped.iter().for_each(|key| self.remove(key));
    }

    /// Removes the records that only this pod needed.
    pub(crate) fn release(&self, uid: &str) {
        self.own(uid, Vec::new());
    }

    /// Removes stored records that no pod needs. A crash can leave such records. The caller calls this once, after
    /// [`Checkpoint::own`] for all stored pods. If the record of a pod could not be read, nothing is removed: the pod
    /// may need any record.
    pub(crate) fn remove_unowned(&self) {
        if self.state().is_pod_unread {
            return;
        }
        for kind in Kind::ALL.into_iter().filter(|kind| kind.is_owned()) {
            let owned = self.state().owners.files(kind);
            let stray = self
                .list(kind)
                .unwrap_or_default()
                .into_iter()
                .filter(|path| !owned.contains(path.file_name().unwrap_or_default()));
            for path in stray {
                // The next start of the agent removes the file.
                if let Err(error) = files::remove(&path) {
                    tracing::warn!(%error, path = %path.display(), "cannot remove a checkpoint record");
                }
            }
        }
    }

    /// The file that exists while the kernel has a table of services that was made from stored services.
    pub(crate) fn stored_services_mark(&self) -> PathBuf {
        self.shared.dir.join("services-in-use")
    }

    /// The files of the stored records of a kind. An error is logged.
    fn list(&self, kind: Kind) -> io::Result<Vec<PathBuf>> {
        let dir = self.shared.dir.join(kind.directory());
        files::list(&dir).inspect_err(|error| {
            tracing::warn!(%error, path = %dir.display(), "cannot list checkpoint records");
        })
    }

    fn path(&self, key: &Key) -> PathBuf {
        self.shared.dir.join(key.kind().directory()).join(key.file_name())
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.shared.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl std::fmt::Debug for Checkpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // The content is secret.
        f.debug_struct("Checkpoint").field("dir", &self.shared.dir).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
