//! Memory of superseded objects that responses still refer to.
//!
//! A response that a client does not read keeps its objects in memory, also after they have changed. A client could thus
//! keep many versions of its objects. The cache counts an object that it and its history no longer have, if others refer
//! to it. The object counts until it is dropped. Above a limit, responses end: the oldest ones of the owner that may
//! refer to the most of these bytes. Current objects do not count, so many readers of the same objects do not end.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
};

use crate::unread_bytes::Reader;

/// Maximum bytes of superseded objects. Unread bytes are allowed in addition: they have a limit of their own, and queued
/// events of watches count as both.
const MAX_BYTES: usize = 64 << 20;

/// The superseded objects that are still in memory, and the responses that may refer to some.
#[derive(Default)]
pub(crate) struct SupersededObjects {
    /// Bytes of the objects that are still in memory.
    bytes: Arc<AtomicUsize>,
    /// Bytes of all objects that were ever counted.
    counted: AtomicUsize,
    responses: Mutex<Responses>,
}

/// The bytes of a superseded object. They count until this is dropped.
#[derive(Debug)]
pub(crate) struct CountedBytes {
    all: Arc<AtomicUsize>,
    bytes: usize,
}

/// A response that may refer to superseded objects, until this is dropped.
pub(crate) struct OpenResponse {
    all: Arc<SupersededObjects>,
    number: u64,
}

#[derive(Default)]
struct Responses {
    /// By number, in the order of their start.
    open: BTreeMap<u64, Open>,
    next: u64,
    /// Number of responses that were ended and are not dropped yet.
    ending: usize,
}

struct Open {
    reader: Arc<Reader>,
    /// [`SupersededObjects::counted`] at the start of the request.
    begin: usize,
    /// Maximum bytes of the response.
    size: usize,
    is_ending: bool,
}

/// Limits of the bytes that the responses of an owner refer to.
#[derive(Default)]
struct Held {
    /// Bytes of the responses.
    size: usize,
    /// Bytes that were counted since the start of the oldest response.
    counted: usize,
}

// === impl SupersededObjects ===

impl SupersededObjects {
    /// Bytes of all objects that were ever counted: the start of a request, for [`Self::open`].
    pub(crate) fn counted(&self) -> usize {
        self.counted.load(Ordering::Relaxed)
    }

    /// Registers a response. `begin`: the result of [`Self::counted`] before its objects were collected. `size`: maximum
    /// bytes of its objects.
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
        let ended = responses.end(bytes.saturating_sub(MAX_BYTES + unread), self.counted());
        drop(responses);
        ended.iter().for_each(|reader| reader.lost().cancel());
    }
}

// === impl Responses ===

impl Responses {
    /// Ends the oldest responses of the owner that may refer to the most bytes, until these may refer to `excess` bytes.
    /// Returns their readers. While ended responses exist, no further ones end.
    fn end(&mut self, excess: usize, counted: usize) -> Vec<Arc<Reader>> {
        let mut ended = Vec::new();
        if excess == 0 || self.ending > 0 {
            return ended;
        }
        let mut owners = HashMap::<&str, Held>::new();
        for one in self.open.values() {
            owners.entry(one.reader.owner()).or_default().add(one, counted);
        }
        let Some((owner, _)) = owners.into_iter().max_by_key(|(_, held)| held.bytes()) else { return ended };
        let owner = owner.to_owned();
        let mut released = 0_usize;
        for one in self.open.values_mut().filter(|one| one.reader.owner() == owner) {
            let bytes = one.bytes(counted);
            if released >= excess {
                break;
            }
            if bytes == 0 {
                continue;
            }
            released = released.saturating_add(bytes);
            one.is_ending = true;
            ended.push(one.reader.clone());
        }
        self.ending = ended.len();
        ended
    }

    /// Removes a response. Returns whether it was the last one that was ended.
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
            let reader = self.unread.reader(owner);
            let open = self.superseded.open(&reader, self.superseded.counted(), mebibytes * MEBIBYTE);
            (reader, open)
        }

        fn supersede(&self, mebibytes: usize) -> Vec<CountedBytes> {
            (0..mebibytes).map(|_| self.superseded.count(MEBIBYTE)).collect()
        }
    }

    fn has_lost((reader, _): &Opened) -> bool {
        reader.lost().is_cancelled()
    }

    #[test]
    fn the_owner_of_the_most_superseded_objects_loses_its_oldest_responses() {
        let server = Server::default();
        let mut of_eve = vec![server.open("eve", 30), server.open("eve", 30)];
        let mut objects = server.supersede(40);
        // Readers of current objects, and a large list that began later.
        let mut others: Vec<Opened> = (0..100).map(|_| server.open("nodes", 100)).collect();
        others.push(server.open("bob", 100));
        of_eve.push(server.open("eve", 30));
        objects.extend(server.supersede(24));
        assert!(!of_eve.iter().any(has_lost), "within the limit");
        objects.extend(server.supersede(1));
        assert_eq!(of_eve.iter().map(has_lost).collect::<Vec<_>>(), [true, false, false]);
        objects.extend(server.supersede(10));
        assert_eq!(of_eve.iter().map(has_lost).collect::<Vec<_>>(), [true, false, false], "one is ending");
        objects.truncate(45);
        drop(of_eve.remove(0));
        assert_eq!(of_eve.iter().map(has_lost).collect::<Vec<_>>(), [false; 2], "enough is released");
        assert!(!others.iter().any(has_lost));
        drop((of_eve, others, objects));
        assert_eq!((server.superseded.bytes(), server.superseded.responses()), (0, 0));
    }

    #[test]
    fn responses_end_until_enough_is_released() {
        let server = Server::default();
        let mut of_eve: Vec<Opened> = (0..3).map(|_| server.open("eve", 30)).collect();
        let objects = server.supersede(65);
        for _ in 0..3 {
            let lost: Vec<bool> = of_eve.iter().map(has_lost).collect();
            assert_eq!(lost.iter().filter(|lost| **lost).count(), 1, "{lost:?}");
            // The other responses refer to the same objects, so nothing is released.
            drop(of_eve.remove(0));
        }
        drop(objects);
        assert_eq!((server.superseded.bytes(), server.superseded.responses()), (0, 0));
    }

    #[test]
    fn bytes_that_count_as_unread_too_end_no_response() {
        let server = Server::default();
        let list = server.open("bob", 100);
        let watch = server.unread.reader("eve");
        let queued = watch.hold(bytes::Bytes::from(vec![0_u8; 20 * MEBIBYTE])).unwrap();
        let mut objects = server.supersede(84);
        assert!(!has_lost(&list));
        objects.extend(server.supersede(1));
        assert!(has_lost(&list));
        drop((queued, objects));
    }
}
