//! Memory of events and responses that clients have not read yet.
//!
//! A client that does not read keeps the queued events of its watch in memory, and the piece of the response that is
//! being sent. Each watch has a limit, but there can be many users, and each can have thousands of watches. So all
//! users share a limit. Above this limit, the server evicts a reader: it ends the largest response of the owner with
//! the most unread bytes. The server closes the connection only if the connection still holds the bytes.
//!
//! Bytes that several responses share count once: one service account may have watches on every node of a cluster.
//!
//! If many users hold a few bytes each, a component of the cluster could be the owner with the most bytes. So each
//! class of owners has a share of the limit that other classes cannot use up.

mod class;
mod piece;
mod unread;

use std::sync::{
    Arc, Mutex, MutexGuard, PoisonError,
    atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
};

use bytes::Bytes;
use tokio_util::sync::CancellationToken;

use class::Class;
pub(crate) use piece::SLOT_BYTES;
use piece::{Identity, Piece, counted, identity};
use unread::{ReaderId, Unread};

/// Maximum unread bytes of all owners.
const MAX_BYTES: usize = 64 << 20;
/// Minimum size of a piece in bytes. The server does not count smaller pieces while it sends them.
pub(crate) const MIN_HELD_BYTES: usize = 8 << 10;

/// The unread bytes of all owners. An owner is a user, or all service accounts of a namespace.
#[derive(Default)]
pub(crate) struct UnreadBytes {
    unread: Mutex<Unread>,
    next_reader: AtomicU64,
    /// Bytes of members of `system:masters`, which have no limit. Shared bytes count for each reader.
    of_masters: AtomicUsize,
}

/// A response that a client reads. It counts while it has unread bytes.
pub(crate) struct Reader {
    all: Arc<UnreadBytes>,
    is_of_masters: bool,
    id: ReaderId,
    /// Whether any bytes were counted for this reader. If so, [`Unread`] may have an entry for the owner.
    has_counted: AtomicBool,
}

/// The memory of a list. It counts until this value is dropped. Short lists do not count.
pub(crate) struct HeldList(Option<(Identity, Arc<Reader>)>);

/// Bytes that count until they are sent.
struct HeldBytes {
    bytes: Bytes,
    reader: Arc<Reader>,
}

// === impl UnreadBytes ===

impl UnreadBytes {
    /// A reader of an owner.
    pub(crate) fn reader(self: &Arc<Self>, owner: &str) -> Arc<Reader> {
        self.add_reader(owner, false)
    }

    /// A reader of a member of `system:masters`. Its unread bytes have no limit.
    pub(crate) fn reader_of_masters(self: &Arc<Self>, user: &str) -> Arc<Reader> {
        self.add_reader(user, true)
    }

    fn add_reader(self: &Arc<Self>, owner: &str, is_of_masters: bool) -> Arc<Reader> {
        let number = self.next_reader.fetch_add(1, Ordering::Relaxed);
        let (class, owner, evicted) = (Class::of(owner), owner.into(), CancellationToken::new());
        let id = ReaderId { class, owner, number, evicted };
        let has_counted = AtomicBool::new(false);
        Arc::new(Reader { all: self.clone(), is_of_masters, id, has_counted })
    }

    /// Number of bytes that count now.
    #[cfg(test)]
    pub(crate) fn bytes(&self) -> usize {
        self.lock().bytes
    }

    fn lock(&self) -> MutexGuard<'_, Unread> {
        self.unread.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// === impl Reader ===

impl Reader {
    /// Counts bytes. The caller keeps them in memory, and removes them later. Above the limit, readers of the owners
    /// with the most bytes are evicted. Returns false if this reader is evicted now or was evicted before. The bytes do
    /// not count then.
    pub(crate) fn add(&self, bytes: &Bytes) -> bool {
        self.count(identity(bytes).into())
    }

    /// Like [`Self::add`], for an event in a queue and the object that it keeps in memory. If the result is false, the
    /// reader is evicted, and its watch ends. This releases the bytes of the reader, so other watches can continue.
    pub(crate) fn add_event(&self, object: Option<&Bytes>) -> bool {
        let is_within = self.count(Piece::event(object));
        if !is_within {
            self.evict();
        }
        is_within
    }

    /// Ends the response, unless the reader was evicted before.
    fn evict(&self) {
        let evicted = self.all.lock().end(&self.id.owner, self.id.number);
        if let Some(evicted) = evicted {
            evicted.cancel();
        }
    }

    fn count(&self, piece: Piece) -> bool {
        if self.is_of_masters {
            self.all.of_masters.fetch_add(counted(piece.shared), Ordering::Relaxed);
            return true;
        }
        if self.id.evicted.is_cancelled() {
            return false;
        }
        self.has_counted.store(true, Ordering::Relaxed);
        let mut unread = self.all.lock();
        if !unread.add(&self.id, piece) {
            return false;
        }
        let (mut evicted, mut is_kept) = (Vec::new(), true);
        // A large piece may need the memory of many small pieces, so several readers may have to be evicted.
        while let Some((owner, number)) = unread.next_to_end() {
            if number == self.id.number {
                unread.remove(&self.id, piece);
                is_kept = false;
                break;
            }
            let Some(token) = unread.end(&owner, number) else { break };
            evicted.push(token);
        }
        drop(unread);
        evicted.iter().for_each(CancellationToken::cancel);
        is_kept
    }

    /// Ends the count of bytes that were added.
    pub(crate) fn remove(&self, bytes: &Bytes) {
        self.uncount(identity(bytes).into());
    }

    /// Ends the count of an event that was added.
    pub(crate) fn remove_event(&self, object: Option<&Bytes>) {
        self.uncount(Piece::event(object));
    }

    fn uncount(&self, piece: Piece) {
        if self.is_of_masters {
            self.all.of_masters.fetch_sub(counted(piece.shared), Ordering::Relaxed);
        } else {
            self.all.lock().remove(&self.id, piece);
        }
    }

    /// Counts the memory of a list, without the memory to which its elements refer. The list must exist at this address
    /// until the result is dropped. Returns `None` where [`Self::add`] returns false.
    pub(crate) fn hold_list<T>(self: &Arc<Self>, list: &[T]) -> Option<HeldList> {
        let identity = Identity { address: list.as_ptr().addr(), length: size_of_val(list) };
        if identity.length < MIN_HELD_BYTES {
            return Some(HeldList(None));
        }
        self.count(identity.into()).then(|| HeldList(Some((identity, self.clone()))))
    }

    /// Counts large bytes until they are dropped. Returns `None` where [`Self::add`] returns false.
    pub(crate) fn hold(self: &Arc<Self>, bytes: Bytes) -> Option<Bytes> {
        if bytes.len() < MIN_HELD_BYTES {
            return Some(bytes);
        }
        self.add(&bytes).then(|| Bytes::from_owner(HeldBytes { bytes, reader: self.clone() }))
    }

    /// Does the same as [`Self::hold`], for a frame that only this response has, such as a rendered table. A frame that
    /// shares the memory of a stored object does not count.
    pub(crate) fn hold_frame(self: &Arc<Self>, frame: Bytes) -> std::io::Result<Bytes> {
        if !frame.is_unique() {
            return Ok(frame);
        }
        let refused = || std::io::Error::other("cannot send the response: too many bytes are not read yet");
        self.hold(frame).ok_or_else(refused)
    }

    /// Token that is cancelled when the response must end because other responses need the memory.
    pub(crate) fn evicted(&self) -> CancellationToken {
        self.id.evicted.clone()
    }

    /// The owner: a user, or all service accounts of a namespace.
    pub(crate) fn owner(&self) -> &str {
        &self.id.owner
    }

    /// Whether the client is a member of `system:masters` or a component of the cluster. Other users must not be able
    /// to end its response.
    pub(crate) fn is_protected(&self) -> bool {
        self.is_of_masters || self.id.class == Class::Components
    }

    /// Number of unread bytes of all owners, including owners without a limit, but without the slots of events.
    pub(crate) fn bytes_of_all(&self) -> usize {
        let of_masters = self.all.of_masters.load(Ordering::Relaxed);
        let unread = self.all.lock();
        unread.bytes - unread.slot_bytes + of_masters
    }

    /// Number of bytes that count for the owner now.
    #[cfg(test)]
    pub(crate) fn bytes_of_owner(&self) -> usize {
        self.all.lock().owners.get(&self.id.owner).map_or(0, |owner| owner.bytes)
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        if *self.has_counted.get_mut() {
            self.all.lock().remove_unused(&self.id.owner);
        }
    }
}

// === impl HeldList ===

impl Drop for HeldList {
    fn drop(&mut self) {
        if let Some((identity, reader)) = &self.0 {
            reader.uncount((*identity).into());
        }
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
        self.reader.remove(&self.bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::unread::{ClassBytes, KEPT_CAPACITY, Owner};
    use super::*;

    fn large(mebibytes: usize) -> Bytes {
        Bytes::from(vec![0_u8; mebibytes << 20])
    }

    /// Whether no bytes count. Owners may still be present if their readers are not dropped yet.
    fn is_released(unread: &Unread) -> bool {
        let is_unused = |owner: &Owner| {
            let bytes = owner.bytes + owner.ending;
            bytes == 0
                && owner.references.is_empty()
                && owner.readers.is_empty()
                && owner.remaining.is_empty()
        };
        let is_empty = |class: &ClassBytes| class.bytes + class.ending == 0 && class.owners_of.is_empty();
        let bytes = unread.bytes + unread.slot_bytes + unread.ending;
        bytes == 0
            && unread.classes_of.is_empty()
            && unread.classes.iter().all(is_empty)
            && unread.owners.values().all(is_unused)
    }

    #[test]
    fn large_bytes_count_until_they_are_dropped() {
        let unread = Arc::<UnreadBytes>::default();
        let reader = unread.reader("eve");
        let mut held: Vec<Bytes> = std::iter::from_fn(|| reader.hold(large(1))).collect();
        assert_eq!(held.len(), 64);
        assert!(reader.hold(Bytes::from_static(b"small")).is_some());
        let last = held.pop().map(|bytes| bytes.slice(1..));
        assert!(reader.hold(large(1)).is_none(), "a part keeps all bytes in memory");
        held.pop();
        assert!(reader.hold(large(1)).is_some_and(|bytes| bytes == large(1)));
        drop((held, last));
        assert!(is_released(&unread.lock()));
    }

    #[test]
    fn shared_bytes_count_once() {
        let (unread, large) = (Arc::<UnreadBytes>::default(), large(1));
        let hold =
            |number: usize| unread.reader(&format!("node-{}", number % 10)).hold(large.clone()).unwrap();
        let mut held: Vec<Bytes> = (0..1000).map(hold).collect();
        assert_eq!(unread.bytes(), 1 << 20);
        held.truncate(1);
        assert_eq!(unread.bytes(), 1 << 20);
        drop(held);
        let unread = unread.lock();
        assert!(is_released(&unread) && unread.owners.is_empty());
    }

    #[test]
    fn the_owner_with_the_most_bytes_loses_the_largest_response_first() {
        let unread = Arc::<UnreadBytes>::default();
        let [small, largest, ann, bob] = ["eve", "eve", "ann", "bob"].map(|owner| unread.reader(owner));
        let of_eve = [small.hold(large(10)).unwrap(), largest.hold(large(20)).unwrap()];
        // A single response of another owner is larger.
        let of_ann = ann.hold(large(25)).unwrap();
        let is_evicted = |reader: &Arc<Reader>| reader.evicted().is_cancelled();
        let first = bob.hold(large(10)).unwrap();
        assert_eq!([&small, &largest, &ann, &bob].map(is_evicted), [false, true, false, false]);
        assert!(largest.hold(large(1)).is_none());
        let second = bob.hold(large(15)).unwrap();
        assert_eq!(
            [&small, &ann, &bob].map(is_evicted),
            [false; 3],
            "the bytes of an evicted reader are released soon"
        );
        assert!(bob.hold(large(30)).is_none(), "now this owner has the most");
        drop((of_eve, of_ann, first, second));
        assert!(is_released(&unread.lock()));
    }

    #[test]
    fn as_many_small_responses_are_evicted_as_a_large_one_needs() {
        let unread = Arc::<UnreadBytes>::default();
        let small: Vec<_> = (0..63).map(|_| unread.reader("eve")).collect();
        let of_eve: Vec<Bytes> = small.iter().map(|reader| reader.hold(large(1)).unwrap()).collect();
        let of_bob = unread.reader("bob").hold(large(20)).unwrap();
        let is_evicted: Vec<bool> = small.iter().map(|reader| reader.evicted().is_cancelled()).collect();
        assert_eq!(is_evicted, [[false; 44].as_slice(), &[true; 19]].concat(), "the newest ones are evicted");
        drop((of_eve, of_bob));
        assert!(is_released(&unread.lock()));
    }

    #[test]
    fn many_users_together_do_not_take_the_share_of_a_component() {
        let unread = Arc::<UnreadBytes>::default();
        let users: Vec<_> = (0..64).map(|number| unread.reader(&format!("user-{number}"))).collect();
        let of_users: Vec<Bytes> = users.iter().map(|user| user.hold(large(1)).unwrap()).collect();
        let count = || users.iter().filter(|user| user.evicted().is_cancelled()).count();
        let components = ["system:kube-scheduler", "system:serviceaccount:kube-system:dns", "system:node:a"]
            .map(|name| unread.reader(name));
        let held: Vec<Bytes> = components.iter().map(|reader| reader.hold(large(16)).unwrap()).collect();
        assert_eq!(count(), 48, "the users keep their own share");
        assert!(!components.iter().any(|reader| reader.evicted().is_cancelled()));
        assert!(components[2].hold(large(1)).is_none(), "the nodes are above their share");
        drop((of_users, held));
        assert!(is_released(&unread.lock()));
    }

    #[test]
    fn the_shares_of_the_classes_are_the_limit() {
        assert_eq!(Class::ALL.map(Class::share).iter().sum::<usize>(), MAX_BYTES);
        assert!(Class::ALL.into_iter().enumerate().all(|(place, class)| class as usize == place));
    }

    #[test]
    fn the_bytes_of_masters_have_no_limit() {
        let unread = Arc::<UnreadBytes>::default();
        let (master, user) = (unread.reader_of_masters("root"), unread.reader("bob"));
        let mut held: Vec<Bytes> = (0..80).map(|_| master.hold(large(1)).unwrap()).collect();
        held.push(user.hold(large(1)).unwrap());
        assert_eq!((unread.bytes(), user.bytes_of_all()), (1 << 20, 81 << 20));
        drop(held);
        assert_eq!(user.bytes_of_all(), 0);
    }

    #[test]
    fn the_memory_of_a_list_counts_until_it_is_dropped() {
        let unread = Arc::<UnreadBytes>::default();
        let (reader, list) = (unread.reader("eve"), vec![0_u64; 2 << 20]);
        let held: Vec<HeldList> = list.chunks(1 << 17).map_while(|chunk| reader.hold_list(chunk)).collect();
        assert_eq!((held.len(), unread.bytes()), (16, 16 << 20));
        assert!(reader.hold_list(&list[1..100]).is_some());
        assert_eq!(unread.bytes(), 16 << 20, "a short list");
        drop(held);
        assert!(is_released(&unread.lock()));
    }

    #[test]
    fn an_owner_takes_little_memory_between_events_and_none_after_its_last_reader() {
        let unread = Arc::<UnreadBytes>::default();
        let (reader, other) = (unread.reader("eve"), unread.reader("eve"));
        let objects: Vec<Bytes> = (1..1000).map(|length| Bytes::from(vec![0_u8; length])).collect();
        assert!(objects.iter().all(|object| reader.add_event(Some(object))));
        objects.iter().for_each(|object| reader.remove_event(Some(object)));
        let capacity = || unread.lock().owners.get("eve").map(|owner| owner.references.capacity());
        assert!(is_released(&unread.lock()));
        assert!(capacity().is_some_and(|kept| kept <= 2 * KEPT_CAPACITY), "{:?}", capacity());
        drop(reader);
        assert!(unread.lock().owners.is_empty());
        assert!(other.add_event(None));
        other.remove_event(None);
        drop(other);
        assert!(unread.lock().owners.is_empty());
    }

    #[test]
    fn the_limit_of_unread_bytes_is_exact_to_one_event() {
        let unread = Arc::<UnreadBytes>::default();
        let (list, watches) = (unread.reader("bob"), ["eve", "ann"].map(|owner| unread.reader(owner)));
        let held = [32, 31].map(|mebibytes| list.hold(large(mebibytes)).unwrap());
        for number in 0..(MAX_BYTES - unread.bytes()) / SLOT_BYTES {
            assert!(watches[number % 2].add_event(None));
        }
        assert_eq!(unread.bytes(), MAX_BYTES);
        watches[0].remove_event(None);
        assert!(watches[1].add_event(None));
        assert!(!list.evicted().is_cancelled(), "as many bytes as before");
        assert!(watches[0].add_event(None));
        assert!(list.evicted().is_cancelled(), "one event above the limit");
        assert!(!watches.iter().any(|watch| watch.evicted().is_cancelled()));
        drop(held);
    }

    #[test]
    fn readers_in_several_threads_leave_nothing() {
        let (unread, object) = (Arc::<UnreadBytes>::default(), Bytes::from(vec![0_u8; 100]));
        let read = || {
            for _ in 0..1000 {
                let reader = unread.reader("eve");
                assert!(reader.add_event(Some(&object)));
                reader.remove_event(Some(&object));
            }
        };
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(read);
            }
        });
        let unread = unread.lock();
        assert!(is_released(&unread) && unread.owners.is_empty());
    }

    #[test]
    fn a_response_larger_than_the_limit_is_possible() {
        let reader = Arc::<UnreadBytes>::default().reader("eve");
        let held = reader.hold(large(70)).unwrap();
        assert!(reader.hold(large(1)).is_some());
        drop(held);
        assert_eq!(reader.bytes_of_owner(), 0);
    }
}
