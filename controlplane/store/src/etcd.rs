//! The store on etcd 3.6, which several servers share.
//!
//! Keys have a common prefix in etcd. Revisions are etcd's revisions, so a transaction is one commit. One task for each
//! watch follows etcd and resumes after a disconnection. Another task compacts the history. In each interval, one of
//! the servers that share the prefix compacts the history.

mod channels;
mod compaction;
mod connection;
mod follow;
mod hang;
mod leases;
mod range;
mod request_metrics;
mod size;
#[cfg(test)]
mod tests;
mod transaction;

use std::{path::PathBuf, sync::Arc, time::Duration};

use futures::future::BoxFuture;
use tokio::{sync::mpsc, task::JoinHandle};

use crate::{
    Backup, Entry, Error, Health, MemberSize, Page, Range, ReadablePage, Sealing, Store, Tier, Watch, Write,
    codec::{EntryCodec, FailedServices},
};
use connection::Connection;
use follow::Follower;
use leases::Leases;
use request_metrics::{GET, LIST, measured};
pub use request_metrics::{etcd_metrics, forget_etcd_metrics};
use size::Sizes;
use transaction::Outcome;

/// Messages and clients of etcd's API v3.
#[allow(missing_docs, unreachable_pub, reason = "generated; proto/etcd.proto carries the meaning")]
#[allow(clippy::all, clippy::too_many_lines, unused_results, reason = "generated")]
mod api {
    tonic::include_proto!("etcdserverpb");
}

/// Maximum time that a starting server waits for etcd.
const START_TIMEOUT: Duration = Duration::from_secs(60);
/// Delay between attempts to reach etcd at the start.
const START_RETRY_DELAY: Duration = Duration::from_secs(1);

/// Settings of the store on etcd.
#[derive(Debug)]
pub struct EtcdOptions {
    /// URLs of etcd's members. If the current member does not respond, the next member is used.
    pub servers: Vec<String>,
    /// Prefix of all keys.
    pub prefix: String,
    /// TLS for `https` URLs.
    pub tls: Option<EtcdTls>,
    /// The encryption of values in etcd. `None` means no encryption.
    pub sealing: Option<Sealing>,
    /// Interval of compactions of the history. `None` means that another program compacts the history.
    pub compaction: Option<Duration>,
    /// Maximum age of [`Store::member_sizes`]. `None` means that etcd is not asked for sizes.
    pub size_max_age: Option<Duration>,
}

/// TLS files of the connection to etcd, in PEM.
#[derive(Clone, Debug)]
pub struct EtcdTls {
    /// Certificate authorities that sign etcd's certificates.
    pub authority: PathBuf,
    /// The client's certificate and key, if etcd verifies clients.
    pub identity: Option<EtcdIdentity>,
}

/// Files of a client certificate for etcd and its key, in PEM.
#[derive(Clone, Debug)]
pub struct EtcdIdentity {
    /// The certificate and its intermediate authorities.
    pub certificate: PathBuf,
    /// The private key.
    pub key: PathBuf,
}

/// A store in etcd.
pub struct Etcd {
    shared: Arc<Shared>,
    compaction: Option<JoinHandle<()>>,
    sizes: Sizes,
}

/// The part of the store that its tasks share.
struct Shared {
    connection: Connection,
    keys: Keys,
    codec: EntryCodec,
    leases: Leases,
}

/// The names of keys in etcd.
struct Keys {
    /// The prefix. It ends with `/`.
    prefix: String,
}

// === impl Keys ===

impl Keys {
    fn new(prefix: &str) -> Self {
        Self { prefix: format!("/{}/", prefix.trim_matches('/')) }
    }

    /// The name of a key in etcd.
    fn outer(&self, key: &str) -> Vec<u8> {
        format!("{}{key}", self.prefix).into_bytes()
    }

    /// The key of a name in etcd. `None` if the name does not have the prefix.
    fn inner<'a>(&self, name: &'a [u8]) -> Option<&'a str> {
        std::str::from_utf8(name).ok()?.strip_prefix(&self.prefix)
    }

    /// The end of the range of names that begin with this name.
    fn end_of(mut name: Vec<u8>) -> Vec<u8> {
        // The prefix ends with `/`, so there is a byte that can be incremented.
        while let Some(last) = name.pop() {
            if last < u8::MAX {
                name.push(last + 1);
                break;
            }
        }
        name
    }
}

// === impl Etcd ===

impl Etcd {
    /// Connects to etcd, and waits at most one minute until etcd responds. Must be called within a tokio runtime.
    ///
    /// # Errors
    /// [`Error::Endpoint`] if the settings cannot be used, [`Error::Unavailable`] if etcd does not respond.
    pub async fn connect(options: EtcdOptions) -> Result<Self, Error> {
        let connection = Connection::new(&options.servers, options.tls.as_ref())?;
        let shared = Arc::new(Shared {
            connection,
            keys: Keys::new(&options.prefix),
            codec: EntryCodec(options.sealing),
            leases: Leases::default(),
        });
        shared.wait().await?;
        let compaction = options.compaction;
        let compaction = compaction.map(|interval| tokio::spawn(compaction::run(shared.clone(), interval)));
        Ok(Self { shared, compaction, sizes: Sizes::new(options.size_max_age) })
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        if let Some(compaction) = &self.compaction {
            compaction.abort();
        }
    }
}

impl Store for Etcd {
    fn get<'a>(&'a self, key: &'a str) -> BoxFuture<'a, Result<Option<Entry>, Error>> {
        Box::pin(measured(GET, key, self.shared.get(key)))
    }

    fn revision_of<'a>(&'a self, key: &'a str) -> BoxFuture<'a, Result<Option<u64>, Error>> {
        Box::pin(measured(GET, key, self.shared.revision_of(key)))
    }

    fn list(&self, range: Range) -> BoxFuture<'_, Result<Page, Error>> {
        Box::pin(async move { measured(LIST, &range.prefix, self.shared.list(&range)).await })
    }

    fn list_readable(&self, range: Range) -> BoxFuture<'_, Result<ReadablePage, Error>> {
        Box::pin(async move { measured(LIST, &range.prefix, self.shared.list_readable(&range)).await })
    }

    fn write(&self, write: Write) -> BoxFuture<'_, Result<u64, Error>> {
        Box::pin(async move {
            let operation = request_metrics::of_write(&write);
            measured(operation, &write.key, self.shared.write(&write)).await
        })
    }

    fn watch<'a>(&'a self, prefix: &'a str, after: u64) -> BoxFuture<'a, Result<Watch, Error>> {
        Box::pin(async move {
            self.shared.check_history(prefix, after).await?;
            let (sender, events) = mpsc::unbounded_channel();
            tokio::spawn(Follower::new(self.shared.clone(), prefix, after, sender).run());
            Ok(Watch { events })
        })
    }

    fn compact(&self, revision: u64) -> BoxFuture<'_, Result<(), Error>> {
        Box::pin(self.shared.compact(revision))
    }

    fn revision(&self) -> BoxFuture<'_, Result<u64, Error>> {
        Box::pin(self.shared.revision())
    }

    fn health(&self) -> Health {
        self.shared.connection.health()
    }

    fn is_shared(&self) -> bool {
        true
    }

    fn unreachable_for(&self) -> Option<Duration> {
        self.shared.connection.unreachable_for()
    }

    fn probe(&self, timeout: Duration) -> BoxFuture<'_, Result<(), Error>> {
        Box::pin(self.shared.probe(timeout))
    }

    fn member_sizes(&self) -> BoxFuture<'_, Vec<MemberSize>> {
        Box::pin(self.sizes.get(self.shared.connection.channels()))
    }

    fn is_current<'a>(&'a self, key: &'a str) -> BoxFuture<'a, Result<bool, Error>> {
        Box::pin(self.shared.is_current(key))
    }

    fn backup(&self) -> Result<Backup, Error> {
        Err(Error::BackupOfEtcd)
    }
}

// === impl Shared ===

impl Shared {
    /// Waits until etcd responds.
    async fn wait(&self) -> Result<(), Error> {
        let until = tokio::time::Instant::now() + START_TIMEOUT;
        loop {
            match self.revision().await {
                Ok(_) => return Ok(()),
                Err(error) if tokio::time::Instant::now() >= until => return Err(error),
                Err(error) => tracing::warn!(%error, "waiting for etcd"),
            }
            tokio::time::sleep(START_RETRY_DELAY).await;
        }
    }

    async fn write(&self, write: &Write) -> Result<u64, Error> {
        if write.value.is_none() && write.expect == crate::Expect::Absent {
            return Err(Error::Conflict { found: None, at: self.revision().await? });
        }
        let value = match &write.value {
            Some(value) => Some(self.sealed(&write.key, value)?),
            None => None,
        };
        let ttl = match write.tier {
            Tier::Volatile { ttl: Some(ttl) } if value.is_some() => Some(ttl),
            _ => None,
        };
        let outcome = match ttl {
            None => self.commit(write, value, 0).await?,
            Some(ttl) => {
                let lease = self.leases.of(&self.connection, ttl).await?;
                match self.commit(write, value.clone(), lease).await {
                    // The lease has expired or was revoked.
                    Err(Error::Unavailable { detail }) if detail.contains("lease not found") => {
                        self.leases.remove(ttl).await;
                        let lease = self.leases.of(&self.connection, ttl).await?;
                        self.commit(write, value, lease).await?
                    }
                    outcome => outcome?,
                }
            }
        };
        match outcome {
            Outcome::Committed(revision) => Ok(revision),
            Outcome::Conflict { found, at } => {
                self.connection.expect_progress(at);
                Err(Error::Conflict { found, at })
            }
            Outcome::Guard { at } => {
                self.connection.expect_progress(at);
                Err(Error::Guard { at })
            }
        }
    }

    async fn commit(&self, write: &Write, value: Option<Vec<u8>>, lease: i64) -> Result<Outcome, Error> {
        let request = transaction::request(&self.keys, write, value, lease);
        let response = self.connection.txn(request).await?;
        Ok(transaction::outcome(write, &response))
    }

    fn sealed(&self, key: &str, value: &[u8]) -> Result<Vec<u8>, Error> {
        self.codec.ready(key)?;
        let sealed = self.codec.seal(key, value);
        let sealed = sealed.map_err(|source| Error::Sealed { key: key.to_owned(), source })?;
        Ok(sealed.unwrap_or_else(|| value.to_vec()))
    }

    /// The stored value as the caller wrote it.
    fn opened(&self, failed: &mut FailedServices, key: &str, value: Vec<u8>) -> Result<bytes::Bytes, Error> {
        Ok(self.codec.open_in_pass(failed, key, &value)?.unwrap_or_else(|| value.into()))
    }
}

/// A revision of etcd, which is never negative.
fn unsigned(revision: i64) -> u64 {
    u64::try_from(revision).unwrap_or(0)
}

/// A revision for etcd.
fn signed(revision: u64) -> i64 {
    i64::try_from(revision).unwrap_or(i64::MAX)
}

/// The revision of a response.
fn revision_of(header: Option<&api::ResponseHeader>) -> u64 {
    header.map_or(0, |header| unsigned(header.revision))
}
