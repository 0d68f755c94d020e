//! The contract between the apiserver and whatever keeps its bytes.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use futures::future::BoxFuture;
use tokio::sync::mpsc;

use crate::Error;

/// Versioned keyed bytes. Implementations: [`crate::Embedded`]; etcd comes next.
pub trait Store: Send + Sync + 'static {
    /// The entry under `key`, as of the newest commit.
    fn get<'a>(&'a self, key: &'a str) -> BoxFuture<'a, Result<Option<Entry>, Error>>;

    /// Entries in key order, all as of one revision.
    fn list(&self, range: Range) -> BoxFuture<'_, Result<Page, Error>>;

    /// Creates, replaces or deletes one entry if the expectation holds, and returns the commit's
    /// revision once it is as durable as its tier promises.
    fn write(&self, write: Write) -> BoxFuture<'_, Result<u64, Error>>;

    /// Every commit under `prefix` after the revision `after`, in order.
    fn watch<'a>(&'a self, prefix: &'a str, after: u64) -> BoxFuture<'a, Result<Watch, Error>>;

    /// Forgets the history up to `revision`; the newest state of every entry stays.
    fn compact(&self, revision: u64) -> BoxFuture<'_, Result<(), Error>>;

    /// The revision of the newest commit that was published to watchers.
    fn revision(&self) -> BoxFuture<'_, Result<u64, Error>>;

    /// Whether the store takes writes, as of this moment.
    fn health(&self) -> Health;
}

/// Whether a store takes writes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Health {
    /// It takes all writes.
    Good,
    /// It takes no new objects: its disk is full.
    Full {
        /// Free bytes.
        free: u64,
    },
    /// It takes no durable writes, and why.
    Failed(String),
}

/// One stored value and where it stands in the store's history.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The entry's key.
    pub key: Arc<str>,
    /// The stored bytes.
    pub value: Bytes,
    /// The commit that created the entry.
    pub created: u64,
    /// The commit that last changed it.
    pub modified: u64,
}

/// What a list asks for.
#[derive(Clone, Debug, Default)]
pub struct Range {
    /// Only keys that start with this.
    pub prefix: String,
    /// Only keys that are not less than this; empty for all.
    pub start: String,
    /// At most so many entries; 0 for all.
    pub limit: usize,
}

/// What a list found.
#[derive(Clone, Debug)]
pub struct Page {
    /// The entries, in key order.
    pub entries: Vec<Entry>,
    /// The revision at which this was the truth.
    pub revision: u64,
    /// Whether entries beyond the limit were left out.
    pub more: bool,
}

/// What must hold for a write to happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expect {
    /// There is no such entry.
    Absent,
    /// The entry was last changed by this commit.
    Revision(u64),
}

/// How long an entry is to live.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tier {
    /// Synced to disk before the write is acknowledged.
    Durable,
    /// In memory only: gone after a restart, or when the time to live is over.
    Volatile {
        /// After this the entry is deleted, give or take a minute; `None` keeps it.
        ttl: Option<Duration>,
    },
}

/// One change of one entry. A key belongs to one tier for all its life.
#[derive(Clone, Debug)]
pub struct Write {
    /// The entry's key.
    pub key: Arc<str>,
    /// What must hold.
    pub expect: Expect,
    /// The new bytes; `None` deletes.
    pub value: Option<Bytes>,
    /// Where the entry lives.
    pub tier: Tier,
}

/// A change that happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Commit {
    /// Its place in the history.
    pub revision: u64,
    /// The entry's key.
    pub key: Arc<str>,
    /// The new bytes; `None` when deleted.
    pub value: Option<Bytes>,
    /// The commit that created the entry.
    pub created: u64,
}

/// A running watch. Commits wait here without bound, so a consumer keeps reading.
#[derive(Debug)]
pub struct Watch {
    pub(crate) commits: mpsc::UnboundedReceiver<Arc<Commit>>,
}

impl Watch {
    /// The next commit; `None` when the store is closed.
    pub async fn next(&mut self) -> Option<Arc<Commit>> {
        self.commits.recv().await
    }
}
