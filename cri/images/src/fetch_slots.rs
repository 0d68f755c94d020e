//! Slots for layers that are fetched at the same time. They limit the memory of a node that pulls many images.
//!
//! A fetch from a slow registry would occupy its slot for hours. Two rules limit this. First, one owner, for example
//! the namespace of the pods, gets only a part of the slots. Second, a fetch holds its slot for a time slice. Then it
//! gives the slot to a waiting owner that has fewer slots. A free slot goes to the waiting owner with the fewest slots.
//! So even many hostile owners can only delay the pulls of another owner.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::oneshot::error::RecvError;
use tokio::sync::{Notify, oneshot};

/// Maximum layers that all pulls together fetch at a time.
const MAX_FETCHES: usize = 8;
/// Maximum layers that the pulls of one owner fetch at a time. The remaining slots suffice for one more image.
const MAX_FETCHES_OF_OWNER: usize = 5;

/// All slots.
#[derive(Debug, Clone)]
pub(crate) struct FetchSlots(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    max: usize,
    max_of_owner: usize,
    time_slice: Duration,
    state: Mutex<State>,
    /// Notified after each change of the state.
    changed: Notify,
}

#[derive(Debug, Default)]
struct State {
    /// The owners that have or await slots.
    owners: HashMap<String, Owner>,
    held: usize,
    /// Number of the next caller.
    next: u64,
}

#[derive(Debug, Default)]
struct Owner {
    held: usize,
    /// Slots of `held` whose time slice is over.
    yielding: usize,
    waiting: VecDeque<Waiter>,
}

#[derive(Debug)]
struct Waiter {
    number: u64,
    slot: oneshot::Sender<FetchSlot>,
}

/// The right to fetch one layer, until it is dropped.
#[derive(Debug)]
pub(crate) struct FetchSlot {
    slots: FetchSlots,
    owner: String,
    is_yielding: AtomicBool,
}

// === impl FetchSlots ===

impl FetchSlots {
    /// The slots of all layers. After a time slice of this duration, a fetch gives its slot to an owner with fewer slots.
    pub(crate) fn all(time_slice: Duration) -> Self {
        Self::new(MAX_FETCHES, MAX_FETCHES_OF_OWNER, time_slice)
    }

    /// One slot for all owners.
    pub(crate) fn single(time_slice: Duration) -> Self {
        Self::new(1, 1, time_slice)
    }

    fn new(max: usize, max_of_owner: usize, time_slice: Duration) -> Self {
        let (state, changed) = (Mutex::default(), Notify::new());
        Self(Arc::new(Shared { max, max_of_owner, time_slice, state, changed }))
    }

    /// Waits for a slot. Callers of one owner get their slots in the order of their calls.
    pub(crate) async fn acquire(&self, owner: &str) -> Result<FetchSlot, RecvError> {
        let (slot, granted) = oneshot::channel();
        {
            let mut state = self.state();
            let number = state.next;
            state.next += 1;
            let waiter = Waiter { number, slot };
            state.owners.entry(owner.to_owned()).or_default().waiting.push_back(waiter);
        }
        self.grant();
        granted.await
    }

    /// Gives free slots to waiting callers.
    fn grant(&self) {
        loop {
            let next = self.state().grant(self.0.max, self.0.max_of_owner);
            let Some((owner, waiter)) = next else { break };
            let slot = FetchSlot { slots: self.clone(), owner, is_yielding: AtomicBool::new(false) };
            // If the caller disconnects at this moment, the slot is dropped and thereby released.
            drop(waiter.slot.send(slot));
        }
        self.0.changed.notify_waiters();
    }

    /// The number of held slots, and the number of waiting callers.
    #[cfg(test)]
    pub(crate) fn held_and_waiting(&self) -> (usize, usize) {
        let state = self.state();
        (state.held, state.owners.values().map(|owner| owner.waiting.len()).sum())
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// === impl State ===

impl State {
    /// Takes a free slot for the waiting owner with the fewest slots.
    fn grant(&mut self, max: usize, max_of_owner: usize) -> Option<(String, Waiter)> {
        self.remove_cancelled();
        if self.held >= max {
            return None;
        }
        let waiting = self.owners.iter_mut().filter(|(_, owner)| owner.held < max_of_owner);
        let first = waiting.filter_map(|(name, owner)| {
            let number = owner.waiting.front()?.number;
            Some(((owner.held, number), name, owner))
        });
        let (_, name, owner) = first.min_by_key(|(order, ..)| *order)?;
        let waiter = owner.waiting.pop_front()?;
        owner.held += 1;
        self.held += 1;
        Some((name.clone(), waiter))
    }

    fn remove_cancelled(&mut self) {
        self.owners.retain(|_, owner| {
            owner.waiting.retain(|waiter| !waiter.slot.is_closed());
            owner.held > 0 || !owner.waiting.is_empty()
        });
    }

    /// Whether one slot of this owner must go to another owner. If so, counts the slot as yielding.
    fn must_yield(&mut self, owner: &str) -> bool {
        self.remove_cancelled();
        let Some(mine) = self.owners.get(owner).map(|owner| owner.held.saturating_sub(owner.yielding)) else {
            return false;
        };
        let has_fewer_slots = |other: &&Owner| !other.waiting.is_empty() && other.held < mine;
        let waiting = self.owners.values().filter(has_fewer_slots).count();
        let yielding: usize = self.owners.values().map(|owner| owner.yielding).sum();
        if yielding >= waiting {
            return false;
        }
        if let Some(owner) = self.owners.get_mut(owner) {
            owner.yielding += 1;
        }
        true
    }

    fn release(&mut self, owner: &str, is_yielding: bool) {
        self.held -= 1;
        if let Some(owner) = self.owners.get_mut(owner) {
            owner.held -= 1;
            owner.yielding -= usize::from(is_yielding);
        }
    }
}

// === impl FetchSlot ===

impl FetchSlot {
    /// Completes when the time slice is over: its time has passed since this call, and an owner with fewer slots waits. The
    /// caller must then drop the slot.
    pub(crate) async fn time_slice_over(&self) {
        tokio::time::sleep(self.slots.0.time_slice).await;
        loop {
            let mut changed = std::pin::pin!(self.slots.0.changed.notified());
            changed.as_mut().enable();
            if self.must_yield() {
                return;
            }
            changed.await;
        }
    }

    fn must_yield(&self) -> bool {
        let must_yield =
            self.is_yielding.load(Ordering::Relaxed) || self.slots.state().must_yield(&self.owner);
        self.is_yielding.store(must_yield, Ordering::Relaxed);
        must_yield
    }
}

impl Drop for FetchSlot {
    fn drop(&mut self) {
        self.slots.state().release(&self.owner, self.is_yielding.load(Ordering::Relaxed));
        self.slots.grant();
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    fn acquire_now(slots: &FetchSlots, owner: &str) -> Option<FetchSlot> {
        slots.acquire(owner).now_or_never().map(|slot| slot.expect("slots are never closed"))
    }

    #[test]
    fn one_owner_does_not_get_all_slots() {
        let slots = FetchSlots::all(Duration::ZERO);
        let mut held: Vec<FetchSlot> =
            (0..MAX_FETCHES_OF_OWNER).map(|_| acquire_now(&slots, "slow").expect("a slot")).collect();
        assert!(acquire_now(&slots, "slow").is_none());
        held.extend((held.len()..MAX_FETCHES).map(|_| acquire_now(&slots, "other").expect("a slot")));
        assert!(acquire_now(&slots, "third").is_none(), "all owners together have a limit");
        held.remove(0);
        assert!(acquire_now(&slots, "third").is_some());
        assert!(acquire_now(&slots, "slow").is_some());
    }

    #[test]
    fn owners_without_slots_are_removed() {
        let slots = FetchSlots::all(Duration::ZERO);
        for number in 0..100 {
            drop(acquire_now(&slots, &number.to_string()));
        }
        let held: Vec<_> = (0..MAX_FETCHES).map(|n| acquire_now(&slots, &(n % 2).to_string())).collect();
        for number in 0..100 {
            assert!(acquire_now(&slots, &format!("cancelled {number}")).is_none());
        }
        assert!(slots.state().owners.len() <= 3);
        drop(held);
        assert!(slots.state().owners.len() <= 1);
    }

    #[tokio::test]
    async fn slow_owners_yield_a_slot_to_an_owner_without_slots() {
        let slots = FetchSlots::new(8, 5, Duration::ZERO);
        let mut tasks = tokio::task::JoinSet::new();
        for owner in ["slow", "slower"] {
            for _ in 0..8 {
                let slots = slots.clone();
                // These fetches end only with their time slice.
                tasks.spawn(async move {
                    loop {
                        slots.acquire(owner).await.unwrap().time_slice_over().await;
                    }
                });
            }
        }
        coracle_testing::until_yielding("all slots are held", 10, || slots.state().held >= 8).await;
        let mine = [slots.acquire("mine").await.unwrap(), slots.acquire("mine").await.unwrap()];
        let held = |owner| slots.state().owners.get(owner).map_or(0, |owner| owner.held);
        coracle_testing::until_yielding("all slots are held", 10, || slots.state().held >= 8).await;
        assert_eq!(held("slow") + held("slower"), 6);
        drop(mine);
    }

    #[test]
    fn each_waiting_owner_gets_one_slot_of_another_at_a_time() {
        let slots = FetchSlots::new(3, 3, Duration::ZERO);
        let mut held: Vec<_> = (0..3).map(|_| acquire_now(&slots, "first").expect("a slot")).collect();
        assert!(!held[0].must_yield(), "no other owner waits");
        let mut second = std::pin::pin!(slots.acquire("second"));
        assert!(second.as_mut().now_or_never().is_none());
        assert!(held[0].must_yield() && held[0].must_yield());
        assert!(!held[1].must_yield(), "one slot suffices");
        held.remove(0);
        let second = second.now_or_never().expect("the slot was passed on").unwrap();
        let mut again = std::pin::pin!(slots.acquire("second"));
        assert!(again.as_mut().now_or_never().is_none());
        assert!(held[0].must_yield() && !second.must_yield());
        held.remove(0);
        let again = again.now_or_never().expect("a second slot").unwrap();
        let mut first = std::pin::pin!(slots.acquire("first"));
        assert!(first.as_mut().now_or_never().is_none());
        assert!(again.must_yield(), "an owner with two slots yields one");
        drop(again);
        assert!(first.now_or_never().is_some());
    }
}
