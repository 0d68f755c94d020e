//! Snapshots of a collection, for the continue tokens of lists.
//!
//! The pages of a list have the objects as they were at the revision of the first page. For a slow client the history
//! of changes is too short. So the collection takes a snapshot when a list has more than one page. A snapshot has only
//! the former states of objects that changed after its revision, and whose changes the history has dropped. So it has
//! no states while objects do not change. Each change is in one snapshot only: in the newest one whose list has the
//! object. An older snapshot therefore also needs the states in the newer ones.

use std::{
    collections::{BTreeMap, HashMap, btree_map::Entry},
    ops::Bound,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use tokio::time::Instant;

use super::{Change, Object};
use crate::superseded::SupersededObjects;

/// Age at which a snapshot is dropped. Upstream compacts the history of etcd at this interval.
pub(super) const LIFETIME: Duration = Duration::from_secs(300);
/// Maximum number of snapshots of a collection.
const MAX_SNAPSHOTS: usize = 64;
/// Maximum bytes of the states in the snapshots of a collection.
const MAX_BYTES: usize = 16 << 20;
/// Maximum bytes in the snapshots of all collections. Above it, a collection that adds a state drops snapshots until it
/// has at most [`SMALL_BYTES`].
const MAX_ALL_BYTES: usize = 64 << 20;
const SMALL_BYTES: usize = 1 << 20;
/// Maximum bytes in the snapshots of all collections, including small collections.
const MAX_ALL_BYTES_WITH_SMALL: usize = MAX_ALL_BYTES + MAX_ALL_BYTES / 4;
/// Bytes of a state without its object.
const STATE_BYTES: usize = 512;

/// The state of an object at a revision. `None` if the object did not exist.
type State = Option<Arc<Object>>;

/// The snapshots of a collection.
#[derive(Default)]
pub(super) struct Snapshots {
    /// In the order of their revisions.
    all: Vec<Snapshot>,
    /// Bytes of the states in all snapshots of this collection.
    bytes: usize,
    /// Bytes of the states in the snapshots of all collections.
    total: Arc<AtomicUsize>,
}

/// The objects under a prefix at a revision.
struct Snapshot {
    revision: u64,
    prefix: Box<str>,
    /// The user whose list needs the snapshot. All service accounts of a namespace are one owner.
    owner: Box<str>,
    /// Time of the newest first page at this revision.
    taken: Instant,
    /// States of changed objects before their first change after the revision, by key.
    former: BTreeMap<Arc<str>, State>,
    /// Bytes of these states.
    bytes: usize,
}

// === impl Snapshots ===

impl Snapshots {
    /// No snapshots. `total` counts the bytes of all collections.
    pub(super) fn new(total: Arc<AtomicUsize>) -> Self {
        Self { all: Vec::new(), bytes: 0, total }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// Takes a snapshot at a revision. The history must have all changes after this revision. Above the maximum number,
    /// drops the oldest snapshot of the owner with the most snapshots.
    pub(super) fn take(&mut self, revision: u64, prefix: &str, owner: &str, superseded: &SupersededObjects) {
        let taken = Instant::now();
        let is_same =
            |one: &&mut Snapshot| one.revision == revision && *one.prefix == *prefix && *one.owner == *owner;
        if let Some(known) = self.all.iter_mut().find(is_same) {
            known.taken = taken;
            return;
        }
        let at = self.all.partition_point(|one| one.revision <= revision);
        let (prefix, owner) = (prefix.into(), owner.into());
        let former = BTreeMap::new();
        self.all.insert(at, Snapshot { revision, prefix, owner, taken, former, bytes: 0 });
        while self.all.len() > MAX_SNAPSHOTS && self.drop_of_largest_owner(|_one| 1, superseded) {}
    }

    /// Adds the former state of an object, whose change the history has dropped. Above the maximum number of bytes,
    /// drops the oldest snapshot with states of the owner with the most bytes.
    pub(super) fn add(&mut self, change: Change, superseded: &SupersededObjects) {
        let before = self.all.partition_point(|one| one.revision < change.revision);
        let Change { old, new, .. } = change;
        self.insert(before, &new.key, old, superseded);
        while self.bytes > self.max_bytes() && self.drop_of_largest_owner(|one| one.bytes, superseded) {}
    }

    /// Drops snapshots above the maximum age.
    pub(super) fn drop_old(&mut self, superseded: &SupersededObjects) {
        let now = Instant::now();
        while let Some(at) = self.all.iter().position(|one| now.duration_since(one.taken) >= LIFETIME) {
            self.drop_at(at, superseded);
        }
    }

    /// Drops all snapshots.
    pub(super) fn clear(&mut self, superseded: &SupersededObjects) {
        for snapshot in std::mem::take(&mut self.all) {
            self.uncount(snapshot.bytes);
            snapshot.former.values().flatten().for_each(|object| object.count_superseded(superseded));
        }
    }

    /// Whether there is a snapshot at a revision of all objects under a prefix.
    pub(super) fn covers(&self, prefix: &str, revision: u64) -> bool {
        self.all.iter().any(|one| one.revision == revision && prefix.starts_with(&*one.prefix))
    }

    /// The former states after a revision of the objects whose keys are `start` or greater. If an object has several
    /// states, its oldest state is the last one.
    pub(super) fn former_after<'a>(
        &'a self,
        revision: u64,
        start: &'a str,
    ) -> impl Iterator<Item = (&'a Arc<str>, &'a State)> {
        let at = self.all.partition_point(|one| one.revision < revision);
        let from = (Bound::Included(start), Bound::Unbounded);
        self.all.iter().skip(at).rev().flat_map(move |one| one.former.range::<str, _>(from))
    }

    /// Maximum bytes of this collection now.
    fn max_bytes(&self) -> usize {
        match self.total.load(Ordering::Relaxed) {
            0..=MAX_ALL_BYTES => MAX_BYTES,
            total if total <= MAX_ALL_BYTES_WITH_SMALL => SMALL_BYTES,
            _ => 0,
        }
    }

    /// Adds a state to the newest of the first `count` snapshots that has the object, unless it has an older state of
    /// the object.
    fn insert(&mut self, count: usize, key: &Arc<str>, state: State, superseded: &SupersededObjects) {
        let snapshot = self.all.iter_mut().take(count).rev().find(|one| key.starts_with(&*one.prefix));
        if let Some(snapshot) = snapshot
            && let Entry::Vacant(free) = snapshot.former.entry(key.clone())
        {
            let bytes = STATE_BYTES + key.len() + state.as_ref().map_or(0, |object| object.stored_bytes());
            let _inserted = free.insert(state);
            snapshot.bytes += bytes;
            self.bytes += bytes;
            self.total.fetch_add(bytes, Ordering::Relaxed);
        } else if let Some(object) = state {
            object.count_superseded(superseded);
        }
    }

    /// Drops the oldest snapshot with a charge, of the owner with the highest sum of charges. Returns false if no
    /// snapshot has a charge.
    fn drop_of_largest_owner(
        &mut self,
        charge: impl Fn(&Snapshot) -> usize,
        superseded: &SupersededObjects,
    ) -> bool {
        let mut owners = HashMap::<&str, usize>::new();
        for one in &self.all {
            *owners.entry(&*one.owner).or_default() += charge(one);
        }
        let highest = owners.values().copied().max().unwrap_or_default();
        let is_chosen =
            |one: &Snapshot| charge(one) > 0 && owners.get(&*one.owner).is_some_and(|sum| *sum == highest);
        let Some(at) = self.all.iter().position(is_chosen) else { return false };
        self.drop_at(at, superseded);
        true
    }

    /// Drops a snapshot. Older snapshots get the states that they need.
    fn drop_at(&mut self, at: usize, superseded: &SupersededObjects) {
        let dropped = self.all.remove(at);
        self.uncount(dropped.bytes);
        for (key, state) in dropped.former {
            self.insert(at, &key, state, superseded);
        }
    }

    fn uncount(&mut self, bytes: usize) {
        self.bytes -= bytes;
        self.total.fetch_sub(bytes, Ordering::Relaxed);
    }
}

impl Drop for Snapshots {
    fn drop(&mut self) {
        self.total.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_collections_may_add_states_after_large_ones_have_used_up_the_memory() {
        let total = Arc::new(AtomicUsize::new(0));
        let snapshots = Snapshots::new(total.clone());
        let above = [MAX_ALL_BYTES + 1, MAX_ALL_BYTES_WITH_SMALL + 1];
        for (used, max) in [(0, MAX_BYTES), (above[0], SMALL_BYTES), (above[1], 0)] {
            total.store(used, Ordering::Relaxed);
            assert_eq!(snapshots.max_bytes(), max);
        }
    }
}
