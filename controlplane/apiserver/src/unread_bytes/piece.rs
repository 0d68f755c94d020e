//! Pieces of unread bytes, and the number of bytes for which each piece counts.

use bytes::Bytes;

use super::MAX_BYTES;

/// A larger piece counts as this number of bytes, so that one large response fits within [`MAX_BYTES`].
const MAX_COUNTED_BYTES: usize = MAX_BYTES / 2;

/// Bytes that the server counts for the slot of a queued event; the real slot is not larger. Watches share objects, but
/// each watch has its own slots. Otherwise the slots of small shared events would take memory without a limit.
pub(crate) const SLOT_BYTES: usize = 32;

/// Identity of bytes. It is unique only while the bytes are in memory.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub(super) struct Identity {
    pub(super) address: usize,
    pub(super) length: usize,
}

/// Bytes that count for a reader.
#[derive(Clone, Copy)]
pub(super) struct Piece {
    /// Bytes that other readers may share.
    pub(super) shared: Identity,
    /// Number of bytes that only this reader has.
    pub(super) own: usize,
}

// === impl Piece ===

impl Piece {
    /// An event in a queue, and the object that it keeps in memory.
    pub(super) fn event(object: Option<&Bytes>) -> Self {
        Self { shared: object.map_or_else(Identity::default, identity), own: SLOT_BYTES }
    }

    /// Number of bytes, including the bytes that other readers may share.
    pub(super) fn bytes(self) -> usize {
        counted(self.shared) + self.own
    }
}

impl From<Identity> for Piece {
    fn from(shared: Identity) -> Self {
        Self { shared, own: 0 }
    }
}

pub(super) fn identity(bytes: &Bytes) -> Identity {
    Identity { address: bytes.as_ptr().addr(), length: bytes.len() }
}

pub(super) fn counted(identity: Identity) -> usize {
    identity.length.min(MAX_COUNTED_BYTES)
}
