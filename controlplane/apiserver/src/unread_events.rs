//! Memory of the events that the watches of one owner have not sent yet.
//!
//! A client that does not read keeps the queued events of its watch in memory, and the one that is being sent. Each watch has
//! a limit, but a user can have thousands of them, and each can be at another version of a large object.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use bytes::Bytes;

/// Maximum bytes of the unread events of one user, or of all service accounts of a namespace. An event counts once for
/// each watch, although watches may share its bytes. A watch above the limit ends.
const MAX_BYTES: usize = 64 << 20;
/// Minimum bytes of a line that counts while it is being sent.
pub(crate) const MIN_HELD_BYTES: usize = 8 << 10;

/// The bytes of unread events of one owner.
#[derive(Debug, Default)]
pub(crate) struct UnreadEvents(AtomicUsize);

/// Bytes that count until they are sent.
struct HeldBytes {
    bytes: Bytes,
    unread: Arc<UnreadEvents>,
}

// === impl UnreadEvents ===

impl UnreadEvents {
    /// Adds bytes, which must be removed later in any case. Returns false above the limit.
    pub(crate) fn add(&self, bytes: usize) -> bool {
        self.0.fetch_add(bytes, Ordering::Relaxed) <= MAX_BYTES
    }

    pub(crate) fn remove(&self, bytes: usize) {
        self.0.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Whether bytes of this length would be within the limit now.
    pub(crate) fn has_room(&self, bytes: usize) -> bool {
        self.0.load(Ordering::Relaxed).saturating_add(bytes) <= MAX_BYTES
    }

    /// Counts large bytes until they are dropped. Returns `None` above the limit.
    pub(crate) fn hold(self: &Arc<Self>, bytes: Bytes) -> Option<Bytes> {
        if bytes.len() < MIN_HELD_BYTES {
            return Some(bytes);
        }
        let is_within = self.add(bytes.len());
        let held = HeldBytes { bytes, unread: self.clone() };
        is_within.then(|| Bytes::from_owner(held))
    }
}

// === impl HeldBytes ===

impl AsRef<[u8]> for HeldBytes {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for HeldBytes {
    fn drop(&mut self) {
        self.unread.remove(self.bytes.len());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_bytes_count_until_they_are_dropped() {
        let unread = Arc::<UnreadEvents>::default();
        let large = Bytes::from(vec![b'x'; 1 << 20]);
        let mut held: Vec<Bytes> = std::iter::from_fn(|| unread.hold(large.clone())).collect();
        assert_eq!(held.len(), 65);
        assert!(unread.hold(Bytes::from_static(b"small")).is_some());
        assert!(!unread.has_room(0));
        let last = held.pop().map(|bytes| bytes.slice(1..));
        held.pop();
        assert_eq!(unread.hold(large.clone()).as_deref(), Some(&large[..]));
        drop((held, last));
        assert_eq!(unread.0.load(Ordering::Relaxed), 0);
    }
}
