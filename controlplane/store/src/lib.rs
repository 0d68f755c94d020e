//! The store: versioned values by key, with compare-and-swap and watches. It does not depend on Kubernetes kinds.
//!
//! The interface is [`Store`]. It has two implementations: [`Embedded`] for one server, and [`Etcd`] for several
//! servers that share one store. `suite.rs` has the tests of both. One revision counts the commits of the whole store.
//! Every entry has the revision that created it and the revision that last changed it.
//!
//! Invariants:
//! - A revision is never used twice, not even after a restart. This holds for durable and for volatile writes.
//! - Every watcher gets the commits in the order of revisions, without gaps.
//! - A durable write is acknowledged only after it was synced to disk. A volatile write never reaches the disk of the
//!   embedded store. In etcd it is stored like a durable entry, with a lease if it has a time to live.
//! - Without calls the embedded store neither wakes up nor writes, except to remove expired entries.

mod backup;
mod codec;
mod embedded;
mod error;
mod etcd;
mod store;
#[cfg(test)]
mod suite;

pub use backup::{Backup, BackupHead, BackupSummary, verify_backup};
pub use codec::Sealing;
pub use embedded::{Embedded, EmbeddedOptions, restore};
pub use error::Error;
pub use etcd::{Etcd, EtcdIdentity, EtcdOptions, EtcdTls, etcd_metrics, forget_etcd_metrics};
pub use store::{
    Commit, Entry, Event, Expect, Guard, Health, MemberSize, Page, Range, ReadablePage, Store, Tier,
    Unreadable, UnreadableEntry, Watch, Write,
};
