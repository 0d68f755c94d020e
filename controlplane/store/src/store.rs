//! The interface of the store.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use futures::future::BoxFuture;
use tokio::sync::mpsc;

use crate::{Backup, Error};

/// Versioned values by key. Implementations: [`crate::Embedded`] and [`crate::Etcd`].
pub trait Store: Send + Sync + 'static {
    /// The newest version of the entry with this key. `None` if there is no such entry.
    fn get<'a>(&'a self, key: &'a str) -> BoxFuture<'a, Result<Option<Entry>, Error>>;

    /// Revision of the commit that last changed the entry with this key. `None` if there is no such entry. etcd and
    /// the embedded store do not decrypt the value, so this also works for an unreadable entry.
    fn revision_of<'a>(&'a self, key: &'a str) -> BoxFuture<'a, Result<Option<u64>, Error>> {
        Box::pin(async move { Ok(self.get(key).await?.map(|entry| entry.modified)) })
    }

    /// Entries in the order of their keys, all from one revision.
    fn list(&self, range: Range) -> BoxFuture<'_, Result<Page, Error>>;

    /// Does the same as [`Store::list`], but returns entries that cannot be decrypted in a separate list. A key
    /// management service that fails is called only once for the whole list.
    fn list_readable(&self, range: Range) -> BoxFuture<'_, Result<ReadablePage, Error>> {
        Box::pin(async move {
            let page = self.list(range).await?;
            Ok(ReadablePage { page, unreadable: Vec::new() })
        })
    }

    /// Creates, replaces or deletes one entry and touches the write's guard, if the conditions of both hold. Returns
    /// the commit's revision when the commit is as durable as its tier requires.
    fn write(&self, write: Write) -> BoxFuture<'_, Result<u64, Error>>;

    /// Returns every commit under `prefix` after the revision `after`, in order. If the store is shared and another
    /// call of it returns a revision, the watch also reaches that revision: it sends a commit or an
    /// [`Event::Progress`] of that revision or a later one.
    fn watch<'a>(&'a self, prefix: &'a str, after: u64) -> BoxFuture<'a, Result<Watch, Error>>;

    /// Removes the history up to `revision`. The newest version of every entry is kept.
    fn compact(&self, revision: u64) -> BoxFuture<'_, Result<(), Error>>;

    /// The revision of the newest commit that any server has acknowledged.
    fn revision(&self) -> BoxFuture<'_, Result<u64, Error>>;

    /// Whether the store accepts writes now.
    fn health(&self) -> Health;

    /// Whether other processes write to this store. Then a reader of a cache must wait for [`Store::revision`] to see
    /// all acknowledged commits.
    fn is_shared(&self) -> bool;

    /// Duration for which the commits of other processes could not be read. `None` if they can be read, or if no other
    /// process writes to the store.
    fn unreachable_for(&self) -> Option<Duration> {
        None
    }

    /// The size of the store on the disk of this machine, in bytes. `None` if the store is on another machine, or if
    /// the size cannot be read.
    fn size(&self) -> Option<u64> {
        None
    }

    /// Reads from the store's server, to check whether it responds within `timeout`. A store in this process needs no
    /// such check.
    fn probe(&self, _timeout: Duration) -> BoxFuture<'_, Result<(), Error>> {
        Box::pin(std::future::ready(Ok(())))
    }

    /// The size of the database of each of the store's servers. Empty if the store is in this process, or if the sizes
    /// are not requested.
    fn member_sizes(&self) -> BoxFuture<'_, Vec<MemberSize>> {
        Box::pin(std::future::ready(Vec::new()))
    }

    /// Whether the value of a key is encrypted with the current key, or need not be encrypted. True for an absent
    /// entry. A write of the same value encrypts it with the current key.
    fn is_current<'a>(&'a self, key: &'a str) -> BoxFuture<'a, Result<bool, Error>>;

    /// Starts a backup of all durable entries at the current revision. Writes continue during the backup.
    fn backup(&self) -> Result<Backup, Error>;
}

/// Whether a store accepts writes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Health {
    /// All writes are accepted.
    Good,
    /// New objects are refused because the disk is full.
    Full {
        /// Free bytes. 0 if etcd has reached its quota.
        free: u64,
    },
    /// Durable writes are refused for this reason.
    Failed(String),
}

/// The size of the database of one server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemberSize {
    /// The URL of the server.
    pub endpoint: String,
    /// Allocated bytes of the database file. `None` if the server did not respond.
    pub bytes: Option<u64>,
}

/// One stored value with its revisions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The entry's key.
    pub key: Arc<str>,
    /// The stored bytes.
    pub value: Bytes,
    /// Revision of the commit that created the entry.
    pub created: u64,
    /// Revision of the commit that last changed the entry.
    pub modified: u64,
}

/// The parameters of a list.
#[derive(Clone, Debug, Default)]
pub struct Range {
    /// Prefix of the keys.
    pub prefix: String,
    /// First key. If empty, the list starts at the beginning.
    pub start: String,
    /// Maximum number of entries. 0 means all.
    pub limit: usize,
}

/// The result of a list.
#[derive(Clone, Debug)]
pub struct Page {
    /// The entries, in key order.
    pub entries: Vec<Entry>,
    /// The revision of the list.
    pub revision: u64,
    /// Whether there are more entries beyond the limit.
    pub more: bool,
}

/// The result of a list with entries that cannot be read.
#[derive(Debug)]
pub struct ReadablePage {
    /// The entries that can be read.
    pub page: Page,
    /// The other entries.
    pub unreadable: Vec<Unreadable>,
}

/// An entry that exists but cannot be decrypted.
#[derive(Debug)]
pub struct Unreadable {
    /// The entry's key.
    pub key: Arc<str>,
    /// Revision of the commit that last changed the entry.
    pub modified: u64,
    /// The cause.
    pub error: Error,
}

/// An entry that exists but cannot be decrypted. Unlike [`Unreadable`], it has no error, so it can be cloned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnreadableEntry {
    /// The entry's key.
    pub key: Arc<str>,
    /// Revision of the commit that last changed the entry.
    pub modified: u64,
    /// Name of the key management service that failed. `None` for another cause, for example an unknown key.
    pub service: Option<Box<str>>,
}

// === impl Unreadable ===

impl Unreadable {
    /// The entry without the error.
    #[must_use]
    pub fn entry(&self) -> UnreadableEntry {
        let service = self.error.service().map(Box::from);
        UnreadableEntry { key: self.key.clone(), modified: self.modified, service }
    }
}

// === impl ReadablePage ===

impl ReadablePage {
    /// The page if all entries can be read.
    ///
    /// # Errors
    /// The error of the first entry that cannot be read.
    pub(crate) fn complete(self) -> Result<Page, Error> {
        match self.unreadable.into_iter().next() {
            Some(first) => Err(first.error),
            None => Ok(self.page),
        }
    }
}

/// The condition of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expect {
    /// The entry does not exist.
    Absent,
    /// The entry was last changed by this commit.
    Revision(u64),
}

/// Durability of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tier {
    /// Synced to disk before the write is acknowledged.
    Durable,
    /// The embedded store keeps the entry in memory only, so it is lost at a restart. etcd stores it like a durable
    /// entry. Both remove it after the time to live.
    Volatile {
        /// Time to live, accurate to a minute. `None` means no limit.
        ttl: Option<Duration>,
    },
}

/// One change of one entry. A key always belongs to the same tier.
#[derive(Clone, Debug)]
pub struct Write {
    /// The entry's key.
    pub key: Arc<str>,
    /// The condition.
    pub expect: Expect,
    /// The new value. `None` deletes the entry.
    pub value: Option<Bytes>,
    /// The tier of the entry.
    pub tier: Tier,
    /// A second entry that is checked and touched in the same commit.
    pub guard: Option<Guard>,
}

/// An empty entry that represents a set of entries. Writers whose decision depends on the whole set touch its guard, so
/// that the second of two concurrent writers fails with [`Error::Guard`].
#[derive(Clone, Debug)]
pub struct Guard {
    /// The guard's key.
    pub key: Arc<str>,
    /// The condition.
    pub expect: Expect,
}

/// A committed change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Commit {
    /// The commit's revision.
    pub revision: u64,
    /// The entry's key.
    pub key: Arc<str>,
    /// The new value. `None` if the entry was deleted.
    pub value: Option<Bytes>,
    /// Revision of the commit that created the entry. 0 for a deletion if the store does not know this revision.
    pub created: u64,
    /// Whether the commit of the write's guard follows, with the same revision. That commit completes the revision.
    pub guard_follows: bool,
}

/// An event of a watch.
#[derive(Clone, Debug)]
pub enum Event {
    /// A commit. A write with a guard has two commits with one revision: the guard's commit follows.
    Commit(Arc<Commit>),
    /// An entry was changed, and its new value cannot be decrypted. The consumer must keep the former value, because a
    /// missing entry counts as deleted, and deletions affect other objects. A later event of the same key replaces this
    /// event. No event follows when the value can be decrypted later. So the consumer must read the entry again.
    Unreadable(UnreadableEntry),
    /// All commits up to this revision were sent.
    Progress(u64),
    /// The watch missed commits that are compacted. The page has all entries under the prefix. The watch continues
    /// after the page's revision.
    Resync {
        /// All entries that can be decrypted.
        page: Page,
        /// Entries that exist but cannot be decrypted. The consumer must keep their former values, as with
        /// [`Event::Unreadable`].
        unreadable: Vec<UnreadableEntry>,
    },
}

/// A running watch. Its queue has no limit, so the consumer must read it continuously.
#[derive(Debug)]
pub struct Watch {
    pub(crate) events: mpsc::UnboundedReceiver<Event>,
}

impl Watch {
    /// The next event. `None` if the store is closed.
    pub async fn next(&mut self) -> Option<Event> {
        self.events.recv().await
    }
}
