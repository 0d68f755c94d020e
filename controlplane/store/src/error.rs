//! Errors of a store.

use std::path::PathBuf;

/// A failed store operation.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The condition of the write did not hold.
    #[error("cannot write the entry: {}", state(*found))]
    Conflict {
        /// The entry's current revision. `None` if there is no such entry.
        found: Option<u64>,
        /// The revision at which the store checked the entry.
        at: u64,
    },
    /// The condition of the write's guard did not hold. The condition of the entry held.
    #[error("cannot write the entry: its guard changed at revision {at} or before")]
    Guard {
        /// The revision at which the store checked the guard.
        at: u64,
    },
    /// The store's server does not respond, or has no leader. The outcome of a write is unknown.
    #[error("etcd cannot serve the request: {detail}")]
    Unavailable {
        /// The error text of the connection or the server.
        detail: String,
    },
    /// The database of the store's server has reached its quota.
    #[error(
        "etcd refuses new objects: database space exceeded; compact and defragment etcd, then disarm its NOSPACE alarm"
    )]
    Quota,
    /// The entry exceeds the limit of the store's server.
    #[error("etcd refuses the entry: request is too large (see etcd's --max-request-bytes)")]
    TooLarge,
    /// The connection to the store's server is misconfigured.
    #[error("cannot use the etcd {what}: {detail}")]
    Endpoint {
        /// The endpoint, certificate or key.
        what: String,
        /// The cause.
        detail: String,
    },
    /// The watch starts at a revision whose commits are compacted.
    #[error("cannot start the watch: revisions up to {oldest} are compacted")]
    Compacted {
        /// The history has all commits after this revision.
        oldest: u64,
    },
    /// The watch starts at a revision that does not exist yet.
    #[error("cannot start the watch: revision {requested} is in the future; the newest is {newest}")]
    Future {
        /// The requested revision.
        requested: u64,
        /// The newest revision.
        newest: u64,
    },
    /// Another process has the store open.
    #[error("cannot open the store at {path}: it is in use by another process")]
    Locked {
        /// The store's directory.
        path: PathBuf,
    },
    /// A file of the store is damaged.
    #[error("the store at {path} is damaged and cannot be opened: {detail}")]
    Corrupt {
        /// The store's directory.
        path: PathBuf,
        /// The damage.
        detail: String,
    },
    /// The directory cannot be read or written.
    #[error("cannot open the store at {path}")]
    Open {
        /// The store's directory.
        path: PathBuf,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// The store was replaced, but the replacement may not survive a power failure.
    #[error("cannot sync the directory of the store at {path}")]
    Sync {
        /// The store's directory.
        path: PathBuf,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// The disk failed. The store refuses writes until the disk accepts them again.
    #[error("the store cannot write to its disk: {detail}")]
    Disk {
        /// The error text of the engine.
        detail: String,
    },
    /// Too little space is left for new objects. Deletions still work.
    #[error(
        "the store cannot take new objects: database space exceeded, the disk of {path} is full; free some space or \
         delete objects, and writes will succeed again without a restart"
    )]
    Full {
        /// The store's directory.
        path: PathBuf,
    },
    /// A file of the store cannot be read, or its content is corrupt.
    #[error("the store cannot read its files: {detail}")]
    Read {
        /// The error text of the engine.
        detail: String,
    },
    /// An encrypted entry cannot be decrypted, or an entry cannot be encrypted.
    #[error("the store cannot encrypt or decrypt the entry {key}")]
    Sealed {
        /// The entry's key.
        key: String,
        /// The cause.
        #[source]
        source: coracle_sealing::Error,
    },
    /// A backup cannot be read.
    #[error("cannot read the backup: {detail}")]
    Backup {
        /// The defect.
        detail: String,
    },
    /// A backup of a store on etcd was requested. etcd has its own backups.
    #[error("cannot back up the store: the objects are in etcd; use `etcdctl snapshot save`")]
    BackupOfEtcd,
    /// The store was closed.
    #[error("the store is closed")]
    Closed,
}

// === impl Error ===

impl Error {
    /// Whether an entry cannot be decrypted or encrypted because a key management service failed. The service may
    /// respond later.
    #[must_use]
    pub fn is_of_service(&self) -> bool {
        self.service().is_some()
    }

    /// The name of the key management service that failed. `None` if the error has another cause.
    #[must_use]
    pub fn service(&self) -> Option<&str> {
        match self {
            Self::Sealed { source: coracle_sealing::Error::Kms { name, .. }, .. } => Some(name),
            _ => None,
        }
    }
}

/// The state of an entry that a write does not expect.
fn state(revision: Option<u64>) -> String {
    match revision {
        Some(revision) => format!("it is at revision {revision}, which the write does not expect"),
        None => "it does not exist".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::Error;

    #[test]
    fn a_conflict_names_the_state_of_the_entry() {
        let text = |found| Error::Conflict { found, at: 8 }.to_string();
        assert_eq!(
            text(Some(7)),
            "cannot write the entry: it is at revision 7, which the write does not expect"
        );
        assert_eq!(text(None), "cannot write the entry: it does not exist");
    }
}
