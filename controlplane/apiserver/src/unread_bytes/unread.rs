//! The counts of unread bytes by class, owner and reader. No I/O.

use std::collections::hash_map::Entry;
use std::collections::{BTreeSet, HashMap};
use std::hash::Hash;
use std::sync::Arc;

use tokio_util::sync::CancellationToken;

use super::MAX_BYTES;
use super::class::Class;
use super::piece::{Identity, Piece, counted};

/// Capacity, in elements, that an empty map keeps.
pub(super) const KEPT_CAPACITY: usize = 14;

/// The identity of a reader, and the token that ends its response.
pub(super) struct ReaderId {
    pub(super) class: Class,
    pub(super) owner: Arc<str>,
    pub(super) number: u64,
    /// Token that is cancelled when the response must end.
    pub(super) evicted: CancellationToken,
}

#[derive(Default)]
pub(super) struct Unread {
    /// Number of bytes. Shared bytes count once.
    pub(super) bytes: usize,
    /// Number of bytes of the slots of events. They are included in `bytes`.
    pub(super) slot_bytes: usize,
    /// Number of classes with references to bytes.
    pub(super) classes_of: HashMap<Identity, usize>,
    /// Unread bytes of each class, in the order of [`Class::ALL`].
    pub(super) classes: [ClassBytes; 3],
    /// The owners that had unread bytes. An owner stays until its readers are dropped. Otherwise each event of a watch
    /// would add and remove the owner, because it is unread for a short time.
    pub(super) owners: HashMap<Arc<str>, Owner>,
    /// Bytes that evicted readers still hold.
    pub(super) ending: usize,
}

/// The unread bytes of a class of owners.
#[derive(Default)]
pub(super) struct ClassBytes {
    /// Number of bytes. Bytes that owners of this class share count once.
    pub(super) bytes: usize,
    /// Bytes that evicted readers still hold.
    pub(super) ending: usize,
    /// Number of owners with references to bytes.
    pub(super) owners_of: HashMap<Identity, usize>,
}

#[derive(Default)]
pub(super) struct Owner {
    /// Number of bytes. Bytes that readers of this owner share count once.
    pub(super) bytes: usize,
    /// Bytes that evicted readers still hold.
    pub(super) ending: usize,
    /// Number of references to bytes.
    pub(super) references: HashMap<Identity, usize>,
    pub(super) readers: HashMap<u64, Holding>,
    /// The readers that are not evicted: bytes and number.
    pub(super) remaining: BTreeSet<(usize, u64)>,
}

/// The unread bytes of one reader.
pub(super) struct Holding {
    pub(super) bytes: usize,
    pub(super) references: usize,
    pub(super) evicted: CancellationToken,
    pub(super) is_evicted: bool,
}

// === impl Unread ===

impl Unread {
    /// Counts bytes of a reader. Returns false if the reader is evicted.
    pub(super) fn add(&mut self, reader: &ReaderId, piece: Piece) -> bool {
        let (identity, counted) = (piece.shared, counted(piece.shared));
        let owner = self.owners.entry(reader.owner.clone()).or_default();
        let new = || Holding { bytes: 0, references: 0, evicted: reader.evicted.clone(), is_evicted: false };
        let holding = owner.readers.entry(reader.number).or_insert_with(new);
        if holding.is_evicted {
            return false;
        }
        owner.remaining.remove(&(holding.bytes, reader.number));
        holding.bytes += piece.bytes();
        holding.references += 1;
        owner.remaining.insert((holding.bytes, reader.number));
        owner.bytes += piece.own;
        let class = &mut self.classes[reader.class as usize];
        class.bytes += piece.own;
        self.bytes += piece.own;
        self.slot_bytes += piece.own;
        let references = owner.references.entry(identity).or_default();
        *references += 1;
        if *references == 1 {
            owner.bytes += counted;
            let owners = class.owners_of.entry(identity).or_default();
            *owners += 1;
            if *owners == 1 {
                class.bytes += counted;
                let classes = self.classes_of.entry(identity).or_default();
                *classes += 1;
                self.bytes += if *classes == 1 { counted } else { 0 };
            }
        }
        true
    }

    pub(super) fn remove(&mut self, reader: &ReaderId, piece: Piece) {
        let (identity, counted) = (piece.shared, counted(piece.shared));
        let Some(owner) = self.owners.get_mut(&reader.owner) else { return };
        let Some(holding) = owner.readers.get_mut(&reader.number) else { return };
        let class = &mut self.classes[reader.class as usize];
        let before = holding.bytes;
        holding.bytes -= piece.bytes();
        holding.references -= 1;
        let (after, is_last) = (holding.bytes, holding.references == 0);
        if holding.is_evicted {
            owner.ending -= piece.bytes();
            class.ending -= piece.bytes();
            self.ending -= piece.bytes();
        } else {
            owner.remaining.remove(&(before, reader.number));
            if !is_last {
                owner.remaining.insert((after, reader.number));
            }
        }
        if is_last {
            owner.readers.remove(&reader.number);
            release_if_empty(&mut owner.readers);
        }
        owner.bytes -= piece.own;
        class.bytes -= piece.own;
        self.bytes -= piece.own;
        self.slot_bytes -= piece.own;
        if dereference(&mut owner.references, identity) {
            owner.bytes -= counted;
            if dereference(&mut class.owners_of, identity) {
                class.bytes -= counted;
                if dereference(&mut self.classes_of, identity) {
                    self.bytes -= counted;
                }
            }
        }
    }

    /// Removes an owner without unread bytes.
    pub(super) fn remove_unused(&mut self, owner: &str) {
        if self.owners.get(owner).is_some_and(|owner| owner.readers.is_empty()) {
            self.owners.remove(owner);
            release_if_empty(&mut self.owners);
        }
    }

    /// Bytes of a class above its share. Evicted readers do not count.
    fn excess(&self, class: Class) -> usize {
        let of_class = &self.classes[class as usize];
        of_class.bytes.saturating_sub(of_class.ending).saturating_sub(class.share())
    }

    /// The next reader to evict: the largest reader of the largest owner, in the class that exceeds its share the most.
    /// If several readers have equally many bytes, it is the newest of them. Evicted readers do not count. `None`
    /// within the limit.
    pub(super) fn next_to_end(&self) -> Option<(Arc<str>, u64)> {
        if self.bytes.saturating_sub(self.ending) <= MAX_BYTES {
            return None;
        }
        // Above the limit, at least one class is above its share.
        let class = Class::ALL.into_iter().max_by_key(|class| self.excess(*class))?;
        let is_candidate =
            |(name, owner): &(&Arc<str>, &Owner)| Class::of(name) == class && !owner.remaining.is_empty();
        let owners = self.owners.iter().filter(is_candidate);
        let (name, owner) = owners.max_by_key(|(_, owner)| owner.bytes.saturating_sub(owner.ending))?;
        owner.remaining.last().map(|(_, number)| (name.clone(), *number))
    }

    /// Marks a reader as evicted. Returns the token that ends its response. `None` if the reader was evicted before, or
    /// holds no bytes.
    pub(super) fn end(&mut self, owner: &str, number: u64) -> Option<CancellationToken> {
        let class = Class::of(owner);
        let owner = self.owners.get_mut(owner)?;
        let holding = owner.readers.get_mut(&number).filter(|holding| !holding.is_evicted)?;
        holding.is_evicted = true;
        owner.remaining.remove(&(holding.bytes, number));
        owner.ending += holding.bytes;
        self.classes[class as usize].ending += holding.bytes;
        self.ending += holding.bytes;
        Some(holding.evicted.clone())
    }
}

/// Removes a reference. Returns whether it was the last reference.
fn dereference(references: &mut HashMap<Identity, usize>, of: Identity) -> bool {
    let Entry::Occupied(mut found) = references.entry(of) else { return false };
    *found.get_mut() -= 1;
    let is_last = *found.get() == 0;
    if is_last {
        found.remove();
        release_if_empty(references);
    }
    is_last
}

/// Releases most of the memory of an empty map, which may have had many elements.
fn release_if_empty<K: Eq + Hash, V>(map: &mut HashMap<K, V>) {
    if map.is_empty() {
        map.shrink_to(KEPT_CAPACITY);
    }
}
