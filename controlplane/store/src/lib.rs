//! The store: versioned bytes by key, with compare-and-swap and watch. It does not depend on Kubernetes kinds.
//!
//! Start reading at [`Store`]. It has two implementations: [`Embedded`] for one server, [`Etcd`] for several servers that
//! share one store. `suite.rs` has the tests that both pass. One revision counts the commits of the whole store. Every
//! entry has the revision that created it and the revision that last changed it.
//!
//! Invariants:
//! - A revision is never used twice, also not after a restart, in either tier.
//! - Commits reach every watcher in revision order, without gaps.
//! - A durable write is acknowledged only after it was synced to disk. A volatile write never touches the disk of the
//!   embedded store; etcd stores it like a durable one, with a lease if it has a time to live.
//! - Without calls the embedded store neither wakes up nor writes, except for due expiries.

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
pub use etcd::{Etcd, EtcdOptions, EtcdTls};
pub use store::{Commit, Entry, Event, Expect, Guard, Health, Page, Range, Store, Tier, Watch, Write};
