//! Memory of superseded objects that responses still refer to.
//!
//! A response that a client does not read keeps its objects in memory, even after they have changed. A client could
//! thus keep many versions of its objects. When the cache and its history drop an object to which responses still
//! refer, the cache counts the object until its memory is freed. Above a limit, the server selects the owner whose
//! responses may refer to the most of these bytes. It ends the oldest responses of that owner. Current objects do not
//! count, so the responses of many readers of the same objects do not end.
//!
//! Responses to members of `system:masters` and to components of the cluster are protected: they have a limit of their
//! own. The server subtracts all bytes to which the other responses may refer. It ends protected responses only if the
//! rest exceeds their limit. Other users therefore cannot end protected responses.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
};

use crate::unread_bytes::Reader;

/// Maximum bytes of superseded objects. Unread bytes are allowed in addition: unread bytes have a limit of their own.
/// Queued events of watches count for both limits.
const MAX_BYTES: usize = 64 << 20;
/// Maximum bytes of superseded objects that only protected responses ([`Reader::is_protected`]) refer to, in addition.
const MAX_PROTECTED_BYTES: usize = 64 << 20;

/// The superseded objects that are still in memory, and the responses that may refer to some of them.
#[derive(Default)]
pub(crate) struct SupersededObjects {
    /// Bytes of the objects that are still in memory.
    bytes: Arc<AtomicUsize>,
    /// Bytes of all objects that were ever counted.
    counted: AtomicUsize,
    responses: Mutex<Responses>,
}

/// The bytes of a superseded object. They count until this value is dropped.
#[derive(Debug)]
pub(crate) struct CountedBytes {
    all: Arc<AtomicUsize>,
    bytes: usize,
}

/// A response that may refer to superseded objects. Dropping this value removes it from the registry.
pub(crate) struct OpenResponse {
    all: Arc<SupersededObjects>,
    number: u64,
}

#[derive(Default)]
struct Responses {
    /// The open responses by number, in the order of their start.
    open: BTreeMap<u64, Open>,
    next: u64,
    /// Number of responses that were ended and are not dropped yet.
    ending: usize,
}

struct Open {
    reader: Arc<Reader>,
    /// Value of [`SupersededObjects::counted`] at the start of the request.
    begin: usize,
    /// Maximum bytes of the response.
    size: usize,
    is_ending: bool,
}

/// Upper bounds for the bytes that the responses of an owner refer to.
#[derive(Default)]
struct Held {
    /// Bytes of the responses.
    size: usize,
    /// Bytes that were counted since the start of the oldest response.
    counted: usize,
}

// === impl SupersededObjects ===

impl SupersededObjects {
    /// Bytes of all objects that were ever counted. A request passes the value at its start to [`Self::open`].
    pub(crate) fn counted(&self) -> usize {
        self.counted.load(Ordering::Relaxed)
    }

    /// Registers a response. `begin` is the result of [`Self::counted`] before its objects were collected. `size` is
    /// the maximum number of bytes of its objects.
    pub(crate) fn open(self: &Arc<Self>, reader: &Arc<Reader>, begin: usize, size: usize) -> OpenResponse {
        let mut responses = self.lock();
        let number = responses.next;
        responses.next += 1;
        responses.open.insert(number, Open { reader: reader.clone(), begin, size, is_ending: false });
        OpenResponse { all: self.clone(), number }
    }

    /// Counts the bytes of a superseded object. Above the limit, responses end.
    pub(crate) fn count(&self, bytes: usize) -> CountedBytes {
        self.counted.fetch_add(bytes, Ordering::Relaxed);
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        self.enforce_limit();
        CountedBytes { all: self.bytes.clone(), bytes }
    }

    /// Bytes of the superseded objects that are still in memory.
    #[cfg(test)]
    pub(crate) fn bytes(&self) -> usize {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Number of registered responses.
    #[cfg(test)]
    pub(crate) fn responses(&self) -> usize {
        self.lock().open.len()
    }

    fn lock(&self) -> MutexGuard<'_, Responses> {
        self.responses.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends responses above the limit.
    fn enforce_limit(&self) {
        let bytes = self.bytes.load(Ordering::Relaxed);
        if bytes <= MAX_BYTES {
            return;
        }
        let mut responses = self.lock();
        let unread = responses.open.values().next().map_or(0, |one| one.reader.bytes_of_all());
        let ended = responses.end(bytes.saturating_sub(unread), self.counted());
        drop(responses);
        ended.iter().for_each(|reader| reader.evicted().cancel());
    }
}

// === impl Responses ===

impl Responses {
    /// Ends responses above the limits. `bytes` is the number of superseded bytes that do not count as unread. Returns
    /// the readers of the ended responses. While ended responses exist, no further responses end.
    fn end(&mut self, bytes: usize, counted: usize) -> Vec<Arc<Reader>> {
        if self.ending > 0 || bytes <= MAX_BYTES {
            return Vec::new();
        }
        let (protected, others) = (self.held(true, counted), self.held(false, counted));
        // Bytes above the protected limit to which only protected responses can refer.
        let of_protected = bytes.saturating_sub(others + MAX_PROTECTED_BYTES);
        if of_protected > 0 && protected > 0 {
            return self.end_oldest(of_protected, counted, |one| one.reader.is_protected());
        }
        let excess = bytes.saturating_sub(MAX_BYTES + protected.min(MAX_PROTECTED_BYTES));
        if excess == 0 {
            return Vec::new();
        }
        let Some(owner) = self.largest_owner(counted) else { return Vec::new() };
        self.end_oldest(excess, counted, |one| one.is_of(&owner))
    }

    /// Maximum bytes of superseded objects that the protected responses refer to, or that all other responses refer to.
    fn held(&self, is_protected: bool, counted: usize) -> usize {
        let mut held = Held::default();
        let chosen = self.open.values().filter(|one| one.reader.is_protected() == is_protected);
        chosen.for_each(|one| held.add(one, counted));
        held.bytes()
    }

    /// The owner whose responses may refer to the most bytes. Protected responses do not count.
    fn largest_owner(&self, counted: usize) -> Option<String> {
        let mut owners = HashMap::<&str, Held>::new();
        for one in self.open.values().filter(|one| !one.reader.is_protected()) {
            owners.entry(one.reader.owner()).or_default().add(one, counted);
        }
        let (owner, _) = owners.into_iter().max_by_key(|(_, held)| held.bytes())?;
        Some(owner.to_owned())
    }

    /// Ends the oldest of the responses that `is_chosen` accepts, until the ended responses may refer to `excess`
    /// bytes.
    fn end_oldest(
        &mut self,
        excess: usize,
        counted: usize,
        is_chosen: impl Fn(&Open) -> bool,
    ) -> Vec<Arc<Reader>> {
        let (mut ended, mut released) = (Vec::new(), 0_usize);
        for one in self.open.values_mut() {
            if released >= excess {
                break;
            }
            let bytes = one.bytes(counted);
            if bytes == 0 || !is_chosen(one) {
                continue;
            }
            released = released.saturating_add(bytes);
            one.is_ending = true;
            ended.push(one.reader.clone());
        }
        self.ending = ended.len();
        ended
    }

    /// Removes a response. Returns whether it was the last response that was being ended.
    fn remove(&mut self, number: u64) -> bool {
        let was_ending = self.open.remove(&number).is_some_and(|one| one.is_ending);
        if was_ending {
            self.ending -= 1;
        }
        was_ending && self.ending == 0
    }
}

// === impl Open ===

impl Open {
    /// Whether the response is to this owner, and not protected.
    fn is_of(&self, owner: &str) -> bool {
        !self.reader.is_protected() && self.reader.owner() == owner
    }

    /// Maximum bytes of superseded objects that the response refers to.
    fn bytes(&self, counted: usize) -> usize {
        self.size.min(counted.saturating_sub(self.begin))
    }
}

// === impl Held ===

impl Held {
    fn add(&mut self, one: &Open, counted: usize) {
        self.size = self.size.saturating_add(one.size);
        self.counted = self.counted.max(counted.saturating_sub(one.begin));
    }

    /// Maximum bytes of superseded objects that the owner's responses refer to.
    fn bytes(&self) -> usize {
        self.size.min(self.counted)
    }
}

// === impl CountedBytes ===

impl Drop for CountedBytes {
    fn drop(&mut self) {
        self.all.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

// === impl OpenResponse ===

impl Drop for OpenResponse {
    fn drop(&mut self) {
        let is_last_ended = self.all.lock().remove(self.number);
        // Other responses may refer to the same objects.
        if is_last_ended {
            self.all.enforce_limit();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::unread_bytes::UnreadBytes;

    const MEBIBYTE: usize = 1 << 20;

    /// A reader and its response.
    type Opened = (Arc<Reader>, OpenResponse);

    /// A registry, and the unread bytes of its readers.
    #[derive(Default)]
    struct Server {
        unread: Arc<UnreadBytes>,
        superseded: Arc<SupersededObjects>,
    }

    impl Server {
        fn open(&self, owner: &str, mebibytes: usize) -> Opened {
            self.opened(self.unread.reader(owner), mebibytes)
        }

        fn open_by_master(&self, mebibytes: usize) -> Opened {
            self.opened(self.unread.reader_of_masters("root"), mebibytes)
        }

        fn opened(&self, reader: Arc<Reader>, mebibytes: usize) -> Opened {
            let open = self.superseded.open(&reader, self.superseded.counted(), mebibytes * MEBIBYTE);
            (reader, open)
        }

        fn supersede(&self, mebibytes: usize) -> Vec<CountedBytes> {
            (0..mebibytes).map(|_| self.superseded.count(MEBIBYTE)).collect()
        }
    }

    fn is_evicted((reader, _): &Opened) -> bool {
        reader.evicted().is_cancelled()
    }

    #[test]
    fn the_owner_of_the_most_superseded_objects_loses_its_oldest_responses() {
        let server = Server::default();
        let mut of_eve = vec![server.open("eve", 30), server.open("eve", 30)];
        let mut objects = server.supersede(40);
        // The readers of other owners are not evicted: readers of current objects, and a large list that began later.
        let mut others: Vec<Opened> = (0..100).map(|_| server.open("nodes", 100)).collect();
        others.push(server.open("bob", 100));
        of_eve.push(server.open("eve", 30));
        objects.extend(server.supersede(24));
        assert!(!of_eve.iter().any(is_evicted), "within the limit");
        objects.extend(server.supersede(1));
        assert_eq!(of_eve.iter().map(is_evicted).collect::<Vec<_>>(), [true, false, false]);
        objects.extend(server.supersede(10));
        assert_eq!(of_eve.iter().map(is_evicted).collect::<Vec<_>>(), [true, false, false], "one is ending");
        objects.truncate(45);
        drop(of_eve.remove(0));
        assert_eq!(of_eve.iter().map(is_evicted).collect::<Vec<_>>(), [false; 2], "enough is released");
        assert!(!others.iter().any(is_evicted));
        drop((of_eve, others, objects));
        assert_eq!((server.superseded.bytes(), server.superseded.responses()), (0, 0));
    }

    #[test]
    fn responses_end_until_enough_is_released() {
        let server = Server::default();
        let mut of_eve: Vec<Opened> = (0..3).map(|_| server.open("eve", 30)).collect();
        let objects = server.supersede(65);
        for _ in 0..3 {
            let evicted: Vec<bool> = of_eve.iter().map(is_evicted).collect();
            assert_eq!(evicted.iter().filter(|evicted| **evicted).count(), 1, "{evicted:?}");
            // The other responses refer to the same objects, so nothing is released.
            drop(of_eve.remove(0));
        }
        drop(objects);
        assert_eq!((server.superseded.bytes(), server.superseded.responses()), (0, 0));
    }

    #[test]
    fn responses_to_masters_have_a_limit_of_their_own() {
        let server = Server::default();
        let master = server.open_by_master(300);
        let mut objects = server.supersede(60);
        let bob = server.open("bob", 100);
        objects.extend(server.supersede(68));
        assert!(!is_evicted(&master) && !is_evicted(&bob), "both are within their limits");
        objects.extend(server.supersede(1));
        assert!(!is_evicted(&master) && is_evicted(&bob), "his response may refer to the objects");
        drop(bob);
        assert!(is_evicted(&master), "only this response remains");
        drop((master, objects));
        assert_eq!((server.superseded.bytes(), server.superseded.responses()), (0, 0));
    }

    #[test]
    fn other_users_do_not_end_the_responses_to_masters_and_components() {
        let server = Server::default();
        let users: Vec<Opened> = (0..32).map(|number| server.open(&format!("user-{number}"), 16)).collect();
        let protected = [server.open_by_master(300), server.open("system:kube-scheduler", 300)];
        let mut objects = server.supersede(192);
        assert!(users.iter().any(is_evicted));
        for user in users {
            // Each user has kept six objects.
            objects.truncate(objects.len() - 6);
            drop(user);
            assert!(!protected.iter().any(is_evicted));
        }
        assert!(objects.is_empty());
    }

    #[test]
    fn bytes_that_count_as_unread_too_end_no_response() {
        let server = Server::default();
        let list = server.open("bob", 100);
        let watch = server.unread.reader("eve");
        let queued = watch.hold(bytes::Bytes::from(vec![0_u8; 20 * MEBIBYTE])).unwrap();
        let mut objects = server.supersede(84);
        assert!(!is_evicted(&list));
        objects.extend(server.supersede(1));
        assert!(is_evicted(&list));
        drop((queued, objects));
    }
}
