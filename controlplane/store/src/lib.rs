//! Versioned keyed bytes with compare-and-swap and watch; knows no kind.
//!
//! Start reading at [`Store`]. One rising revision counts the commits of the whole store; every
//! entry carries the revision that made it and the one that last changed it.
//!
//! Invariants:
//! - A revision is never handed out twice, across restarts too, whichever tier it went to.
//! - Commits reach every watcher in revision order, without gaps.
//! - A durable write is acknowledged only after it was synced to disk; a volatile one never
//!   touches the disk.
//! - Nothing wakes up and nothing is written while nobody calls, save for expiries that are due.

mod embedded;
mod error;
mod store;
#[cfg(test)]
mod suite;

pub use embedded::{Embedded, EmbeddedOptions, Sealing};
pub use error::Error;
pub use store::{Commit, Entry, Expect, Health, Page, Range, Store, Tier, Watch, Write};
