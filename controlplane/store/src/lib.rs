//! The store: versioned bytes by key, with compare-and-swap and watch. It does not know Kubernetes kinds.
//!
//! Start reading at [`Store`]. One revision counts the commits of the whole store. Every entry has the revision that
//! created it and the revision that last changed it.
//!
//! Invariants:
//! - A revision is never used twice, also not after a restart, in either tier.
//! - Commits reach every watcher in revision order, without gaps.
//! - A durable write is acknowledged only after it was synced to disk; a volatile write never touches the disk.
//! - Without calls the store neither wakes up nor writes, except for due expiries.

mod embedded;
mod error;
mod store;
#[cfg(test)]
mod suite;

pub use embedded::{Embedded, EmbeddedOptions, Sealing};
pub use error::Error;
pub use store::{Commit, Entry, Expect, Health, Page, Range, Store, Tier, Watch, Write};
