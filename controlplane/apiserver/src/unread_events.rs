//! Memory of the events that the watches of one owner have not sent yet.
//!
//! A client that does not read keeps the queued events of its watch in memory, and the one that is being sent. Each watch has
//! a limit, but a user can have thousands of them, and each can be at another version of a large object. Watches at the
//! same version share its bytes, which count once: one service account may have watches on every node of a cluster.

use std::{
    collections::{HashMap, hash_map::Entry},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use bytes::Bytes;

/// Maximum bytes of the unread events of one user, or of all service accounts of a namespace. A watch above the limit
/// ends.
const MAX_BYTES: usize = 64 << 20;
/// Minimum bytes of a line that counts while it is being sent.
pub(crate) const MIN_HELD_BYTES: usize = 8 << 10;

/// The unread events of one owner.
#[derive(Default)]
pub(crate) struct UnreadEvents(Mutex<Unread>);

#[derive(Default)]
struct Unread {
    bytes: usize,
    /// Number of references to bytes, by their address and length.
    references: HashMap<(usize, usize), usize>,
}

/// Bytes that count until they are sent.
struct HeldBytes {
    bytes: Bytes,
    unread: Arc<UnreadEvents>,
}

/// Address and length. Only bytes in memory at the same time can be compared.
fn identity(bytes: &Bytes) -> (usize, usize) {
    (bytes.as_ptr().addr(), bytes.len())
}

// === impl UnreadEvents ===

impl UnreadEvents {
    /// Counts bytes. The caller keeps them in memory, and removes them later. Returns false above the limit; they do not
    /// count then.
    pub(crate) fn add(&self, bytes: &Bytes) -> bool {
        let mut locked = self.lock();
        let unread = &mut *locked;
        match unread.references.entry(identity(bytes)) {
            Entry::Occupied(mut references) => *references.get_mut() += 1,
            Entry::Vacant(_) if unread.bytes > MAX_BYTES => return false,
            Entry::Vacant(references) => {
                references.insert(1);
                unread.bytes += bytes.len();
            }
        }
        true
    }

    /// Ends the count of bytes that were added.
    pub(crate) fn remove(&self, bytes: &Bytes) {
        let mut locked = self.lock();
        let unread = &mut *locked;
        let Entry::Occupied(mut references) = unread.references.entry(identity(bytes)) else { return };
        *references.get_mut() -= 1;
        if *references.get() == 0 {
            references.remove();
            unread.bytes -= bytes.len();
        }
    }

    /// Whether bytes of this length would be within the limit now.
    pub(crate) fn has_room(&self, bytes: usize) -> bool {
        self.lock().bytes.saturating_add(bytes) <= MAX_BYTES
    }

    /// Counts large bytes until they are dropped. Returns `None` above the limit.
    pub(crate) fn hold(self: &Arc<Self>, bytes: Bytes) -> Option<Bytes> {
        if bytes.len() < MIN_HELD_BYTES {
            return Some(bytes);
        }
        self.add(&bytes).then(|| Bytes::from_owner(HeldBytes { bytes, unread: self.clone() }))
    }

    /// Number of bytes that count now.
    #[cfg(test)]
    pub(crate) fn bytes(&self) -> usize {
        self.lock().bytes
    }

    fn lock(&self) -> MutexGuard<'_, Unread> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
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
        self.unread.remove(&self.bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_bytes_count_until_they_are_dropped() {
        let unread = Arc::<UnreadEvents>::default();
        let large = || Bytes::from(vec![0_u8; 1 << 20]);
        let mut held: Vec<Bytes> = std::iter::from_fn(|| unread.hold(large())).collect();
        assert_eq!(held.len(), 65);
        assert!(unread.hold(Bytes::from_static(b"small")).is_some());
        assert!(!unread.has_room(0));
        let last = held.pop().map(|bytes| bytes.slice(1..));
        held.pop();
        assert!(unread.hold(large()).is_some_and(|bytes| bytes == large()));
        drop((held, last));
        assert_eq!(unread.bytes(), 0);
    }

    #[test]
    fn shared_bytes_count_once() {
        let unread = Arc::<UnreadEvents>::default();
        let large = Bytes::from(vec![0_u8; 1 << 20]);
        let mut held: Vec<Bytes> = (0..1000).map(|_| unread.hold(large.clone()).unwrap()).collect();
        assert_eq!(unread.bytes(), 1 << 20);
        held.truncate(1);
        assert_eq!(unread.bytes(), 1 << 20);
        drop(held);
        assert!(unread.bytes() == 0 && unread.lock().references.is_empty());
    }
}
